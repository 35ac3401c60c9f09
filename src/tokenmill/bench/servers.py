"""`tokenmill bench compare --server`: our server beside llama.cpp's own, on the same file, over HTTP.

Both are processes of their own and take turns; whoever is not measured is stopped. A round measures ours, theirs and
ours again: the ratio of the two of ours (A/A) says how much of a difference is noise. llama.cpp's server gets a slot
for each client, continuous batching, and the settings that do best in trials of the same work; prompts are token ids,
so both compute the same, and no two measurements share any unless sharing is what is measured.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import signal
import socket
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenmill.backends.library import pull
from tokenmill.bench import bench_parser
from tokenmill.bench.load_clients import (
    HttpFailure,
    Sample,
    ServerProcess,
    Stream,
    Target,
    completion_body,
    first_model,
    server_process,
    serving,
)
from tokenmill.bench.serve import statistics_of
from tokenmill.bench.workloads import IdPrompts, Word, learn_words
from tokenmill.config import DEFAULT_MODEL

CONTEXT = 8192
TIMEOUT_S = 1200.0
ENDLESS = 2048
"""New tokens of a stream that is cancelled long before."""
SPEED, FIRST, GAP = "tok/s", "p50 TTFT ms", "p99 ITL ms"


@dataclass(frozen=True)
class Subject:
    """A server that is awake, what it calls its model, and prompts that no other measurement has."""

    target: Target
    model: str
    prompts: IdPrompts

    def stream(self, prompt: Any, max_tokens: int) -> Stream:
        body = completion_body(self.model, prompt, max_tokens, temperature=0, ignore_eos=True)
        return Stream(self.target, "/v1/completions", body, TIMEOUT_S)

    async def all_of(self, prompts: Sequence[Any], max_tokens: int) -> list[Sample]:
        """Requests that are sent together; all must be answered in full."""
        samples = await asyncio.gather(*(self.stream(prompt, max_tokens).run() for prompt in prompts))
        for sample, prompt in zip(samples, prompts, strict=True):
            if not sample.is_ok:
                raise HttpFailure(sample.error, f"{self.target.base_url}: {sample.detail}")
            if (sample.prompt_tokens, sample.output_tokens) != (len(prompt), max_tokens):
                told = f"{sample.prompt_tokens} tokens in and {sample.output_tokens} out"
                raise HttpFailure("other work", f"{told}, not {len(prompt)} and {max_tokens}")
        return samples


Work = Callable[[Subject], Awaitable[dict[str, float]]]


def clients(count: int, prompt_tokens: int = 140, new_tokens: int = 128) -> Work:
    """So many clients, each with a request of its own."""

    async def work(subject: Subject) -> dict[str, float]:
        samples = await subject.all_of([subject.prompts.part(prompt_tokens) for _ in range(count)], new_tokens)
        took = max(one.ended_s for one in samples) - min(one.sent_s for one in samples)
        return {SPEED: count * new_tokens / took, FIRST: 1000 * statistics.median(one.ttft_s for one in samples)}

    return work


def shared_prefix(count: int, shared: int = 1000, own: int = 32, new_tokens: int = 16) -> Work:
    """Requests that come together and begin alike."""

    async def work(subject: Subject) -> dict[str, float]:
        prompts = subject.prompts
        prefix = prompts.part(shared)
        samples = await subject.all_of([prompts.join(prefix, prompts.part(own)) for _ in range(count)], new_tokens)
        return {FIRST: 1000 * statistics.median(one.ttft_s for one in samples)}

    return work


def long_prompt(num_streams: int, prompt_tokens: int, short_tokens: int = 64) -> Work:
    """Streams that decode while a long prompt arrives: their times between tokens until it has its first one."""

    async def work(subject: Subject) -> dict[str, float]:
        streams = [subject.stream(subject.prompts.part(short_tokens), ENDLESS) for _ in range(num_streams)]
        tasks = [asyncio.create_task(one.run()) for one in streams]
        try:
            await asyncio.gather(*(one.wait_for_chunks(4) for one in streams))
            (arriving,) = await subject.all_of([subject.prompts.part(prompt_tokens)], 1)
            await asyncio.gather(*(one.wait_for_chunks(one.num_chunks + 1) for one in streams))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await subject.all_of([subject.prompts.part(8)], 1)  # so that it has seen them go before it is put to sleep
        gaps = [gap for one in streams for gap in gaps_within(one.sample(), arriving.sent_s, arriving.ended_s)]
        return {GAP: 1000 * statistics_of(gaps, [99])["p99"]}

    return work


def gaps_within(sample: Sample, began_s: float, ended_s: float) -> list[float]:
    """The gaps between tokens that lie in a span of time, in part at least."""
    pairs = zip(sample.chunk_times_s, sample.chunk_times_s[1:], strict=False)
    return [b - a for a, b in pairs if b > began_s and a < ended_s]


# -- tasks ------------------------------------------------------------------------------------------------------------

Axis = Sequence[Mapping[str, int]]
"""Settings that exclude each other."""


@dataclass(frozen=True, kw_only=True)
class ServerTask:
    """Something both servers do."""

    title: str
    work: Work
    trial: Work
    """A shorter form, by which llama.cpp's settings are chosen: its first measure decides."""
    slots: int
    """Requests that llama.cpp's server takes at the same time: one for each client."""
    slot_context: int
    bars: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """For each measure: should the ratio be `>=`, `<=` or `<`, and what."""
    axes: Sequence[Axis] = ()
    """What is tried for llama.cpp beside threads and polling."""


