"""`python -m benchmarks.speculation`: decoding with proposals against decoding without, in interleaved pairs, with A/A.

On a model, here (`--model`):

copy     1 sequence: a text, code and JSON with one change, an agent's recurring tool results (bar: 1.8)
chat     1 sequence: the model's own answer in the third turn of a chat, drawn at temperature 0.8 (bar: 1.05)
fresh    1 sequence: tokens among which nothing repeats (bar: 0.95)
batch    16 sequences: the chat answers (bar: 0.95)
rows     a step with 1 to 8 tokens of one sequence against one with as many sequences (bar: 1.05 times its time)
lookup   microseconds of a lookup in 1,000,000 tokens (bar: 20)
peer     the texts of `copy`, beside llama.cpp with and without the prompt lookup of llama-cpp-python

On random weights of a real model's shape on a CUDA card (`--shape`, which needs torch, triton and numpy only):

full     1 sequence: 4 tokens proposed in each step, all of them right (bar: 3.0)
wide     256 sequences: the same, and proposals that are always wrong (bar: 0.97)
draft    1 sequence: a draft model (`--draft-shape`) whose tokens are right with a given chance (bars: 1.5 at 80 %,
         0.98 at 50 %)
same     200 prompts, 16 at a time, some with a draft model, some with lookup, some without: where the two largest
         logits differ by more than that changes between two batch sizes, the largest is the same (bar: no exception)

What is said is replayed from a log: logits are computed as always, then the log's token is taken. Small models loop
when they decode greedily, random ones always do. The time counted is from the first token to the last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import numpy as np

from tokenmill.backends.library import pull
from tokenmill.bench import bench_parser
from tokenmill.config import DEFAULT_MODEL, EngineConfig
from tokenmill.contract import BatchBuilder, DecodeOutput, IntArray, ModelHandle, Output, Sampled, Sampler
from tokenmill.engine.core import DraftModel, EngineCore
from tokenmill.engine.cost_model import CostLine, Price
from tokenmill.engine.events import Event, VerifiedEvent
from tokenmill.engine.plan import Draft, StepPlan
from tokenmill.engine.proposers import LONGEST_MATCH, LookupProposer, Proposal
from tokenmill.engine.request import Draw, Hints, Limits, Request
from tokenmill.engine.speculation import Candidate
from tokenmill.entrypoints.options import choose_limits, open_for_engine
from tokenmill.params import SamplingParams
from tokenmill.text.model_text import ModelText

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
CHATS = (
    (
        "What is a good way to learn the piano as an adult?",
        "How long should I practise each day?",
        "Write me a plan for the first four weeks.",
    ),
    (
        "Explain how a heat pump works.",
        "Is it worth it in a cold climate?",
        "Summarize the advantages and disadvantages of a heat pump.",
    ),
    (
        "Plan a weekend in Vienna for two people who like music.",
        "We also want to see a museum. Which one?",
        "Now put everything into one itinerary, hour by hour.",
    ),
    (
        "Why is the sky blue, and why are sunsets red?",
        "What would the sky look like on Mars?",
        "Explain all of that to a child of eight.",
    ),
)
"""Questions of one user, three turns each."""


Log = tuple[list[int], list[int]]
"""A prompt, and what is said after it."""


class Replay:
    """A sampler that takes the log's tokens instead of the largest logits."""

    on_card: ClassVar[dict[tuple[int, ...], Any]] = {}
    """Tokens of earlier runs: a sampler that draws the largest logits uploads nothing."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)

    def see(self, logits: Any) -> None:
        """Nothing is done with them."""

    def __call__(self, logits: Any, mask: Any | None, threads: Any | None = None) -> Sampled:  # noqa: ARG002
        self.see(logits)
        if not getattr(logits, "is_cuda", False):  # on a card, a graph finds the largest ones
            logits.argmax(-1)
            return Sampled(np.array(self._tokens, dtype=np.int32))
        if self._tokens not in self.on_card:
            from tokenmill.backends.torch.kernels.device import upload

            self.on_card[self._tokens] = upload(np.array(self._tokens, dtype=np.int32), logits.device)
        return Sampled(self.on_card[self._tokens])


class Watched(Replay):
    """Keeps the two largest logits of each draw, and where they are."""

    top: Any = None

    def see(self, logits: Any) -> None:
        self.top = logits.float().topk(2)


@cache
def agreed(token: int, position: int, acceptance: float) -> int:
    """The token, or another one as often as the acceptance says. The same one each time."""
    is_right = acceptance == 1 or random.Random(token * 65_537 + position).random() < acceptance
    return token if is_right else token + 1


@dataclass
class Oracle:
    """A proposer that knows what will be said, and is right with a given chance."""

    known: Callable[[Request], Sequence[int]]
    acceptance: float = 1.0
    most: int = 4
    name: str = "lookup"

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Proposal]:
        found = []
        for request, count in zip(requests, most, strict=True):
            begin = len(request.tokens)
            tokens = self.known(request)[begin : begin + min(count, self.most)]
            proposed = (agreed(token, begin + i, self.acceptance) for i, token in enumerate(tokens))
            found.append(Proposal(tuple(proposed), LONGEST_MATCH))
        return found

    def can_propose(self, request: Request) -> bool:  # noqa: ARG002
        return True

    def cost(self, num_requests: int) -> CostLine:  # noqa: ARG002
        return CostLine()

    def forget(self, request: Request) -> None:
        """Nothing is kept."""

    def keep(self, request: Request) -> None:
        """Nothing is kept."""


@dataclass
class Replayer:
    """An engine whose requests say what they are told to."""

    core: EngineCore
    text: ModelText | None = None
    acceptance: float = 1.0
    """Chance that a token of the draft model is made the right one."""
    num_proposed: int = 0
    num_agreed: int = 0
    tops: dict[tuple[str, int], tuple[float, int]] | None = None
    """Of each draw that counted, by log and position: how far apart the two largest logits were, and the largest."""
    _watched: dict[int, Watched] = field(default_factory=dict)
    """By tick."""
    _logs: dict[str, list[int]] = field(default_factory=dict)
    _num_runs: int = 0

    def __post_init__(self) -> None:
        self.core._executor._sampler = self._sampler  # type: ignore[method-assign]
        if self.core._drafter is not None:
            self.core._drafter._sampler_of = self._draft_sampler
        self.core.events.subscribe(self._note)
        self._update = self.core.scheduler.update
        self.core.scheduler.update = self._watch  # type: ignore[method-assign]

    def log_of(self, request: Request) -> list[int]:
        return self._logs[request.request_id]

    def _note(self, event: Event) -> None:
        if isinstance(event, VerifiedEvent):
            self.num_proposed += sum(event.num_proposed)
            self.num_agreed += sum(event.num_agreed)

    def _sampler(self, plan: StepPlan) -> Replay:
        rows = [*plan.sampled_rows.tolist(), *plan.more_rows.tolist()]
        positions = [*plan.positions.tolist(), *plan.more_positions.tolist()]
        tokens = [log[at] for log, at in zip(self._logs_of(rows), positions, strict=True)]
        if self.tops is None:
            return Replay(tokens)
        return self._watched.setdefault(plan.tick, Watched(tokens))

    def _watch(self, plan: StepPlan, sampled: Sampled, outputs: DecodeOutput | None = None) -> None:
        """Note the draws of a step that count: a request's own, and those behind proposed tokens that were right."""
        watched = self._watched.pop(plan.tick, None)
        if watched is not None and self.tops is not None:
            gaps = (watched.top.values[:, 0] - watched.top.values[:, 1]).tolist()
            largest = watched.top.indices[:, 0].tolist()
            rows = [*plan.sampled_rows.tolist(), *plan.more_rows.tolist()]
            positions = [*plan.positions.tolist(), *plan.more_positions.tolist()]
            before = plan.proposed_before()
            for place, (row, position) in enumerate(zip(rows, positions, strict=True)):
                request, proposed = self.core.scheduler.rows.requests[row], before.get(place, ())
                if request is None:
                    continue
                log = self._logs[request.request_id]
                if tuple(log[position - len(proposed) : position]) == proposed:
                    number = request.request_id.partition(" ")[2]
                    self.tops[number, position] = gaps[place], largest[place]
        self._update(plan, sampled, outputs)

    def _draft_sampler(self, rows: IntArray, positions: IntArray, proposed: Mapping[int, Sequence[int]]) -> Sampler:
        """As often as told the log's token, otherwise another one."""
        del proposed
        places = zip(self._logs_of(rows.tolist()), positions.tolist(), strict=True)
        return Replay([agreed(log[min(at, len(log) - 1)], at, self.acceptance) for log, at in places])

    def _logs_of(self, rows: Sequence[int]) -> list[list[int]]:
        requests = self.core.scheduler.rows.requests
        return [self._logs[one.request_id] for row in rows if (one := requests[row]) is not None]

    def run(self, logs: Sequence[Log], *speculation: str, before: Sequence[Log] = ()) -> float:
        """Seconds a token, from the first ones to the last. `before`: what the same key has said earlier.

        `speculation`: of the requests in turn.
        """
        self._num_runs += 1
        hints = Hints(namespace=self._num_runs)  # nothing of an earlier run is found, neither its KV nor its text
        params = [SamplingParams(temperature=0, speculation=one) for one in speculation]
        lookup = self.core.scheduler.speculation.proposers["lookup"]
        for prompt, output in before:
            lookup.keep(Request("before", [*prompt, *output], Limits(), hints))
        for i, (prompt, output) in enumerate(logs):
            name = f"{self._num_runs} {i}"
            self._logs[name] = [*prompt, *output]
            draw = Draw(params=params[i % len(params)], seed=0)
            self.core.add(Request(name, prompt, Limits(max_new_tokens=len(output)), hints, draw))
        begun = set[str]()
        while len(begun) < len(logs):
            begun |= {token.request_id for token in self.core.step()}
        began = time.perf_counter()
        while self.core.has_work:
            self.core.step()
        if self.core.failure is not None:
            raise self.core.failure
        return (time.perf_counter() - began) / sum(len(output) for _, output in logs)

    def compare(
        self, logs: Sequence[Log], rounds: int, mode: str = "auto", before: Sequence[Log] = ()
    ) -> dict[str, Any]:
        """Speed with speculation over speed without, and without over without; medians of interleaved pairs."""
        self.run(logs, "off", before=before), self.run(logs, mode, before=before)
        self.num_proposed = self.num_agreed = 0
        found: dict[str, list[float]] = {"speedup": [], "a/a": [], "tokens_per_s": []}
        for _ in range(rounds):
            off, on, again = (self.run(logs, one, before=before) for one in ("off", mode, "off"))
            found["speedup"].append((off + again) / 2 / on)
            found["a/a"].append(off / again)
            found["tokens_per_s"].append(1 / on)
        shown: dict[str, Any] = {name: round(statistics.median(values), 3) for name, values in found.items()}
        shown["a/a range"] = [round(one, 3) for one in (min(found["a/a"]), max(found["a/a"]))]
        shown["proposed"], shown["accepted"] = self.num_proposed, self.num_agreed
        return shown


