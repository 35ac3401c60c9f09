"""`python -m benchmarks.gpu`: the engine on one CUDA card, on random weights of real models' shapes.

Each figure stands beside the least time the card needs for it. Each optimisation can be turned off. Runs from the
source tree with torch, triton and numpy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_workloads import Job, Workload, first_token, run, workloads
from tokenmill.backends.families.config import DecoderConfig, LayerConfig
from tokenmill.backends.families.names import HF_NAMES, num_values
from tokenmill.backends.families.rope import Rope
from tokenmill.backends.torch.cuda.backend import CudaBackend
from tokenmill.backends.torch.cuda.layers import CudaDecoder, Switches
from tokenmill.backends.torch.cuda.model import CudaModel
from tokenmill.backends.torch.footprint import FP8
from tokenmill.backends.torch.weights import DecoderWeights
from tokenmill.bench import bench_parser
from tokenmill.config import EngineConfig
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.entrypoints.options import choose_limits
from tokenmill.params import SamplingParams

CONTEXT = 32_768
NUM_LAYERS = 28
SPREAD = 0.02
"""Standard deviation of the weights."""

SHAPES: Mapping[str, DecoderConfig] = {
    "qwen2.5-7b": DecoderConfig(
        family="qwen2", vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_heads=28, num_kv_heads=4,
        head_dim=128, max_context=CONTEXT, rms_eps=1e-6,
        layers=(LayerConfig(rope=Rope(dim=128, theta=1e6), qkv_bias=True),) * NUM_LAYERS,
    ),
    "qwen3-0.6b": DecoderConfig(
        family="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8,
        head_dim=128, max_context=CONTEXT, rms_eps=1e-6, tied=True,
        layers=(LayerConfig(rope=Rope(dim=128, theta=1e6), qk_norm="head"),) * NUM_LAYERS,
    ),
}  # fmt: skip


@torch.inference_mode()
def random_model(name: str, switches: Switches, kv_dtype: torch.dtype | None = None) -> CudaModel:
    """A model of one of the shapes. The same weights each time."""
    config = SHAPES[name]
    weights = DecoderWeights(config, torch.bfloat16, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    for own, view in weights.views.items():
        if "norm" in own:
            view.fill_(1.0)
        else:
            view.normal_(0.0, SPREAD, generator=generator)
    return CudaModel(name, CudaDecoder(config, weights, switches), HF_NAMES, kv_dtype=kv_dtype)


COPIED_BYTES = 1 << 31
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


NUM_SEQS = 256
HOST_STEPS = 100
"""Decode steps over which the host's share is measured."""


class WatchedWaits:
    """How long a backend's `collect` has waited for the card."""

    def __init__(self, backend: CudaBackend) -> None:
        self.seconds = 0.0
        self._wait = backend._wait
        backend._wait = self._timed  # type: ignore[method-assign]

    def _timed(self, step: Any) -> None:
        began = time.perf_counter()
        self._wait(step)
        self.seconds += time.perf_counter() - began


