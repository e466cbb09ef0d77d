"""The GPU's side of training and translation: fused CUDA kernels and graphs."""
