"""Gemma 2 and 3: norms before and after attention and MLP, scaled embeddings, soft caps, windows of some layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenmill.backends.torch.config import (
    DecoderConfig,
    LayerConfig,
    activation,
    decoder_config,
    layer_count,
    optional,
    sliding_layers,
)
from tokenmill.backends.torch.rope import Rope, rope_from_config
from tokenmill.errors import UnsupportedModel
from tokenmill.files import Settings

LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0
"""Of Gemma 3's layers with and without a window."""


def read_gemma2(config: Mapping[str, Any]) -> DecoderConfig:
    """Every second layer has a window; attention scores and logits have soft caps."""
    settings = Settings(config, "config.json")
    layer = replace(_layer(settings), attention_softcap=optional(settings, "attn_logit_softcapping", 50.0))
    cap = optional(settings, "final_logit_softcapping", 30.0)
    return _decoder(settings, "gemma2", layer, _slides(settings, 2), logit_softcap=cap)


def read_gemma3(config: Mapping[str, Any]) -> DecoderConfig:
    """Five of six layers have a window and a RoPE base of their own; queries and keys are normed, scores not capped."""
    settings = Settings(config, "config.json")
    slides = _slides(settings, settings.number("sliding_window_pattern", 6))

    def ropes(head_dim: int, max_context: int) -> Sequence[Rope]:
        local, full = _ropes(settings, head_dim, max_context)
        return [local if one else full for one in slides]

    layer = replace(_layer(settings), qk_norm="head")
    cap = optional(settings, "final_logit_softcapping")
    return _decoder(settings, "gemma3_text", layer, slides, ropes=ropes, logit_softcap=cap)


def _layer(settings: Settings) -> LayerConfig:
    if settings.given("use_bidirectional_attention"):
        raise UnsupportedModel("bidirectional attention is not supported")
    bias = settings.flag("attention_bias", False)
    return LayerConfig(
        norm_after=True,
        qkv_bias=bias,
        output_bias=bias,
        activation=activation(settings, "hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=settings.real("query_pre_attn_scalar", 256.0) ** -0.5,
    )


def _slides(settings: Settings, pattern: int) -> list[bool]:
    """For each layer whether it has a window: all but the last one of each `pattern`, unless `layer_types` differs."""
    return sliding_layers(settings) or [(layer + 1) % pattern != 0 for layer in range(layer_count(settings))]


def _ropes(settings: Settings, head_dim: int, max_context: int) -> tuple[Rope, Rope]:
    """Of layers with a window and of the others: in `rope_parameters` by type of layer, or in older spelling."""
    new, old = settings.mapping("rope_parameters"), settings.mapping("rope_scaling")
    by_type = Settings(new, "config.json: rope_parameters")
    local = dict(by_type.mapping("sliding_attention"))
    local.setdefault("rope_theta", settings.real("rope_local_base_freq", LOCAL_THETA, above=1.0))
    full = {**old, **by_type.mapping("full_attention")}
    full.setdefault("rope_theta", settings.real("rope_theta", GLOBAL_THETA, above=1.0))
    return tuple(rope_from_config(settings, head_dim, max_context, scaling=one) for one in (local, full))  # type: ignore[return-value]


def _decoder(settings: Settings, family: str, layer: LayerConfig, slides: list[bool], **others: Any) -> DecoderConfig:
    default = None if settings.mentions("sliding_window") else 4096
    window = settings.number("sliding_window", default) if any(slides) else None
    return decoder_config(
        settings,
        family,
        layer,
        windows=[window if one else None for one in slides],
        head_dim=256,
        tied=True,
        embed_scale=math.sqrt(settings.number("hidden_size")),
        norm_offset=1.0,
        wide_norms=True,
        **others,
    )
