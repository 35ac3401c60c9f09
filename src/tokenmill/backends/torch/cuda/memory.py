"""How much memory of the card a step takes: found out by running the largest one there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.core import BackendLimits, Batch, Output

if TYPE_CHECKING:
    from tokenmill.backends.torch.cuda.model import CudaModel

KV_SHARE = 0.95
"""Of what is free beside the largest step, how much KV may take by default. The rest is for what nobody has counted."""
NUM_ROWS = 256
"""Sequences of the step that is measured, each of which wants logits."""


def peak_bytes(model: CudaModel) -> int:
    """Bytes of the largest step beyond weights and KV."""
    num_tokens = min(model.ubatch_size, NUM_ROWS * model.info.max_context)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block = model.block_size
    limits = BackendLimits(num_cells=num_tokens + 2 * NUM_ROWS * block, max_seqs=NUM_ROWS, ubatch_size=num_tokens)
    with model.new_backend(limits) as backend:
        kv_bytes = backend.kv_bytes
        backend.decode(_largest_batch(num_tokens))
        peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    return int(peak - before - kv_bytes)


def _largest_batch(num_tokens: int) -> Batch:
    """All tokens that a step may have, in as many sequences as may run."""
    token = np.arange(num_tokens, dtype=np.int32)
    seq = token % NUM_ROWS
    output = np.zeros(num_tokens, dtype=np.uint8)
    output[-NUM_ROWS:] = Output.LOGITS
    return Batch(token=np.zeros_like(token), pos=token // NUM_ROWS, seq_ids=seq[:, None], output=output)
