"""How much memory of the card a step takes: found out by running the largest one, or worked out before that can be."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.contract import BackendLimits, Batch, Output

if TYPE_CHECKING:
    from tokenmill.backends.torch.cuda.model import CudaModel

KV_SHARE = 0.95
"""Of what is free beside the largest step, how much KV may take by default. The rest is for what nobody has counted."""
UBATCH_SIZE = 8192
"""Tokens computed at once, at least: a card needs many to be busy."""
GATED_BYTES = 160 << 20
"""Gate and up that are there at a time: nothing else of a step is as wide, and it is a little faster in parts."""
NUM_TURNS = 2
"""Buffers for the logits of decode steps; other steps have their own."""
WORKSPACE_BYTES = 32 << 20
"""cuBLAS's."""
NUM_ROWS = 256
"""Sequences of the step that is measured, each of which wants logits."""


def step_bytes(config: DecoderConfig, num_tokens: int, num_rows: int, itemsize: int) -> int:
    """What `peak_bytes` will find, before there is a model: so many tokens, and rows of logits."""
    num_tokens = max(num_tokens, UBATCH_SIZE)
    qkv = config.query_size + 2 * config.kv_size
    state = 2 * config.hidden_size  # itself, and normed
    layer = num_tokens * (state + max(qkv + config.query_size, config.intermediate_size))
    gated = min(GATED_BYTES, itemsize * num_tokens * 2 * config.intermediate_size)
    logits = (NUM_TURNS + 1) * NUM_ROWS * config.vocab_size
    more_rows = more_rows_bytes(config, num_rows, itemsize)
    return itemsize * (layer + logits) + gated + WORKSPACE_BYTES + more_rows


def more_rows_bytes(config: DecoderConfig, num_rows: int, itemsize: int) -> int:
    """Of logits, beyond the rows of the step that is measured."""
    return itemsize * (NUM_TURNS + 1) * max(0, num_rows - NUM_ROWS) * config.vocab_size


def peak_bytes(model: CudaModel) -> int:
    """Bytes of the largest step beyond weights and KV."""
    num_tokens = min(model.ubatch_size, NUM_ROWS * model.info.max_context)
    gc.collect()  # else what others have left might be freed meanwhile
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
