"""How much KV of ended requests may stay while others run.

llama.cpp's attention reads every cell up to the highest one in use, whoever's it is, so parked KV makes each step
slower, in proportion. The step of a lone sequence suffers most: it reads all weights once, and of each parked cell the
keys and values. The bytes alone would say by how much; measured, a byte of KV costs less than a byte of weights
(`python -m benchmarks.llamacpp` gives the curve, docs/llamacpp.md has it).
"""

from __future__ import annotations

SLOWDOWN = 0.1
"""By how much of itself parked KV may slow a step of a lone sequence down."""
KV_BYTE_COST = 0.5
"""Of a byte of weights, measured."""
LEAST = 512
"""Cells that may always stay: llama.cpp reads them in blocks of 256."""


def parked_cells(weight_bytes: int, kv_bytes_per_token: int) -> int | None:
    """None where there is nothing that steps would read."""
    if kv_bytes_per_token == 0:
        return None
    return max(LEAST, int(SLOWDOWN * weight_bytes / (KV_BYTE_COST * kv_bytes_per_token)))
