"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.families.config import DecoderConfig, LayerConfig, activation, decoder_config, layer_windows
from tokenmill.files import Settings


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """Windows are off unless `use_sliding_window` says otherwise."""
    settings = Settings(config, "config.json")
    layer = LayerConfig(qkv_bias=True, activation=activation(settings))
    return decoder_config(settings, "qwen2", layer, windows=layer_windows(settings))
