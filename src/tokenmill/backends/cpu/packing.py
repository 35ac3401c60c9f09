"""From a file's numbers to the library's blocks.

Types of GGUF files that there are kernels for are taken over value for value; a matrix takes as many bytes as in its
file. All others are rounded to 8 bits in groups of 32 (`Quantised`), which adds less than their own rounding.
`NativeWeights` are the weights of a decoder in these blocks, shared by every engine core.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tokenmill.backends.checkpoints import StoredTensor, TensorSource
from tokenmill.backends.cpu.bindings import (
    ACTIVATIONS,
    GROUP,
    INT4,
    INT8,
    KINDS,
    NORMS,
    ROWS,
    DecoderStruct,
    Layer,
    Matrix,
    Pool,
    address,
)
from tokenmill.backends.families.config import DecoderConfig, LayerConfig
from tokenmill.backends.families.names import in_file, is_norm, shapes
from tokenmill.errors import InvalidOperation, ModelLoadError

Floats = NDArray[np.float32]
FILE_BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "IQ4_NL": (32, 18),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ4_XS": (256, 136),
}  # fmt: skip
"""Columns and bytes of a block of one row, in files and here."""
BLOCKS = {KINDS[name]: block for name, block in FILE_BLOCKS.items()}
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

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.numbers.shape
        return rows, cols

    def values(self) -> Floats:
        """As float32."""
        cols = self.numbers.shape[1]
        values: Floats = np.repeat(self.scale, GROUP, axis=1)[:, :cols] * self.numbers
        if self.minimum is not None:
            values += np.repeat(self.minimum, GROUP, axis=1)[:, :cols]
        return values


def num_groups(cols: int) -> int:
    return -(-cols // GROUP)


def held_as(dtype: str, asked: int | None) -> int:
    """The type in which a matrix is held: that of its file, unless another number of bits is asked for."""
    if asked is None or (asked == INT4 and dtype in ("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS")):
        return KINDS.get(dtype, INT8)
    return asked


def packed_bytes(rows: int, cols: int, kind: int) -> int:
    """What a matrix takes in blocks."""
    width, size = BLOCKS[kind]
    return -(-rows // ROWS) * ROWS * -(-cols // width) * size


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


def as_kind(values: Floats, kind: int) -> Quantised:
    """Values rounded to INT4 or INT8."""
    rows, cols = values.shape
    together = max(1, ROUNDED_TOGETHER // max(1, cols))
    parts = [(to_int4 if kind == INT4 else to_int8)(values[at : at + together]) for at in range(0, rows, together)]
    minima = [part.minimum for part in parts if part.minimum is not None]
    return Quantised(
        kind,
        np.concatenate([part.numbers for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate(minima) if minima else None,
    )


def pack_stored(lib: Any, tensor: StoredTensor, blocks: NDArray[np.uint8], pool: Pool | None = None) -> bool:
    """Put a matrix of a GGUF file into its blocks. False: it has scales that are not finite."""
    kind, (rows, cols) = KINDS[tensor.dtype], tensor.shape
    assert blocks.size == packed_bytes(rows, cols, kind)
    raw = np.ascontiguousarray(tensor.raw)
    order = None if tensor.order is None else np.ascontiguousarray(tensor.order, dtype=np.int64)
    where = None if order is None else address(order)
    threads = None if pool is None else pool.handle
    return bool(lib.tm_pack(kind, address(raw), where, rows, cols, address(blocks), threads))


def pack(lib: Any, matrix: Quantised, blocks: NDArray[np.uint8]) -> None:
    """Put a matrix into its blocks."""
    rows, cols = matrix.shape
    assert blocks.size == packed_bytes(rows, cols, matrix.kind)
    numbers, scale = np.ascontiguousarray(matrix.numbers), np.ascontiguousarray(matrix.scale, dtype=np.float32)
    if matrix.kind == INT8:
        lib.tm_pack_int8(address(numbers), address(scale), rows, cols, address(blocks))
        return
    assert matrix.minimum is not None
    minimum = np.ascontiguousarray(matrix.minimum, dtype=np.float32)
    lib.tm_pack_int4(address(numbers), address(scale), address(minimum), rows, cols, address(blocks))


def _in_groups(values: Floats) -> Floats:
    """[rows, groups, 32], filled up with zeros."""
    rows, cols = values.shape
    missing = num_groups(cols) * GROUP - cols
    padded = np.pad(values, ((0, 0), (0, missing))) if missing else values
    return padded.reshape(rows, -1, GROUP)


def _flat(numbers: NDArray[Any], cols: int) -> NDArray[Any]:
    return np.ascontiguousarray(numbers.reshape(len(numbers), -1)[:, :cols])


def matrices(layer: LayerConfig) -> dict[str, str]:
    """The matrices of a layer in the library, and the tensor that each is made of."""
    names = {"q": "qkv", "gate": "gate_up"} if layer.fused else {name: name for name in ("q", "k", "v", "gate", "up")}
    return {**names, "o": "o", "down": "down"}


MOST_WEIGHT = 65504.0
"""Scales and minima are kept in half precision."""
MOST_HEAD_DIM, MOST_SHARED = 512, 64
"""As in decoder.h."""
LARGE_PAGE, LINE = 2 << 20, 64
"""Bytes of a large page, and of a line of the cache, with which every matrix begins."""


@dataclass(frozen=True)
class Native:
    """Weights for the C library: of one type, INT4 or INT8, or None for those of the file."""

    kind: int | None

    @property
    def bits(self) -> int | None:
        return {INT4: 4, INT8: 8, None: None}[self.kind]


@dataclass(frozen=True)
class Part:
    """Where a tensor is: its matrix in the library, and the matrix's blocks."""

    matrix: Matrix
    blocks: NDArray[np.uint8]


