"""CUDA kernels and their host code, imported only if torch has a device."""
