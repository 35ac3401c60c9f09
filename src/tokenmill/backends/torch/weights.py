"""The weights of a decoder: allocated once, filled from a file, shared by every engine core.

Queries, keys and values are one matrix, and so are gate and up; each tensor that a file knows by a name of its own is a
view into them, which is how it is loaded and replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.backends.checkpoints import StoredTensor, TensorSource
from tokenmill.backends.families.config import DecoderConfig
from tokenmill.backends.families.names import Shape, in_file, is_norm, shapes
from tokenmill.errors import InvalidOperation, ModelLoadError


@dataclass(frozen=True)
class Linear:
    """Rows times a weight matrix."""

    weight: Tensor
    """[out, in]"""
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


TORCH_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Of safetensors files."""


def as_tensor(stored: StoredTensor, where: str, name: str) -> Tensor:
    """A tensor's values on the host, of the type that they are stored in if torch has it; mapped, where that can be."""
    kind = TORCH_TYPES.get(stored.dtype)
    if kind is not None and stored.order is None and stored.raw.flags.writeable:
        return torch.from_numpy(stored.raw).view(kind)
    values = stored.values(where, name)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    attn_norm: Tensor | None
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    attn_post_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Linear
    down: Linear
    mlp_post_norm: Tensor | None


class DecoderWeights:
    """All tensors of a decoder, uninitialised until they are loaded."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.views: dict[str, Tensor] = {}
        """The decoder's name of a tensor -> where its values are."""
        self._dtype, self._device = dtype, device
        self._sizes = shapes(config)
        hidden = config.hidden_size
        self.embed = self._new("embed", (config.vocab_size, hidden))
        self.layers = [self._layer(i) for i in range(config.num_layers)]
        self.norm = self._new("norm", (hidden,))
        self.head = Linear(self.embed if config.tied else self._new("head", (config.vocab_size, hidden)))

    @property
    def num_bytes(self) -> int:
        return sum(view.numel() * view.element_size() for view in self.views.values())

    def load(self, source: TensorSource, names: Mapping[str, str], report: Callable[[int, int], None]) -> None:
        """Fill everything from a checkpoint that `check_tensors` has nothing against.

        `report` is told how many tensors are done, and of how many.
        """
        for done, (own, view) in enumerate(self.views.items()):
            name = in_file(own, names)
            value = as_tensor(source.load(name), source.where, name)
            view.copy_(self._shifted(own, value))
            if not all_finite(view):
                raise ModelLoadError(f"{source.where}: {name} has non-finite values as {view.dtype}")
            report(done + 1, len(self.views))

    def replace(self, own: str, value: Tensor) -> None:
        """New values for one tensor, in place."""
        overwrite(self.views[own], self._shifted(own, value))

    def _shifted(self, own: str, value: Tensor) -> Tensor:
        """A file's values as the decoder has them."""
        offset = self.config.norm_offset
        return value.float() + offset if offset and is_norm(own) and value.is_floating_point() else value

    def _layer(self, i: int) -> LayerWeights:
        layer, sizes = self.config.layers[i], self._sizes

        def norm(name: str) -> Tensor | None:
            own = f"{name}.{i}"
            return self._new(own, sizes[own]) if own in sizes else None

        return LayerWeights(
            attn_norm=norm("attn_norm"),
            qkv=self._merged(i, ("qkv",) if layer.fused else ("q", "k", "v"), layer.qkv_bias),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            o=self._merged(i, ("o",), layer.output_bias),
            attn_post_norm=norm("attn_post_norm"),
            mlp_norm=norm("mlp_norm"),
            gate_up=self._merged(i, ("gate_up",) if layer.fused else ("gate", "up"), layer.mlp_bias),
            down=self._merged(i, ("down",), layer.mlp_bias),
            mlp_post_norm=norm("mlp_post_norm"),
        )

    def _new(self, own: str, shape: Shape) -> Tensor:
        dtype = torch.float32 if self.config.wide_norms and is_norm(own) else self._dtype
        self.views[own] = torch.empty(shape, dtype=dtype, device=self._device)
        return self.views[own]

    def _merged(self, layer: int, parts: Sequence[str], has_bias: bool) -> Linear:
        """One matrix for several tensors, each a view of some of its rows."""
        rows = [self._sizes[f"{part}.{layer}"] for part in parts]
        height, width = sum(shape[0] for shape in rows), rows[0][1]
        weight = torch.empty((height, width), dtype=self._dtype, device=self._device)
        bias = torch.empty(height, dtype=self._dtype, device=self._device) if has_bias else None
        at = 0
        for part, (count, _) in zip(parts, rows, strict=True):
            self.views[f"{part}.{layer}"] = weight[at : at + count]
            if bias is not None:
                self.views[f"{part}_bias.{layer}"] = bias[at : at + count]
            at += count
        return Linear(weight, bias)


def overwrite(weight: Tensor, value: Tensor) -> None:
    """New values for a weight, in place. `InvalidOperation`: another shape, or values that the weight's type lacks."""
    if value.shape != weight.shape:
        raise InvalidOperation(f"the new tensor has shape {tuple(value.shape)}, not {tuple(weight.shape)}")
    # Converted first: a number may be finite in its own type and too large for the weights'.
    converted = value.to(weight.dtype) if value.is_floating_point() else None
    if converted is None or not all_finite(converted):
        raise InvalidOperation(f"the new tensor has non-finite values as {weight.dtype}")
    weight.copy_(converted)


def all_finite(values: Tensor) -> bool:
    """By the extremes, which takes no memory; a NaN is both."""
    return all(bool(extreme.isfinite()) for extreme in values.aminmax())
