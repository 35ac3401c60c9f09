"""From a file's numbers to the library's blocks: 4-bit and 8-bit weights in groups of 32 inputs.

4-bit types of GGUF (Q4_0, Q4_1, Q4_K) have scale and minimum for each group of 32 already and are taken over number by
number; so is Q8_0. (The scales of Q4_K are products, rounded to half precision here.) All others become 8-bit numbers,
which adds less than their own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.backends.torch.native.bindings import BLOCK_BYTES, GROUP, INT4, INT8, ROWS, address

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
