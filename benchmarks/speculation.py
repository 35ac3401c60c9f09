"""`python -m benchmarks.speculation`: decoding with proposals against decoding without, in interleaved pairs, with A/A.

copy     at 1 sequence: a text, code and JSON with one change, an agent's recurring tool results (bar: 1.8)
chat     answers as the model itself gives them, drawn at temperature 0.8, at 1 sequence (bar: 1.05)
fresh    tokens among which nothing repeats, at 1 sequence (bar: 0.95)
batch    the chat answers at 16 sequences (bar: 0.95)
rows     a step with 1 to 8 tokens of one sequence against one with as many sequences (bar: 1.05 times its time)

The model is small and loops when it decodes greedily, so what is said is replayed from a log: logits are computed and
their largest found as always, then the log's token is taken. The time counted is from the first token to the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tokenmill.backends.library import DEFAULT_MODEL
from tokenmill.bench import bench_parser
from tokenmill.contract import BatchBuilder, Output, Sampled
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import Event, VerifiedEvent
from tokenmill.engine.plan import StepPlan
from tokenmill.engine.request import Draw, Hints, Limits, Request
from tokenmill.entrypoints.options import open_for_engine
from tokenmill.params import SamplingParams

TEXT = (
    "The mill stands at the upper end of the valley, where the stream leaves the forest. It was built in 1783 by a "
    "carpenter from the next village, and for more than a century it ground the corn of nine farms. In spring, when "
    "the snow melts, the wheel turned day and night; in August it often stood still for weeks, and the miller repaired "
    "nets and sharpened saws instead. The last miller, Anna Brandt, closed the sluice in 1931. Since then the building "
    "has been a school, a store for apples, and a workshop; today a society of forty members keeps it in working order."
)
CODE = '''def percentile(values, fraction):
    """The value below which this fraction of the values lies."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = fraction * len(ordered)
    low, high = int(place), min(int(place) + 1, len(ordered) - 1)
    weight = place - low
    return ordered[low] * (1 - weight) + ordered[high] * weight


def summary(values):
    return {
        "count": len(values),
        "median": percentile(values, 0.5),
        "p95": percentile(values, 0.95),
    }
