"""The shapes of telemetry's answers, for the OpenAPI document. Answers themselves are plain dictionaries."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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


class ParkedTokens(BaseModel):
    all: int
    plain: int


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
    parked_tokens: ParkedTokens
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


class TimelineParts(BaseModel):
    received: float
    queued: float
    prefill: float
    neighbours_prefill: float
    decode: float
    preempted: float
    delivery: float
    client_blocked: float


class TimelineCause(BaseModel):
    cause: Literal["queue", "queue_full", "long_neighbour", "preempted", "slow_reader", "prompt"]
    seconds: float
    why: str


class Difference(BaseModel):
    token: int
    turn: int | None
    message: int | None
    role: str | None
    before: str
    now: str


class Evicted(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    seconds_before: float
    by: str | None = Field(alias="for")


class CacheCost(BaseModel):
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    cause: str
    why: str
    difference: Difference | None
    evicted: Evicted | None


class TurnCost(CacheCost):
    id: str


class SessionExplanation(BaseModel):
    object: Literal["session.explanation"]
    session_id: str
    turns: list[TurnCost]


class GenerationTimeline(BaseModel):
    id: str
    model: str
    core: int
    phases: list[TimelinePhase]
    seconds: float
    parts: TimelineParts
    causes: list[TimelineCause]
    cache: CacheCost | None
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
