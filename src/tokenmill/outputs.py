"""What comes out of the engine: step results, the deltas of text made of them, and whole outputs, their sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple


class FinishReason(Enum):
    """Why a request ended. Every request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OVERLOAD = "overload"
    CONFLICT = "conflict"
    ERROR = "error"
    SHUTDOWN = "shutdown"


ENDED_WELL = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS})
"""The reasons of a complete answer; all others are failures of some kind."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities under the model's own distribution: of the token drawn, and of the likeliest ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability), likeliest first."""


class End(NamedTuple):
    """How a request ended."""

    finish_reason: FinishReason
    error: str | None = None


class GeneratedToken(NamedTuple):
    """One row of a step result. The last one has a finish reason, and no token where the end came without one."""

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens and endings of one engine step for all its requests, by column: what crosses threads and processes."""

    request_ids: list[str]
    token_ids: list[int | None]
    """None: the request ended without a token."""
    logprobs: list[TokenLogprobs | None] | None
    """None: no request of the step asked for them."""
    ends: dict[int, End]
    """By place in the columns."""

    @classmethod
    def of_end(cls, request_id: str, finish_reason: FinishReason, error: str | None = None) -> StepResult:
        """A request has ended outside any step."""
        return cls([request_id], [None], None, {0: End(finish_reason, error)})

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[GeneratedToken]:
        """Row by row."""
        for place, (name, token) in enumerate(zip(self.request_ids, self.token_ids, strict=True)):
            reason, error = self.ends.get(place, _GOES_ON)
            yield GeneratedToken(name, token, reason, error, None if self.logprobs is None else self.logprobs[place])

    def select(self, places: Sequence[int]) -> StepResult:
        """Some of its rows."""
        return StepResult(
            [self.request_ids[place] for place in places],
            [self.token_ids[place] for place in places],
            None if self.logprobs is None else [self.logprobs[place] for place in places],
            {i: self.ends[place] for i, place in enumerate(places) if place in self.ends},
        )


_GOES_ON = (None, None)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""
    reasoning_tokens: int = 0
    """Of the completion's tokens, those of the model's thinking."""
    accepted_prediction_tokens: int = 0
    """Tokens that speculation proposed and that were drawn as proposed..."""
    rejected_prediction_tokens: int = 0
    """...and those that were not: computed, and no part of the completion."""


@dataclass(frozen=True)
class Divergence:
    """Where a prompt and KV that was there begin to differ."""

    at: int
    """Tokens that are the same."""
    held: tuple[int, ...]
    """Some ids of what was there, from the first that differs on..."""
    asked: tuple[int, ...]
    """...and of the prompt."""


@dataclass(frozen=True)
class Loss:
    """KV of a session that was given up before the session came back for it."""

    at: float
    """When, by the engine's clock."""
    reason: str
    """`room`: others needed it; `weights`: they were replaced; `failure`: a step failed."""
    by: str | None
    """The request that room was made for, if it was one, and..."""
    by_key: str
    """...whose that is."""
    num_tokens: int
    """What is left of it is so much less."""


@dataclass(frozen=True)
class CacheVerdict:
    """How much of a prompt did not have to be computed, and why not more."""

    num_cached: int
    divergence: Divergence | None = None
    """From the KV that has most in common with the prompt, if that goes on otherwise."""
    loss: Loss | None = None
    """The latest of its session, since its last answer."""
    core_since: float = 0.0
    """Since when the engine core is there: it knows of nothing before."""
    is_found: bool = True
    """Is KV found wherever it is? Not without prefix caching, nor where a sequence can only be had as a whole."""


PartKind = Literal["content", "reasoning", "call", "arguments"]


class TurnPart(NamedTuple):
    """What an answer with reasoning or tool calls has grown by."""

    kind: PartKind
    text: str = ""
    """Of content, reasoning, or of a call's arguments (JSON)."""
    call: int = 0
    """Which call, from 0 on..."""
    call_id: str = ""
    """...and with the part that begins it, its id..."""
    name: str = ""
    """...and the function's name."""


class OutputDelta(NamedTuple):
    """What one choice of a request has grown by. Its text is that of its tokens; neither is taken back later."""

    index: int = 0  # type: ignore[assignment]  # in place of tuple's method
    """Of the choice."""
    text: str = ""
    token_ids: Sequence[int] = ()
    offset: int = 0
    """Tokens of the choice before these: where to resume after a lost connection is `offset + len(token_ids)`."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of the tokens, if they were asked for."""
    finish_reason: str | None = None
    """Of the last delta of a choice; the fields below belong to it, too."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, if one did."""
    error: str | None = None
    usage: Usage | None = None
    """Of the request, once all its choices have ended."""
    durable: bool | None = None
    """Of a session's answer: is the turn in the store? None: there is no store."""
    parts: Sequence[TurnPart] | None = None
    """The same text as content, reasoning and tool calls; None: it is content alone."""

    @property
    def is_complete(self) -> bool:
        """Has the choice ended as its request wanted it to?"""
        return self.finish_reason is not None and FinishReason(self.finish_reason) in ENDED_WELL

    @property
    def is_failure(self) -> bool:
        """Has the choice ended in any other way?"""
        return self.finish_reason is not None and FinishReason(self.finish_reason) not in ENDED_WELL


def joined(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Consecutive deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    return last._replace(
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        offset=first.offset,
        logprobs=None if last.logprobs is None else [score for delta in deltas for score in delta.logprobs or ()],
        parts=None if last.parts is None else [part for delta in deltas for part in delta.parts or ()],
    )


@dataclass
class CompletionOutput:
    """One choice of a request. Under vLLM's names."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, if one did."""
    logprobs: list[TokenLogprobs] | None = None
    parts: list[TurnPart] | None = None
    """The text as content, reasoning and tool calls; None: it is content alone."""


@dataclass(frozen=True)
class EmbeddingOutput:
    """An embedding. Under vLLM's names, as the next one."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A text and its embedding."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    usage: Usage


@dataclass
class RequestOutput:
    """A request and what it has said so far. Under vLLM's names."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    finished: bool = False
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token, None for the first, if they were asked for; there from the first token on, or from the
    end on if the engine is another process."""
    cache: CacheVerdict | None = None
    """Why so much of the prompt was computed; None before it has started, or if the engine is another process."""
