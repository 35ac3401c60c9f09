"""Rotary positions: from a model's settings to frequencies, and from positions to rotated vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.errors import ModelLoadError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """How a model turns positions into rotations."""

    dim: int
    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    """The context before it was stretched (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """What cosines and sines are multiplied with (yarn); None: as the factor asks for."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    """One for each frequency, where a file brings its stretching along."""


def rope_from_config(config: Mapping[str, Any], dim: int, max_context: int) -> Rope:
    """The settings in a config.json, in either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    settings = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = settings.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in KINDS:
        raise ModelLoadError(f"rope scaling of type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    original = settings.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelLoadError(f"partial_rotary_factor {partial} is not supported")
    known = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
             "mscale_all_dim", "truncate")  # fmt: skip
    given = {name: settings[name] for name in known if settings.get(name) is not None}
    return Rope(dim=dim, theta=theta, kind=kind, original_context=original or max_context, **given)


def frequencies(rope: Rope) -> tuple[Tensor, float]:
    """Angle a position of each pair of dimensions, and what cosines and sines are multiplied with."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim))
    if rope.divisors:
        return plain / torch.tensor(rope.divisors), 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain), _yarn_attention(rope)
    return plain, 1.0


def rotations(pos: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [tokens, 1, dim / 2]."""
    angle = pos.to(torch.float32)[:, None, None] * inv_freq
    return angle.cos() * scale, angle.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads, dim] with the pairs (i, i + dim / 2) turned by their angles."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Low frequencies are stretched, high ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    low, high = rope.original_context / rope.low_freq_factor, rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(wavelength > low, plain / rope.factor, plain)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, stretched)


def _yarn(rope: Rope, plain: Tensor) -> Tensor:
    """Dimensions that turn often inside the original context are kept, those that turn rarely are stretched."""

    def dimension_of(num_turns: float) -> float:
        turn = rope.original_context / (num_turns * 2 * math.pi)
        return rope.dim * math.log(turn) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain / rope.factor * (1 - keep) + plain * keep


def _yarn_attention(rope: Rope) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
