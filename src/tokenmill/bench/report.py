"""`tokenmill bench report`: what this engine does on this machine, as JSON and one self-contained HTML page.

Every row is measured in rounds: ours, each of the others, ours again; the ratio of the two of ours (A/A) is noise.
The others are peers (llama.cpp, its server) where they are installed, and the same engine with one optimization off;
the row names the switch. The fraction of the limit is the least time that the machine allows, from its measured
memory bandwidth and float32 products, over the time that was taken.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from tokenmill import __version__
from tokenmill.backends.library import pull
from tokenmill.backends.loading import open_model
from tokenmill.bench import bench_parser, compare, servers
from tokenmill.bench.contenders import prompt
from tokenmill.bench.load_clients import ServerProcess, Target, first_model, serving
from tokenmill.bench.sessions import WAYS, by_turn_medians, first_token_by_turn, line_chart
from tokenmill.bench.shapes import SHAPES, checkpoint
from tokenmill.bench.throughput import Offline
from tokenmill.bench.workloads import IdPrompts, Word, learn_words
from tokenmill.config import DEFAULT_MODEL, EngineConfig
from tokenmill.contract import ModelHandle
from tokenmill.entrypoints.llm import LLM
from tokenmill.params import SamplingParams, StructuredOutputs
from tokenmill.session.manager import SessionLimits
from tokenmill.session.service import SessionService

SPEED, LATENCY = "tok/s", "ms"
OFF = "off"
"""The same engine with one optimization switched off."""


@dataclass
class Figure:
    """One row: a value of each round, of ours and of each of the others."""

    name: str
    unit: str
    switch: str
    """What turns the optimization off."""
    ours: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    theirs: dict[str, list[float]] = field(default_factory=dict)
    limit: float | None = None
    """The least time that the machine allows over the time that was taken."""

    def add(self, ours: float, theirs: Mapping[str, float], again: float) -> None:
        self.ours.append(ours)
        self.again.append(again)
        for name, value in theirs.items():
            self.theirs.setdefault(name, []).append(value)

    def ratio(self, values: Sequence[float]) -> float:
        """How many times as good ours are as these, round by round: the median."""
        pairs = zip(self.ours, values, strict=True)
        return statistics.median(a / b if self.unit == SPEED else b / a for a, b in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "median": statistics.median(self.ours),
            "medians": {name: statistics.median(values) for name, values in self.theirs.items()},
            "ratios": {name: self.ratio(values) for name, values in self.theirs.items()},
            "noise": self.ratio(self.again),
        }


@dataclass
class Section:
    name: str
    title: str
    about: str
    rows: list[Figure] = field(default_factory=list)
    charts: list[str] = field(default_factory=list)
    """SVG."""

    def row(self, name: str, unit: str, switch: str) -> Figure:
        self.rows.append(Figure(name, unit, switch))
        return self.rows[-1]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [row.to_json() for row in self.rows]}


@dataclass(frozen=True)
class Rounds:
    """As many rounds as wanted, fewer if they take too long, but not fewer than the least."""

    most: int
    budget_s: float
    least: int = 1

    def __iter__(self) -> Iterator[int]:
        began = time.monotonic()
        for number in range(max(self.most, self.least)):
            round_began = time.monotonic()
            yield number
            now = time.monotonic()
            if number + 1 >= self.least and (now - began) + (now - round_began) > self.budget_s:
                return


@dataclass(frozen=True)
class Bench:
    """The model and the machine, and how much is to be measured."""

    model: str
    path: Path | str
    backend: str
    is_quick: bool
    rounds: Rounds
    machine: compare.Machine
    weight_bytes: int
    num_values: int

    def step_s(self, num_tokens: int) -> float:
        """The least time of a step with so many tokens: all weights are read once and multiplied with each token."""
        read_s = self.weight_bytes / self.machine.read_bytes_per_s
        return max(read_s, 2 * self.num_values * num_tokens / self.machine.float_ops_per_s)

    def requests_s(self, count: int, prompt_tokens: int, new_tokens: int) -> float:
        return self.step_s(count * prompt_tokens) + (new_tokens - 1) * self.step_s(count)

    @property
    def threads(self) -> int:
        return self.machine.num_threads

    def pick(self, quick: int, full: int) -> int:
        return quick if self.is_quick else full

    def open(self) -> closing[ModelHandle]:
        """Weights that several engines share."""
        return closing(open_model(str(self.path), backend=self.backend))


# -- sections ---------------------------------------------------------------------------------------------------------


def kernels(bench: Bench) -> Section:
    made = Section("kernels", "Prefill and decode", "One prompt of 512 tokens; steps of 1, 4 and 16 sequences.")
    todo = compare.tasks([1, 4, 16])
    rows = [made.row(task.name, SPEED, "--backend llamacpp") for task in todo]
    others = ["llama.cpp"] if _is_installed("llama_cpp") and str(bench.path).endswith(".gguf") else []
    others += ["transformers"] if not bench.is_quick and _is_installed("transformers") else []
    with ExitStack() as processes:

        def start(name: str, *more: str) -> compare.Running:
            running = compare.Running(name, Path(bench.path), bench.threads, sys.executable, *more)
            processes.callback(running.close)
            return running

        ours = start("tokenmill", "auto", bench.backend)
        peers = dict[str, compare.Running]()
        for name in others:
            try:
                peers[name] = start(name)
            except RuntimeError as error:  # it may not know the model, or lack memory for it
                _say(f"left out: {error}")
        for one in (ours, *peers.values()):
            for task in todo:
                one.seconds(task.line)  # warm
        for number in bench.rounds:
            for task, row in zip(todo, rows, strict=True):
                first = task.num_tokens / ours.seconds(task.line)
                theirs = {name: task.num_tokens / one.seconds(task.line) for name, one in peers.items()}
                row.add(first, theirs, task.num_tokens / ours.seconds(task.line))
                _say_row(number, row)
    for task, row in zip(todo, rows, strict=True):
        least_s = task.num_steps * bench.step_s(task.num_tokens // task.num_steps)
        row.limit = least_s * statistics.median(row.ours) / task.num_tokens
    return made


def throughput(bench: Bench) -> Section:
    made = Section("throughput", "Throughput by concurrency", "Whole requests of 32 + 64 tokens, offline.")
    counts = [1, 2, 4, 8, 16] if bench.is_quick else [1, 2, 4, 8, 16, 32, 64]
    rows = [made.row(f"{count} requests", SPEED, "--max-num-seqs 1") for count in counts]
    new_tokens = bench.pick(64, 128)
    with (
        bench.open() as handle,
        LLM(handle, max_num_seqs=max(counts), num_threads=bench.threads) as many,
        LLM(handle, max_num_seqs=1, num_threads=bench.threads) as single,
    ):
        on, off = Offline(many, 32, new_tokens), Offline(single, 32, new_tokens)
        on.together(max(counts)), off.together(1)
        for number in bench.rounds:
            alone = off.together(2)
            for count, row in zip(counts, rows, strict=True):
                row.add(on.together(count), {OFF: alone}, on.together(count))
                _say_row(number, row)
    for count, row in zip(counts, rows, strict=True):
        row.limit = bench.requests_s(count, 32, new_tokens) * statistics.median(row.ours) / (count * new_tokens)
    lines = {"tokenmill": [statistics.median(row.ours) for row in rows]}
    lines["one at a time"] = [statistics.median(row.theirs[OFF]) for row in rows]
    made.charts.append(line_chart("Throughput", counts, lines, x_label="concurrent requests", y_label="tok/s"))
    return made


def server_load(bench: Bench) -> Section:
    made = Section("server", "Server under load", "Streaming clients over HTTP, each with a request of its own.")
    prompt_tokens, new_tokens = bench.pick(64, 140), bench.pick(32, 128)
    counts = (1, 16)
    speeds = [made.row(f"{count} clients", SPEED, "--max-num-seqs 1") for count in counts]
    firsts = [made.row(f"{count} clients, p50 TTFT", LATENCY, "--max-num-seqs 1") for count in counts]
    with ExitStack() as running:
        ours = running.enter_context(serving(str(bench.path), _arguments(bench)))
        words = asyncio.run(_words(ours))
        ours.sleep()
        others = {OFF: running.enter_context(serving(str(bench.path), [*_arguments(bench), "--max-num-seqs", "1"]))}
        if not bench.is_quick and _is_installed("xllamacpp") and str(bench.path).endswith(".gguf"):
            settings = servers.LlamaSettings(bench.threads, max(counts), 512)
            theirs = servers.llama_serving(sys.executable, Path(bench.path), settings)
            others["llama.cpp server"] = running.enter_context(theirs)
        for one in others.values():
            one.sleep()
        turns = Turns(words)
        for one in (ours, *others.values()):
            turns.do(one, servers.clients(2, prompt_tokens, 4))  # warm
        for number in bench.rounds:
            for count, speed, first in zip(counts, speeds, firsts, strict=True):
                work = servers.clients(count, prompt_tokens, new_tokens)
                found = turns.do(ours, work)
                theirs_found = {name: turns.do(one, work) for name, one in others.items()}
                again = turns.do(ours, work)
                for row, key in ((speed, servers.SPEED), (first, servers.FIRST)):
                    row.add(found[key], {name: one[key] for name, one in theirs_found.items()}, again[key])
                    _say_row(number, row)
    for count, speed, first in zip(counts, speeds, firsts, strict=True):
        least_s = bench.requests_s(count, prompt_tokens, new_tokens)
        speed.limit = least_s * statistics.median(speed.ours) / (count * new_tokens)
        first.limit = 1000 * bench.step_s(count * prompt_tokens) / statistics.median(first.ours)
    return made


def session_turns(bench: Bench) -> Section:
    made = Section("sessions", "Time to first token by turn", "Each turn adds 100 tokens and is answered with 100.")
    num_turns, tokens = bench.pick(6, 12), 100
    reused, cold = WAYS[1:]
    rounds = replace(bench.rounds, least=2)  # one and the next are the A/A pair
    row = made.row(f"turn {num_turns}, p50 TTFT", LATENCY, "requests without session_id")

    async def measure() -> list[Any]:
        options: dict[str, Any] = {"backend": bench.backend, "max_num_seqs": 4, "num_threads": bench.threads}
        async with SessionService(str(bench.path), limits=SessionLimits(stall_timeout_s=None), **options) as service:
            await first_token_by_turn(service, 1, tokens, 1, lambda _: None)  # warm
            return [await first_token_by_turn(service, num_turns, tokens, 1, _say) for _ in rounds]

    runs = asyncio.run(measure())
    last = {way: [1000 * run.seconds[way][0][-1] for run in runs] for way in WAYS}
    for number in range(len(runs)):
        theirs = {"stateless, prefix reuse": last[reused][number], OFF: last[cold][number]}
        row.add(last["session"][number], theirs, last["session"][(number + 1) % len(runs)])
    row.limit = 1000 * bench.step_s(tokens) / statistics.median(row.ours)
    seconds = {way: [run.seconds[way][0] for run in runs] for way in WAYS}
    medians = {way: [1000 * one for one in values] for way, values in by_turn_medians({"seconds": seconds}).items()}
    numbers = list(range(1, num_turns + 1))
    made.charts.append(line_chart("Time to first token", numbers, medians, x_label="turn", y_label="ms"))
    return made


def shared_prefix(bench: Bench) -> Section:
    count, shared, own = 16, bench.pick(400, 1000), 32
    made = Section(
        "prefix", "Shared prefix", f"{count} requests with {shared} tokens in common, until all have a token."
    )
    row = made.row(f"{count} x ({shared} + {own})", LATENCY, "EngineConfig(prefix_caching=False)")
    params = SamplingParams(temperature=0, max_tokens=1)
    sizes: dict[str, Any] = {"max_num_seqs": count, "max_num_batched_tokens": 2048}
    with (
        bench.open() as handle,
        LLM(handle, config=EngineConfig(**sizes), num_threads=bench.threads) as on,
        LLM(handle, config=EngineConfig(**sizes, prefix_caching=False), num_threads=bench.threads) as off,
    ):
        vocab_size = on.get_tokenizer().vocab_size

        def first_tokens_ms(llm: LLM, number: int) -> float:
            prefix = prompt(1000 * number, shared, vocab_size)
            prompts: list[Any] = [prefix + prompt(1000 * number + i + 1, own, vocab_size) for i in range(count)]
            return _timed_ms(lambda: llm.generate(prompts, params, use_tqdm=False))

        for number in bench.rounds:
            base = 3 * number + 1
            row.add(first_tokens_ms(on, base), {OFF: first_tokens_ms(off, base)}, first_tokens_ms(on, base + 1))
            _say_row(number, row)
    row.limit = 1000 * bench.step_s(shared + count * own) / statistics.median(row.ours)
    return made


NO_CHUNKS = ["--target-tick-ms", "1e6", "--prefill-chunk", "8192", "--max-num-batched-tokens", "8192"]


def long_prompt(bench: Bench) -> Section:
    num_streams, length = 8, bench.pick(2000, 7000)
    about = f"{num_streams} streams decode while a prompt of {length:,} tokens arrives: 99th percentile between tokens."
    made = Section("stall", "Long-prompt stall", about)
    row = made.row(f"p99 ITL beside {length:,} tokens", LATENCY, " ".join(NO_CHUNKS))
    arguments = [*_arguments(bench), "--context", "8192"]
    with serving(str(bench.path), arguments) as on, serving(str(bench.path), [*arguments, *NO_CHUNKS]) as off:
        turns, work = Turns(asyncio.run(_words(on))), servers.long_prompt(num_streams, length)
        for server in (on, off):
            server.sleep()
            turns.do(server, servers.clients(2, 64, 4))  # warm
        for number in bench.rounds:
            found = [turns.do(server, work)[servers.GAP] for server in (on, off, on)]
            row.add(found[0], {OFF: found[1]}, found[2])
            _say_row(number, row)
    row.limit = 1000 * bench.step_s(num_streams) / statistics.median(row.ours)
    return made


KEYS = ("first_name", "last_name", "email_address", "telephone", "street", "city", "postal_code", "country")
FORM = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 8} for name in KEYS},
    "required": list(KEYS),
    "additionalProperties": False,
}


def structured_output(bench: Bench) -> Section:
    made = Section("structured", "Structured output", "A JSON form of 8 fixed keys, with and without forced tokens.")
    params = SamplingParams(temperature=0, max_tokens=400, structured_outputs=StructuredOutputs(json=FORM))
    with (
        bench.open() as handle,
        LLM(handle, num_threads=bench.threads) as on,
        LLM(handle, forced_tokens=False, num_threads=bench.threads) as off,
    ):
        for count in (1, 8):
            row = made.row(f"{count} forms", SPEED, "forced_tokens=False")

            def fill(llm: LLM, number: int, count: int = count) -> tuple[float, list[list[int]]]:
                asked = [f"Customer {number}.{i}, as JSON." for i in range(count)]
                prompts: list[Any] = [llm.chat_prompt([{"role": "user", "content": one}]) for one in asked]
                began = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                ids = [one.outputs[0].token_ids for one in outputs]
                return sum(map(len, ids)) / (time.perf_counter() - began), ids

            fill(on, -1), fill(off, -1)
            for number in bench.rounds:
                (first, some), (without, others), (again, _) = fill(on, number), fill(off, number), fill(on, number)
                if some != others:
                    raise RuntimeError("forced tokens have changed an output")
                row.add(first, {OFF: without}, again)
                _say_row(number, row)
            row.limit = bench.step_s(count) / count * statistics.median(row.ours)
    return made


TEXT = (
    "The mill stands at the upper end of the valley, where the stream leaves the forest. It was built in 1783 by a "
    "carpenter from the next village, and for more than a century it ground the corn of nine farms. In spring, when "
    "the snow melts, the wheel turned day and night; in August it often stood still for weeks."
)


def speculation(bench: Bench) -> Section:
    about = "One answer that copies from its prompt, and one that is given with the request as `prediction`."
    made = Section("speculation", "Speculation", about)
    copied = made.row("copy of a text", SPEED, "--speculation off")
    predicted = made.row("predicted answer", SPEED, "--speculation off")
    num_tokens = 96
    with bench.open() as handle, LLM(handle, num_threads=bench.threads) as llm:
        asked: Any = llm.get_tokenizer().encode(f"{TEXT}\n\nOnce more, word for word:\n\n{TEXT[:120]}")

        def speed(how: str, expected: Sequence[int] = ()) -> tuple[float, list[int]]:
            params = SamplingParams(
                temperature=0,
                max_tokens=num_tokens,
                ignore_eos=True,
                speculation=how,
                prediction_token_ids=tuple(expected),
            )
            began = time.perf_counter()
            (output,) = llm.generate([asked], params, use_tqdm=False)
            return num_tokens / (time.perf_counter() - began), output.outputs[0].token_ids

        _, answer = speed(OFF)
        for number in bench.rounds:
            for row, expected in ((copied, ()), (predicted, answer)):
                (on, some), (off, others), (again, _) = speed("lookup", expected), speed(OFF), speed("lookup", expected)
                if some != others:
                    raise RuntimeError("speculation has changed an output")
                row.add(on, {OFF: off}, again)
                _say_row(number, row)
    for row in (copied, predicted):
        row.limit = bench.step_s(1) * statistics.median(row.ours)
    return made


SECTIONS: Mapping[str, Callable[[Bench], Section]] = {
    "kernels": kernels,
    "throughput": throughput,
    "server": server_load,
    "sessions": session_turns,
    "prefix": shared_prefix,
    "stall": long_prompt,
    "structured": structured_output,
    "speculation": speculation,
}


class Turns:
    """Lets one server work while the others are stopped; no two measurements have a prompt in common."""

    def __init__(self, words: Sequence[Word]) -> None:
        self._words = words
        self._seed = 0

    def do(self, server: ServerProcess, work: servers.Work) -> dict[str, float]:
        self._seed += 1
        server.wake()
        try:
            return asyncio.run(self._work(Target(server.base_url), work))
        finally:
            server.sleep()

    async def _work(self, target: Target, work: servers.Work) -> dict[str, float]:
        return await work(servers.Subject(target, await first_model(target), IdPrompts(self._words, self._seed)))


async def _words(server: ServerProcess) -> list[Word]:
    target = Target(server.base_url)
    return await learn_words(target, await first_model(target))


def _arguments(bench: Bench) -> list[str]:
    return ["--threads", str(bench.threads), "--backend", bench.backend, "--log-level", "warning"]


def _timed_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _say_row(number: int, row: Figure) -> None:
    beside = "".join(f", {name} {values[-1]:.1f}" for name, values in row.theirs.items())
    _say(f"round {number + 1}, {row.name}: {row.ours[-1]:.1f} {row.unit}{beside}, again {row.again[-1]:.1f}")


# -- the report -------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """All sections that are asked for, as JSON."""
    path: Path | str = options.model if options.model == "fake" else Path(options.model)
    if options.shape:
        path = checkpoint(options.shape, options.type)
    elif isinstance(path, Path) and not path.exists():
        path = pull(options.model)
    began = time.monotonic()
    machine = best_of([compare.measure_machine(options.threads) for _ in range(3)])
    sizes = (1, 1) if path == "fake" else compare.weight_sizes(Path(path), options.backend)
    num_rounds = options.rounds or (3 if options.quick else 7)
    budget_s = 60 * (options.minutes or (7 if options.quick else 240)) / len(options.sections)
    rounds = Rounds(num_rounds, budget_s)
    bench = Bench(options.model, path, options.backend, options.quick, rounds, machine, *sizes)
    sections = []
    for name in options.sections:
        _say(f"-- {name}")
        section_began = time.monotonic()
        section = SECTIONS[name](bench)
        sections.append({**section.to_json(), "seconds": time.monotonic() - section_began})
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command,
        "tokenmill": __version__,
        "model": _model(options, path),
        "machine": {**asdict(machine), "cpu": _cpu(), "python": platform.python_version(), "system": platform.system()},
        "peers": {name: version for name in ("llama-cpp-python", "xllamacpp") if (version := _version(name))},
        "seconds": time.monotonic() - began,
        "sections": sections,
    }


def _model(options: argparse.Namespace, path: str | Path) -> str:
    if options.shape:
        return f"Llama shape of {options.shape.upper()}, random weights, {options.type}"
    return options.model if path == "fake" else Path(path).name


def best_of(tries: Sequence[compare.Machine]) -> compare.Machine:
    """What the machine can do at its best: other work on it may have slowed down a measurement."""
    reading, products = max(one.read_bytes_per_s for one in tries), max(one.float_ops_per_s for one in tries)
    return replace(tries[0], read_bytes_per_s=reading, float_ops_per_s=products)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    """The model of the processor, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


