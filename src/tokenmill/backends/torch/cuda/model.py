"""`CudaModel`: a model whose weights are on a card, and how much of the card its KV may take.

`BaseCudaModel` is what it shares with the models that run through transformers (`adapted.py`).
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tokenmill.backends.families.names import in_file
from tokenmill.backends.torch.cuda.backend import CudaBackend
from tokenmill.backends.torch.cuda.layers import AnyCudaDecoder, CudaDecoder
from tokenmill.backends.torch.footprint import FP8, NUM_ROWS, UBATCH_SIZE, graph_bytes, more_rows_bytes, plan
from tokenmill.backends.torch.kernels.paged_attention import TILE
from tokenmill.backends.torch.model import BaseTorchModel
from tokenmill.contract import BackendLimits, Batch, Output, StepSizes
from tokenmill.contract.backend import MemoryPlan
from tokenmill.errors import ConfigError

KV_SHARE = 0.95
"""Of what is free beside the largest step, how much KV may take by default. The rest is for what nobody has counted."""


class BaseCudaModel(BaseTorchModel):
    """A `ModelHandle`. A block of KV is a tile of our kernels, and steps are submitted ahead, by default."""

    decoder: AnyCudaDecoder
    default_block_size = TILE
    step_sizes = StepSizes(
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        prefill_chunk=2048,
        min_prefill_chunk=256,
        offline_tick_ms=1000.0,
        max_queue=1024,
    )
    """A card is busy with many sequences only, and done with them soon."""
    default_depth = 1
    ubatch_size = UBATCH_SIZE
    _peak_bytes: int | None = None

    @property
    def kv_budget_bytes(self) -> int:
        step_bytes = self.step_bytes  # first: to measure it, a step is run
        return max(0, int(KV_SHARE * (self.free_bytes - step_bytes)))

    @property
    def step_bytes(self) -> int:
        """What the largest step takes beside weights and KV: measured once, by running one."""
        if self._peak_bytes is None:
            self._peak_bytes = self._measure_step()
        return self._peak_bytes

    def _measure_step(self) -> int:
        """Bytes of the largest step beyond weights and KV, found by running it."""
        num_tokens = min(self.ubatch_size, NUM_ROWS * self.info.max_context)
        gc.collect()  # else what others have left might be freed meanwhile
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        num_cells = num_tokens + 2 * NUM_ROWS * self.block_size
        limits = BackendLimits(num_cells=num_cells, max_seqs=NUM_ROWS, ubatch_size=num_tokens)
        with self.cold_backend(limits) as backend:
            kv_bytes = backend.kv_bytes
            backend.decode(_largest_batch(num_tokens))
            peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        return int(peak - before - kv_bytes) + graph_bytes(self.decoder.config, self.decoder.kv_dtype.itemsize)

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        planned = self._plan(limits, num_rows)
        kv = limits.num_cells * self.info.kv_bytes_per_token
        more_rows = more_rows_bytes(self.decoder.config, num_rows, self.decoder.kv_dtype.itemsize)
        return replace(planned, kv=kv, activations=self.step_bytes + more_rows)

    @abstractmethod
    def _plan(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        """As on the CPU; the card's own figures replace those of KV and steps."""

    @property
    def free_bytes(self) -> int:
        """With what torch has cached and would give back."""
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return super().free_bytes + cached

    def new_backend(self, limits: BackendLimits) -> CudaBackend:
        backend = self.cold_backend(limits)
        try:
            backend.warm_up()
        except BaseException:
            backend.close()
            raise
        return backend

    def cold_backend(self, limits: BackendLimits) -> CudaBackend:
        """A backend that compiles and captures what steps need when they need it."""
        if self._dtype is FP8 and not self.decoder.switches.attention:
            raise ConfigError("kv_cache_dtype fp8 requires the paged attention kernels")
        kv, storage = self._new_memory(limits)
        return CudaBackend(
            self.decoder,
            kv,
            storage,
            self._gate,
            ubatch_size=max(limits.ubatch_size, self.ubatch_size),
            num_threads=limits.num_threads or self._num_threads,
            num_running=limits.num_running,
        )


class CudaModel(BaseCudaModel):
    """A model of one of our own families. `names` are what the model's files call its tensors."""

    decoder: CudaDecoder

    def __init__(
        self,
        name: str,
        decoder: CudaDecoder,
        names: Mapping[str, str],
        path: Path | None = None,
        *,
        form: torch.dtype | None = None,
        deterministic: bool = False,
        block_size: int | None = None,
        depth: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.decoder = decoder
        own_names = {in_file(own, names): own for own in decoder.names}
        super().__init__(
            name,
            decoder,
            own_names,
            path,
            form=form,
            deterministic=deterministic,
            block_size=block_size,
            depth=depth,
            kv_dtype=kv_dtype,
        )

    def _plan(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        return plan(self.decoder.config, self.decoder.weights.num_bytes, self._form, limits, num_rows)


def _largest_batch(num_tokens: int) -> Batch:
    """All tokens that a step may have, in as many sequences as may run."""
    token = np.arange(num_tokens, dtype=np.int32)
    seq = token % NUM_ROWS
    output = np.zeros(num_tokens, dtype=np.uint8)
    output[-NUM_ROWS:] = Output.LOGITS
    return Batch(token=np.zeros_like(token), pos=token // NUM_ROWS, seq_ids=seq[:, None], output=output)
