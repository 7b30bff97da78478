"""The tests of regard; helpers shared between files are imported as `tests.<name>`."""
