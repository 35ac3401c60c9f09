"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.torch.config import DecoderConfig, common_settings, layer_windows
from tokenmill.files import Settings


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """Windows are off unless `use_sliding_window` says otherwise."""
    settings = Settings(config, "config.json")
    return DecoderConfig(**common_settings(settings, "qwen2", layer_windows(settings)), qkv_bias=True)
