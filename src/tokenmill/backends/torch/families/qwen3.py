"""Qwen3: norms over each head of queries and keys, head size apart from the hidden size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.torch.config import DecoderConfig, common_settings, layer_windows


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """Windows are off unless `use_sliding_window` says otherwise; biases are a switch."""
    windows = layer_windows({"use_sliding_window": False, "max_window_layers": 28, **config})
    settings = common_settings({"head_dim": 128, **config}, "qwen3", windows)
    bias = bool(config.get("attention_bias", False))
    return DecoderConfig(**settings, qk_norm=True, qkv_bias=bias, output_bias=bias)
