"""`DecoderConfig`: what one generic decoder has to know to be a model of any of the families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tokenmill.backends.torch.rope import Rope, rope_from_config
from tokenmill.contract.kv import LayerKV
from tokenmill.errors import ModelLoadError, UnsupportedModel
from tokenmill.files import Settings

MOST_LAYERS = 10_000
"""No model comes near; a larger count is a damaged file, and not worth the memory to find that out."""
MOST_CONTEXT = 2**31 - 1
"""Positions are 32-bit numbers."""
LAYER_TYPES = ("full_attention", "sliding_attention")


class DecoderSizes(Protocol):
    """What a backend and the memory plan must know of any decoder."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def query_size(self) -> int: ...

    @property
    def kv_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    def layer_kv(self, dtype_bytes: int) -> tuple[LayerKV, ...]:
        """What each layer keeps per token."""
        ...


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
            raise ModelLoadError(f"{self.num_heads} heads are not divisible by {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim must be even, not {self.head_dim}")
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


def common_settings(
    settings: Settings, family: str, windows: tuple[int | None, ...], head_dim: int | None = None
) -> dict[str, Any]:
    """What all families spell alike in their config.json. `head_dim` is the family's, where config.json has none."""
    activation = settings.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"activation {activation!r} is not supported; supported: silu")
    num_heads, hidden_size = settings.number("num_attention_heads"), settings.number("hidden_size")
    head_dim = settings.number("head_dim", head_dim or hidden_size // num_heads)
    max_context = settings.number("max_position_embeddings", least=2, most=MOST_CONTEXT)
    return {
        "family": family,
        "vocab_size": settings.number("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": settings.number("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": settings.number("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "max_context": max_context,
        "rms_eps": settings.real("rms_norm_eps", 1e-6),
        "rope": rope_from_config(settings, head_dim, max_context),
        "windows": windows,
        "tied": settings.flag("tie_word_embeddings", False),
    }


def layer_count(settings: Settings) -> int:
    """The number of layers."""
    return settings.number("num_hidden_layers", most=MOST_LAYERS)


def layer_windows(settings: Settings) -> tuple[int | None, ...]:
    """The windows of Qwen: off by default; by `layer_types`, else from `max_window_layers` on."""
    num_layers = layer_count(settings)
    if settings.given("sliding_window") is None or not settings.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = settings.number("sliding_window")
    slides = _sliding_layers(settings, num_layers)
    return tuple(window if one else None for one in slides)


def _sliding_layers(settings: Settings, num_layers: int) -> list[bool]:
    """For each layer whether it has a window."""
    kinds = settings.given("layer_types")
    if kinds is None:
        # A null says nothing about where windows begin; only a config.json without the key means the usual 28.
        usual = None if settings.mentions("max_window_layers") else 28
        first = settings.number("max_window_layers", usual, least=0)
        return [layer >= first for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise settings.wrong("layer_types", f"a list of {num_layers} of {', '.join(LAYER_TYPES)}", kinds)
    return [kind == "sliding_attention" for kind in kinds]