def on_model(options: argparse.Namespace, num_rows: int) -> Replayer:
    """The engine of a model, as users open it."""
    sizes = {"max_num_seqs": num_rows, "kv_cache_tokens": num_rows * 2048, "num_threads": options.threads}
    opened, handle = open_for_engine(options.model, sizes)
    return Replayer(EngineCore(handle.new_backend(opened.limits), handle.info, opened.config), opened.text)


def on_shape(options: argparse.Namespace, num_rows: int, draft_shape: str | None = None) -> Replayer:
    """An engine on random weights on the card, with a draft model of another shape if one is named."""
    from benchmarks.gpu import random_model
    from tokenmill.backends.torch.cuda.layers import Switches

    config = EngineConfig(
        max_num_seqs=num_rows, max_num_batched_tokens=8192, prefill_chunk=8192, max_model_len=4096,
        target_tick_ms=1000.0, prefix_caching=False,
    )  # fmt: skip
    model: ModelHandle = random_model(options.shape, Switches())
    limits = choose_limits(model, config, num_rows * 1024 + 8192)
    draft = None
    if draft_shape is not None:
        draft = DraftModel(random_model(draft_shape, Switches()), limits)
    return Replayer(EngineCore(model.new_backend(limits), model.info, config, draft=draft))


def random_logs(count: int, num_prompt: int, num_new: int) -> list[Log]:
    """Tokens among which nothing repeats but by chance."""
    choose = np.random.default_rng(1)
    tokens = choose.integers(0, 100_000, (count, num_prompt + num_new)).tolist()
    return [(one[:num_prompt], one[num_prompt:]) for one in tokens]


