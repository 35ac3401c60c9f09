"""`Request`: a token log with a target length; its states, their transitions, and what each ending means to clients.

How much of the log is computed is tracked by the running rows (`rows.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract import IntArray, ModelInfo
from tokenmill.engine.prefix import Entry
from tokenmill.errors import ContextOverflow, IllegalTransition, InvalidRequest
from tokenmill.outputs import CacheVerdict, FinishReason, TokenLogprobs
from tokenmill.params import Pooling, SamplingParams
from tokenmill.text.grammar import GrammarState


class RequestState(Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    """Reserved for KV transferred from another machine; unused."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_IGNORED = "finished_ignored"

    @property
    def is_finished(self) -> bool:
        return self in FINISHED


FINISHED = frozenset(
    {
        RequestState.FINISHED_STOPPED,
        RequestState.FINISHED_LENGTH_CAPPED,
        RequestState.FINISHED_ABORTED,
        RequestState.FINISHED_IGNORED,
    }
)

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset(
        {
            RequestState.RUNNING,
            RequestState.WAITING_FOR_REMOTE_KVS,
            RequestState.FINISHED_ABORTED,
            RequestState.FINISHED_IGNORED,
        }
    ),
    RequestState.WAITING_FOR_REMOTE_KVS: frozenset({RequestState.WAITING, RequestState.FINISHED_ABORTED}),
    RequestState.RUNNING: frozenset(
        {
            RequestState.PREEMPTED,
            RequestState.FINISHED_STOPPED,
            RequestState.FINISHED_LENGTH_CAPPED,
            RequestState.FINISHED_ABORTED,
        }
    ),
    # A stop string may be found in the text of a request that was just preempted.
    RequestState.PREEMPTED: frozenset(
        {RequestState.RUNNING, RequestState.FINISHED_STOPPED, RequestState.FINISHED_ABORTED}
    ),
    **{state: frozenset() for state in FINISHED},
}


def check_transition(old: RequestState, new: RequestState) -> None:
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(f"a request can't go from {old.value} to {new.value}")


@dataclass(frozen=True)
class Ending:
    """What a finish reason maps to: the final state, OpenAI's literal, the HTTP status."""

    state: RequestState
    openai: str | None
    """OpenAI's `finish_reason`; None if the response is an error."""
    http_status: int


ENDINGS: dict[FinishReason, Ending] = {
    FinishReason.STOP: Ending(RequestState.FINISHED_STOPPED, "stop", 200),
    FinishReason.LENGTH: Ending(RequestState.FINISHED_LENGTH_CAPPED, "length", 200),
    FinishReason.TOOL_CALLS: Ending(RequestState.FINISHED_STOPPED, "tool_calls", 200),
    FinishReason.CANCELLED: Ending(RequestState.FINISHED_ABORTED, None, 499),
    FinishReason.TIMEOUT: Ending(RequestState.FINISHED_ABORTED, None, 504),
    FinishReason.OVERLOAD: Ending(RequestState.FINISHED_IGNORED, None, 429),
    FinishReason.CONFLICT: Ending(RequestState.FINISHED_ABORTED, None, 400),
    FinishReason.ERROR: Ending(RequestState.FINISHED_ABORTED, None, 500),
    FinishReason.SHUTDOWN: Ending(RequestState.FINISHED_ABORTED, None, 503),
}


NO_ROW = -1
BACKGROUND = 101
"""Priorities from here on are background: such requests run in otherwise idle time."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a request ends, and its share of the engine."""

    max_new_tokens: int = 16
    min_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the request; the stop token itself is part of the log."""
    max_context: int | None = None
    """Maximum tokens of prompt and output."""
    max_tokens_per_step: int | None = None
    """Maximum tokens per step."""
    timeout_s: float | None = None
    """From arrival to the end."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_context", "max_tokens_per_step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1, not {value}")
        if self.min_new_tokens < 0:
            raise InvalidRequest(f"min_new_tokens must be non-negative, not {self.min_new_tokens}")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise InvalidRequest(f"timeout_s must be positive, not {self.timeout_s}")


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Limits of a caller; None for no limit of its own."""

    max_context: int | None = None
    """Maximum tokens of prompt and output, per request."""
    max_tokens_per_step: int | None = None
    """Maximum tokens per step, per request."""
    max_rows: int | None = None
    """Running requests of the key, on all cores of the engine."""
    max_queued: int | None = None
    """Queued requests of the key, on all cores of the engine."""
    yields_rows: bool = False
    """May be preempted for another key's request, while its own key has more rows than the other."""

    def __post_init__(self) -> None:
        for name in ("max_context", "max_tokens_per_step", "max_rows", "max_queued"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True, kw_only=True)
