"""The memory footprint of a model of the torch backend: from its configuration, before it is loaded."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tokenmill.backends.families.config import DecoderConfig, DecoderSizes, kv_bytes, memory_plan
from tokenmill.backends.families.names import num_norm_values, num_values, shapes
from tokenmill.contract import BackendLimits
from tokenmill.contract.backend import MemoryPlan, free_host_bytes

FP8 = torch.float8_e4m3fn
"""Keys and values on a card may be held in 8 bits, as they are: without a scale."""
SCORE_COPIES = 3
"""Copies of attention scores that a soft cap makes on the way: torch's fused attention has none."""


def weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Of all tensors, as they are held."""
    wide = num_norm_values(config) * (4 - dtype.itemsize) if config.wide_norms else 0
    return num_values(config) * dtype.itemsize + wide


def plan(config: DecoderConfig, weights: int, dtype: torch.dtype, limits: BackendLimits, num_rows: int) -> MemoryPlan:
    """Everything, for one backend; so many rows of logits are wanted in a step."""
    loading = 4 * max(math.prod(shape) for shape in shapes(config).values())  # the largest tensor, as float32
    planned = plan_sizes(config, weights, dtype, limits, num_rows, loading)
    if not any(layer.attention_softcap is not None for layer in config.layers):
        return planned
    scores = SCORE_COPIES * 4 * config.num_heads * min(limits.ubatch_size, limits.num_cells) * limits.num_cells
    return replace(planned, activations=planned.activations + scores)


def plan_sizes(
    config: DecoderSizes, weights: int, dtype: torch.dtype, limits: BackendLimits, num_rows: int, loading: int
) -> MemoryPlan:
    """As `plan`, for a decoder of any kind; `loading` is what its weights take on their way into memory."""
    step = _step_bytes(config, min(limits.ubatch_size, limits.num_cells), limits.num_cells, dtype.itemsize)
    return memory_plan(
        config,
        limits,
        num_rows,
        weights=weights,
        kv_token_bytes=kv_bytes(config, dtype.itemsize),
        step=step,
        loading=loading,
    )


def _step_bytes(config: DecoderSizes, n: int, num_cells: int, itemsize: int) -> int:
    """The largest layer's tensors at a time, and what attention gathers of all cells, for every head."""
    rows = 4 * config.hidden_size + 3 * (config.query_size + 2 * config.kv_size) + 4 * config.intermediate_size
    return itemsize * (n * rows + 2 * num_cells * config.query_size)


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on a device."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_host_bytes()


# -- on a card --------------------------------------------------------------------------------------------------------

UBATCH_SIZE = 8192
"""Tokens computed at once on a card, at least: it needs many to be busy."""
GATED_BYTES = 160 << 20
"""Gate and up that are there at a time: nothing else of a step is as wide, and it is a little faster in parts."""
NUM_TURNS = 2
"""Buffers for the logits of decode steps; other steps have their own."""
GRAPH_TOKENS = 2048
"""Of the largest step with prompt tokens that is run as a graph."""
WORKSPACE_BYTES = 32 << 20
"""cuBLAS's."""
NUM_ROWS = 256
"""Sequences of the step that is measured, each of which wants logits."""


def cuda_step_bytes(config: DecoderConfig, num_tokens: int, num_rows: int, itemsize: int) -> int:
    """What `CudaModel.step_bytes` will measure, before there is a model: so many tokens, and rows of logits."""
    num_tokens = max(num_tokens, UBATCH_SIZE)
    state = itemsize * num_tokens * config.hidden_size
    logits = itemsize * (NUM_TURNS + 1) * NUM_ROWS * config.vocab_size
    more_rows = more_rows_bytes(config, num_rows, itemsize)
    layer = _layer_bytes(config, num_tokens, itemsize)
    return state + layer + logits + WORKSPACE_BYTES + more_rows + graph_bytes(config, itemsize)


def graph_bytes(config: DecoderSizes, itemsize: int) -> int:
    """Of the memory that graphs share: nothing else may use it."""
    return _layer_bytes(config, GRAPH_TOKENS, itemsize)


def _layer_bytes(config: DecoderSizes, num_tokens: int, itemsize: int) -> int:
    """What the widest part of a layer takes, the normed state included."""
    qkv = config.query_size + 2 * config.kv_size
    widest = config.hidden_size + max(qkv + config.query_size, config.intermediate_size)
    gated = min(GATED_BYTES, itemsize * num_tokens * 2 * config.intermediate_size)
    return itemsize * num_tokens * widest + gated


def more_rows_bytes(config: DecoderSizes, num_rows: int, itemsize: int) -> int:
    """Of logits, beyond the rows of the step that is measured."""
    return itemsize * (NUM_TURNS + 1) * max(0, num_rows - NUM_ROWS) * config.vocab_size
