"""`python -m benchmarks.memory`: what `tokenmill fit` plans beside what is really used, on a grid of settings.

For each setting a process of its own loads the model, fills the KV of all sessions to the last token and says how many
private bytes it had more than after importing torch, at the most.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenmill.bench import bench_parser
from tokenmill.bench.contenders import prompt
from tokenmill.config import DEFAULT_MODEL
from tokenmill.entrypoints.fit import limits_for, plan_fit
from tokenmill.kv.paged_backend import BLOCK_SIZE

MIB = 1 << 20
GRID = ((1, 256), (1, 2048), (4, 1024), (16, 256), (16, 1024), (32, 512), (8, 4096))
LOOK_EVERY_S = 0.005
NEW = 8
"""Tokens that are generated; the rest of the context is prompt."""


@dataclass(frozen=True)
class Row:
    sessions: int
    context: int
    dtype: str
    planned: int
    measured: int

    @property
    def is_inside(self) -> bool:
        """Within 5 %, or 30 MB where that is more."""
        return abs(self.planned - self.measured) <= max(0.05 * self.measured, 30e6)


def private_bytes() -> int:
    """Pages of this process that it shares with nobody."""
    return 1024 * sum(_numbers("/proc/self/smaps_rollup", "Private_Clean", "Private_Dirty"))


def _numbers(file: str, *names: str) -> list[int]:
    return [int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(names)]


class Peak:
    """Looks again and again how much memory the process has of its own; the most that it saw."""

    def __init__(self) -> None:
        self._most = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            self._most = max(self._most, *_numbers("/proc/self/status", "RssAnon:"))

    def above_now(self) -> int:
        """Bytes that there were more than there are now."""
        self._is_over.set()
        self._thread.join()
        return 1024 * max(0, self._most - _numbers("/proc/self/status", "RssAnon:")[0])


def use(model: str, sessions: int, context: int, dtype: str) -> int:
    """In a process of its own: bytes more than after importing torch."""
    import torch  # noqa: F401

    before, peak = private_bytes(), Peak()
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.params import SamplingParams

    cells = limits_for(sessions, context, BLOCK_SIZE).num_cells
    with LLM(model, max_num_seqs=sessions, max_model_len=context, kv_cache_tokens=cells, dtype=dtype) as llm:
        vocab_size = llm.get_tokenizer().vocab_size
        prompts: list[Any] = [prompt(i + 1, context - NEW, vocab_size) for i in range(sessions)]
        params = SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.7, seed=1)
        llm.generate(prompts, params, use_tqdm=False)
        return private_bytes() - before + peak.above_now()


def measure(model: str, dtype: str, sessions: int, context: int) -> Row:
    command = [sys.executable, "-m", "benchmarks.memory", "--use", model, str(sessions), str(context), dtype]
    used = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    planned = plan_fit(model, sessions, context, free_bytes=None, dtype=dtype, device="cpu").plan.total
    return Row(sessions, context, dtype, planned, used)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.memory", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--dtype", nargs="+", default=["auto", "float32"], help="data types of the weights")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--use", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.use:
        model, sessions, context, dtype = options.use
        print(use(model, int(sessions), int(context), dtype))
        return 0
    rows = []
    for dtype in options.dtype:
        for sessions, context in GRID:
            rows.append(measure(options.model, dtype, sessions, context))
            print(f"{dtype}, {sessions} x {context}: {rows[-1].measured / MIB:.0f} MiB", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([{**asdict(row), "inside": row.is_inside} for row in rows], indent=2))
        return 0
    print("| weights | sessions | context | planned MiB | used MiB | planned / used | within 5 % or 30 MB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for row in rows:
        sizes = f"{row.planned / MIB:,.0f} | {row.measured / MIB:,.0f} | {row.planned / row.measured:.3f}"
        print(f"| {row.dtype} | {row.sessions} | {row.context} | {sizes} | {'yes' if row.is_inside else 'no'} |")
    return 0 if all(row.is_inside for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
