"""Triton kernels, one theme a module. Each module ends with the functions that launch them."""