HEADS = ("", "tokenmill", "others", "ratio", "A/A", "of the limit", "switch")


def noise_of(row: Mapping[str, Any]) -> str:
    """A/A of a row; `-` if it has no second run."""
    return "-" if row["again"] == row["ours"] else f"{row['noise']:.2f}"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table. A ratio over 1 says that ours is better."""
    others = ", ".join(f"{name} {value:,.0f}" for name, value in row["medians"].items())
    ratios = ", ".join(f"{value:.2f}" for value in row["ratios"].values())
    limit = "" if row["limit"] is None else f"{row['limit']:.2f}"
    return (
        row["name"],
        f"{row['median']:,.0f} {row['unit']}",
        others,
        ratios,
        noise_of(row),
        limit,
        row["switch"],
    )


def markdown(report: Mapping[str, Any], sections: Sequence[str] = tuple(SECTIONS)) -> str:
    """The sections as one table."""
    rows = [row for one in report["sections"] if one["name"] in sections for row in one["rows"]]
    lines = [f"| {' | '.join(HEADS)} |", "| --- | ---: | ---: | ---: | ---: | ---: | --- |"]
    shown = [cells(row) for row in rows]
    return "\n".join(lines + [f"| {' | '.join((*one[:-1], f'`{one[-1]}`'))} |" for one in shown])


def setting(report: Mapping[str, Any]) -> str:
    """Machine, model, date and command of a report, in a sentence."""
    machine = report["machine"]
    where = str(machine["cpu"])
    if "num_threads" in machine:
        limits = f"{machine['read_bytes_per_s'] / 1e9:.1f} GB/s, {machine['float_ops_per_s'] / 1e9:.0f} GFLOP/s float32"
        where = f"{where}, {machine['num_threads']} threads ({limits})"
    beside = "".join(f", {name} {version}" for name, version in report["peers"].items())
    made = f"tokenmill {report['tokenmill']}{beside}, {report['date']}"
    return f"{report['model']}, {where}, {made}: `{report['command']}`"


def ratio_chart(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """A bar for each ratio, and a line where both are equal."""
    bars = [(row["name"], other, ratio) for row in rows for other, ratio in row["ratios"].items()]
    left, width, height = 300, 720, 24
    scale = (width - left - 60) / max([ratio for _, _, ratio in bars] + [1.2])
    end = 40 + height * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {end + 24}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{end + 24}" fill="white"/>',
        f'<text x="8" y="22" font-size="15">{escape(title)}</text>',
    ]
    for i, (name, other, ratio) in enumerate(bars):
        y, colour = 40 + height * i, "#2563eb" if ratio >= 1 else "#dc2626"
        beside = "switched off" if other == OFF else other
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(f"{name} / {beside}")}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{scale * ratio:.1f}" height="{height - 6}" fill="{colour}"/>')
        parts.append(f'<text x="{left + scale * ratio + 6:.1f}" y="{y + 14}">{ratio:.2f}</text>')
    equal = left + scale
    parts.append(f'<line x1="{equal:.1f}" x2="{equal:.1f}" y1="34" y2="{end}" stroke="#111" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{equal:.1f}" y="{end + 14}" text-anchor="middle">equal</text>')
    return "\n".join([*parts, "</svg>\n"])


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem }
th, td { padding: 0.3rem 0.6rem; text-align: right } tr + tr td { border-top: 1px solid #ddd }
th:first-child, td:first-child, td:last-child, th:last-child { text-align: left }
th { border-bottom: 2px solid #111 } code { font-size: 0.85em; background: #f3f4f6; padding: 0 0.2em }
svg { width: 100%; height: auto; border: 1px solid #ddd; margin: 1rem 0 } .scroll { overflow-x: auto }
"""


