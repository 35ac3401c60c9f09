"""The memory footprint of a model of the torch backend: from its configuration, before it is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from tokenmill.backends.torch.config import DecoderConfig, DecoderSizes
from tokenmill.backends.torch.families.names import in_file, num_norm_values, num_values, shapes
from tokenmill.backends.torch.native.bindings import INT4, INT8
from tokenmill.backends.torch.native.packing import KV_DTYPE, Native, merged_tensors, num_groups, packed_bytes
from tokenmill.backends.torch.weights import TensorSource
from tokenmill.contract import BackendLimits
from tokenmill.contract.backend import MemoryPlan, free_host_bytes

Form = torch.dtype | Native
FP8 = torch.float8_e4m3fn
"""Keys and values on a card may be held in 8 bits, as they are: without a scale."""
MIB = 1 << 20
OTHER_BYTES = 24 * MIB
"""Code, tables and bookkeeping, measured."""
TOKEN_BYTES = 1500
"""Of a tokenizer, for each token of its vocabulary, measured."""
SCORE_COPIES = 3
"""Copies of attention scores that a soft cap makes on the way: torch's fused attention has none."""
LOGITS_COPIES = 4
"""Copies of the logits that sampling makes on the way."""


def weight_bytes(config: DecoderConfig, source: TensorSource, names: Mapping[str, str], form: Form) -> int:
    """Of all tensors, as they are held."""
    if isinstance(form, torch.dtype):
        wide = num_norm_values(config) * (4 - form.itemsize) if config.wide_norms else 0
        return num_values(config) * form.itemsize + wide
    sizes = shapes(config)
    total = sum(4 * shape[0] for shape in sizes.values() if len(shape) == 1)

    def bits(own: str, otherwise: int | None) -> int:
        if form.bits is not None:
            return otherwise or form.bits
        return source.bits_of(in_file(own, names))

    for i, layer in enumerate(config.layers):
        for parts in merged_tensors(layer).values():
            owns = [f"{part}.{i}" for part in parts]
            kind = INT4 if all(bits(own, None) == INT4 for own in owns) else INT8
            total += sum(packed_bytes(sizes[own][0], sizes[own][1], kind) for own in owns)
    heads = ["embed"] if config.tied else ["embed", "head"]
    return total + sum(packed_bytes(config.vocab_size, config.hidden_size, bits(own, INT8)) for own in heads)


def kv_dtype(form: Form) -> torch.dtype:
    """In which keys and values are held."""
    return form if isinstance(form, torch.dtype) else KV_DTYPE


def kv_bytes(config: DecoderSizes, dtype: torch.dtype) -> int:
    """Of one token in all layers."""
    return sum(layer.bytes_per_token for layer in config.layer_kv(dtype.itemsize))


def plan(config: DecoderConfig, weights: int, form: Form, limits: BackendLimits, num_rows: int) -> MemoryPlan:
    """Everything, for one backend; so many rows of logits are wanted in a step."""
    planned = plan_sizes(config, weights, form, limits, num_rows, _loading(config, form))
    is_capped = any(layer.attention_softcap is not None for layer in config.layers)
    if isinstance(form, Native) or not is_capped:
        return planned
    scores = SCORE_COPIES * 4 * config.num_heads * min(limits.ubatch_size, limits.num_cells) * limits.num_cells
    return replace(planned, activations=planned.activations + scores)


def plan_sizes(
    config: DecoderSizes, weights: int, form: Form, limits: BackendLimits, num_rows: int, loading: int
) -> MemoryPlan:
    """As `plan`, for a decoder of any kind; `loading` is what its weights take on their way into memory."""
    itemsize = kv_dtype(form).itemsize
    per_token = kv_bytes(config, kv_dtype(form))
    num_tokens = min(limits.ubatch_size, limits.num_cells)
    activations = (
        _native_step(config, num_tokens)
        if isinstance(form, Native)
        else _torch_step(config, num_tokens, limits.num_cells, itemsize)
    )
    logits = LOGITS_COPIES * num_rows * config.vocab_size * 4
    other = OTHER_BYTES + TOKEN_BYTES * config.vocab_size
    kv = limits.num_cells * per_token
    return MemoryPlan(weights, kv, activations + logits, other, OTHER_BYTES + loading)


def _loading(config: DecoderConfig, form: Form) -> int:
    """The largest tensor on its way: as float32, and rounded where it is."""
    largest = max(math.prod(shape) for shape in shapes(config).values())
    if isinstance(form, torch.dtype):
        return 4 * largest
    return (2 if form.bits is None else 5) * largest


def _native_step(config: DecoderSizes, n: int) -> int:
    """As `tm_scratch_bytes` has it, and the rows that go in and come out."""
    query, kv = config.query_size, config.kv_size
    widest = max(config.hidden_size, config.intermediate_size, query)
    rounded = n * num_groups(widest) * (32 + 8)
    return rounded + n * 4 * (query + 2 * kv + query + 2 * config.intermediate_size + 4 * config.hidden_size)


def _torch_step(config: DecoderSizes, n: int, num_cells: int, itemsize: int) -> int:
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
