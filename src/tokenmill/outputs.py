"""What the engine gives back: tokens, and the one reason for which a request ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class FinishReason(Enum):
    """Why a request ended. Every request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OVERLOAD = "overload"
    ERROR = "error"
    SHUTDOWN = "shutdown"


ENDED_WELL = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS})
"""The reasons of a complete answer; all others are failures of some kind."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities under the model's own distribution: of the token drawn, and of the likeliest ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability), likeliest first."""


class GeneratedToken(NamedTuple):
    """One step of one request. The last one has a finish reason, and no token where the end came without one."""

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""


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
    num_settled: int = 0
    """Tokens whose text is all in `text`: no stop string can take them back."""


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
