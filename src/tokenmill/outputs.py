"""Engine outputs: step results, text deltas made of them, and whole outputs, the sums of deltas."""

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
"""Reasons of complete answers; all others are failures."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities under the model's own distribution: of the drawn token and of the top alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability), most likely first."""


class End(NamedTuple):
    """How a request ended."""

    finish_reason: FinishReason
    error: str | None = None


class GeneratedToken(NamedTuple):
    """One row of a step result. The last row of a request has a finish reason, and no token if it ended without one."""

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
    """Tokens and endings of one engine step for all its requests, in columns: crosses threads and processes."""

    request_ids: list[str]
    token_ids: list[int | None]
    """None: the request ended without a token."""
    logprobs: list[TokenLogprobs | None] | None
    """None if no request of the step asked for them."""
    ends: dict[int, End]
    """By row index."""

    @classmethod
    def of_end(cls, request_id: str, finish_reason: FinishReason, error: str | None = None) -> StepResult:
        """The end of a request outside any step."""
        return cls([request_id], [None], None, {0: End(finish_reason, error)})

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[GeneratedToken]:
        """Iterate over the rows."""
        for place, (name, token) in enumerate(zip(self.request_ids, self.token_ids, strict=True)):
            reason, error = self.ends.get(place, _GOES_ON)
            yield GeneratedToken(name, token, reason, error, None if self.logprobs is None else self.logprobs[place])

    def select(self, places: Sequence[int]) -> StepResult:
        """A subset of the rows."""
        return StepResult(
            [self.request_ids[place] for place in places],
            [self.token_ids[place] for place in places],
            None if self.logprobs is None else [self.logprobs[place] for place in places],
            {i: self.ends[place] for i, place in enumerate(places) if place in self.ends},
        )


_GOES_ON = (None, None)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens served from cached KV."""
    reasoning_tokens: int = 0
    """Completion tokens that are reasoning."""
    accepted_prediction_tokens: int = 0
    """Proposed tokens that were accepted..."""
    rejected_prediction_tokens: int = 0
    """...and rejected: computed, but not part of the completion."""


@dataclass(frozen=True)
class Divergence:
    """The first difference between a prompt and the cached KV closest to it."""

    at: int
    """Length of the common prefix."""
    held: tuple[int, ...]
    """A few ids of the cached tokens from the divergence on..."""
    asked: tuple[int, ...]
    """...and of the prompt."""


@dataclass(frozen=True)
class Loss:
    """KV of a session that was evicted before the session's next request."""

    at: float
    """Time of the eviction, by the engine's clock."""
    reason: str
    """`room`: evicted for another request; `weights`: they were replaced; `failure`: a step failed."""
    by: str | None
    """The request it was evicted for, if any..."""
    by_key: str
    """...and its API key."""
    num_tokens: int
    """Tokens evicted."""


@dataclass(frozen=True)
class CacheVerdict:
    """How much of a prompt was cached, and why not more."""

    num_cached: int
    divergence: Divergence | None = None
    """From the KV that shares the longest prefix with the prompt, if they diverge."""
    loss: Loss | None = None
    """The session's latest eviction since its last answer."""
    core_since: float = 0.0
    """Start time of the engine core, which knows of nothing before."""
    is_found: bool = True
    """Whether KV is found wherever it is: not without prefix caching, nor if sequences can only be reused whole."""


PartKind = Literal["content", "reasoning", "call", "arguments"]


class TurnPart(NamedTuple):
    """An increment of an answer with reasoning or tool calls."""

    kind: PartKind
    text: str = ""
    """Of content, reasoning, or a call's arguments (JSON)."""
    call: int = 0
    """Index of the call..."""
    call_id: str = ""
    """...and, in the part that opens it, its id..."""
    name: str = ""
    """...and the function's name."""


class OutputDelta(NamedTuple):
    """An increment of one choice. Its text is exactly that of its tokens; neither is retracted later."""

    index: int = 0  # type: ignore[assignment]  # in place of tuple's method
    """Of the choice."""
    text: str = ""
    token_ids: Sequence[int] = ()
    offset: int = 0
    """Tokens of the choice before this delta: a lost stream is resumed at `offset + len(token_ids)`."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token, if requested."""
    finish_reason: str | None = None
    """Set in the last delta of a choice, as are the fields below."""
    stop_reason: str | int | None = None
    """The stop string or stop token that matched, if any."""
    error: str | None = None
    usage: Usage | None = None
    """Of the request, once all its choices have ended."""
    durable: bool | None = None
    """For a session's answer: whether the turn is in the store. None without a store."""
    parts: Sequence[TurnPart] | None = None
    """The same text as content, reasoning and tool calls; None if it is content alone."""

    @property
    def is_complete(self) -> bool:
        """Whether the choice ended with a complete answer."""
        return self.finish_reason is not None and FinishReason(self.finish_reason) in ENDED_WELL

    @property
    def is_failure(self) -> bool:
        """Whether the choice ended with a failure."""
        return self.finish_reason is not None and FinishReason(self.finish_reason) not in ENDED_WELL


def joined(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Consecutive deltas of one choice, joined."""
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
    """One choice of a request. Fields are named as in vLLM."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that matched, if any."""
    logprobs: list[TokenLogprobs] | None = None
    parts: list[TurnPart] | None = None
    """The text as content, reasoning and tool calls; None if it is content alone."""


@dataclass(frozen=True)
class EmbeddingOutput:
    """An embedding. Fields are named as in vLLM."""

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
    """A request and its output so far. Fields are named as in vLLM."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    finished: bool = False
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token, None for the first, if requested; available from the first output token on, or at the
    end if the engine runs in its own process."""
    cache: CacheVerdict | None = None
    """Cache statistics of the prompt; None before the request has started, or if the engine runs in its own process."""
