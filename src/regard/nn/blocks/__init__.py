"""What stands around attention in a model: residual paths, feed-forward layers, experts, norms,
embeddings.
"""
