"""SmolLM3: Llama with some layers that know no positions (NoPE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.backends.families.config import (
    DecoderConfig,
    LayerConfig,
    activation,
    decoder_config,
    layer_count,
    layer_windows,
)
from tokenmill.backends.families.rope import Rope, rope_from_config
from tokenmill.files import Settings

NOPE_INTERVAL = 4
"""Usual number of layers of which the last one is not rotated."""


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """`no_rope_layers` has a 1 for each layer with RoPE. Without `layer_types`, windows are those of the others."""
    settings = Settings(config, "config.json")
    bias, rotated = settings.flag("attention_bias", False), _rotated_layers(settings)

    def ropes(head_dim: int, max_context: int) -> Sequence[Rope | None]:
        rope = rope_from_config(settings, head_dim, max_context, theta=2_000_000.0)
        return [rope if one else None for one in rotated]

    windows = layer_windows(settings, usual=[not one for one in rotated])
    layer = LayerConfig(
        qkv_bias=bias, output_bias=bias, mlp_bias=settings.flag("mlp_bias", False), activation=activation(settings)
    )
    return decoder_config(settings, "smollm3", layer, windows=windows, ropes=ropes, tied=True)


def _rotated_layers(settings: Settings) -> list[bool]:
    given, num_layers = settings.given("no_rope_layers"), layer_count(settings)
    if given is None:
        interval = settings.number("no_rope_layer_interval", NOPE_INTERVAL)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(one not in (0, 1) for one in given):
        raise settings.wrong("no_rope_layers", f"a list of {num_layers} of 0 and 1", given)
    return [bool(one) for one in given[:num_layers]]
