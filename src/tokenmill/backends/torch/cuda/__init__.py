"""The torch backend on CUDA: its own kernels, graphs of whole steps, and inputs that never make the card wait."""
