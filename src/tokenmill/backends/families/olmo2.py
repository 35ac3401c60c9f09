"""OLMo 2: norms after attention and MLP instead of before them, and over all queries and all keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.families.config import DecoderConfig, LayerConfig, activation, decoder_config
from tokenmill.files import Settings


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """Full attention; biases of the attention are a switch."""
    settings = Settings(config, "config.json")
    bias = settings.flag("attention_bias", False)
    layer = LayerConfig(
        norm_before=False,
        norm_after=True,
        qk_norm="projection",
        qkv_bias=bias,
        output_bias=bias,
        activation=activation(settings),
    )
    return decoder_config(settings, "olmo2", layer, eps=1e-5)
