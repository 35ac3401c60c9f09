"""`DecoderConfig`: what one generic decoder has to know to be a model of any of the families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.backends.torch.rope import Rope, rope_from_config
from tokenmill.core.kv import LayerKV
from tokenmill.errors import ModelLoadError


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a decoder: pre-norm, RoPE, grouped queries, gated MLP."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    """One entry a layer: its attention window, None for full attention."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """A norm over each head of queries and keys."""
    tied: bool = False
    """The head is the embedding."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(f"{self.num_heads} heads can't share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim {self.head_dim} is odd")
        if not self.windows:
            raise ModelLoadError("the model has no layers")

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def layer_kv(self, dtype_bytes: int) -> tuple[LayerKV, ...]:
        """What each layer keeps per token."""
        sizes = {"num_heads": self.num_kv_heads, "key_dim": self.head_dim, "value_dim": self.head_dim}
        return tuple(
            LayerKV("full" if window is None else "window", window, dtype_bytes=dtype_bytes, **sizes)
            for window in self.windows
        )


def common_settings(config: Mapping[str, Any], family: str, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """What all families spell alike in their config.json."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"activation {activation!r} is not supported; supported: silu")
    num_heads, hidden_size = need(config, "num_attention_heads"), need(config, "hidden_size")
    head_dim = config.get("head_dim") or hidden_size // num_heads
    max_context = need(config, "max_position_embeddings")
    return {
        "family": family,
        "vocab_size": need(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": need(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "max_context": max_context,
        "rms_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope": rope_from_config(config, head_dim, max_context),
        "windows": windows,
        "tied": bool(config.get("tie_word_embeddings", False)),
    }


def need(config: Mapping[str, Any], name: str) -> int:
    """A number that a config.json must have."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"config.json: {name} must be a positive number, not {value!r}")
    return value


def layer_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The windows of families in which some layers slide: by `layer_types`, else from `max_window_layers` on."""
    num_layers = need(config, "num_hidden_layers")
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 0)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise ModelLoadError(f"config.json: layer_types of {num_layers} layers are not supported: {sorted(set(kinds))}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