def seconds_since_start() -> float:
    """Since this process began."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def open_engine(shape: str, options: argparse.Namespace) -> tuple[EngineCore, CudaBackend]:
    names = ("graphs", "attention", "islands", "one_row")
    switches = Switches(**{name: name not in options.off for name in names})
    model = random_model(shape, switches, FP8 if options.kv_cache_dtype == "fp8" else None)
    config = EngineConfig(
        max_num_seqs=NUM_SEQS, max_num_batched_tokens=options.budget, prefill_chunk=options.budget,
        max_model_len=CONTEXT, max_queue=NUM_SEQS, target_tick_ms=options.target_tick_ms,
        prefix_caching=False, depth=0 if "ahead" in options.off else 1,
    )  # fmt: skip
    backend = model.new_backend(choose_limits(model, config, options.kv_cache_tokens))
    return EngineCore(backend, model.info, config), backend


def host_cost(engine: EngineCore, waits: WatchedWaits, rounds: int, temperature: float) -> dict[str, Any]:
    """Milliseconds a decode step of all sequences: in all, and the part in which the card was not waited for."""
    found = [_host_cost(engine, waits, number, temperature) for number in range(rounds + 1)][1:]
    best = min(found, key=lambda one: one["host_ms"])
    return {"temperature": temperature, **best, "each_host_ms": [one["host_ms"] for one in found]}


def _host_cost(engine: EngineCore, waits: WatchedWaits, turn: int, temperature: float) -> dict[str, float]:
    for number in range(NUM_SEQS):
        limits = Limits(max_new_tokens=2 * HOST_STEPS)
        draw = Draw(params=SamplingParams(temperature=temperature), seed=number)
        engine.add(Request(f"host-{turn}-{number}", [number + 1] * 16, limits, draw=draw))
    while any(slot.state != "generating" for slot in engine.slots()):
        engine.step()
    for _ in range(HOST_STEPS // 4):
        engine.step()
    began, waited = time.perf_counter(), waits.seconds
    for _ in range(HOST_STEPS):
        engine.step()
    wall, waited = time.perf_counter() - began, waits.seconds - waited
    while engine.has_work:
        engine.step()
    return {"step_ms": 1000 * wall / HOST_STEPS, "host_ms": 1000 * (wall - waited) / HOST_STEPS}


def measure(
    engine: EngineCore, shape: str, name: str, workload: Workload, rounds: int, ceilings: Ceilings
) -> dict[str, Any]:
    """The best of some rounds, after one to warm up."""
    seconds = [run(engine, workload.jobs, f"{name}-{number}") for number in range(rounds + 1)]
    best = min(seconds[1:])
    least = least_seconds(SHAPES[shape], workload.jobs, ceilings)
    return {
        "shape": shape, "measure": workload.title, "tok_s": workload.num_counted / best, "seconds": seconds,
        "of_the_least_time": least / best,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.gpu", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="models, by shape")
    parser.add_argument(
        "--measures", nargs="+", choices=[*workloads(), "host"], default=[*workloads(), "host"], help="measurements"
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds after a warm-up; the best counts")
    parser.add_argument(
        "--off",
        nargs="+",
        default=[],
        choices=["graphs", "attention", "islands", "one_row", "ahead"],
        help="optimizations to turn off",
    )
    parser.add_argument("--budget", type=int, default=8192, help="maximum number of tokens in a step")
    parser.add_argument("--target-tick-ms", type=float, default=1000.0, help="target step latency (ms)")
    parser.add_argument("--kv-cache-tokens", type=int, help="size of the KV cache in tokens (default: what fits)")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="data type of the KV cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parser.parse_args(arguments)
    known, ceilings, startup_s = workloads(), None, seconds_since_start()
    for shape in options.shapes:
        engine, backend, first_token_s = first_token(partial(open_engine, shape, options), startup_s)
        _tell(options.json, {"shape": shape, "first_token_after_s": first_token_s})
        if ceilings is None:
            ceilings = measure_ceilings()
            _tell(options.json, {"TB_s": ceilings.bytes_per_s / 1e12, "TFLOP_s": ceilings.flops_per_s / 1e12})
        waits = WatchedWaits(backend)
        for name in options.measures:
            if name == "host":
                for temperature in (0.0, 0.6):
                    cost = host_cost(engine, waits, options.rounds, temperature)
                    _tell(options.json, {"shape": shape, "measure": "256 decodes", **cost})
            else:
                _tell(options.json, measure(engine, shape, name, known[name], options.rounds, ceilings))
        engine.close()
        del engine, backend, waits  # the next model needs their memory
    return 0


def _tell(as_json: bool, figures: dict[str, Any]) -> None:
    if as_json:
        print(json.dumps(figures), flush=True)
        return
    said = [f"{name} {value:,.3g}" if isinstance(value, float) and value < 100 else
            f"{name} {value:,.0f}" if isinstance(value, float) else
            f"{name} {[round(one, 3) for one in value]}" if isinstance(value, list) else str(value)
            for name, value in figures.items()]  # fmt: skip
    print(" | ".join(said), flush=True)


if __name__ == "__main__":
    sys.exit(main())
