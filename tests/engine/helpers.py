"""What engine tests share: an engine on the fake backend, what a request says when it is alone, and a clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from tokenmill.backends.fake import FakeBackend, FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, BatchBuilder, DecodeOutput, Forward, Sampled, Sampling
from tokenmill.engine.core import DraftModel, EngineCore
from tokenmill.engine.events import TickEvent
from tokenmill.engine.request import Hints, Limits, Request
from tokenmill.outputs import FinishReason, GeneratedToken

VOCAB = 64
MakeBackend = Callable[[FakeConfig], Any]
LIMITS = {"max_new_tokens", "min_new_tokens", "stop_ids", "max_context", "max_tokens_per_step", "timeout_s"}


def make_engine(
    *,
    depth: int = 0,
    fake: dict[str, Any] | None = None,
    clock: Callable[[], float] | None = None,
    backend: MakeBackend = FakeBackend,
    draft: DraftModel | None = None,
    **config: Any,
) -> EngineCore:
    fake_config = FakeConfig(
        **{"vocab_size": VOCAB, "max_context": 256, "num_cells": 512, "block_size": 4, "max_seqs": 16, "depth": depth}
        | (fake or {})
    )
    settings = EngineConfig(**{"max_num_seqs": 8} | config)
    more = {} if clock is None else {"clock": clock}
    return EngineCore(backend(fake_config), FakeModel(fake_config).info, settings, draft=draft, **more)


def request(name: str, prompt: Sequence[int], **options: Any) -> Request:
    limits = {key: options.pop(key) for key in list(options) if key in LIMITS}
    if "stop_ids" in limits:
        limits["stop_ids"] = frozenset(limits["stop_ids"])
    return Request(name, prompt, Limits(**limits), Hints(**options))


def backend_of(engine: EngineCore) -> Any:
    """Its backend, which takes faults."""
    return engine._executor.backend


class Transcript:
    """What came out of an engine: tokens by request, and the terminal event of each, which must be one."""

    def __init__(self) -> None:
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, FinishReason] = {}
        self.errors: dict[str, str | None] = {}

    def add(self, outputs: Iterable[GeneratedToken]) -> None:
        for output in outputs:
            assert output.request_id not in self.reasons, f"{output} came after the end"
            if output.token_id is not None:
                self.tokens[output.request_id].append(output.token_id)
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
                self.errors[output.request_id] = output.error


def run(engine: EngineCore, transcript: Transcript | None = None, max_ticks: int = 5000) -> Transcript:
    """Step until nothing is left."""
    transcript = transcript or Transcript()
    for _ in range(max_ticks):
        if not engine.has_work:
            return transcript
        transcript.add(engine.step())
    raise AssertionError(f"not done after {max_ticks} ticks: {engine.scheduler.requests}")


@cache
def alone(
    prompt: tuple[int, ...],
    max_new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    min_new_tokens: int = 0,
    make_backend: MakeBackend = FakeBackend,
    max_context: int = 4096,
) -> list[int]:
    """The ids a request gets on a fresh backend with nobody else: token by token, no engine involved."""
    tokens = list(prompt)
    config = FakeConfig(vocab_size=VOCAB, max_context=max_context, num_cells=max_context, block_size=1, max_seqs=1)
    with make_backend(config) as backend:
        batch = BatchBuilder().add_run(tokens, 0, 0)
        while True:
            token = int(backend.decode(batch.build()).logits[0].argmax())
            tokens.append(token)
            done = len(tokens) - len(prompt)
            if done == max_new_tokens or (token in stop_ids and done > min_new_tokens):
                return tokens[len(prompt) :]
            batch = BatchBuilder().add_run([token], len(tokens) - 1, 0)


def assert_clean(engine: EngineCore) -> None:
    """Nothing is left once the parked KV is given up: no row, no sequence, no cell."""
    engine.check_integrity()
    engine.kv.evict_all()
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_parked) == (0, 0, 0)
    assert stats.kv.free_cells == stats.kv.num_cells
    assert stats.kv.referenced_cells == 0
    assert engine.kv.index.num_entries == 0
    assert not engine.scheduler.requests
    assert not engine.scheduler.usage._own.rows
    assert not engine.scheduler.usage._own.slots


class SimulatedClock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedBackend(FakeBackend):
    """A fake backend whose steps take time on a simulated clock: a + b * tokens + c * cells read.

    They take it when they are collected, as on a device, or at once, as on a CPU.
    """

    def __init__(
        self, config: FakeConfig, clock: SimulatedClock, seconds: tuple[float, float, float], *, at_once: bool = False
    ) -> None:
        super().__init__(config)
        self._clock = clock
        self._seconds = seconds
        self._at_once = at_once
        self._costs: dict[int, float] = {}

    def forward(self, batch: Any) -> Any:
        step = super().forward(batch)
        base, per_token, per_cell = self._seconds
        cost = base + per_token * len(batch) + per_cell * float(batch.pos.sum())
        if self._at_once:
            self._clock.now += cost
        else:
            self._costs[step.number] = cost
        return step

    def collect(self, handle: Forward | Sampling) -> DecodeOutput | Sampled:  # type: ignore[override]
        step: Any = getattr(handle, "forward", handle)
        self._clock.now += self._costs.pop(step.number, 0.0)
        return super().collect(handle)  # type: ignore[arg-type]


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything."""
    array = np.asarray(values, dtype=float)
    return float(array.sum() ** 2 / (len(array) * (array**2).sum()))


class TimedModel(FakeModel):
    """A model whose backends take time on a simulated clock."""

    def __init__(self, config: FakeConfig, clock: SimulatedClock, seconds: tuple[float, float, float]) -> None:
        super().__init__(config)
        self._clock, self._seconds = clock, seconds

    def new_backend(self, limits: BackendLimits) -> TimedBackend:
        return TimedBackend(replace(self.config, num_cells=limits.num_cells), self._clock, self._seconds)


def timed_engine(
    depth: int,
    seconds: tuple[float, float, float],
    fake: dict[str, Any],
    *,
    at_once: bool = False,
    draft_s: tuple[float, float, float] | None = None,
    **config: Any,
) -> tuple[EngineCore, SimulatedClock]:
    """`draft_s`: what steps of a draft model take that says the same; None: there is none."""
    clock = SimulatedClock()
    fake_config = FakeConfig(**{"vocab_size": VOCAB, "depth": depth, "block_size": 16} | fake)
    backend = TimedBackend(fake_config, clock, seconds, at_once=at_once)
    draft = None if draft_s is None else DraftModel(TimedModel(fake_config, clock, draft_s), BackendLimits())
    engine = EngineCore(backend, FakeModel(fake_config).info, EngineConfig(**config), clock, draft=draft)
    return engine, clock


def ticks_of(engine: EngineCore) -> list[TickEvent]:
    ticks: list[TickEvent] = []
    engine.events.subscribe(lambda event: ticks.append(event) if isinstance(event, TickEvent) else None)
    return ticks