def can_hold(config: DecoderConfig) -> bool:
    """Are these sizes that the library can do? Heads and rows of the MLP fill whole vectors."""
    fits_head = config.head_dim % 16 == 0 and config.head_dim <= MOST_HEAD_DIM
    shared = config.num_heads // config.num_kv_heads
    return fits_head and shared <= MOST_SHARED and config.intermediate_size % ROWS == 0


class NativeWeights:
    """All tensors of a decoder. `kind` says how matrices are stored: None as their file has them, else INT4 or INT8."""

    def __init__(self, lib: Any, config: DecoderConfig, kind: int | None) -> None:
        self.config = config
        self._lib = lib
        self._kind = kind
        self._free: NDArray[np.uint8] = np.empty(0, np.uint8)
        """Memory for blocks that is not taken yet: one piece for all matrices, so that it is made of large pages."""
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
        self.embed = self.head = Matrix()

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
    def kinds(self) -> list[str]:
        """Types of the matrices; the one with the most bytes first."""
        sizes: dict[int, int] = {}
        for part in self._parts.values():
            sizes[part.matrix.kind] = sizes.get(part.matrix.kind, 0) + part.blocks.nbytes
        names = {number: name for name, number in KINDS.items()}
        return [names[kind] for kind in sorted(sizes, key=lambda one: -sizes[one])]

    def load(self, source: TensorSource, names: Mapping[str, str], report: Callable[[int, int], None]) -> None:
        """Fill everything. `report` is told how many tensors are done, and of how many."""
        total, done = len(shapes(self.config)), 0
        for own, vector in self._vectors.items():
            name = in_file(own, names)
            vector[:] = self._shifted(own, _floats(source, name))
            done += 1
        self._free = zeros((self._blocks_bytes(source, names),), np.uint8)
        pool = Pool(self._lib, os.cpu_count() or 1)
        # The largest ones first: what reading them takes on the way is given back before the others come.
        self._fill(self.embed, "embed", source, in_file("embed", names), pool)
        self.head = self.embed
        if not self.config.tied:
            self.head = Matrix()
            self._fill(self.head, "head", source, in_file("head", names), pool)
        for i, layer in enumerate(self.layers):
            for name, tensor in matrices(self.config.layers[i]).items():
                own, matrix = f"{tensor}.{i}", getattr(layer, name)  # not a copy
                bias = self._vectors.get(f"{tensor}_bias.{i}")
                matrix.bias = None if bias is None else address(bias)
                self._fill(matrix, own, source, in_file(own, names), pool)
                done += 1
                report(done, total)
        pool.close()
        report(total, total)

    def replace(self, own: str, value: NDArray[Any]) -> None:
        """New values for one tensor, in place; rounded as the old ones were."""
        expected = shapes(self.config)[own]
        if value.shape != expected:
            raise InvalidOperation(f"the new tensor has shape {value.shape}, not {expected}")
        most = MOST_WEIGHT if len(expected) == 2 else np.finfo(np.float32).max
        if value.dtype.kind != "f" or not (np.abs(value) <= most).all():
            raise InvalidOperation("the new tensor has values that are not finite or too large to be quantized")
        floats = value.astype(np.float32)
        if own in self._vectors:
            self._vectors[own][:] = self._shifted(own, floats)
            return
        part = self._parts[own]
        kind = INT4 if part.matrix.kind == INT4 else INT8
        if part.matrix.kind != kind:  # we can't round to a file's own type as llama.cpp does: 8 bits lose less
            part = self._take(own, part.matrix, kind)
        pack(self._lib, as_kind(np.ascontiguousarray(floats), kind), part.blocks)

    def _shifted(self, own: str, values: Floats) -> Floats:
        """A file's values as the decoder has them."""
        return values + np.float32(self.config.norm_offset) if is_norm(own) else values

    def _fill(self, matrix: Matrix, own: str, source: TensorSource, name: str, pool: Pool) -> None:
        """Load a tensor as the file has it, if no other type was asked for; else in that type, or in 8 bits."""
        tensor = source.load(name)
        kind = self._kind_of(own, tensor.dtype)
        matrix.rows, matrix.cols = tensor.shape
        blocks = self._take(own, matrix, kind).blocks
        if KINDS.get(tensor.dtype) != kind:
            pack(self._lib, as_kind(_floats(source, name), kind), blocks)
        elif not pack_stored(self._lib, tensor, blocks, pool):
            raise ModelLoadError(f"{source.where}: {name} has non-finite values")

    def _kind_of(self, own: str, dtype: str) -> int:
        return held_as(dtype, INT8 if self._kind is not None and own in ("embed", "head") else self._kind)

    def _blocks_bytes(self, source: TensorSource, names: Mapping[str, str]) -> int:
        """Of all matrices."""
        found = [(self._kind_of(own, source.dtype_of(in_file(own, names))), shape)
                 for own, shape in shapes(self.config).items() if len(shape) == 2]  # fmt: skip
        return sum(-(-packed_bytes(*shape, kind) // LINE) * LINE for kind, shape in found)

    def _take(self, own: str, matrix: Matrix, kind: int) -> Part:
        """Memory for a tensor's blocks of this type."""
        size = packed_bytes(matrix.rows, matrix.cols, kind)
        if size > len(self._free):  # of a tensor that is replaced and takes more than before
            self._free = zeros((size,), np.uint8)
        blocks, self._free = self._free[:size], self._free[-(-size // LINE) * LINE :]
        matrix.blocks, matrix.kind = address(blocks), kind
        self._parts[own] = Part(matrix, blocks)
        return self._parts[own]


def _floats(source: TensorSource, name: str) -> Floats:
    values = source.load(name).values(source.where, name)
    if not np.isfinite(values).all():
        raise ModelLoadError(f"{source.where}: {name} has non-finite values")
    return values


def zeros(shape: tuple[int, ...], dtype: DTypeLike, *, small_bytes: int = 0) -> NDArray[Any]:
    """Zeros, since what lies outside a sequence is multiplied by a weight of zero, and must be a number for that.

    They come from the operating system page by page, when a page is first used: memory for a long context costs
    nothing until it is there. Large ones come in large pages, where the system has them: each costs once. The first
    `small_bytes` stay in small pages.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    flags = {} if not hasattr(mmap, "MAP_ANONYMOUS") else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    memory = mmap.mmap(-1, max(1, num_bytes), **flags)  # shared memory, the default, has large pages on few systems
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            if small_bytes:
                memory.madvise(mmap.MADV_NOHUGEPAGE, 0, min(small_bytes, len(memory)))
            if num_bytes - small_bytes >= LARGE_PAGE:
                memory.madvise(mmap.MADV_HUGEPAGE, small_bytes)
    return np.frombuffer(memory, dtype=dtype, count=math.prod(shape)).reshape(shape)
