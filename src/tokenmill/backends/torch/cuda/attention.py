"""`PagedAttention`: the attention of a step by the kernels that read paged KV where it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.backends.torch.cuda.inputs import StepInputs
from tokenmill.backends.torch.cuda.kernels.decode_attention import decode_attention, num_splits_for
from tokenmill.backends.torch.cuda.kernels.prefill_attention import prefill_attention
from tokenmill.backends.torch.kv_storage import TorchKV


class PagedAttention:
    """An `Attention`. What it launches depends on the step's shapes alone, so a graph can hold it."""

    def __init__(self, kv: TorchKV, inputs: StepInputs, windows: Sequence[int | None], num_processors: int) -> None:
        self._kv = kv
        self._inputs = inputs
        self._windows = windows
        self._num_splits = 1
        if inputs.singles is not None:
            num_kv = kv.keys[0].shape[1]
            self._num_splits = num_splits_for(len(inputs.singles.row), num_kv, num_processors)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        block_size, window = self._kv.block_size, self._windows[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        width, singles, longs = self._inputs.width, self._inputs.singles, self._inputs.longs
        if longs is not None:
            prefill_attention(
                q, keys, values, out,
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
