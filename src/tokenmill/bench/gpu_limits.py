"""What the card could do at best: two ceilings, measured, and the least time that a workload takes under them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.families.names import num_values
from tokenmill.bench.gpu_workloads import Job

COPIED_BYTES = 1 << 32
MATRIX_SIDE = 8192
REPEATS = 10


@dataclass(frozen=True)
class Ceilings:
    bytes_per_s: float
    """Of a copy: read and written ones together."""
    flops_per_s: float
    """Of a large product in bfloat16, on random numbers."""


def measure_ceilings() -> Ceilings:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_s = _seconds(lambda: target.copy_(source))
    left, right = (torch.randn(MATRIX_SIDE, MATRIX_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = _seconds(lambda: left @ right)
    return Ceilings(2 * COPIED_BYTES / copy_s, 2 * MATRIX_SIDE**3 / product_s)


def _seconds(launch: Callable[[], object]) -> float:
    """The median of some runs, by the card's own clock."""
    launch()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return float(statistics.median(times))


def least_seconds(config: DecoderConfig, jobs: Sequence[Job], ceilings: Ceilings, itemsize: int = 2) -> float:
    """Prompts at the rate of products, then a step for each token: bound by reading weights and KV, or by products."""
    embedding = config.vocab_size * config.hidden_size
    layers = num_values(config) - embedding * (1 if config.tied else 2)
    weight_bytes = (layers + embedding) * itemsize
    kv_bytes = 2 * config.kv_size * config.num_layers * itemsize
    attention = 2 * config.query_size * config.num_layers  # flops a cell, half of them for keys
    prefill = sum(2 * layers * job.num_prompt + attention * job.num_prompt**2 for job in jobs)
    seconds = prefill / ceilings.flops_per_s
    for step in range(1, max(job.num_new for job in jobs)):
        running = [job for job in jobs if job.num_new > step]
        products = 2 * (layers + embedding) * len(running) / ceilings.flops_per_s
        cells = sum(job.num_prompt + step for job in running)
        seconds += max(weight_bytes / ceilings.bytes_per_s, products) + kv_bytes * cells / ceilings.bytes_per_s
    return seconds