def full(options: argparse.Namespace) -> dict[str, Any]:
    replayer = on_shape(options, 1)
    replayer.core.scheduler.speculation.proposers["lookup"] = Oracle(replayer.log_of)
    return replayer.compare(random_logs(1, 512, 256), options.rounds, "lookup")


def wide(options: argparse.Namespace) -> dict[str, Any]:
    replayer, found = on_shape(options, 256), {}
    logs = random_logs(256, 128, 128)
    for name, acceptance in (("right", 1.0), ("wrong", 0.0)):
        replayer.core.scheduler.speculation.proposers["lookup"] = Oracle(replayer.log_of, acceptance)
        found[name] = replayer.compare(logs, options.rounds, "lookup")
    return found


def draft(options: argparse.Namespace) -> dict[str, Any]:
    replayer, found = on_shape(options, 1, options.draft_shape), {}
    for acceptance in options.acceptance:
        replayer.acceptance = acceptance
        found[f"{acceptance:.0%}"] = replayer.compare(random_logs(1, 512, 256), options.rounds, "draft")
        found[f"{acceptance:.0%}"]["draft_ms"] = round(
            1000 * replayer.core.scheduler.speculation.proposers["draft"].cost(1).each, 3
        )
    return found


def same(options: argparse.Namespace) -> dict[str, Any]:
    """Whatever the controller thinks of it, all that is proposed is verified: about half of it is wrong."""
    replayer = on_shape(options, 16, options.draft_shape)
    replayer.acceptance = 0.7
    speculation = replayer.core.scheduler.speculation
    speculation.proposers["lookup"] = Oracle(replayer.log_of, 0.7)
    speculation.allot = _all_of  # type: ignore[method-assign]
    speculation._worth_drafting = lambda _, asked, *__: (  # type: ignore[method-assign]
        asked, [min(4, speculation._most(request)) for request in asked],
    )  # fmt: skip
    logs = random_logs(200, 128, 32)

    def tops(num_together: int, *modes: str) -> dict[tuple[str, int], tuple[float, int]]:
        found: dict[tuple[str, int], tuple[float, int]] = {}
        for begin in range(0, len(logs), num_together):
            replayer.tops = {}
            replayer.run(logs[begin : begin + num_together], *modes)
            found |= {(f"{begin + int(i)}", position): top for (i, position), top in replayer.tops.items()}
        return found

    plain, others = tops(16, "off"), tops(5, "off")
    noise = max(abs(gap - others[at][0]) for at, (gap, _) in plain.items())
    replayer.num_proposed = replayer.num_agreed = 0
    found = tops(16, "draft", "lookup", "off", "draft")
    different = [gap for at, (gap, largest) in plain.items() if found[at][1] != largest]
    return {
        "draws": len(plain), "noise": round(noise, 4), "surer": sum(gap > noise for gap, _ in plain.values()),
        "proposed": replayer.num_proposed, "accepted": replayer.num_agreed,
        "different": len(different), "different where surer": sum(gap > noise for gap in different),
        "largest gap of a different one": round(max(different, default=0.0), 4),
        "different between batch sizes": sum(others[at][1] != largest for at, (_, largest) in plain.items()),
    }  # fmt: skip


