"""Mistral: every layer slides, if any does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.backends.torch.config import DecoderConfig, common_settings, need


def read(config: Mapping[str, Any]) -> DecoderConfig:
    """No biases; one window for all layers, or none."""
    windows = (config.get("sliding_window"),) * need(config, "num_hidden_layers")
    return DecoderConfig(**common_settings(config, "mistral", windows))
