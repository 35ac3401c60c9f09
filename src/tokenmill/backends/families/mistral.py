"""Mistral: every layer slides, if any does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.families.config import DecoderConfig, LayerConfig, activation, decoder_config, one_window
from tokenmill.files import Settings


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """No biases; one window for all layers, or none."""
    settings = Settings(config, "config.json")
    layer = LayerConfig(activation=activation(settings))
    return decoder_config(settings, "mistral", layer, windows=one_window(settings))
