"""Qwen3: norms over each head of queries and keys, head size apart from the hidden size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.families.config import DecoderConfig, LayerConfig, activation, decoder_config, layer_windows
from tokenmill.files import Settings


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """Windows are off unless `use_sliding_window` says otherwise; biases are a switch."""
    settings = Settings(config, "config.json")
    bias = settings.flag("attention_bias", False)
    layer = LayerConfig(qk_norm="head", qkv_bias=bias, output_bias=bias, activation=activation(settings))
    return decoder_config(settings, "qwen3", layer, windows=layer_windows(settings), head_dim=128)
