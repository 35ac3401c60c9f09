"""Random paged KV and batches for the attention kernels, and what they owe, in float32 without any paging."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv: int
    dim: int
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    """Of keys and values, where it is another."""
    scale: float | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Paged:
    """Sequences of some cells each, in blocks scattered over the memory; what lies between them is NaN."""

    shape: Shape
    keys: Tensor
    values: Tensor
    tables: Tensor
    first: list[int]
    length: list[int]

    def cells(self, seq: int, tensor: Tensor) -> Tensor:
        """[length, KV heads, dim] of one sequence, indexed as its row of blocks is."""
        index = torch.arange(self.length[seq], device=tensor.device)
        size = self.shape.block_size
        return tensor.float()[self.tables[seq, index // size].long() * size + index % size]


def paged(shape: Shape, length: list[int], first: list[int], device: str, seed: int) -> Paged:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-one // shape.block_size) for one in length]
    blocks = list(range(sum(num_blocks) + 3))
    rng.shuffle(blocks)
    width = max(num_blocks) + 1
    tables = torch.full((len(length), width), -7, dtype=torch.int32)
    slots = len(blocks) * shape.block_size
    keys, values = (torch.full((slots, shape.num_kv, shape.dim), torch.nan) for _ in range(2))
    for seq, count in enumerate(num_blocks):
        tables[seq, :count] = torch.tensor([blocks.pop() for _ in range(count)], dtype=torch.int32)
        index = torch.arange(first[seq], length[seq])
        at = tables[seq, index // shape.block_size].long() * shape.block_size + index % shape.block_size
        for tensor in (keys, values):
            tensor[at] = torch.randn(len(index), shape.num_kv, shape.dim, generator=generator)
    held_as = shape.kv_dtype or shape.dtype
    return Paged(shape, keys.to(device, held_as), values.to(device, held_as), tables.to(device), first, length)


def attended(memory: Paged, seq: int, q: Tensor, index: int) -> Tensor:
    """[tokens, heads, dim]: what consecutive tokens read whose own cells begin at `index`."""
    shape = memory.shape
    group = shape.num_heads // shape.num_kv
    keys, values = (memory.cells(seq, one).repeat_interleave(group, 1) for one in (memory.keys, memory.values))
    own = torch.arange(index, index + len(q), device=q.device)[:, None]
    cell = torch.arange(len(keys), device=q.device)[None]
    sees = (cell <= own) & (cell >= memory.first[seq])
    if shape.window is not None:
        sees &= cell > own - shape.window
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * (shape.scale or shape.dim**-0.5)
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    shares = scores.masked_fill(~sees, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", shares, values.nan_to_num())


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, over all numbers; NaN never passes."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
