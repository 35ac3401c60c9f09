"""Where the tests of this folder can run."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

HAS_CARD = torch.cuda.is_available()
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if HAS_CARD else "cpu"


def _skip_unless(condition: bool, reason: str) -> Any:
    try:
        import pytest
    except ImportError:  # `python -m tests.gpu` needs none
        return None
    return pytest.mark.skipif(not condition, reason=reason)


def needs_card() -> Any:
    return _skip_unless(HAS_CARD, "no CUDA device here")


def needs_kernels() -> Any:
    return _skip_unless(HAS_CARD or INTERPRETS, "no CUDA device here, nor an interpreter of its kernels")