class Hints:
    """The owner of a request, and what it may share."""

    priority: int = 0
    """Lower values are scheduled first."""
    key: str = ""
    """Tokens are divided fairly between keys (an API key, a user)."""
    owner: str | None = None
    """The session that owns the KV: evicted after that of plain requests."""
    namespace: Hashable = None
    """KV is shared within a namespace only: weights version, adapter, cache salt."""
    fork_of: str | None = None
    """The request that this one continues; its KV is shared while it runs."""
    quota: Quota = Quota()

    @property
    def is_background(self) -> bool:
        return self.priority >= BACKGROUND

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or not isinstance(self.key, str):
            raise InvalidRequest(f"priority must be a number and key a string, not {self.priority!r} and {self.key!r}")
        try:
            hash(self.namespace)
        except TypeError:
            raise InvalidRequest(f"a namespace must be hashable, not {self.namespace!r}") from None


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Parameters and key of a request's draws. The same key at the same position draws the same token."""

    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    choice: int = 0
    """Index among the request's n choices."""
    prefix: tuple[int, ...] = ()
    """The output begins with these tokens instead of draws: an interrupted answer resumes after them."""


GREEDY = Draw(seed=0)


class RequestTokens(Sequence[int]):
    """A request's log: the prompt as an array, generated ids as a list that the engine appends to.

    The prompt is copied once and never becomes a list, so that a turn of a long conversation costs what is new in it.
    """

    __slots__ = ("_array", "_num_converted", "append", "generated", "num_prompt")

    def __init__(self, prompt: IntArray) -> None:
        self.num_prompt = len(prompt)
        self.generated: list[int] = []
        self.append = self.generated.append
        """Bound once: it is called for each token."""
        self._array = _with_room(prompt, len(prompt))
        self._num_converted = len(prompt)

    @property
    def array(self) -> IntArray:
        """The log so far. Generated ids are converted once, behind those that earlier arrays hold."""
        count, known = len(self), self._num_converted
        if known < count:
            if count > len(self._array):
                self._array = _with_room(self._array[:known], count)
            self._array[known:count] = self.generated[known - self.num_prompt :]
            self._num_converted = count
        return self._array[:count]

    @property
    def prompt(self) -> IntArray:
        """Safe on any thread."""
        return self._array[: self.num_prompt]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return self.num_prompt + len(self.generated)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            ids: list[int] = self.array[index].tolist()
            return ids
        place = range(len(self))[index]
        return self.generated[place - self.num_prompt] if place >= self.num_prompt else int(self._array[place])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __iadd__(self, ids: Iterable[int]) -> Self:
        self.generated += ids
        return self

    def keep_generated(self, count: int) -> None:
        """Drop generated ids beyond the first `count`; earlier arrays keep them."""
        del self.generated[count:]
        if self._num_converted > len(self):
            self._array = _with_room(self._array[: len(self)], len(self))
            self._num_converted = len(self)


