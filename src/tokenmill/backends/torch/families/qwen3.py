"""Qwen3: norms over each head of queries and keys, head size apart from the hidden size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.torch.config import DecoderConfig, common_settings, layer_windows
from tokenmill.files import Settings


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """Windows are off unless `use_sliding_window` says otherwise; biases are a switch."""
    settings = Settings(config, "config.json")
    common = common_settings(settings, "qwen3", layer_windows(settings), head_dim=128)
    bias = settings.flag("attention_bias", False)
    return DecoderConfig(**common, qk_norm=True, qkv_bias=bias, output_bias=bias)
