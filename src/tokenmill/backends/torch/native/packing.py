"""From a file's numbers to the library's blocks: 4-bit and 8-bit weights in groups of 32 inputs.

4-bit types of GGUF (Q4_0, Q4_1, Q4_K) have scale and minimum for each group of 32 already and are taken over number by
number; so is Q8_0. (The scales of Q4_K are products, rounded to half precision here.) All others become 8-bit numbers,
which adds less than their own rounding. `NativeWeights` are the weights of a decoder in these blocks, shared by every
engine core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.backends.torch.config import DecoderConfig, LayerConfig
from tokenmill.backends.torch.families.names import in_file, is_norm, shapes
from tokenmill.backends.torch.native.bindings import (
    ACTIVATIONS,
    BLOCK_BYTES,
    GROUP,
    INT4,
    INT8,
    NORMS,
    ROWS,
    DecoderStruct,
    Layer,
    Matrix,
    address,
)
from tokenmill.errors import InvalidOperation, ModelLoadError

Floats = NDArray[np.float32]
FOUR_BITS = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""GGUF's types that stay 4 bits."""
ROUNDED_TOGETHER = 1 << 20
"""Values that are rounded at a time: what that takes on the way must not count beside the weights."""


@dataclass(frozen=True)
class Quantised:
    """A matrix as numbers with a scale (and a minimum) for each group of a row."""

    kind: int
    numbers: NDArray[Any]
    """[rows, cols]: 0 to 15 as uint8, or signed bytes."""
    scale: Floats
    """[rows, groups]"""
    minimum: Floats | None = None
    """[rows, groups], of 4-bit ones."""

    def rows(self, order: NDArray[np.intp] | slice) -> Quantised:
        """Some rows, in this order."""
        minimum = None if self.minimum is None else self.minimum[order]
        return Quantised(self.kind, self.numbers[order], self.scale[order], minimum)

    def values(self) -> Floats:
        """As float32."""
        cols = self.numbers.shape[1]
        values: Floats = np.repeat(self.scale, GROUP, axis=1)[:, :cols] * self.numbers
        if self.minimum is not None:
            values += np.repeat(self.minimum, GROUP, axis=1)[:, :cols]
        return values


