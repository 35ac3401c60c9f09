"""For tests that need llama.cpp: skipped where it is missing, but a failure where it must be there (as in CI)."""

from __future__ import annotations

import importlib.util
import os

import pytest

HAS_LLAMACPP = importlib.util.find_spec("llama_cpp") is not None
MUST_BE_THERE = os.environ.get("TOKENMILL_REQUIRE_LLAMACPP") == "1"

needs_llamacpp = pytest.mark.skipif(
    not HAS_LLAMACPP and not MUST_BE_THERE, reason="llama-cpp-python is missing: pip install 'tokenmill[llamacpp]'"
)
"""Where it must be there nothing is skipped, and the test fails at its import."""
