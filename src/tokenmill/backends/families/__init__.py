"""The families of models: each is a way to read its config.json, and the names of its tensors.

`choose_family` says which models are run by them, and which through transformers (`transformers_adapter.py`).
"""

from __future__ import annotations

import importlib.util
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.backends.families import gemma, granite, llama, mistral, olmo2, phi3, qwen2, qwen3, smollm3
from tokenmill.backends.families.config import DecoderConfig
from tokenmill.backends.families.names import HF_NAMES, SANDWICH_NAMES
from tokenmill.errors import ConfigError, UnsupportedModel


@dataclass(frozen=True)
class Family:
    """One kind of model that the generic decoder can be."""

    name: str
    """Its `model_type` in config.json."""
    read: Callable[[Mapping[str, Any]], DecoderConfig]
    names: Mapping[str, str] = field(default_factory=lambda: HF_NAMES)
    """The decoder's name of each tensor -> the family's."""
    ignored: tuple[str, ...] = ()
    """How names of tensors begin that are no part of the decoder."""


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
        raise UnsupportedModel(f"model_type {reprlib.repr(name)} is not supported; supported: {supported}")
    return _families[name]


MODEL_IMPLS = ("auto", "native", "transformers")


@dataclass(frozen=True)
class FamilyChoice:
    """How a model of a config.json is run."""

    family: Family | None
    """One of ours; None: through transformers."""
    why: str


def choose_family(config: Mapping[str, Any], asked: str = "auto") -> FamilyChoice:
    """Ours where the model has one that supports its settings, else transformers'.

    `UnsupportedModel` if that takes a package that is not installed.
    """
    if asked not in MODEL_IMPLS:
        raise ConfigError(f"model_impl {asked!r} is not supported; supported: {', '.join(MODEL_IMPLS)}")
    if asked == "transformers":
        _check_installed("model_impl 'transformers'")
        return FamilyChoice(None, "as asked for")
    try:
        family = family_of(config)
        family.read(config)
    except UnsupportedModel as error:
        if asked == "native":
            raise
        _check_installed(f"{error} without transformers")
        return FamilyChoice(None, str(error))
    return FamilyChoice(family, f"model_type {family.name!r} is one of {', '.join(sorted(_families))}")


def _check_installed(what: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedModel(f"{what}; transformers runs most decoders: pip install 'tokenmill[transformers]'")


for _family in (
    Family("gemma2", gemma.read_gemma2, SANDWICH_NAMES),
    Family("gemma3", gemma.read_gemma3_with_images, gemma.NAMES_WITH_IMAGES, gemma.IMAGE_TENSORS),
    Family("gemma3_text", gemma.read_gemma3, SANDWICH_NAMES),
    Family("granite", granite.read),
    Family("llama", llama.read),
    Family("mistral", mistral.read),
    Family("olmo2", olmo2.read, SANDWICH_NAMES),
    Family("phi3", phi3.read),
    Family("qwen2", qwen2.read),
    Family("qwen3", qwen3.read),
    Family("smollm3", smollm3.read),
):
    register_family(_family)