def num_groups(cols: int) -> int:
    return -(-cols // GROUP)


def packed_bytes(rows: int, cols: int, kind: int) -> int:
    """What a matrix takes in blocks."""
    return -(-rows // ROWS) * num_groups(cols) * BLOCK_BYTES[kind]


def to_int8(values: Floats) -> Quantised:
    """Round to 8 bits: the largest number of a group is 127."""
    grouped = _in_groups(values)
    scale = (np.abs(grouped).max(axis=2) / 127).astype(np.float16).astype(np.float32)
    # A scale so small that it is 0 as a half: all of its group is as good as 0.
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    numbers = np.clip(np.rint(grouped * inverse[..., None]), -127, 127).astype(np.int8)
    return Quantised(INT8, _flat(numbers, values.shape[1]), scale)


def to_int4(values: Floats) -> Quantised:
    """Round to 4 bits, from the least to the largest of a group."""
    grouped = _in_groups(values)
    least = grouped.min(axis=2).astype(np.float16).astype(np.float32)
    scale = ((grouped.max(axis=2) - least) / 15).astype(np.float16).astype(np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    numbers = np.clip(np.rint((grouped - least[..., None]) * inverse[..., None]), 0, 15).astype(np.uint8)
    return Quantised(INT4, _flat(numbers, values.shape[1]), scale, least)


def as_kind(matrix: Quantised | Floats, kind: int) -> Quantised:
    """A matrix in one of the two forms."""
    if isinstance(matrix, Quantised) and matrix.kind == kind:
        return matrix
    rows, cols = (matrix.numbers if isinstance(matrix, Quantised) else matrix).shape
    together = max(1, ROUNDED_TOGETHER // max(1, cols))
    parts = []
    for at in range(0, rows, together):
        part = matrix.rows(slice(at, at + together)) if isinstance(matrix, Quantised) else matrix[at : at + together]
        values = part.values() if isinstance(part, Quantised) else part
        parts.append(to_int4(values) if kind == INT4 else to_int8(values))
    return _joined(parts)


def _joined(parts: list[Quantised]) -> Quantised:
    """All rows, one below the other."""
    minima = [part.minimum for part in parts if part.minimum is not None]
    return Quantised(
        parts[0].kind,
        np.concatenate([part.numbers for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate(minima) if minima else None,
    )


def pack(lib: Any, matrix: Quantised, blocks: NDArray[np.uint8]) -> None:
    """Put a matrix into its blocks."""
    rows, cols = matrix.numbers.shape
    assert blocks.size == packed_bytes(rows, cols, matrix.kind)
    numbers, scale = np.ascontiguousarray(matrix.numbers), np.ascontiguousarray(matrix.scale, dtype=np.float32)
    if matrix.kind == INT8:
        lib.tm_pack_int8(address(numbers), address(scale), rows, cols, address(blocks))
        return
    assert matrix.minimum is not None
    minimum = np.ascontiguousarray(matrix.minimum, dtype=np.float32)
    lib.tm_pack_int4(address(numbers), address(scale), address(minimum), rows, cols, address(blocks))


# -- GGUF's own blocks ------------------------------------------------------------------------------------------------


def from_gguf(kind: str, raw: NDArray[np.uint8]) -> Quantised | None:
    """A matrix of one of GGUF's types, rows of its bytes; None for a type that is not taken over as it is."""
    read = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q8_0": _q8_0}.get(kind)
    return None if read is None else read(raw)


def _halves(raw: NDArray[np.uint8]) -> Floats:
    return np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Sixteen bytes are thirty-two numbers: the low halves, then the high ones."""
    return np.concatenate((raw & 15, raw >> 4), axis=-1)


def _q4_0(raw: NDArray[np.uint8]) -> Quantised:
    blocks = raw.reshape(len(raw), -1, 18)
    scale = _halves(blocks[..., :2])
    return Quantised(INT4, _nibbles(blocks[..., 2:]).reshape(len(raw), -1), scale, -8 * scale)


def _q4_1(raw: NDArray[np.uint8]) -> Quantised:
    blocks = raw.reshape(len(raw), -1, 20)
    numbers = _nibbles(blocks[..., 4:]).reshape(len(raw), -1)
    return Quantised(INT4, numbers, _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q8_0(raw: NDArray[np.uint8]) -> Quantised:
    blocks = raw.reshape(len(raw), -1, 34)
    numbers = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(len(raw), -1)
    return Quantised(INT8, numbers, _halves(blocks[..., :2]))


def _q4_k(raw: NDArray[np.uint8]) -> Quantised:
    """Blocks of 256: eight groups with 6-bit scales and minima, in units of the block's own."""
    blocks = raw.reshape(len(raw), -1, 144)
    unit, least = _halves(blocks[..., :2])[..., None], _halves(blocks[..., 2:4])[..., None]
    packed = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4)
    low, middle, high = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 6) << 4)), axis=-1)
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 6) << 4)), axis=-1)
    quads = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    numbers = np.stack((quads & 15, quads >> 4), axis=3).reshape(len(raw), -1)
    scale, minimum = (unit * scales).reshape(len(raw), -1), (-least * minima).reshape(len(raw), -1)
    return Quantised(INT4, numbers, scale.astype(np.float32), minimum.astype(np.float32))


def _in_groups(values: Floats) -> Floats:
    """[rows, groups, 32], filled up with zeros."""
    rows, cols = values.shape
    missing = num_groups(cols) * GROUP - cols
    padded = np.pad(values, ((0, 0), (0, missing))) if missing else values
    return padded.reshape(rows, -1, GROUP)


def _flat(numbers: NDArray[Any], cols: int) -> NDArray[Any]:
    return np.ascontiguousarray(numbers.reshape(len(numbers), -1)[:, :cols])


