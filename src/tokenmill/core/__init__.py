"""The contract between engine and compute: every noun of it on one page. Imports numpy and nothing else.

    batch.py     Batch: the tokens of one forward pass
    kv.py        KVMemory: what may be done with keys and values; Capabilities, LayerKV
    backend.py   Backend: forward, sample, collect; ModelHandle
    cells.py     CellTable: the KV rules as a program, written to be read
    paged.py     PagedKV: the same rules on block tables, for backends (tables.py, blocks.py, segments.py)
    steps.py     StepQueue: the steps in flight
    fake.py      FakeBackend: logits are a hash of what a token sees (faults.py: told to fail)

Start with `docs/contract.md`.
"""

from tokenmill.core.backend import (
    BAD_ROW,
    Backend,
    BackendLimits,
    DecodeOutput,
    Forward,
    Mask,
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
from tokenmill.core.batch import NO_SEQ, Batch, BatchBuilder, IntArray, Output, last_sampled
from tokenmill.core.cells import CellTable
from tokenmill.core.fake import FakeBackend, FakeConfig, FakeModel
from tokenmill.core.faults import Fault, FaultKind
from tokenmill.core.kv import ANY, Capabilities, KVMemory, KVStats, LayerKV
from tokenmill.core.paged import KVStorage, PagedKV

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
    "FakeBackend",
    "FakeConfig",
    "FakeModel",
    "Fault",
    "FaultKind",
    "Forward",
    "IntArray",
    "KVMemory",
    "KVStats",
    "KVStorage",
    "LayerKV",
    "Mask",
    "ModelHandle",
    "ModelInfo",
    "Output",
    "PagedKV",
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
