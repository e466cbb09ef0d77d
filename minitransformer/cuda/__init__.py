"""Fused CUDA kernels: the operations of `ops.py` and the update, on CuPy arrays."""
