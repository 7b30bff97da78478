"""What CPU kernels are compiled from: Numba, pure Python source, no thread of Numba's own."""
