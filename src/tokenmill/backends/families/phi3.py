"""Phi-3, Phi-3.5 and Phi-4 (dense): fused projections, partial rotations, longrope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.backends.families.config import (
    DecoderConfig,
    LayerConfig,
    activation,
    decoder_config,
    layer_count,
    one_window,
)
from tokenmill.backends.families.rope import Rope, rope_from_config
from tokenmill.files import Settings

LONGROPE = {"su": "longrope", "yarn": "longrope"}
"""Older names of longrope in this family."""


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """One window for all layers, or none. With longrope, the context ends at the original one."""
    settings = Settings(config, "config.json")

    def ropes(head_dim: int, max_context: int) -> Sequence[Rope]:
        return (rope_from_config(settings, head_dim, max_context, aliases=LONGROPE),) * layer_count(settings)

    layer = LayerConfig(fused=True, activation=activation(settings))
    return decoder_config(settings, "phi3", layer, windows=one_window(settings), ropes=ropes, eps=1e-5)
