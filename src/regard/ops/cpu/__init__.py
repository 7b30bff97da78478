"""Compiled CPU kernels, in C++: loops for which PyTorch has no fast operator."""
