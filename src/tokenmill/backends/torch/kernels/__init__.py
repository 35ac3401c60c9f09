"""Kernels for backends and sampler, one theme a module; those in Triton end with the functions that launch them."""