def _all_of(found: Mapping[int, Candidate], draft: Draft, price: Price) -> dict[int, int]:
    del draft, price
    return {row: len(candidate.proposal.tokens) for row, candidate in found.items()}


def encoded(replayer: Replayer, text: str, *, is_output: bool = False) -> list[int]:
    if replayer.text is None:
        raise SystemExit("this measure needs a model with a tokenizer: --model")
    return replayer.text.tokenizer.encode(text, add_special=not is_output)


def copy(options: argparse.Namespace) -> dict[str, Any]:
    replayer, found = on_model(options, 1), {}
    for name, (prompt, output) in COPIES.items():
        logs = [(encoded(replayer, prompt), encoded(replayer, output, is_output=True))]
        found[name] = replayer.compare(logs, options.rounds)
    return found


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of ours and theirs in turn, each saying the same; theirs relative to itself without lookup."""
    from llama_cpp import Llama, LogitsProcessorList
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    replayer, found = on_model(options, 1), {}
    shared: dict[str, Any] = {"model_path": str(pull(options.model)), "n_ctx": 2048, "verbose": False}
    shared["n_threads"] = options.threads or os.cpu_count()
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=10)
    theirs = {"with": Llama(**shared, draft_model=lookup, logits_all=True), "without": Llama(**shared)}

    def run(llama: Any, prompt: list[int], output: list[int]) -> float:
        """Seconds a token, as `Replayer.run` counts them."""
        left = iter(output)

        def force(_: Any, scores: Any) -> Any:
            """Called for each token that is said, and for none of those that are looked up."""
            scores[next(left)] = 1e9
            return scores

        llama.reset()
        tokens = llama.generate(prompt, temp=0, logits_processor=LogitsProcessorList([force]))
        heard = [next(tokens)]
        began = time.perf_counter()
        heard += itertools.islice(tokens, len(output) - 1)
        if heard != output:
            raise SystemExit("llama.cpp did not say what it was told to")
        return (time.perf_counter() - began) / len(output)

    for name, (prompt, output) in COPIES.items():
        log = (encoded(replayer, prompt), encoded(replayer, output, is_output=True))
        speeds: dict[str, list[float]] = {"ours": [], "with": [], "without": []}
        for number in range(options.rounds + 1):
            seconds = {"ours": replayer.run([log], "auto")} | {how: run(one, *log) for how, one in theirs.items()}
            if number:
                for how, each in seconds.items():
                    speeds[how].append(1 / each)
        ratio = statistics.median(a / b for a, b in zip(speeds["ours"], speeds["with"], strict=True))
        gain = statistics.median(a / b for a, b in zip(speeds["with"], speeds["without"], strict=True))
        medians = {how: round(statistics.median(values), 1) for how, values in speeds.items()}
        found[name] = {"tokens_per_s": medians, "ours / theirs": round(ratio, 2), "their speedup": round(gain, 2)}
    return found


def chat(options: argparse.Namespace) -> dict[str, Any]:
    """The third turns, with the same user's other chats in the index; `all`: their total times, compared."""
    replayer, found = on_model(options, 1), {}
    chats = [third_turn(replayer, topic, seed) for seed, topic in enumerate(CHATS)]
    without = with_it = 0.0
    for i, log in enumerate(chats):
        others = chats[:i] + chats[i + 1 :]
        one = found[CHATS[i][0]] = replayer.compare([log], options.rounds, before=others)
        seconds = len(log[1]) / one["tokens_per_s"]
        without, with_it = without + one["speedup"] * seconds, with_it + seconds
    return {"all": round(without / with_it, 3), **found}


