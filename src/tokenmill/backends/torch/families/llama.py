"""Llama (and everything that calls itself so: SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.torch.config import DecoderConfig, common_settings, need


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """Full attention; biases are a switch."""
    bias = bool(config.get("attention_bias", False))
    settings = common_settings(config, "llama", (None,) * need(config, "num_hidden_layers"))
    mlp_bias = bool(config.get("mlp_bias", False))
    return DecoderConfig(**settings, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
