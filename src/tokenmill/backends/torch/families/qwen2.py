"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.torch.config import DecoderConfig, common_settings, layer_windows


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """Windows are off unless `use_sliding_window` says otherwise."""
    windows = layer_windows({"use_sliding_window": False, "max_window_layers": 28, **config})
    return DecoderConfig(**common_settings(config, "qwen2", windows), qkv_bias=True)