def fresh(options: argparse.Namespace) -> dict[str, Any]:
    replayer = on_model(options, 1)
    order = np.random.default_rng(0).permutation(min(20_000, replayer.core.model.vocab_size - 1)).tolist()
    return replayer.compare([(order[:200], order[200:400])], options.rounds)


def batch(options: argparse.Namespace) -> dict[str, Any]:
    replayer = on_model(options, 16)
    logs = [third_turn(replayer, CHATS[seed % len(CHATS)], seed) for seed in range(16)]
    return replayer.compare(logs, options.rounds)


def third_turn(replayer: Replayer, questions: Sequence[str], seed: int, num_tokens: int = 160) -> Log:
    """A chat of three turns as the model itself answers them: the prompt of the last one, and its answer."""
    core, text = replayer.core, replayer.text
    if text is None:
        raise SystemExit("this measure needs a model with a tokenizer: --model")
    replaying = core._executor._sampler
    del core._executor._sampler  # the class's own
    messages: list[dict[str, str]] = []
    log: Log = ([], [])
    for turn, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        prompt = text.chat_template().encode(messages)
        draw = Draw(params=SamplingParams(temperature=0.8, top_p=0.95, speculation="off"), seed=100 * seed + turn)
        limits = Limits(max_new_tokens=num_tokens, stop_ids=frozenset(text.tokenizer.eos_ids))
        request = Request(f"{seed} {turn}", list(prompt), limits, Hints(namespace="answers"), draw)
        core.add(request)
        while core.has_work:
            core.step()
        log = (list(prompt), request.output)
        messages.append({"role": "assistant", "content": text.tokenizer.decode(request.output)})
    core._executor._sampler = replaying  # type: ignore[method-assign]
    return log


