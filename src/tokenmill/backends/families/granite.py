"""Granite: Llama with factors on embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.families.config import DecoderConfig, LayerConfig, activation, decoder_config
from tokenmill.files import Settings


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """Logits are divided by `logits_scaling`; biases are a switch."""
    settings = Settings(config, "config.json")
    bias = settings.flag("attention_bias", False)
    layer = LayerConfig(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=settings.flag("mlp_bias", False),
        activation=activation(settings),
        attention_scale=settings.real("attention_multiplier", 1.0),
        residual_scale=settings.real("residual_multiplier", 1.0),
    )
    return decoder_config(
        settings,
        "granite",
        layer,
        embed_scale=settings.real("embedding_multiplier", 1.0),
        logit_scale=1.0 / settings.real("logits_scaling", 1.0),
    )
