"""What two servers are compared by: the requests of each task, and what is measured of them.

Prompts are token ids, so that all servers compute the same; no two measurements have one in common.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.bench.load_clients import RequestFailed, Sample, Stream, Target, completion_body
from tokenmill.bench.load_metrics import statistics_of
from tokenmill.bench.workloads import IdPrompts

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
                raise RequestFailed(sample.error, f"{self.target.base_url}: {sample.detail}")
            if (sample.prompt_tokens, sample.output_tokens) != (len(prompt), max_tokens):
                told = f"{sample.prompt_tokens} tokens in and {sample.output_tokens} out"
                raise RequestFailed("other work", f"{told}, not {len(prompt)} and {max_tokens}")
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
class Task:
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


TASKS: dict[str, Task] = {
    "clients-1": Task(
        title="1 client",
        work=clients(1),
        trial=clients(1, new_tokens=64),
        slots=1,
        slot_context=512,
        bars={SPEED: (">=", 1.0)},
    ),
    "clients-4": Task(
        title="4 clients",
        work=clients(4),
        trial=clients(4, new_tokens=32),
        slots=4,
        slot_context=512,
    ),
    "clients-16": Task(
        title="16 clients",
        work=clients(16),
        trial=clients(16, new_tokens=32),
        slots=16,
        slot_context=512,
        bars={SPEED: (">=", 2.5), FIRST: ("<=", 0.4)},
    ),
    "long-prompt": Task(
        title="8 streams while 7,900 tokens arrive",
        work=long_prompt(8, 7900),
        trial=long_prompt(8, 2500),
        slots=9,
        slot_context=CONTEXT,
        bars={GAP: ("<=", 0.5)},
        axes=[[{"batch": 512}, {"batch": 128}]],
    ),
    "shared-prefix": Task(
        title="32 requests with 1,000 tokens in common",
        work=shared_prefix(32),
        trial=shared_prefix(8, shared=500),
        slots=32,
        slot_context=2048,
        bars={FIRST: ("<", 1.0)},
        axes=[[{"slots": 4}, {"slots": 1}]],
    ),
}
