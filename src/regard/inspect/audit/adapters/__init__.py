"""Ways to call code that is not ours."""
