"""`NativeWeights`: the weights of a decoder in the library's blocks, shared by every engine core."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.families.names import in_file, shapes
from tokenmill.backends.torch.native.bindings import (
    BLOCK_BYTES,
    INT4,
    INT8,
    ROWS,
    DecoderStruct,
    Layer,
    Matrix,
    address,
)
from tokenmill.backends.torch.native.packing import Floats, Quantised, as_kind, num_groups, pack, packed_bytes
from tokenmill.errors import InvalidOperation, ModelLoadError

MERGED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""The matrices of a layer, and the tensors that each is made of."""
MOST_WEIGHT = 65504.0
"""Scales and minima are kept in half precision."""
MOST_HEAD_DIM, MOST_SHARED = 512, 64
"""As in decoder.h."""
KV_DTYPE = torch.float16
"""Of keys and values."""
NORMS = ("attn_norm", "mlp_norm", "q_norm", "k_norm")


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
            config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_eps,
        )  # fmt: skip
        for i, layer in enumerate(self.layers):
            for name in NORMS:
                vector = self._vectors.get(f"{name}.{i}")
                setattr(layer, name, None if vector is None else address(vector))
            layer.window = config.windows[i] or 0
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
            vector[:] = _floats(source, name)
            done += 1
        # The largest ones first: what reading them takes on the way is given back before the others come.
        self.embed = self._merged({"embed": self._read(source, in_file("embed", names), INT8)}, None)
        self.head = self.embed
        if not self.config.tied:
            self.head = self._merged({"head": self._read(source, in_file("head", names), INT8)}, None)
        for i, layer in enumerate(self.layers):
            for name, parts in MERGED.items():
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
            self._vectors[own][:] = floats
            return
        part = self._parts[own]
        pack(self._lib, as_kind(np.ascontiguousarray(floats), part.matrix.kind), part.blocks)

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
