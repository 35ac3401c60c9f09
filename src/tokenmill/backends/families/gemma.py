"""Gemma 2 and 3: norms before and after attention and MLP, scaled embeddings, soft caps, windows of some layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenmill.backends.families.config import (
    DecoderConfig,
    LayerConfig,
    activation,
    decoder_config,
    layer_count,
    optional,
    sliding_layers,
)
from tokenmill.backends.families.names import SANDWICH_NAMES
from tokenmill.backends.families.rope import Rope, rope_from_config
from tokenmill.errors import UnsupportedModel
from tokenmill.files import Settings

LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0
"""Of Gemma 3's layers with and without a window."""
TEXT = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
"""Settings that the published config.json of Gemma 3 with images lack."""
NAMES_WITH_IMAGES = {own: f"language_model.{name}" for own, name in SANDWICH_NAMES.items()}
IMAGE_TENSORS = ("vision_tower.", "multi_modal_projector.")


def read_gemma2(config: Mapping[str, Any]) -> DecoderConfig:
    """Every second layer has a window; attention scores and logits have soft caps."""
    settings = Settings(config, "config.json")
    softcap, cap = (
        optional(settings, "attn_logit_softcapping", 50.0),
        optional(settings, "final_logit_softcapping", 30.0),
    )
    return _decoder(settings, "gemma2", _slides(settings, 2), logit_softcap=cap, attention_softcap=softcap)


def read_gemma3(config: Mapping[str, Any]) -> DecoderConfig:
    """Five of six layers have a window and a RoPE base of their own; queries and keys are normed, scores not capped."""
    settings = Settings(config, "config.json")
    slides = _slides(settings, settings.number("sliding_window_pattern", 6))

    def ropes(head_dim: int, max_context: int) -> Sequence[Rope]:
        local, full = (rope_from_config(settings, head_dim, max_context, scaling=one) for one in _ropes(settings))
        return [local if one else full for one in slides]

    cap = optional(settings, "final_logit_softcapping")
    return _decoder(settings, "gemma3_text", slides, logit_softcap=cap, ropes=ropes, qk_norm="head")


def read_gemma3_with_images(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder of a model that has an image encoder, too: transformers does not cap its logits."""
    settings = Settings(config, "config.json")
    tied, text = settings.flag("tie_word_embeddings", True), settings.mapping("text_config")
    return replace(read_gemma3({**TEXT, "tie_word_embeddings": tied, **text}), logit_softcap=None)


def _slides(settings: Settings, pattern: int) -> list[bool]:
    """For each layer whether it has a window: all but the last one of each `pattern`, unless `layer_types` differs."""
    return sliding_layers(settings) or [(layer + 1) % pattern != 0 for layer in range(layer_count(settings))]


def _ropes(settings: Settings) -> list[Mapping[str, Any]]:
    """Of layers with a window and of the others: in `rope_parameters` by type of layer, or in older spelling."""
    by_type = Settings(settings.mapping("rope_parameters"), "config.json: rope_parameters")
    local = {"rope_theta": settings.real("rope_local_base_freq", LOCAL_THETA, above=1.0)}
    full = {"rope_theta": settings.real("rope_theta", GLOBAL_THETA, above=1.0), **settings.mapping("rope_scaling")}
    return [{**local, **by_type.mapping("sliding_attention")}, {**full, **by_type.mapping("full_attention")}]


def _decoder(
    settings: Settings, family: str, slides: list[bool], *, logit_softcap: float | None, ropes: Any = None, **layer: Any
) -> DecoderConfig:
    """`layer` are settings of all layers."""
    if settings.given("use_bidirectional_attention"):
        raise UnsupportedModel("bidirectional attention is not supported")
    bias = settings.flag("attention_bias", False)
    default = None if settings.mentions("sliding_window") else 4096
    window = settings.number("sliding_window", default) if any(slides) else None
    described = LayerConfig(
        norm_after=True,
        qkv_bias=bias,
        output_bias=bias,
        activation=activation(settings, "hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=settings.real("query_pre_attn_scalar", 256.0) ** -0.5,
        **layer,
    )
    windows, scale = [window if one else None for one in slides], math.sqrt(settings.number("hidden_size"))
    return decoder_config(
        settings, family, described, windows=windows, ropes=ropes, head_dim=256, tied=True, embed_scale=scale,
        norm_offset=1.0, wide_norms=True, logit_softcap=logit_softcap,
    )  # fmt: skip