def merged_tensors(layer: LayerConfig) -> dict[str, tuple[str, ...]]:
    """The matrices of a layer, and the tensors that each is made of."""
    qkv, gate_up = (("qkv",), ("gate_up",)) if layer.fused else (("q", "k", "v"), ("gate", "up"))
    return {"qkv": qkv, "o": ("o",), "gate_up": gate_up, "down": ("down",)}


MOST_WEIGHT = 65504.0
"""Scales and minima are kept in half precision."""
MOST_HEAD_DIM, MOST_SHARED = 512, 64
"""As in decoder.h."""
KV_DTYPE = torch.float16
"""Of keys and values."""


class QuantisedSource(Protocol):
    """A checkpoint that can give a matrix as it is stored."""

    @property
    def where(self) -> str: ...

    def load(self, name: str) -> Tensor: ...

    def load_quantised(self, name: str) -> Quantised | None:
        """A matrix as its file has it; None if it is not stored in a form that is taken over."""
        ...


@dataclass(frozen=True)
class Native:
    """Weights for the C library: in so many bits, None for as many as the file has."""

    bits: int | None


@dataclass(frozen=True)
class Part:
    """Where a tensor is: rows of a matrix."""

    matrix: Matrix
    blocks: NDArray[np.uint8]
    rows: int


def can_hold(config: DecoderConfig) -> bool:
    """Are these sizes that the library can do? Parts of a matrix begin with a block, and heads fill whole vectors."""
    fits_head = config.head_dim % 16 == 0 and config.head_dim <= MOST_HEAD_DIM
    shared = config.num_heads // config.num_kv_heads
    return fits_head and shared <= MOST_SHARED and config.intermediate_size % ROWS == 0


