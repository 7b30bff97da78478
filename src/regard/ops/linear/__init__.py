"""Linear recurrences with a state of fixed size; `regard.linear` has the public names."""