def lookup(options: argparse.Namespace) -> dict[str, Any]:
    """In text that repeats as language does, and in random tokens; the request's own log has 2,000 tokens."""
    found: dict[str, Any] = {}
    choose = np.random.default_rng(0)
    for name, vocab in (("repetitive", 200), ("random", 49_152)):
        proposer = LookupProposer()
        for i in range(256):
            proposer.keep(Request(f"r{i}", choose.integers(0, vocab, 4096).tolist(), Limits()))
        request, times = Request("r", choose.integers(0, vocab, 2000).tolist(), Limits()), []
        proposer.propose([request], [7])
        for token in choose.integers(0, vocab, 1000 * options.rounds).tolist():
            request.tokens.append(token)
            began = time.perf_counter()
            proposer.propose([request], [7])
            times.append(time.perf_counter() - began)
        found[name] = {"us": round(1e6 * statistics.median(times), 1), "MiB": round(proposer.num_bytes / 2**20, 1)}
    return found


def rows(options: argparse.Namespace, context: int = 512) -> dict[str, Any]:
    """Milliseconds a step: k tokens of one sequence, and one of each of k; medians of interleaved pairs."""
    backend = on_model(options, 8).core._executor.backend
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


ON_MODEL: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "copy": copy, "chat": chat, "fresh": fresh, "batch": batch, "rows": rows, "lookup": lookup,
    "peer": peer,
}  # fmt: skip
ON_SHAPE: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "full": full, "wide": wide, "draft": draft, "same": same,
}  # fmt: skip


def main() -> None:
    parser = bench_parser("python -m benchmarks.speculation", __doc__)
    parser.add_argument(
        "measures", nargs="*", default=[], help="by default all of --model, or of --shape if that is given"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--shape", default=None, help="shape of a model (benchmarks/gpu.py), on random weights")
    parser.add_argument("--draft-shape", default="qwen3-0.6b", help="shape of the draft model")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.8, 0.5], help="of the draft model's tokens")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved pairs")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of a step")
    options = parser.parse_args()
    measures = ON_MODEL if options.shape is None else ON_SHAPE
    unknown = set(options.measures) - set(measures)
    if unknown:
        parser.error(f"unknown measure {', '.join(sorted(unknown))}; known: {', '.join(measures)}")
    for name in options.measures or measures:
        print(json.dumps({name: measures[name](options)}), flush=True)


if __name__ == "__main__":
    main()