class NativeWeights:
    """All tensors of a decoder. `bits` says how matrices are stored: None as their file has them, else 4 or 8 bits."""

    def __init__(self, lib: Any, config: DecoderConfig, bits: int | None) -> None:
        self.config = config
        self._lib = lib
        self._bits = bits
        self._keep: list[Any] = []
        """What the structures point to."""
        self._parts: dict[str, Part] = {}
        self._vectors: dict[str, Floats] = {}
        for own, shape in shapes(config).items():
            if len(shape) == 1:
                self._vectors[own] = np.zeros(shape, dtype=np.float32)
        self.layers = (Layer * config.num_layers)()
        self.decoder = DecoderStruct(
            ctypes.cast(self.layers, ctypes.POINTER(Layer)), config.num_layers, config.hidden_size,
            config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim,
            config.ropes[0].dim if config.ropes else 0, config.rms_eps,
        )  # fmt: skip
        for i, (layer, described) in enumerate(zip(self.layers, config.layers, strict=True)):
            for name in NORMS:
                vector = self._vectors.get(f"{name}.{i}")
                setattr(layer, name, None if vector is None else address(vector))
            layer.window = described.window or 0
            layer.rope = -1 if described.rope is None else config.ropes.index(described.rope)
            layer.whole_norms = described.qk_norm == "projection"
            layer.activation = ACTIVATIONS[described.activation]
            layer.scale, layer.softcap = described.attention_scale or 0.0, described.attention_softcap or 0.0
            layer.residual_scale = described.residual_scale
        self.embed = Matrix()
        self.head = Matrix()

    @property
    def names(self) -> list[str]:
        return [*self._parts, *self._vectors]

    @property
    def norm(self) -> Floats:
        return self._vectors["norm"]

    @property
    def num_bytes(self) -> int:
        return sum(part.blocks.nbytes for part in self._parts.values()) + sum(v.nbytes for v in self._vectors.values())

    @property
    def bits(self) -> int:
        """Of the layers' matrices."""
        return int(self.layers[0].gate_up.kind)

    def load(self, source: QuantisedSource, names: Mapping[str, str], report: Callable[[int, int], None]) -> None:
        """Fill everything. `report` is told how many tensors are done, and of how many."""
        total, done = len(shapes(self.config)), 0
        for own, vector in self._vectors.items():
            name = in_file(own, names)
            vector[:] = self._shifted(own, _floats(source, name))
            done += 1
        # The largest ones first: what reading them takes on the way is given back before the others come.
        self.embed = self._merged({"embed": self._read(source, in_file("embed", names), INT8)}, None)
        self.head = self.embed
        if not self.config.tied:
            self.head = self._merged({"head": self._read(source, in_file("head", names), INT8)}, None)
        for i, layer in enumerate(self.layers):
            for name, parts in merged_tensors(self.config.layers[i]).items():
                found = {f"{part}.{i}": self._read(source, in_file(f"{part}.{i}", names)) for part in parts}
                setattr(layer, name, self._merged(found, self._bias(parts, i)))
                done += len(parts)
                report(done, total)
        report(total, total)

    def replace(self, own: str, value: Tensor) -> None:
        """New values for one tensor, in place; rounded as the old ones were."""
        expected = shapes(self.config)[own]
        if tuple(value.shape) != expected:
            raise InvalidOperation(f"the new tensor has shape {tuple(value.shape)}, not {expected}")
        most = MOST_WEIGHT if len(expected) == 2 else torch.finfo(torch.float32).max
        if not value.is_floating_point() or not bool((value.abs() <= most).all()):
            raise InvalidOperation("the new tensor has values that are not finite or too large to be quantized")
        floats = value.detach().to("cpu", torch.float32).numpy()
        if own in self._vectors:
            self._vectors[own][:] = self._shifted(own, floats)
            return
        part = self._parts[own]
        pack(self._lib, as_kind(np.ascontiguousarray(floats), part.matrix.kind), part.blocks)

    def _shifted(self, own: str, values: Floats) -> Floats:
        """A file's values as the decoder has them."""
        return values + np.float32(self.config.norm_offset) if is_norm(own) else values

    def _read(self, source: QuantisedSource, name: str, otherwise: int | None = None) -> Quantised | Floats:
        """As the file has it, or in the form that was asked for."""
        found: Quantised | Floats | None = source.load_quantised(name)
        if found is None:
            found = _floats(source, name)
        if self._bits is None:
            return found if isinstance(found, Quantised) else as_kind(found, INT8)
        return as_kind(found, otherwise or self._bits)

    def _merged(self, parts: Mapping[str, Quantised | Floats], bias: Floats | None) -> Matrix:
        """One matrix for several tensors: in the larger form, where they differ."""
        kinds = {part.kind for part in parts.values() if isinstance(part, Quantised)}
        kind = INT4 if kinds == {INT4} else INT8
        made = {own: as_kind(part, kind) for own, part in parts.items()}
        rows, cols = sum(len(part.numbers) for part in made.values()), next(iter(made.values())).numbers.shape[1]
        blocks = _aligned(packed_bytes(rows, cols, kind))
        matrix = Matrix(address(blocks), None if bias is None else address(bias), kind, rows, cols)
        self._keep += [blocks, bias]
        at = 0
        for own, part in made.items():
            count = len(part.numbers)
            begin = at // ROWS * num_groups(cols) * BLOCK_BYTES[kind]
            place = blocks[begin : begin + packed_bytes(count, cols, kind)]
            pack(self._lib, part, place)
            self._parts[own] = Part(matrix, place, count)
            at += count
        return matrix

    def _bias(self, parts: tuple[str, ...], layer: int) -> Floats | None:
        found = [self._vectors.get(f"{part}_bias.{layer}") for part in parts]
        if found[0] is None:
            return None
        whole = np.concatenate([one for one in found if one is not None])
        at = 0
        for part in parts:  # the tensors are views from now on
            count = len(self._vectors[f"{part}_bias.{layer}"])
            self._vectors[f"{part}_bias.{layer}"] = whole[at : at + count]
            at += count
        return whole


def _floats(source: QuantisedSource, name: str) -> Floats:
    value = source.load(name)
    if not value.is_floating_point():
        raise ModelLoadError(f"{source.where}: {name} has the type {value.dtype}, which is not a floating point type")
    if not bool(value.isfinite().all()):
        raise ModelLoadError(f"{source.where}: {name} has non-finite values")
    return np.ascontiguousarray(value.to(torch.float32).numpy())


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that begins where a line of the cache does."""
    raw = np.empty(num_bytes + 64, dtype=np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + num_bytes]