TASKS: dict[str, ServerTask] = {
    "clients-1": ServerTask(
        title="1 client",
        work=clients(1),
        trial=clients(1, new_tokens=64),
        slots=1,
        slot_context=512,
        bars={SPEED: (">=", 1.0)},
    ),
    "clients-4": ServerTask(
        title="4 clients",
        work=clients(4),
        trial=clients(4, new_tokens=32),
        slots=4,
        slot_context=512,
    ),
    "clients-16": ServerTask(
        title="16 clients",
        work=clients(16),
        trial=clients(16, new_tokens=32),
        slots=16,
        slot_context=512,
        bars={SPEED: (">=", 2.5), FIRST: ("<=", 0.4)},
    ),
    "long-prompt": ServerTask(
        title="8 streams while 7,900 tokens arrive",
        work=long_prompt(8, 7900),
        trial=long_prompt(8, 2500),
        slots=9,
        slot_context=CONTEXT,
        bars={GAP: ("<=", 0.5)},
        axes=[[{"batch": 512}, {"batch": 128}]],
    ),
    "shared-prefix": ServerTask(
        title="32 requests with 1,000 tokens in common",
        work=shared_prefix(32),
        trial=shared_prefix(8, shared=500),
        slots=32,
        slot_context=2048,
        bars={FIRST: ("<", 1.0)},
        axes=[[{"slots": 4}, {"slots": 1}]],
    ),
}


EQUAL_KERNELS: Mapping[str, tuple[str, float]] = {SPEED: (">=", 1.0)}
"""What is asked where llama.cpp computes for both."""


@dataclass(frozen=True)
class LlamaSettings:
    """Of llama.cpp's server; the rest is as it is by default."""

    threads: int
    slots: int
    slot_context: int
    poll: int = 50
    """How long its threads look for work before they sleep; 0 is not at all."""
    batch: int = 2048


@dataclass
class ServerRow:
    """One measure of one task, of each round."""

    task: str
    measure: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    asked: tuple[str, float] = ("", 0.0)
    """What the ratio should be: `>=`, `<=` or `<` than what; empty where nothing is asked."""

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def noise(self) -> float:
        return statistics.median(a / b for a, b in zip(self.again, self.ours, strict=True))

    @property
    def bar(self) -> str:
        sign, limit = self.asked
        return f"{sign} {limit:g}" if sign else ""

    @property
    def is_met(self) -> bool | None:
        """Is the ratio where it should be? None where nothing is asked."""
        sign, limit = self.asked
        return {"": None, ">=": self.ratio >= limit, "<=": self.ratio <= limit, "<": self.ratio < limit}[sign]


# -- the servers ------------------------------------------------------------------------------------------------------


@contextmanager
def llama_serving(python: str, model: Path, settings: LlamaSettings) -> Iterator[ServerProcess]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    given = json.dumps({**asdict(settings), "port": port})
    script = str(Path(__file__).with_name("contenders.py"))
    quiet = {"OMP_WAIT_POLICY": "passive"} if settings.poll == 0 else {}  # builds with OpenMP poll by its rules
    with server_process([python, "-I", script, "--serve-llama", str(model), given], quiet) as server:
        yield server


