"""`TorchKV`: keys and values of every layer as tensors over slots. The bookkeeping is `PagedKV`'s."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenmill.backends.torch.kernels.device import upload
from tokenmill.backends.torch.rotations import rotate, rotations
from tokenmill.contract import IntArray, LayerKV
from tokenmill.errors import InvalidOperation

LARGE_PAGE = 2 << 20


class TorchKV:
    """A `KVStorage`. Keys are stored rotated to their positions, by `inv_freq`: of each layer, or of all."""

    def __init__(
        self,
        layers: Sequence[LayerKV],
        num_blocks: int,
        block_size: int,
        inv_freq: Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        slots = num_blocks * block_size
        self.keys = [zeros((slots, one.num_heads, one.key_dim), dtype, device) for one in layers]
        self.values = [zeros((slots, one.num_heads, one.value_dim), dtype, device) for one in layers]
        self.holds_bad_numbers = False
        """Has a sequence ever computed keys or values that are not finite? Its own request fails by them."""
        self._inv_freq = inv_freq.expand(len(layers), inv_freq.shape[-1])
        self._device = device

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put the keys and values of new tokens into their slots."""
        for cells, new in ((self.keys[layer], keys), (self.values[layer], values)):
            _movable(cells)[slots] = _movable(_narrowed(new, cells.dtype))

    def hand_out(self, blocks: IntArray) -> None:
        """Blocks get a new owner. What a former one left in them is masked, which only helps if it is a number."""
        if self.holds_bad_numbers:
            index = self._index(blocks)
            for tensor in self._all():
                tensor.view(-1, self.block_size, *tensor.shape[1:])[index] = 0

    def copy_blocks(self, src: IntArray, dst: IntArray) -> None:
        source, target = self._index(src), self._index(dst)
        for tensor in self._all():
            blocks = tensor.view(-1, self.block_size, *tensor.shape[1:])
            blocks[target] = blocks[source]

    def shift(self, slots: IntArray, delta: int) -> None:
        """Turn keys on by `delta` positions: rotations add up."""
        index = self._index(slots)
        by = torch.full((1,), delta, device=self._device)
        for keys, inv_freq in zip(self.keys, self._inv_freq, strict=True):
            cos, sin = rotations(by, inv_freq, 1.0)
            turned = rotate(_movable(keys)[index].view(keys.dtype).to(as_wide_as(keys.dtype)), cos, sin)
            _movable(keys)[index] = _movable(_narrowed(turned, keys.dtype))

    def read(self, slots: IntArray) -> bytes:
        index = self._index(slots)
        parts = [tensor[index].cpu().contiguous() for tensor in self._all()]
        return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)

    def write(self, slots: IntArray, data: memoryview) -> None:
        tensors = (*self.keys, *self.values)
        sizes = [len(slots) * tensor[0].numel() * tensor.element_size() for tensor in tensors]
        if len(data) != sum(sizes):
            raise InvalidOperation(f"{len(data)} bytes for {len(slots)} cells of {sum(sizes) // len(slots)} bytes")
        index, at = self._index(slots), 0
        for tensor, size in zip(tensors, sizes, strict=True):
            raw = torch.from_numpy(np.frombuffer(data[at : at + size], dtype=np.uint8).copy())
            cells = raw.view(tensor.dtype).view(len(slots), *tensor.shape[1:])
            if not bool(cells.to(as_wide_as(tensor.dtype)).isfinite().all()):
                raise InvalidOperation("the data contains non-finite keys or values")
            _movable(tensor)[index] = _movable(cells).to(self._device)
            at += size

    def _all(self) -> list[Tensor]:
        """Keys and values of all layers, to be moved about."""
        return [_movable(tensor) for tensor in (*self.keys, *self.values)]

    def _index(self, numbers: IntArray) -> Tensor:
        return upload(numbers.astype(np.int64), self._device)


def as_wide_as(dtype: torch.dtype) -> torch.dtype:
    """What numbers of this type are computed in: torch can't compute with 8 bits."""
    return dtype if dtype.itemsize > 1 else torch.float32


def _narrowed(cells: Tensor, dtype: torch.dtype) -> Tensor:
    """As numbers of this type. What is too large for 8 bits stops at their largest number: some casts make it NaN."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        cells = cells.clamp(-largest, largest)
    return cells.to(dtype)


def _movable(cells: Tensor) -> Tensor:
    """As they are, or as bytes: torch has no indexing of 8-bit floats."""
    return cells if cells.dtype.itemsize > 1 else cells.view(torch.uint8)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since what lies outside a sequence is multiplied by a weight of zero, and must be a number for that.

    On the host they come from the operating system page by page, when a page is first used: memory for a long context
    costs nothing until it is there.
    """
    if device.type != "cpu":
        return torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype).view(shape)
    raw = np.frombuffer(_fresh_memory(math.prod(shape) * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _fresh_memory(num_bytes: int) -> mmap.mmap:
    """Zeros, not there yet. Large ones come in large pages, where the system has them: each costs once."""
    memory = mmap.mmap(-1, num_bytes)
    if num_bytes >= LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
