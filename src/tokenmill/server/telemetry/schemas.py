"""The shapes of telemetry's answers, for the OpenAPI document. Answers themselves are plain dictionaries."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class Slot(BaseModel):
    slot: int
    state: Literal["idle", "prefilling", "generating"]
    request: str | None = None
    session: str | None = None
    tokens: int | None = None
    computed: int | None = None


class Waiting(BaseModel):
    request: str
    session: str | None
    tokens: int
    preempted: bool


class Parked(BaseModel):
    seq: int
    session: str | None
    tokens: int


class Cells(BaseModel):
    all: int
    free: int
    used: int


class Rates(BaseModel):
    ticks: float
    generated_tokens: float
    prefill_tokens: float
    hit_rate: float | None


class Core(BaseModel):
    core: int
    tick: int
    slots: list[Slot]
    waiting: list[Waiting]
    parked: list[Parked]
    cells: Cells
    rates: Rates


class ServedModel(BaseModel):
    model: str
    cores: list[Core]


class Scheduler(BaseModel):
    object: Literal["scheduler"]
    models: list[ServedModel]


class TimelinePhase(BaseModel):
    phase: Literal["queued", "prefill", "decode", "preempted"]
    begin: float
    seconds: float


class GenerationTimeline(BaseModel):
    id: str
    model: str
    core: int
    phases: list[TimelinePhase]
    seconds: float
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    preemptions: int
    finish_reason: str | None


class RequestTimeline(BaseModel):
    id: str
    object: Literal["request.timeline"]
    generations: list[GenerationTimeline]