def _with_room(ids: IntArray, count: int) -> IntArray:
    """The ids in a larger array: for `count` of them, and an eighth more."""
    grown = np.empty(count + count // 8 + 8, dtype=np.int32)
    grown[: len(ids)] = ids
    return grown


class Request:
    """One generation. Owned by its engine core's thread."""

    __slots__ = (
        "arrival",
        "arrived_at",
        "draw",
        "embedding",
        "error",
        "finish_reason",
        "grammar",
        "hints",
        "last_progress",
        "limits",
        "num_agreed",
        "num_cached",
        "num_pooled",
        "num_preemptions",
        "num_prompt",
        "num_proposed",
        "pooled",
        "pooling",
        "prompt_logprobs",
        "request_id",
        "row",
        "state",
        "stop_ids",
        "tokens",
        "verdict",
        "waits_on",
        "waits_until",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int] | IntArray,
        limits: Limits,
        hints: Hints = Hints(),
        draw: Draw = GREEDY,
        pooling: Pooling | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        if len(prompt) == 0:
            raise InvalidRequest(f"request {request_id}: the prompt is empty")
        self.request_id = request_id
        self.tokens = RequestTokens(_checked_array(request_id, prompt))
        """The log: prompt and generated ids, never retokenized."""
        self.num_prompt = len(self.tokens)
        self.limits = limits
        self.stop_ids = limits.stop_ids
        self.hints = hints
        self.draw = draw
        self.state = RequestState.WAITING
        self.row = NO_ROW
        self.arrival = 0
        """Arrival order; kept when preempted."""
        self.arrived_at = 0.0
        """Submission time, 0 before. Timeouts count from here, so they include time in a core's inbox."""
        self.last_progress = 0
        """The tick of its arrival or of its latest tokens."""
        self.num_cached = 0
        """Prompt tokens that were cached when it first started."""
        self.verdict: CacheVerdict | None = None
        """Why there were not more."""
        self.num_preemptions = 0
        self.num_proposed = 0
        """Tokens proposed by speculation and computed..."""
        self.num_agreed = 0
        """...and those accepted."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """From the second prompt token on, if requested."""
        self.pooling = pooling
        """Set if the request is for its prompt's embedding: no token is drawn."""
        self.pooled: NDArray[np.float64] | None = None
        """Sum of the hidden states of the first `num_pooled` tokens."""
        self.num_pooled = 0
        self.embedding: list[float] = []
        self.grammar = grammar
        """State of the grammar in `draw.params.structured_outputs`; follows the log."""
        self.waits_on: Entry | None = None
        """A running request that is computing this request's prefix..."""
        self.waits_until = 0
        """...and the position it has to reach."""
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None

    @property
    def output(self) -> list[int]:
        """A copy of the generated ids."""
        return list(self.tokens.generated)

    @property
    def wants_scores(self) -> bool:
        """Whether prompt log-probabilities are requested and incomplete."""
        asked = self.draw.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def computes_all(self) -> bool:
        """Whether every prompt token needs an output, so that no KV of others can be reused."""
        return self.wants_scores or self.pooling is Pooling.MEAN

    @property
    def takes_proposals(self) -> bool:
        """Whether tokens may be appended without being drawn: not with log-probabilities or banned tokens."""
        params = self.draw.params
        is_edited = params.logit_bias or params.banned_token_ids or params.allowed_token_ids is not None
        return self.grammar is not None and params.logprobs is None and not is_edited

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def max_tokens(self, max_model_len: int) -> int:
        """Maximum length of the log. Never reached by an embedding request, which draws no token."""
        if self.pooling is not None:
            return self.num_prompt + 1
        quota = min(max_model_len, self.limits.max_context or max_model_len)
        return min(quota, self.num_prompt + self.limits.max_new_tokens)

    def become(self, state: RequestState) -> None:
        check_transition(self.state, state)
        self.state = state

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.become(ENDINGS[reason].state)
        self.finish_reason = reason
        self.error = error

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.state.value}, {len(self.tokens)} tokens, row {self.row})"


def check_request(request: Request, model: ModelInfo, max_model_len: int) -> None:
    """Raise `InvalidRequest` unless the prompt is valid for the model and leaves room for a token. Thread-safe."""
    longest = min(max_model_len, request.limits.max_context or max_model_len)
    room = 0 if request.pooling is not None else 1
    if request.num_prompt + room > longest:
        raise ContextOverflow(context_overflow(longest, request.num_prompt, room))
    prompt = request.tokens.array
    if prompt.max() >= model.vocab_size:
        what = f"token {prompt.max()} is outside the vocabulary of {model.vocab_size}"
        raise InvalidRequest(what, param="prompt")
    request.draw.params.check_vocabulary(model.vocab_size)
    outside = next((token for token in request.draw.prefix if not 0 <= token < model.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(f"token {outside} is outside the vocabulary of {model.vocab_size}", param="token_ids")


def check_grammar(request: Request) -> None:
    """Raise `InvalidRequest` if a grammar is required but was not compiled."""
    if request.draw.params.structured_outputs is not None and request.grammar is None:
        raise InvalidRequest(f"request {request.request_id}: its structured_outputs have not been compiled")


def context_overflow(longest: int, num_prompt: int, num_new: int, *, is_exact: bool = True) -> str:
    """The error for a prompt that does not fit. Clients match its first six words; the rest says by how much.

    Unless `is_exact`, the prompt has at least this many tokens.
    """
    least = "" if is_exact else "at least "
    wanted = f"{num_prompt} of the prompt and {num_new} to be generated" if num_new else f"{num_prompt} of the prompt"
    needed = f"{least}{num_prompt + num_new} are needed: {least}{wanted}"
    room = longest - num_prompt
    too_large = (
        f"Ask for at most {room} tokens to be generated, or shorten the prompt."
        if num_new > 1 and room > 0
        else "The prompt is too long: shorten it."
    )
    return f"This model's maximum context length is {longest} tokens, but {needed}. {too_large}"


def _checked_array(request_id: str, tokens: Sequence[int] | IntArray) -> IntArray:
    """The prompt as an array; rejects negative ids, which would refer to another request's last token."""
    try:
        array = np.asarray(tokens, dtype=np.int32)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"request {request_id}: the prompt must be a list of token ids: {error}") from None
    if array.ndim != 1:
        raise InvalidRequest(f"request {request_id}: the prompt must be a flat list of token ids")
    if array.min() < 0:
        raise InvalidRequest(f"request {request_id}: token ids must be non-negative, not {array.min()}")
    return array
