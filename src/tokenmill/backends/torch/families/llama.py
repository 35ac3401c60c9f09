"""Llama (and everything that calls itself so: SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.torch.config import DecoderConfig, common_settings, layer_count
from tokenmill.files import Settings


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """Full attention; biases are a switch."""
    settings = Settings(config, "config.json")
    bias = settings.flag("attention_bias", False)
    return DecoderConfig(
        **common_settings(settings, "llama", (None,) * layer_count(settings)),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=settings.flag("mlp_bias", False),
    )