'''
DOCUMENT = json.dumps(
    [
        {"id": 7000 + i, "name": name, "city": city, "tags": ["member", "active"], "balance": 10.5 * i}
        for i, (name, city) in enumerate(
            [("Ada", "London"), ("Emmy", "Erlangen"), ("Grace", "New York"), ("Sofia", "Oslo")]
        )
    ],
    indent=2,
)
RESULT = '{"status": "ok", "path": "/srv/app/config.yaml", "size": 2048, "owner": "deploy", "mode": "0644"}'
AGENT = "".join(
    f"Call: read_file {i}\nResult: {RESULT}\nThought: the file is in order, I look at the next one.\n" for i in range(4)
)
COPIES = {
    "text": (f"Write this text again, but the year of the mill is 1793.\n\n{TEXT}", TEXT.replace("1783", "1793")),
    "code": (f"Fix the index error.\n\n{CODE}", CODE.replace("* len(ordered)", "* (len(ordered) - 1)")),
    "json": (f"Give me this document with Grace in Boston.\n\n{DOCUMENT}", DOCUMENT.replace("New York", "Boston")),
    "agent": (AGENT, AGENT.replace("read_file 0", "read_file 4").replace("read_file 1", "read_file 5")),
}
QUESTIONS = (
    "What is a good way to learn the piano as an adult?",
    "Explain how a heat pump works.",
    "Plan a weekend in Vienna for two people who like music.",
    "Why is the sky blue, and why are sunsets red?",
)


class Replay:
    """A sampler that finds the largest logits and takes the log's tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.array(tokens, dtype=np.int32)

    def __call__(self, logits: Any, mask: Any | None) -> Sampled:  # noqa: ARG002
        logits.argmax(-1)
        return Sampled(self._tokens)


class Replayer:
    """An engine whose requests say what they are told to."""

    def __init__(self, model: str, num_rows: int, threads: int | None) -> None:
        options = {"max_num_seqs": num_rows, "kv_cache_tokens": num_rows * 2048, "num_threads": threads}
        opened, handle = open_for_engine(model, options)
        self.text = opened.text
        self.core = EngineCore(handle.new_backend(opened.limits), handle.info, opened.config)
        self._logs: dict[str, list[int]] = {}
        self._num_runs = 0
        self.num_proposed = self.num_agreed = 0
        self.core._executor._sampler = self._sampler  # type: ignore[method-assign]
        self.core.events.subscribe(self._note)

    def _note(self, event: Event) -> None:
        if isinstance(event, VerifiedEvent):
            self.num_proposed += sum(event.num_proposed)
            self.num_agreed += sum(event.num_agreed)

    def _sampler(self, plan: StepPlan) -> Replay:
        rows = [*plan.sampled_rows.tolist(), *plan.more_rows.tolist()]
        positions = [*plan.positions.tolist(), *plan.more_positions.tolist()]
        names = [one.request_id for row in rows if (one := self.core.scheduler.rows.requests[row]) is not None]
        return Replay([self._logs[name][at] for name, at in zip(names, positions, strict=True)])

    def run(self, logs: Sequence[tuple[list[int], list[int]]], speculation: str) -> float:
        """Seconds a token, from the first ones to the last, of prompts and what follows them."""
        self._num_runs += 1
        params = SamplingParams(temperature=0, speculation=speculation)
        for i, (prompt, output) in enumerate(logs):
            name = f"{self._num_runs} {i}"
            self._logs[name] = [*prompt, *output]
            # Nothing of an earlier run is found, neither its KV nor its text.
            hints = Hints(namespace=self._num_runs)
            self.core.add(Request(name, prompt, Limits(max_new_tokens=len(output)), hints, Draw(params=params, seed=0)))
        begun = set[str]()
        while len(begun) < len(logs):
            begun |= {token.request_id for token in self.core.step()}
        began = time.perf_counter()
        while self.core.has_work:
            self.core.step()
        if self.core.failure is not None:
            raise self.core.failure
        return (time.perf_counter() - began) / sum(len(output) for _, output in logs)


def compare(replayer: Replayer, logs: Sequence[tuple[list[int], list[int]]], rounds: int) -> dict[str, Any]:
    """Speed with `auto` over speed without, and without over without; medians of interleaved pairs."""
    replayer.run(logs, "off"), replayer.run(logs, "auto")
    replayer.num_proposed = replayer.num_agreed = 0
    found: dict[str, list[float]] = {"speedup": [], "a/a": [], "tokens_per_s": []}
    for _ in range(rounds):
        off, auto, again = (replayer.run(logs, mode) for mode in ("off", "auto", "off"))
        found["speedup"].append((off + again) / 2 / auto)
        found["a/a"].append(off / again)
        found["tokens_per_s"].append(1 / auto)
    shown: dict[str, Any] = {name: round(statistics.median(values), 3) for name, values in found.items()}
    shown["proposed"], shown["accepted"] = replayer.num_proposed, replayer.num_agreed
    return shown


def copy(replayer: Replayer, options: argparse.Namespace) -> dict[str, Any]:
    encode = replayer.text.tokenizer.encode
    cases = {name: [(encode(prompt), encode(output, add_special=False))] for name, (prompt, output) in COPIES.items()}
    return {name: compare(replayer, logs, options.rounds) for name, logs in cases.items()}


def chat(replayer: Replayer, options: argparse.Namespace) -> dict[str, Any]:
    logs = answers(replayer, len(QUESTIONS))
    return {f"chat {i}": compare(replayer, [log], options.rounds) for i, log in enumerate(logs)}


def fresh(replayer: Replayer, options: argparse.Namespace) -> dict[str, Any]:
    order = np.random.default_rng(0).permutation(min(20_000, replayer.core.model.vocab_size - 1)).tolist()
    return {"fresh": compare(replayer, [(order[:200], order[200:400])], options.rounds)}


def batch(replayer: Replayer, options: argparse.Namespace) -> dict[str, Any]:
    return {"16 sequences": compare(replayer, answers(replayer, 16), options.rounds)}


def answers(replayer: Replayer, count: int, num_tokens: int = 160) -> list[tuple[list[int], list[int]]]:
    """Prompts and what the model says, drawn with a seed each."""
    core, found = replayer.core, []
    replaying = core._executor._sampler
    del core._executor._sampler  # the class's own
    for i in range(count):
        prompt = replayer.text.chat_template().encode([{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}])
        draw = Draw(params=SamplingParams(temperature=0.8, top_p=0.95), seed=i)
        request = Request(f"answer {i}", prompt, Limits(max_new_tokens=num_tokens), Hints(namespace="answers"), draw)
        core.add(request)
        while core.has_work:
            core.step()
        found.append((list(prompt), request.output))
    core._executor._sampler = replaying  # type: ignore[method-assign]
    return found


def rows(replayer: Replayer, options: argparse.Namespace, context: int = 512) -> dict[str, Any]:
    """Milliseconds a step: k tokens of one sequence, and one of each of k; medians of interleaved pairs."""
    backend = replayer.core._executor.backend
    prompt = [3 + i % 500 for i in range(context)]
    for seq in range(8):
        backend.decode(BatchBuilder().add_run(prompt, 0, seq).build())

    def seconds(pairs: list[tuple[int, int]]) -> float:
        builder = BatchBuilder()
        for seq, offset in pairs:
            builder.add(5 + offset, context + offset, seq, Output.LOGITS)
        built = builder.build()
        began = time.perf_counter()
        backend.decode(built)
        took = time.perf_counter() - began
        for seq in {seq for seq, _ in pairs}:
            backend.kv.seq_rm(seq, context)
        return took

    found = {}
    for count in (1, 2, 4, 8):
        one = [[(0, k) for k in range(count)], [(k, 0) for k in range(count)]]
        times = np.array([[seconds(pairs) for pairs in one] for _ in range(8 * options.rounds)])
        deep, wide = np.median(times, axis=0) * 1000
        found[str(count)] = {
            "one_sequence_ms": round(deep, 2),
            "sequences_ms": round(wide, 2),
            "ratio": round(deep / wide, 3),
        }
    backend.kv.seq_rm(-1)
    return found


MEASURES: dict[str, tuple[Callable[[Replayer, argparse.Namespace], dict[str, Any]], int]] = {
    "copy": (copy, 1), "chat": (chat, 1), "fresh": (fresh, 1), "batch": (batch, 16), "rows": (rows, 8),
}  # fmt: skip


def main() -> None:
    parser = bench_parser("speculation", __doc__ or "")
    parser.add_argument("measures", nargs="*", default=list(MEASURES), help=", ".join(MEASURES))
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved pairs")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of a step")
    options = parser.parse_args()
    for name in options.measures:
        measure, num_rows = MEASURES[name]
        print(json.dumps({name: measure(Replayer(options.model, num_rows, options.threads), options)}), flush=True)


if __name__ == "__main__":
    main()
