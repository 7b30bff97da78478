"""Checkpoint folders: config.json, safetensors, name tables of families, and filling a network."""