class Contest:
    """Our server, and whichever of llama.cpp's is wanted; both asleep but while they work."""

    def __init__(
        self, ours: ServerProcess, words: Sequence[Word], python: str, model: Path, num_threads: int, backend: str
    ) -> None:
        self._ours = ours
        self._backend = backend
        self._words = words
        self._python = python
        self._model = model
        self._num_threads = num_threads
        self._seeds = itertools.count()
        self.llama_says = ""
        """Its version, and what it was built for."""

    def measure(self, name: str, num_rounds: int, *, tries: bool) -> tuple[list[ServerRow], LlamaSettings]:
        """All rounds of one task."""
        task = TASKS[name]
        settings = LlamaSettings(self._num_threads, task.slots, task.slot_context)
        if tries:
            settings = self._choose(name, settings)
        rows: dict[str, ServerRow] = {}
        with llama_serving(self._python, self._model, settings) as theirs:
            theirs.sleep()
            self.llama_says = theirs.said.splitlines()[0]
            for server in (self._ours, theirs):
                self._do(server, clients(min(4, settings.slots), new_tokens=16))  # warm
            for number in range(num_rounds):
                found = [self._do(server, task.work) for server in (self._ours, theirs, self._ours)]
                for measure in found[0]:
                    row = rows.setdefault(
                        measure, ServerRow(name, measure, asked=self._bars(task).get(measure, ("", 0.0)))
                    )
                    for values, one in zip((row.ours, row.theirs, row.again), found, strict=True):
                        values.append(one[measure])
                    said = f"{row.ours[-1]:.1f}, llama.cpp {row.theirs[-1]:.1f}, again {row.again[-1]:.1f}"
                    _say(f"round {number + 1}, {name}: {measure} {said}")
        return list(rows.values()), settings

    def _bars(self, task: ServerTask) -> Mapping[str, tuple[str, float]]:
        return EQUAL_KERNELS if self._backend == "llamacpp" else task.bars

    def _choose(self, name: str, settings: LlamaSettings) -> LlamaSettings:
        """One axis after the other, the best of each is kept."""
        task = TASKS[name]
        threads: Axis = [{"poll": 0}, {"threads": 1, "poll": 0}]
        best, best_value = settings, self._try(task, settings)
        _say(f"{name}: {settings} {best_value}")
        for axis in (threads, *task.axes):
            for changes in axis:
                tried = replace(best, **changes)
                value = self._try(task, tried)
                _say(f"{name}: {tried} {value}")
                if _is_better(value, best_value):
                    best, best_value = tried, value
        return best

    def _try(self, task: ServerTask, settings: LlamaSettings) -> dict[str, float]:
        with llama_serving(self._python, self._model, settings) as server:
            server.sleep()
            self._do(server, clients(1, new_tokens=8))  # warm
            return self._do(server, task.trial)

    def _do(self, server: ServerProcess, work: Work) -> dict[str, float]:
        """Wake it, let it work, put it to sleep again."""
        server.wake()
        try:
            return asyncio.run(self._work(Target(server.base_url), work))
        finally:
            server.sleep()

    async def _work(self, target: Target, work: Work) -> dict[str, float]:
        return await work(Subject(target, await first_model(target), IdPrompts(self._words, next(self._seeds))))


def _is_better(value: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """By the first measure: more speed, or less time."""
    measure = next(iter(value))
    return value[measure] > other[measure] if measure == SPEED else value[measure] < other[measure]


# -- telling it -------------------------------------------------------------------------------------------------------


def table(rows: Sequence[ServerRow]) -> str:
    """As markdown."""
    lines = ["| task | measure | tokenmill | llama.cpp | ratio | A/A | bar | met |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for row in rows:
        values = f"{statistics.median(row.ours):.1f} | {statistics.median(row.theirs):.1f}"
        met = {None: "", True: "yes", False: "no"}[row.is_met]
        name = f"{TASKS[row.task].title} | {row.measure}"
        lines.append(f"| {name} | {values} | {row.ratio:.2f} | {row.noise:.2f} | {row.bar} | {met} |")
    return "\n".join(lines)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("tokenmill bench compare --server", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="model: a .gguf file, or the short name of one")
    parser.add_argument("--server-python", default=sys.executable, help="Python interpreter with xllamacpp")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK", help="tasks")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "torch", "llamacpp"], help="our backend")
    parser.add_argument("--context", type=int, default=CONTEXT, help="maximum context of our server (tokens)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; the median counts")
    parser.add_argument("--no-trials", action="store_true", help="run llama.cpp with its defaults, without tuning")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if unknown := set(options.tasks) - set(TASKS):
        parser.error(f"no task {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    if options.server_python == sys.executable and importlib.util.find_spec("xllamacpp") is None:
        parser.error("llama.cpp's server needs xllamacpp: pip install 'tokenmill[bench]', or --server-python")
    path = Path(options.model)
    if not path.exists():
        path = pull(options.model)
    more = ["--threads", str(options.threads), "--context", str(options.context), "--log-level", "warning"]
    more += ["--backend", options.backend]
    settings: dict[str, LlamaSettings] = {}
    rows: list[ServerRow] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end then, too: one is asleep
    with serving(str(path), more) as ours:
        _say(ours.said.rstrip())
        words = asyncio.run(_words(Target(ours.base_url)))
        ours.sleep()
        contest = Contest(ours, words, options.server_python, path, options.threads, options.backend)
        for name in options.tasks:
            found, settings[name] = contest.measure(name, options.rounds, tries=not options.no_trials)
            rows += found
    if options.json:
        results = [{**asdict(row), "ratio": row.ratio, "noise": row.noise, "is_met": row.is_met} for row in rows]
        chosen = {name: asdict(one) for name, one in settings.items()}
        about = {"tokenmill": more, "llama.cpp": chosen, "llama.cpp build": contest.llama_says}
        print(json.dumps({"settings": about, "results": results}, indent=2))
        return 0
    print(table(rows))
    print(f"\ntokenmill serve {' '.join(more)}")
    for name, one in settings.items():
        print(f"llama.cpp, {name}: {', '.join(f'{key} {value}' for key, value in asdict(one).items())}")
    print(contest.llama_says)
    return 0


async def _words(target: Target) -> list[Word]:
    return await learn_words(target, await first_model(target))
