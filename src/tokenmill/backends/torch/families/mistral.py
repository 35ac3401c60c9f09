"""Mistral: every layer slides, if any does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.torch.config import DecoderConfig, common_settings, layer_count
from tokenmill.files import Settings


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """No biases; one window for all layers, or none."""
    settings = Settings(config, "config.json")
    window = None if settings.given("sliding_window") is None else settings.number("sliding_window")
    return DecoderConfig(**common_settings(settings, "mistral", (window,) * layer_count(settings)))
