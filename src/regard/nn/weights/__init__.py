"""Linear maps, and their weights of fewer bits."""
