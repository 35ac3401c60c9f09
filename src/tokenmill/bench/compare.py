"""`tokenmill bench compare`: this engine beside llama.cpp's raw loop and transformers, on the same file.

Each contender is a process of its own; they take turns, and one that waits sleeps. A round measures ours, theirs and
ours again: the ratio of the two of ours (A/A) says how much of a difference is noise. Beside each figure stands the
part of the machine's measured limit that it reaches: of reading all weights once a step, or of float32 products.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.backends.library import pull
from tokenmill.bench import bench_parser
from tokenmill.bench.shapes import SHAPES, checkpoint
from tokenmill.config import DEFAULT_MODEL
from tokenmill.contract import BackendLimits

MIB = 1 << 20


@dataclass(frozen=True)
class Machine:
    """Best of a few tries, on so many threads."""

    num_threads: int
    read_bytes_per_s: float
    float_ops_per_s: float
    """Of float32 matrix products: a multiplication and an addition are two."""


def measure_machine(num_threads: int) -> Machine:
    return Machine(num_threads, _read_speed(num_threads), _product_speed(num_threads))


def _read_speed(num_threads: int, size: int = 256 * MIB) -> float:
    """Sum up memory that no cache can hold."""
    parts = np.array_split(np.ones(size // 8), num_threads)

    def read() -> float:
        threads = [threading.Thread(target=part.sum) for part in parts]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    return size / min(read() for _ in range(7))


PRODUCT = """
import sys, time
import numpy as np
size = int(sys.argv[1])
a, b = np.random.default_rng(0).random((2, size, size), dtype=np.float32)
def multiply():
    began = time.perf_counter()
    a @ b
    return time.perf_counter() - began
print(2 * size**3 / min(multiply() for _ in range(7)))
"""


def _product_speed(num_threads: int, size: int = 1536) -> float:
    """Of numpy, in a process of its own: its threads are counted when it is imported."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
    command = [sys.executable, "-c", PRODUCT, str(size)]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


PREFILL = 512
CONTEXT, STEPS = 64, 24
PROMPT, NEW = 140, 128
"""Of whole requests."""
SERVER = "llama.cpp-server"


@dataclass(frozen=True)
class Task:
    """Something to be timed."""

    name: str
    line: str
    """What a contender is told."""
    num_tokens: int
    num_steps: int
    """How often all weights are read."""


def requests(counts: Sequence[int], prompt_tokens: int, new_tokens: int) -> list[Task]:
    """Whole requests, as only engines and servers can do them."""
    line = f"{prompt_tokens} {new_tokens}"
    return [Task(f"{n} requests", f"requests {n} {line}", n * new_tokens, new_tokens) for n in counts]


def tasks(sequences: Sequence[int], prefill: int = PREFILL, context: int = CONTEXT, steps: int = STEPS) -> list[Task]:
    found = [Task(f"prefill {prefill}", f"prefill {prefill}", prefill, 1)]
    return found + [Task(f"decode {n}", f"decode {n} {context} {steps}", n * steps, steps) for n in sequences]


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

    def __init__(
        self,
        name: str,
        model: Path,
        num_threads: int,
        python: str,
        *more: str,
        clock: str = "wall",
        quiet: bool = False,
    ) -> None:
        here = Path(__file__).parents[2]
        command = [python, "-m", "tokenmill.bench.contenders", "--clock", clock]
        command += [name, str(model), str(num_threads), *more]
        if python != sys.executable:  # an environment of its own, without tokenmill's packages
            command[1:3] = [str(Path(__file__).with_name("contenders.py"))]
        settings = {**os.environ, "PYTHONPATH": str(here), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads)}
        if quiet:
            settings["OMP_WAIT_POLICY"] = "passive"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=settings
        )
        self.name = name
        self._expect("ready")
        self._process.send_signal(signal.SIGSTOP)  # some poll for work while they have none

    def seconds(self, line: str) -> float:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        took = float(self._expect())
        self._process.send_signal(signal.SIGSTOP)
        return took

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _expect(self, what: str = "") -> str:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if not said or (what and said != what):
            raise RuntimeError(f"{self.name} has ended or said {said!r}")
        return said


@dataclass(frozen=True)
class ServerSettings:
    """Of llama.cpp's server in its process."""

    num_threads: int
    poll: int
    """How long its threads look for work before they sleep; 0 is not at all."""

    def start(self, model: Path, python: str, slots: int) -> Running:
        return Running(SERVER, model, self.num_threads, python, str(self.poll), str(slots), quiet=self.poll == 0)


