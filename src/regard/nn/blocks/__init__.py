"""Residual paths, feed-forward layers, experts, norms and embeddings of a model."""
