"""Softmax attention assembled from parts, and mechanisms that wrap it."""