def best_settings(model: Path, python: str, num_threads: int, trial: Task, count: int) -> ServerSettings:
    """Those with which llama.cpp's server is fastest on a shorter form of the work, so many requests at a time."""
    took = {}
    for settings in (ServerSettings(num_threads, 50), ServerSettings(num_threads, 0), ServerSettings(1, 0)):
        server = settings.start(model, python, count)
        try:
            server.seconds(f"requests {count} 8 4")  # warm
            took[settings] = server.seconds(trial.line)
        finally:
            server.close()
        print(f"{SERVER}, {settings}: {trial.num_tokens / took[settings]:.0f} tok/s", file=sys.stderr, flush=True)
    return min(took, key=lambda one: took[one])


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


def weight_sizes(model: Path, backend: str) -> tuple[int, int]:
    """Bytes of the weights, and how many numbers they are."""
    from tokenmill import open_model

    opened: Any = open_model(str(model), device="cpu", backend=backend)
    if hasattr(opened, "num_values"):
        return opened.memory(BackendLimits(), 1).weights, opened.num_values
    from tokenmill.backends.families.names import num_values

    return int(opened.decoder.weights.num_bytes), num_values(opened.decoder.config)


def main(arguments: Sequence[str]) -> int:
    if "--server" in arguments:
        from tokenmill.bench import servers

        return servers.main([one for one in arguments if one != "--server"])
    parser = bench_parser("tokenmill bench compare", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument(
        "--shape", choices=list(SHAPES), help="compare on random weights of this size instead (default: none)"
    )
    parser.add_argument("--type", default="Q4_K_M", help="llama.cpp's quantization of --shape")
    parser.add_argument("--server", action="store_true", help="compare servers over HTTP; see --server --help")
    others = f"engines to compare with: llama.cpp, transformers; or {SERVER}"
    parser.add_argument("--with", dest="others", nargs="*", default=["llama.cpp"], help=others)
    parser.add_argument(
        "--server-python", default=sys.executable, help="Python interpreter with xllamacpp (default: this one)"
    )
    parser.add_argument(
        "--llamacpp-python", default=sys.executable, help="Python interpreter with llama-cpp-python (default: this one)"
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16], help="batch sizes")
    parser.add_argument("--prefill", type=int, default=PREFILL, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of context when decoding begins")
    parser.add_argument("--steps", type=int, default=STEPS, help="decode steps that are timed")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT, help="prompt tokens of whole requests")
    parser.add_argument("--new-tokens", type=int, default=NEW, help="generated tokens of whole requests")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all cores)")
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "torch", "llamacpp"], help="our backend")
    parser.add_argument("--dtype", default="auto", help="data type of our weights")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="seconds that count: wall, or CPU time of the process, for --threads 1 on a busy machine (default: wall)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds; the median counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    needs_own = "llama.cpp" in options.others and options.llamacpp_python == sys.executable
    if (needs_own or options.shape) and importlib.util.find_spec("llama_cpp") is None:
        parser.error("llama.cpp needs llama-cpp-python: pip install 'tokenmill[llamacpp]', or --llamacpp-python")
    path = checkpoint(options.shape, options.type) if options.shape else Path(options.model)
    if not path.exists():
        path = pull(options.model)
    if options.clock == "cpu" and not set(options.others) <= {"llama.cpp"}:
        parser.error("--clock cpu compares with llama.cpp only")
    if SERVER in options.others and options.others != [SERVER]:
        parser.error(f"{SERVER} does whole requests and is compared alone")
    pythons = {"llama.cpp": options.llamacpp_python}
    machine = measure_machine(options.threads)
    todo, most = tasks(options.sequences, options.prefill, options.context, options.steps), max(options.sequences)
    settings = None
    if options.others == [SERVER]:
        todo = requests(options.sequences, options.prompt_tokens, options.new_tokens)
        (trial,) = requests([most], options.prompt_tokens, min(32, options.new_tokens))
        settings = best_settings(path, options.server_python, options.threads, trial, most)
    given = [options.dtype, options.backend, *([str(most)] if settings is not None else [])]
    running = [Running("tokenmill", path, options.threads, sys.executable, *given, clock=options.clock)]
    try:
        if settings is not None:
            running += [settings.start(path, options.server_python, most)]
        else:
            for one in options.others:
                python = pythons.get(one, sys.executable)
                running.append(Running(one, path, options.threads, python, clock=options.clock))
        rows = measure(running[0], running[1:], todo, options.rounds)
    finally:
        for one in running:
            one.close()
    add_limits(rows, todo, machine, *weight_sizes(path, options.backend))
    if options.json:
        ratios = [{name: row.ratio(name) for name in options.others} for row in rows]
        results = [{**asdict(row), "ratios": one, "noise": row.noise} for row, one in zip(rows, ratios, strict=True)]
        about = {"machine": asdict(machine), SERVER: asdict(settings) if settings else None}
        print(json.dumps({**about, "results": results}, indent=2))
        return 0
    print(table(rows, options.others, machine))
    if settings is not None:
        print(f"{SERVER}: {settings.num_threads} threads, polling {settings.poll}")
    print()
    print(plot(rows, options.others))
    return 0
