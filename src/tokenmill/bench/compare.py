"""`tokenmill bench compare`: this engine beside llama.cpp's raw loop and transformers, on the same file.

Each contender is a process of its own; they take turns, and one that waits sleeps. A round measures ours, theirs and
ours again: the ratio of the two of ours (A/A) says how much of a difference is noise. Beside each figure stands the
part of the machine's measured limit that it reaches: of reading all weights once a step, or of float32 products.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.backends.library import DEFAULT_MODEL, pull
from tokenmill.bench.limits import Machine, measure_machine

PREFILL = 512
CONTEXT, STEPS = 64, 24


@dataclass(frozen=True)
class Task:
    """Something to be timed."""

    name: str
    line: str
    """What a contender is told."""
    num_tokens: int
    num_steps: int
    """How often all weights are read."""


def tasks(sequences: Sequence[int]) -> list[Task]:
    found = [Task(f"prefill {PREFILL}", f"prefill {PREFILL}", PREFILL, 1)]
    return found + [Task(f"decode {n}", f"decode {n} {CONTEXT} {STEPS}", n * STEPS, STEPS) for n in sequences]


@dataclass
class Row:
    """One task: tokens a second of each round."""

    task: str
    ours: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    theirs: dict[str, list[float]] = field(default_factory=dict)
    read_fraction: float = 0.0
    ops_fraction: float = 0.0

    def ratio(self, name: str) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.ours, self.theirs[name], strict=True))

    @property
    def noise(self) -> float:
        return statistics.median(a / b for a, b in zip(self.again, self.ours, strict=True))


class Running:
    """A contender's process."""

    def __init__(self, name: str, model: Path, num_threads: int, python: str, *more: str) -> None:
        here = Path(__file__).parents[2]
        command = [python, "-m", "tokenmill.bench.contenders", name, str(model), str(num_threads), *more]
        if python != sys.executable:  # an environment of its own, without tokenmill's packages
            command[1:3] = [str(Path(__file__).with_name("contenders.py"))]
        settings = {**os.environ, "PYTHONPATH": str(here), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=settings
        )
        self.name = name
        self._expect("ready")

    def seconds(self, line: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return float(self._expect())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _expect(self, what: str = "") -> str:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if not said or (what and said != what):
            raise RuntimeError(f"{self.name} has ended or said {said!r}")
        return said


def measure(ours: Running, others: Sequence[Running], todo: Sequence[Task], num_rounds: int) -> list[Row]:
    """All tasks, round after round; the first round warms up and does not count."""
    rows = {task.name: Row(task.name, theirs={one.name: [] for one in others}) for task in todo}
    for number in range(num_rounds + 1):
        for task in todo:
            row = rows[task.name]
            ours_s = task.num_tokens / ours.seconds(task.line)
            theirs = {one.name: task.num_tokens / one.seconds(task.line) for one in others}
            again_s = task.num_tokens / ours.seconds(task.line)
            if number == 0:
                continue
            row.ours.append(ours_s)
            row.again.append(again_s)
            for name, speed in theirs.items():
                row.theirs[name].append(speed)
            beside = ", ".join(f"{name} {speed:.0f}" for name, speed in theirs.items())
            said = f"round {number}, {task.name}: {ours_s:.0f} tok/s, again {again_s:.0f}; {beside}"
            print(said, file=sys.stderr, flush=True)
    return list(rows.values())


def add_limits(rows: Sequence[Row], todo: Sequence[Task], machine: Machine, weight_bytes: int, num_values: int) -> None:
    for row, task in zip(rows, todo, strict=True):
        speed = statistics.median(row.ours)
        row.read_fraction = weight_bytes * speed / task.num_tokens * task.num_steps / machine.read_bytes_per_s
        row.ops_fraction = 2 * num_values * speed / machine.float_ops_per_s


def table(rows: Sequence[Row], others: Sequence[str], machine: Machine) -> str:
    """As markdown."""
    heads = ["task", "tok/s", *(f"{name} tok/s | ratio" for name in others), "A/A", "of reading", "of float32 products"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * (len(heads) + len(others))}"]
    for row in rows:
        beside = "".join(f" {statistics.median(row.theirs[one]):.0f} | {row.ratio(one):.2f} |" for one in others)
        fractions = f"{row.noise:.2f} | {row.read_fraction:.2f} | {row.ops_fraction:.2f}"
        lines.append(f"| {row.task} | {statistics.median(row.ours):.0f} |{beside} {fractions} |")
    limits = f"{machine.read_bytes_per_s / 1e9:.1f} GB/s read, {machine.float_ops_per_s / 1e9:.0f} GFLOP/s in float32"
    return "\n".join([*lines, "", f"{machine.num_threads} threads; the machine: {limits}"])


def plot(rows: Sequence[Row], others: Sequence[str], width: int = 40) -> str:
    """Bars, by tokens a second."""
    most = max(max(row.ours) for row in rows)
    lines = []
    for row in rows:
        bars = {"tokenmill": row.ours, **{name: row.theirs[name] for name in others}}
        for name, speeds in bars.items():
            speed = statistics.median(speeds)
            lines.append(f"{row.task:>12} {name:<13} {'#' * max(1, round(width * speed / most))} {speed:.0f}")
    return "\n".join(lines)


def _sizes(model: Path) -> tuple[int, int]:
    """Bytes of the weights, and how many numbers they are."""
    from tokenmill import open_model
    from tokenmill.backends.torch.families.names import num_values

    opened: Any = open_model(str(model), device="cpu")
    return int(opened.decoder.weights.num_bytes), num_values(opened.decoder.config)


def main(arguments: Sequence[str]) -> int:
    if "--server" in arguments:
        from tokenmill.bench import servers

        return servers.main([one for one in arguments if one != "--server"])
    parser = argparse.ArgumentParser(prog="tokenmill bench compare", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--server", action="store_true", help="compare servers over HTTP; see --server --help")
    parser.add_argument("--with", dest="others", nargs="*", default=["llama.cpp"], help="llama.cpp, transformers")
    parser.add_argument("--llamacpp-python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="auto", help="of our weights (auto)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    path = Path(options.model)
    if not path.exists():
        path = pull(options.model)
    needs_own = "llama.cpp" in options.others and options.llamacpp_python == sys.executable
    if needs_own and importlib.util.find_spec("llama_cpp") is None:
        parser.error("llama.cpp needs llama-cpp-python: pip install 'tokenmill[llamacpp]', or --llamacpp-python")
    pythons = {"llama.cpp": options.llamacpp_python}
    machine = measure_machine(options.threads)
    todo = tasks(options.sequences)
    running = [Running("tokenmill", path, options.threads, sys.executable, options.dtype)]
    try:
        for name in options.others:
            running += [Running(name, path, options.threads, pythons.get(name, sys.executable))]
        rows = measure(running[0], running[1:], todo, options.rounds)
    finally:
        for one in running:
            one.close()
    add_limits(rows, todo, machine, *_sizes(path))
    if options.json:
        ratios = [{name: row.ratio(name) for name in options.others} for row in rows]
        results = [{**asdict(row), "ratios": one, "noise": row.noise} for row, one in zip(rows, ratios, strict=True)]
        print(json.dumps({"machine": asdict(machine), "results": results}, indent=2))
        return 0
    print(table(rows, options.others, machine))
    print()
    print(plot(rows, options.others))
    return 0
