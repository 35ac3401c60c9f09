"""For all tests: one thread a computation. Tiny models gain nothing from two, and lose much where others work."""

import torch

torch.set_num_threads(1)
