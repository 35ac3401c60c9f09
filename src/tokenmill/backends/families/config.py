"""`DecoderConfig`: what one generic decoder has to know to be a model of any of the families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tokenmill.backends.families.rope import Rope, rope_from_config
from tokenmill.contract.backend import BackendLimits, MemoryPlan
from tokenmill.contract.kv import LayerKV
from tokenmill.errors import ModelLoadError, UnsupportedModel
from tokenmill.files import Settings

MOST_LAYERS = 10_000
"""No model comes near; a larger count is a damaged file, and not worth the memory to find that out."""
MOST_CONTEXT = 2**31 - 1
"""Positions are 32-bit numbers."""
LAYER_TYPES = ("full_attention", "sliding_attention")
QK_NORMS = ("head", "projection")
"""A norm over each head, or over all heads together."""
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""As config.json spells them -> as layers do."""


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

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer; None: it sees everything."""
        ...

    def layer_kv(self, dtype_bytes: int) -> tuple[LayerKV, ...]:
        """What each layer keeps per token."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What one layer consists of, beside its sizes: RoPE, grouped queries and a gated MLP, with these settings."""

    rope: Rope | None = None
    """None: queries and keys are not rotated (NoPE)."""
    window: int | None = None
    """Positions that a token sees, itself included; None: all."""
    attention_scale: float | None = None
    """Factor on the dot products; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Bounds attention scores smoothly to plus and minus this value."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: str | None = None
    """What the norms of queries and keys cover: one of `QK_NORMS`; None: there are none."""
    norm_before: bool = True
    """Norms of what goes into attention and MLP."""
    norm_after: bool = False
    """Norms of what attention and MLP add to the residual stream."""
    residual_scale: float = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    activation: str = "silu"
    """Of the gate: one of `ACTIVATIONS`."""
    fused: bool = False
    """Files hold queries, keys and values as one tensor, and gate and up as another."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder, and a description of each of its layers."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_eps: float
    layers: tuple[LayerConfig, ...]
    embed_scale: float = 1.0
    """Factor on the embeddings."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    """Bounds logits, already scaled, smoothly to plus and minus this value."""
    norm_offset: float = 0.0
    """Added to the norm weights of the model's files."""
    wide_norms: bool = False
    """Hold norm weights in float32: they are near an offset, which leaves 16-bit types few digits for the rest."""
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
        if not self.layers:
            raise ModelLoadError("the model has no layers")
        dims = {rope.dim for rope in self.ropes}
        if len(dims) > 1 or any(dim % 2 or not 2 <= dim <= self.head_dim for dim in dims):
            raise ModelLoadError(f"RoPE must rotate an even number of the {self.head_dim} dimensions of a head: {dims}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self.layers)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ones, in order of their first layer."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

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


OTHER_BYTES = 24 << 20
"""Code, tables and bookkeeping, measured."""
TOKEN_BYTES = 1500
"""Of a tokenizer, for each token of its vocabulary, measured."""
LOGITS_COPIES = 4
"""Copies of the logits that sampling makes on the way."""


def kv_bytes(config: DecoderSizes, itemsize: int) -> int:
    """Of one token in all layers, with numbers of so many bytes."""
    return sum(layer.bytes_per_token for layer in config.layer_kv(itemsize))


def memory_plan(
    config: DecoderSizes,
    limits: BackendLimits,
    num_rows: int,
    *,
    weights: int,
    kv_token_bytes: int,
    step: int,
    loading: int,
) -> MemoryPlan:
    """Everything, for one backend; so many rows of logits are wanted in a step.

    `kv_token_bytes` is what a token takes in all layers, `step` what a step of
    `limits.ubatch_size` tokens takes on the way, `loading` what the weights do.
    """
    logits = LOGITS_COPIES * num_rows * config.vocab_size * 4
    other = OTHER_BYTES + TOKEN_BYTES * config.vocab_size
    kv = limits.num_cells * kv_token_bytes
    return MemoryPlan(weights, kv, step + logits, other, OTHER_BYTES + loading)


def decoder_config(
    settings: Settings,
    family: str,
    layer: LayerConfig,
    *,
    windows: Sequence[int | None] | None = None,
    ropes: Callable[[int, int], Sequence[Rope | None]] | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    eps: float = 1e-6,
    **others: Any,
) -> DecoderConfig:
    """What all families spell alike in their config.json, with `layer` for every layer; `others` are a family's own.

    `windows` and `ropes`, which is given the head's dimensions and the context, have an entry a layer. `head_dim`,
    `tied` and `eps` are the family's, where config.json has none.
    """
    num_layers = layer_count(settings)
    num_heads, hidden_size = settings.number("num_attention_heads"), settings.number("hidden_size")
    head_dim = settings.number("head_dim", head_dim or hidden_size // num_heads)
    max_context = settings.number("max_position_embeddings", least=2, most=MOST_CONTEXT)
    if ropes is not None:
        of_layers = ropes(head_dim, max_context)
    else:
        of_layers = (rope_from_config(settings, head_dim, max_context),) * num_layers
    max_context = limited_context(max_context, of_layers)
    return DecoderConfig(
        family=family,
        vocab_size=settings.number("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=settings.number("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=settings.number("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_context=max_context,
        rms_eps=settings.real("rms_norm_eps", eps),
        layers=layers_of(layer, windows or (None,) * num_layers, of_layers, max_context),
        tied=settings.flag("tie_word_embeddings", tied),
        **others,
    )


def limited_context(max_context: int, ropes: Sequence[Rope | None]) -> int:
    """The context of a model, which some kinds of RoPE limit."""
    return min([max_context, *(rope.most_context for rope in ropes if rope is not None and rope.most_context)])


def layers_of(
    layer: LayerConfig, windows: Sequence[int | None], ropes: Sequence[Rope | None], max_context: int
) -> tuple[LayerConfig, ...]:
    """All layers, from what they have in common. A window of the whole context is none, and costs no mask."""
    return tuple(
        replace(layer, window=None if window is None or window >= max_context else window, rope=rope)
        for window, rope in zip(windows, ropes, strict=True)
    )


def activation(settings: Settings, name: str = "hidden_act", default: str = "silu") -> str:
    """The gate's activation, as config.json spells it."""
    found = settings.text(name, default)
    if found not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {found!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[found]


def optional(settings: Settings, name: str, default: float | None = None) -> float | None:
    """A number above 0; None where the file says null, the default where it says nothing."""
    if settings.given(name) is None:
        return None if settings.mentions(name) else default
    return settings.real(name)


def layer_count(settings: Settings) -> int:
    """The number of layers."""
    return settings.number("num_hidden_layers", most=MOST_LAYERS)


def one_window(settings: Settings) -> tuple[int | None, ...]:
    """The same window for all layers, or none."""
    window = None if settings.given("sliding_window") is None else settings.number("sliding_window")
    return (window,) * layer_count(settings)


def layer_windows(settings: Settings, usual: list[bool] | None = None) -> tuple[int | None, ...]:
    """The windows of Qwen: off by default; by `layer_types`, else of the `usual` layers, or from `max_window_layers` on
    where there are none.
    """
    num_layers = layer_count(settings)
    if settings.given("sliding_window") is None or not settings.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = settings.number("sliding_window")
    slides = sliding_layers(settings) or usual
    if slides is None:
        # A null says nothing about where windows begin; only a config.json without the key means the usual 28.
        default = None if settings.mentions("max_window_layers") else 28
        first = settings.number("max_window_layers", default, least=0)
        slides = [layer >= first for layer in range(num_layers)]
    return tuple(window if one else None for one in slides)


def sliding_layers(settings: Settings) -> list[bool] | None:
    """For each layer whether it has a window, as `layer_types` says; None where it is missing."""
    kinds, num_layers = settings.given("layer_types"), layer_count(settings)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise settings.wrong("layer_types", f"a list of {num_layers} of {', '.join(LAYER_TYPES)}", kinds)
    return [kind == "sliding_attention" for kind in kinds]
