"""What heads do, in numbers: per head, over a corpus, and of a text."""
