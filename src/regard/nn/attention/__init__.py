"""Softmax attention assembled from parts, and mechanisms that wrap it: windows, eviction,
selection of keys, other distances, compressive memory.
"""