def page(report: Mapping[str, Any]) -> str:
    """One HTML file that needs nothing else: no script, no font, no network."""
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>tokenmill on {escape(report["machine"]["cpu"])}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style></head><body>",
        "<h1>tokenmill benchmark report</h1>",
        f"<p>{_inline(setting(report))}</p>",
        "<p>Medians of interleaved rounds. A ratio above 1 means that tokenmill is better; A/A is the ratio of two "
        "runs of tokenmill, so its distance from 1 is noise. <em>Of the limit</em> is the least time that the measured "
        "memory bandwidth and float32 products allow over the time taken. The switch turns the optimization off; "
        "<em>off</em> is the same engine with it.</p>",
    ]
    for section in report["sections"]:
        parts += [f"<h2>{escape(section['title'])}</h2>", f"<p>{escape(section['about'])}</p>", '<div class="scroll">']
        parts.append(f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in HEADS)}</tr>")
        for row in section["rows"]:
            *shown, switch = cells(row)
            told = "".join(f"<td>{escape(one)}</td>" for one in shown)
            parts.append(f"<tr>{told}<td><code>{escape(switch)}</code></td></tr>")
        parts += ["</table></div>", *section["charts"]]
        if any(row["ratios"] for row in section["rows"]):
            parts.append(ratio_chart(section["rows"], f"{section['title']}: tokenmill / others"))
    return "\n".join([*parts, "</body></html>\n"])


