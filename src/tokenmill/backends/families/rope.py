"""Rotary positions: from a model's settings to the frequencies of its rotations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import ModelLoadError, UnsupportedModel
from tokenmill.files import Settings

Floats = NDArray[np.float32]
KINDS = ("default", "linear", "llama3", "yarn", "longrope")
OPTIONAL = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
"""Settings of scaling that are numbers above 0 and have a default."""


@dataclass(frozen=True)
class Rope:
    """How a model turns positions into rotations."""

    dim: int
    """Dimensions of a head that are rotated: the first ones."""
    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    """The context before it was stretched (llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """What cosines and sines are multiplied with (yarn, longrope); None: as the factor asks for."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    """One for each frequency, where a file brings its stretching along."""
    scale: float = 1.0
    """What cosines and sines are multiplied with on top of what the kind asks for."""

    @property
    def most_context(self) -> int | None:
        """Where the context must end. Beyond its original context, longrope rotates all positions otherwise, those of
        cached keys included.
        """
        return self.original_context if self.kind == "longrope" else None


def rope_from_config(
    config: Settings,
    head_dim: int,
    max_context: int,
    *,
    theta: float = 10_000.0,
    scaling: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Rope:
    """The settings in a config.json, in either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`.

    `theta` is the family's, where config.json has none; `scaling` is used in place of `rope_parameters` and
    `rope_scaling`; `aliases` are a family's own names of types.
    """
    given = {**config.mapping("rope_scaling"), **config.mapping("rope_parameters")} if scaling is None else scaling
    settings = Settings(given, "config.json: rope_parameters or rope_scaling")
    kind = settings.text("rope_type", settings.text("type", "default"))
    kind = aliases.get(kind, kind)
    if kind not in KINDS:
        raise UnsupportedModel(f"rope scaling of type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    partial = settings.real("partial_rotary_factor", config.real("partial_rotary_factor", 1.0))
    outside = config.number("original_max_position_embeddings", max_context)
    plain = Rope(
        dim=int(head_dim * partial),
        theta=settings.real("rope_theta", config.real("rope_theta", theta, above=1.0), above=1.0),
        kind=kind,
        original_context=settings.number("original_max_position_embeddings", outside),
    )
    return _scaled(plain, settings, max_context)


def _scaled(rope: Rope, settings: Settings, max_context: int) -> Rope:
    """With what the kinds of scaling bring along."""
    # transformers takes a yarn or longrope without a factor for stretched to the whole context
    stretched = max_context / rope.original_context
    usual = {"default": 1.0, "yarn": stretched, "longrope": stretched}.get(rope.kind)
    optional: dict[str, Any] = {name: settings.real(name) for name in OPTIONAL if settings.given(name) is not None}
    for name in ("mscale", "mscale_all_dim"):
        if settings.given(name) is not None:
            optional[name] = settings.real(name, above=-math.inf)  # 0 is none
    if rope.kind == "longrope":
        optional["divisors"] = _factors(settings, "short_factor", rope.dim // 2)
    factor, truncate = settings.real("factor", usual), settings.flag("truncate", True)
    return replace(rope, factor=factor, truncate=truncate, **optional)


def _factors(settings: Settings, name: str, count: int) -> tuple[float, ...]:
    """A list of numbers above 0, one for each frequency."""
    values = settings.given(name)
    if not isinstance(values, list) or len(values) != count:
        raise settings.wrong(name, f"a list of {count} numbers", values)
    return tuple(Settings({name: value}, "config.json: rope_parameters").real(name) for value in values)


def check_rope(rope: Rope) -> None:
    """Refuse settings that are sound one by one, but give no usable rotations together."""
    try:
        with np.errstate(all="ignore"):
            inv_freq, scale = frequencies(rope)
        usable = bool((np.isfinite(inv_freq) & (inv_freq > 0)).all()) and 0 < scale < math.inf
    except (ArithmeticError, ValueError):
        usable = False
    if not usable:
        raise ModelLoadError(f"invalid RoPE settings: {rope}")


def frequencies(rope: Rope) -> tuple[Floats, float]:
    """Angle a position of each pair of dimensions, and what cosines and sines are multiplied with."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    # In double precision: a power in single precision is not the same on every machine.
    plain = np.float32(1) / np.power(rope.theta, exponents, dtype=np.float64).astype(np.float32)
    if rope.divisors:
        plain = plain / np.array(rope.divisors, dtype=np.float32)
    if rope.kind == "linear":
        return plain / rope.factor, rope.scale
    if rope.kind == "llama3":
        return _llama3(rope, plain), rope.scale
    if rope.kind == "yarn":
        return _yarn(rope, plain), rope.scale * _yarn_attention(rope)
    if rope.kind == "longrope":
        return plain, rope.scale * _longrope_attention(rope)
    return plain, rope.scale


def _llama3(rope: Rope, plain: Floats) -> Floats:
    """Low frequencies are stretched, high ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    low, high = rope.original_context / rope.low_freq_factor, rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    stretched = np.where(wavelength > low, plain / rope.factor, plain)
    return np.where((wavelength <= low) & (wavelength >= high), blended, stretched)


def _yarn(rope: Rope, plain: Floats) -> Floats:
    """Dimensions that turn often inside the original context are kept, those that turn rarely are stretched."""

    def dimension_of(num_turns: float) -> float:
        turn = rope.original_context / (num_turns * 2 * math.pi)
        return rope.dim * math.log(turn) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (np.arange(rope.dim // 2, dtype=np.float32) - np.float32(low)) / max(high - low, 0.001)
    keep: Floats = 1 - np.clip(ramp, 0, 1)
    return plain / rope.factor * (1 - keep) + plain * keep


def _yarn_attention(rope: Rope) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope_attention(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context)) if rope.factor > 1 else 1.0
