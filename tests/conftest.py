"""For all tests: one thread a computation, and no model hub.

Tiny models gain nothing from two threads, and lose much where others work.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it once

import torch

torch.set_num_threads(1)