def _inline(text: str) -> str:
    before, code, *_ = [*text.split("`"), "", ""]
    return f"{escape(before)}<code>{escape(code)}</code>"


def _without_files(arguments: Sequence[str]) -> list[str]:
    """What is measured, not where it is written."""
    files = argparse.ArgumentParser(add_help=False)
    for name in ("--json", "--html"):
        files.add_argument(name)
    return files.parse_known_args(arguments)[1]


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("tokenmill bench report", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this size instead (default: none)")
    parser.add_argument("--type", default="Q4_K_M", help="llama.cpp's quantization of --shape")
    parser.add_argument("--quick", action="store_true", help="shorter workloads: under 10 minutes on 2 cores")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS), help="sections")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all cores)")
    parser.add_argument("--backend", default="auto", help="our backend")
    parser.add_argument("--rounds", type=int, help="rounds; the median counts (default: 7, 3 with --quick)")
    parser.add_argument(
        "--minutes", type=float, help="stop adding rounds after this time (default: 240, 7 with --quick)"
    )
    parser.add_argument("--json", type=Path, default=Path("report.json"), help="JSON file to write")
    parser.add_argument("--html", type=Path, default=Path("report.html"), help="HTML page to write")
    parser.add_argument("--from-json", type=Path, help="write the page of an earlier run (default: measure)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers that are stopped end, too
    if options.from_json is not None:
        report = json.loads(options.from_json.read_text())
    else:
        report = measure(options, shlex.join(["tokenmill", "bench", "report", *_without_files(arguments)]))
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    options.html.write_text(page(report))
    print(markdown(report))
    print(f"\n{setting(report)}\nwritten to {options.html} in {report['seconds']:.0f} s")
    return 0
