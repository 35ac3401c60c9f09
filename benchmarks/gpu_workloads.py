"""The workloads that `benchmarks.gpu` measures, and how one is run through an engine core."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.outputs import ENDED_WELL
from tokenmill.params import SamplingParams

T = TypeVar("T")
MOST_TOKEN = 10_000
"""Prompts are drawn from the ids up to this one."""


@dataclass(frozen=True)
class Job:
    """One request: its prompt, and how many tokens it generates."""

    prompt: list[int]
    num_new: int
    temperature: float = 0.0

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together; what counts is the tokens they generate, or those they bring along."""

    title: str
    jobs: tuple[Job, ...]
    counts_prompts: bool = False

    @property
    def num_counted(self) -> int:
        return sum(job.num_prompt if self.counts_prompts else job.num_new for job in self.jobs)


def workloads() -> Mapping[str, Workload]:
    """By name. Prompts are the same each time."""
    return {
        "decode": Workload("decode, 1 sequence (128 prompt, 256 new)", _alike(1, 128, 256)),
        "a": Workload("throughput A: 256 requests, 512 prompt + 256 new", _alike(256, 512, 256)),
        "b": Workload("throughput B: 256 requests, 100 to 1,024 prompt and new, temperature 0.6", _mixed()),
        "prefill": Workload("prefill: 64 requests of 2,048 tokens, 1 new", _alike(64, 2048, 1), counts_prompts=True),
        "long": Workload("long: 8 requests, 30,000 prompt + 256 new", _alike(8, 30_000, 256), counts_prompts=True),
    }


def _alike(count: int, num_prompt: int, num_new: int) -> tuple[Job, ...]:
    rng = random.Random(1)
    return tuple(Job([rng.randint(0, MOST_TOKEN) for _ in range(num_prompt)], num_new) for _ in range(count))


def _mixed() -> tuple[Job, ...]:
    rng = random.Random(0)
    prompts = [[rng.randint(0, MOST_TOKEN) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return tuple(Job(prompt, rng.randint(100, 1024), temperature=0.6) for prompt in prompts)


def first_token(open_engine: Callable[[], tuple[EngineCore, T]], startup_s: float) -> tuple[EngineCore, T, float]:
    """Open an engine and have it generate one token; the seconds that took, from the process's start on.

    `startup_s` is what passed before any engine was opened: what other engines have done since is not this one's time.
    """
    began = time.perf_counter()
    engine, backend = open_engine()
    run(engine, [Job([1] * 16, 1)], "first")
    return engine, backend, startup_s + time.perf_counter() - began


def run(engine: EngineCore, jobs: Sequence[Job], name: str) -> float:
    """Seconds from the first request in to the last one's end."""
    began = time.perf_counter()
    requests = []
    for number, job in enumerate(jobs):
        draw = Draw(params=SamplingParams(temperature=job.temperature), seed=number)
        requests.append(Request(f"{name}-{number}", job.prompt, Limits(max_new_tokens=job.num_new), draw=draw))
        engine.add(requests[-1])
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - began
    for request, job in zip(requests, jobs, strict=True):
        if request.finish_reason not in ENDED_WELL or len(request.output) != job.num_new:
            raise RuntimeError(f"{request.request_id} ended with {request.finish_reason}: {request.error}")
    return seconds
