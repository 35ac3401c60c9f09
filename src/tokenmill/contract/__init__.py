"""The contract between engine and compute: every noun of it on one page. Imports numpy and nothing else.

    batch.py     Batch: the tokens of one forward pass
    kv.py        KVMemory: what may be done with keys and values; Capabilities, LayerKV
    backend.py   Backend: forward, sample, collect; ModelHandle, MemoryPlan
    draws.py     Draws: what each row of logits is drawn with; the random numbers of a draw
    cells.py     CellTable: the KV rules as a program, written to be read

Backends build on `tokenmill.kv`, which has the same rules on block tables; `tokenmill.backends.fake` is the smallest
complete one. Start with `docs/contract.md`.
"""

from tokenmill.contract.backend import (
    BAD_ROW,
    Backend,
    BackendLimits,
    DecodeOutput,
    Forward,
    Mask,
    MemoryPlan,
    Model,
    ModelHandle,
    ModelInfo,
    Sampled,
    Sampler,
    SampleRows,
    Sampling,
    StepSizes,
    check_rows,
    pack_mask,
    unpack_mask,
)
from tokenmill.contract.batch import NO_SEQ, Batch, BatchBuilder, IntArray, Output, last_sampled
from tokenmill.contract.cells import CellTable
from tokenmill.contract.kv import ANY, Capabilities, KVMemory, KVStats, LayerKV

__all__ = [
    "ANY",
    "BAD_ROW",
    "NO_SEQ",
    "Backend",
    "BackendLimits",
    "Batch",
    "BatchBuilder",
    "Capabilities",
    "CellTable",
    "DecodeOutput",
    "Forward",
    "IntArray",
    "KVMemory",
    "KVStats",
    "LayerKV",
    "Mask",
    "MemoryPlan",
    "Model",
    "ModelHandle",
    "ModelInfo",
    "Output",
    "SampleRows",
    "Sampled",
    "Sampler",
    "Sampling",
    "StepSizes",
    "check_rows",
    "last_sampled",
    "pack_mask",
    "unpack_mask",
]
