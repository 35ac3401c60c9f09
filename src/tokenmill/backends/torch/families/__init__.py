"""The families of models: each is a way to read its config.json, and the names of its tensors."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.families import llama, mistral, qwen2, qwen3
from tokenmill.backends.torch.families.names import HF_NAMES
from tokenmill.errors import ConfigError, ModelLoadError


@dataclass(frozen=True)
class Family:
    """One kind of model that the generic decoder can be."""

    name: str
    """Its `model_type` in config.json."""
    read: Callable[[Mapping[str, Any]], DecoderConfig]
    names: Mapping[str, str] = field(default_factory=lambda: HF_NAMES)
    """The decoder's name of each tensor -> the family's."""


_families: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Add a family. The engine and the decoder need no change for it."""
    if family.name in _families:
        raise ConfigError(f"the family {family.name!r} is already registered")
    _families[family.name] = family


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in _families:
        supported = ", ".join(sorted(_families))
        raise ModelLoadError(f"model_type {reprlib.repr(name)} is not supported; supported: {supported}")
    return _families[name]


register_family(Family("llama", llama.read))
register_family(Family("mistral", mistral.read))
register_family(Family("qwen2", qwen2.read))
register_family(Family("qwen3", qwen3.read))
