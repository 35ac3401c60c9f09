"""Llama (and everything that calls itself so: SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.families.config import DecoderConfig, LayerConfig, activation, decoder_config
from tokenmill.files import Settings


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """Full attention; biases are a switch."""
    settings = Settings(config, "config.json")
    bias = settings.flag("attention_bias", False)
    layer = LayerConfig(
        qkv_bias=bias, output_bias=bias, mlp_bias=settings.flag("mlp_bias", False), activation=activation(settings)
    )
    return decoder_config(settings, "llama", layer)
