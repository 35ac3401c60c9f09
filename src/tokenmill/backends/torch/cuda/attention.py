"""`PagedAttention`: the attention of a step by the kernels that read paged KV where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmill.backends.torch.cuda.inputs import StepInputs
from tokenmill.backends.torch.cuda.kernels.decode_attention import decode_attention, num_splits_for
from tokenmill.backends.torch.cuda.kernels.prefill_attention import by_block, prefill_attention
from tokenmill.backends.torch.kv_storage import TorchKV


class PagedLayers:
    """What attention reads in each layer, worked out once for a KV memory."""

    def __init__(self, kv: TorchKV, windows: Sequence[int | None]) -> None:
        self.keys, self.values = kv.keys, kv.values
        self.block_size = kv.block_size
        self.windows = windows
        self.blocks = [_blocks(*cells, kv.block_size) for cells in zip(kv.keys, kv.values, strict=True)]
        device = kv.keys[0].device
        self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def clear(self) -> None:
        """Let go of the memory."""
        self.keys, self.values = [], []
        self.blocks.clear()


def _blocks(keys: Tensor, values: Tensor, block_size: int) -> tuple[Any, Any] | None:
    blocks = by_block(keys, block_size), by_block(values, block_size)
    return None if blocks[0] is None else blocks


class PagedAttention:
    """An `Attention`. What it launches depends on the step's shapes alone, so a graph can hold it."""

    def __init__(self, layers: PagedLayers, inputs: StepInputs) -> None:
        self._layers = layers
        self._inputs = inputs
        self._num_splits = 1
        if inputs.singles is not None:
            num_kv = layers.keys[0].shape[1]
            self._num_splits = num_splits_for(len(inputs.singles.row), num_kv, layers.num_processors)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        layers = self._layers
        keys, values = layers.keys[layer], layers.values[layer]
        block_size, window = layers.block_size, layers.windows[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        width, singles, longs = self._inputs.width, self._inputs.singles, self._inputs.longs
        if longs is not None:
            prefill_attention(
                q, keys, values, layers.blocks[layer], out,
                longs.order, longs.begin, longs.count, longs.index, longs.first,
                longs.tile_run, longs.tile_offset, longs.tables, width,
                block_size=block_size, window=window,
            )  # fmt: skip
        if singles is not None:
            decode_attention(
                q, keys, values, out,
                singles.row, singles.last, singles.first, singles.tables, width,
                block_size=block_size, window=window, num_splits=self._num_splits,
            )  # fmt: skip
        return out
