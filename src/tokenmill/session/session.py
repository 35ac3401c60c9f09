"""`Session`: one conversation. State and rules of what may follow what; it runs nothing by itself."""

from __future__ import annotations

import bisect
import copy
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from tokenmill.contract import IntArray
from tokenmill.engine.request import Hints, context_overflow
from tokenmill.errors import ContextOverflow, InvalidRequest, TooManyTokens
from tokenmill.params import MAX_SEED, SamplingParams, StructuredOutputs, token_ids
from tokenmill.session.log import TokenLog, Turn
from tokenmill.text.delta import Continuation, DeltaRenderer
from tokenmill.text.messages import Message, check_messages, num_chars
from tokenmill.text.model_text import ModelText
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.turn_parser import ParsedTurn

if TYPE_CHECKING:
    from tokenmill.session.answer import Answer
    from tokenmill.session.explain import KVMark, TurnCost
    from tokenmill.session.routing import Command

EMPTY_BYTES = 1024
"""What a session takes without its log, so that empty ones are not without limit."""
BIAS_BYTES = 64
"""Of a token in a `logit_bias`."""
MAX_TITLE_CHARS = 256
MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512
"""Entries, and characters of their keys and values, as at OpenAI."""
Overflow = Literal["error", "drop_oldest_turns"]
FORK_STEP = 0x1E3779B97F4A7C15
"""Between the seeds of a session's forks: large and odd, so that they never meet."""
OVERFLOW_KEEP = 0.5
"""Dropping less would be paid for more often: what is kept is computed once more each time."""
SYSTEM_ROLES = ("system", "developer")
Input = str | Sequence[int] | Sequence[Message]


class SessionState(Enum):
    IDLE = "idle"
    APPENDING = "appending"
    """It has input that is not answered."""
    GENERATING = "generating"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a session is created with, and its forks inherit."""

    sampling: SamplingParams
    """With a seed: the same conversation draws the same answers."""
    overflow: Overflow = "error"
    overflow_keep: float = OVERFLOW_KEEP
    """Low-water mark of `drop_oldest_turns`: the fraction of the context that is left when turns are dropped."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    """Whose session it is, for fairness between keys."""
    namespace: Hashable = None
    """Its KV is shared only with what has the same one."""
    priority: int = 0
    renderer: DeltaRenderer | None = None
    """Shared by the sessions of a service that have the same template options."""
    is_kept: bool = True
    """Does it outlive the process, where there is a store?"""

    def for_answer(self, changes: Mapping[str, Any]) -> SamplingParams:
        """The parameters of an answer: the session's, with changes. `InvalidRequest` for what a session can't have."""
        params = self.sampling
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        unknown = set(changes) - set(SamplingParams.__dataclass_fields__)
        if unknown:
            raise InvalidRequest(f"unknown sampling parameter {', '.join(sorted(unknown))}")
        if changes.get("n", params.n) != 1:
            raise InvalidRequest("n must be 1 in a session; fork the session for more answers", param="n")
        return replace(params, **changes)

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """The constraint on answers that do not bring their own."""
        return self.sampling.structured_outputs if isinstance(self.sampling, SamplingParams) else None

    def for_fork(self, number: int) -> SessionOptions:
        """The options of a session's fork: a seed that follows from its parent's, so that it draws differently."""
        seed = ((self.sampling.seed or 0) + number * FORK_STEP) % MAX_SEED
        return replace(self, sampling=replace(self.sampling, seed=seed))

    def changes_of(self, params: SamplingParams) -> dict[str, Any] | None:
        """In which fields an answer's parameters differ from the session's, except for its length; None: in none."""
        names = [name for name in SamplingParams.__dataclass_fields__ if name != "max_tokens"]
        found = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(self.sampling, name)}
        return found or None


@dataclass(frozen=True)
class TurnInfo:
    """A turn, as `get` shows it."""

    kind: str
    messages: tuple[Mapping[str, Any], ...]
    num_tokens: int | None
    finish_reason: str | None


@dataclass(frozen=True)
class SessionInfo:
    """A session, as `get` and `list` show it."""

    session_id: str
    key: str
    """Whose it is."""
    state: str
    core: int
    num_tokens: int
    turns: tuple[TurnInfo, ...]
    pending: tuple[Mapping[str, Any], ...] = ()
    """Messages that wait for an answer: an input turn from the next `generate_stream` on."""
    durable: bool | None = None
    """Is all that was acknowledged on the disk? None: it is not meant to be."""
    problem: str | None = None
    """Why it is not."""
    title: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_at: float = 0.0
    """In Unix time, as the next one."""
    used_at: float = 0.0


@dataclass(frozen=True, slots=True)
class LastAnswer:
    """Which answer was the last that is over: all that a later process knows of it beside the log."""

    request_id: str
    num_tokens: int
    """That were generated: of an answer that went on with one that was cut short, only the new ones."""


@dataclass(frozen=True, slots=True)
class RenderedInbox:
    """What a log becomes with the messages that wait: rendered when they are appended, committed when answered."""

    log: TokenLog
    inbox: tuple[Message, ...]
    continuation: Continuation


@dataclass(frozen=True, slots=True)
class _Start:
    """A place at which a conversation could begin."""

    turn: int
    messages: tuple[Message, ...]
    """The system prompt, and what is left of the turn's messages."""


@dataclass(frozen=True, slots=True)
class SavedKV:
    """KV of the first `num_tokens` ids of a log."""

    num_tokens: int
    state: bytes


@dataclass(frozen=True, slots=True)
class KVSource:
    """Where the KV of a session that comes from a store may be."""

    read: Callable[[str, IntArray], SavedKV | None]
    """By the model's form and the ids of the log; takes as long as the disk or the network does."""
    is_remote: bool = False
    """On another server: computing the log anew may be faster."""


class Session:
    """A token log, its pending input, and the operations that wait for it. Owned by the service's event loop."""

    __slots__ = (
        "answer",
        "attempt",
        "core",
        "costs",
        "created_at",
        "epoch",
        "fixed_bytes",
        "inbox",
        "is_dropped",
        "is_moved",
        "is_preparing",
        "is_stored",
        "kv_source",
        "last_answer",
        "last_used",
        "live",
        "log",
        "mark",
        "metadata",
        "num_forks",
        "num_saving",
        "options",
        "problem",
        "rendered",
        "session_id",
        "state",
        "system",
        "title",
        "unfinished",
        "used_at",
        "waiting",
    )

    def __init__(self, session_id: str, core: int, options: SessionOptions, system: str | None, now: float) -> None:
        self.session_id = session_id
        self.core = core
        """The engine core it is routed to, for life."""
        self.options = options
        self.system = system
        said = str(options.template_options) if options.template_options else ""
        self.fixed_bytes = EMPTY_BYTES + len(system or "") + len(said) + BIAS_BYTES * len(options.sampling.logit_bias)
        """What it takes beside what is said in it."""
        self.log = TokenLog()
        self.inbox: tuple[Message, ...] = ()
        """Messages that came since the last answer: rendered together when it is asked for."""
        self.rendered: RenderedInbox | None = None
        """What the template makes of the inbox, once it is known."""
        self.state = SessionState.IDLE
        self.num_forks = 0
        self.attempt = 0
        """Counts regenerations, so that each has draws of its own."""
        self.live: Answer | None = None
        """The answer on its way."""
        self.answer: Answer | None = None
        """The last one that is over, for readers who come back."""
        self.last_answer: LastAnswer | None = None
        """Which one that is; unlike the answer itself, this is in the store."""
        self.waiting: deque[Command] | None = None
        """Operations that came while it was generating; None spares the memory of an idle one."""
        self.is_preparing = False
        """An operation is being prepared off the event loop: others wait for it, too."""
        self.last_used = now
        """By the event loop's clock; `used_at` is the same in Unix time, for its owner."""
        self.created_at = self.used_at = time.time()
        self.title: str | None = None
        self.metadata: Mapping[str, str] = {}
        """Its owner's; neither is read by the model."""
        self.problem: str | None = None
        """Why its latest state is not in the store."""
        self.is_moved = False
        """Another server has taken it over: this copy is of no more use."""
        self.is_stored = False
        """Has some state of it been written?"""
        self.num_saving = 0
        """States of it that are being written."""
        self.epoch = 0
        """Of the claim on it, in a store that several servers share."""
        self.unfinished: Mapping[str, Any] | None = None
        """An answer that another server has begun and not finished, until it is run again."""
        self.kv_source: KVSource | None = None
        """It comes from the store: where its KV may be, until that is in the engine."""
        self.is_dropped = False
        """It has ended for good: nothing of it may stay in the store."""
        self.mark: KVMark | None = None
        """What of its log had KV when it last answered, and where."""
        self.costs: tuple[TurnCost, ...] | None = None
        """What its latest answers cost, and why."""

    @property
    def is_busy(self) -> bool:
        """Do operations have to wait?"""
        return self.is_preparing or self.state is SessionState.GENERATING

    @property
    def num_bytes(self) -> int:
        """What it costs, about."""
        pending = sum(map(num_chars, self.inbox))
        label = len(self.title or "") + sum(len(key) + len(value) for key, value in self.metadata.items())
        return self.fixed_bytes + self.log.num_bytes + pending + label

    @property
    def hints(self) -> Hints:
        """Whose requests its answers are."""
        options = self.options
        return Hints(key=options.key, priority=options.priority, owner=self.session_id, namespace=options.namespace)

    def info(self, *, has_store: bool) -> SessionInfo:
        """A snapshot, as `get` and `list` show it."""
        turns = []
        for i, turn in enumerate(self.log.turns):
            begin = self.log.begin_of(i)
            count = None if turn.end is None or begin is None else turn.end - begin
            turns.append(TurnInfo(turn.kind, turn.messages, count, turn.finish_reason))
        return SessionInfo(
            self.session_id,
            self.options.key,
            self.state.value,
            self.core,
            len(self.log),
            tuple(turns),
            self.inbox,
            durable=self.problem is None if has_store and self.options.is_kept else None,
            problem=self.problem,
            title=self.title,
            metadata=self.metadata,
            created_at=self.created_at,
            used_at=self.used_at,
        )

    def num_text_bytes(self, text: ModelText) -> int:
        """Of what has been said, how much is read to render the next turn; about."""
        if text.template is None or self.log.num_raw:
            return 0
        return sum(map(num_chars, self._renderer(text).shown(self.log.messages)))

    def snapshot(self) -> tuple[Any, ...]:
        """Everything that an operation may change, to be put back if it fails. Copies nothing: all of it is values."""
        return self.log, self.inbox, self.rendered, self.state, self.attempt

    def restore(self, before: tuple[Any, ...]) -> None:
        self.log, self.inbox, self.rendered, self.state, self.attempt = before

    def copy(self) -> Session:
        """The same conversation: what is done to it on another thread does not change this one."""
        twin = Session(self.session_id, self.core, self.options, self.system, self.last_used)
        twin.restore(self.snapshot())
        return twin

    # -- input --------------------------------------------------------------------------------------------------------

    def append(
        self, given: Input, text: ModelText, max_model_len: int, *, raw: bool, continue_final_message: bool = False
    ) -> int:
        """Take new input in; the tokens that the next answer will start from. Nothing has changed if it raises.

        With `continue_final_message` the last message is the beginning of the answer, which is to be gone on with.
        """
        ids = None if isinstance(given, str) and not raw else self._raw_ids(given, text, max_model_len)
        if ids is not None:
            if continue_final_message:
                raise InvalidRequest("only a message can be continued", param="continue_final_message")
            return self._append_raw(ids, text, max_model_len)
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        checked = copy.deepcopy(check_messages(messages))  # the caller's own may change
        begun = _beginning_of_answer(checked.pop()) if continue_final_message else None
        before = self.snapshot()
        self._reopen_input()
        self.inbox = (*(self._opening() if checked else ()), *self.inbox, *checked)
        try:
            if begun is not None:
                return self._begin_answer(begun, text, max_model_len)
            num_prompt = self._fit(text, max_model_len, 1)
        except BaseException:
            self.restore(before)
            raise
        self.state = SessionState.APPENDING
        return num_prompt

    def _begin_answer(self, begun: Message, text: ModelText, max_model_len: int) -> int:
        """The messages that wait, and the beginning of their answer; as after one that was cut short."""
        if not self.is_unanswered:
            raise InvalidRequest("the prefix of an answer must follow input", param="continue_final_message")
        try:
            ids = text.tokenizer.encode(str(begun["content"]), add_special=False, limit=max_model_len)
        except TooManyTokens as error:
            raise _too_long(error.at_least, max_model_len) from None
        num_prompt = self._fit(text, max_model_len, 1 + len(ids)) if self.inbox else len(self.log)
        if num_prompt + len(ids) >= max_model_len:
            raise ContextOverflow(context_overflow(max_model_len, num_prompt + len(ids), 1))
        if self.inbox:
            self._commit(self._continuation(text))
        turn = Turn("answer", (begun,), num_prompt + len(ids), finish_reason="cut", is_replayable=False)
        self.log = self.log.added(num_prompt, ids, turn)
        self.state = SessionState.IDLE
        return len(self.log)

    def _reopen_input(self) -> None:
        """Messages that are in the log and not answered go back to the inbox: more come, and all are one turn."""
        last = self.log.turns[-1] if self.log.turns else None
        if last is not None and last.kind == "input" and last.messages and last.end is not None:
            self.log = self.log.cut_at_turn(len(self.log.turns) - 1)
            self.inbox = (*last.messages, *self.inbox)

    def _opening(self) -> tuple[Message, ...]:
        """The system prompt, before the first input."""
        is_first = self.system is not None and not self.log.turns and not self.inbox
        return ({"role": "system", "content": self.system},) if is_first else ()

    def _raw_ids(self, given: Input, text: ModelText, max_model_len: int) -> list[int] | None:
        """Ids that go in as they are; None for messages."""
        if isinstance(given, str):
            is_first = not len(self.log) and not self.inbox
            try:
                return text.tokenizer.encode(given, add_special=is_first, limit=max_model_len)
            except TooManyTokens as error:
                raise _too_long(error.at_least, max_model_len) from None
        if isinstance(given, Sequence) and len(given) and isinstance(given[0], Mapping):
            return None
        if isinstance(given, Sequence) and len(given) >= max_model_len:  # before each of them is looked at
            raise ContextOverflow(context_overflow(max_model_len, len(given), 1))
        ids = token_ids("input", given)
        outside = max(ids, default=0)
        if outside >= text.tokenizer.vocab_size:
            raise InvalidRequest(f"token {outside} is outside the vocabulary of {text.tokenizer.vocab_size}")
        return list(ids)

    def _append_raw(self, ids: list[int], text: ModelText, max_model_len: int) -> int:
        """Ids that go in as they are, after any messages that wait."""
        if not ids:
            raise InvalidRequest("the input is empty")
        if self._opening():
            raise InvalidRequest(
                "the first input of a session with a system prompt must be a message, not token ids or raw text"
            )
        waiting = self._continuation(text) if self.inbox else Continuation(len(self.log), [])
        total = waiting.keep + len(waiting.ids) + len(ids)
        if total >= max_model_len:
            raise ContextOverflow(context_overflow(max_model_len, total, 1))
        self._commit(waiting)
        turn = Turn("input", (), len(self.log) + len(ids))
        if self.log.turns and self.log.turns[-1].is_raw:  # one turn until something else comes
            self.log = self.log.continued(ids, turn)
        else:
            self.log = self.log.added(len(self.log), ids, turn)
        self.state = SessionState.APPENDING
        return len(self.log)

    def _continuation(self, text: ModelText, limit: int | None = None) -> Continuation:
        """What the log becomes with the messages that wait. Rendered once for the same log and messages."""
        known = self.rendered
        if known is not None and known.log is self.log and known.inbox is self.inbox:
            return known.continuation
        # Raw input is in no message, so nothing before it may be rendered again from the messages.
        past = () if self.log.num_raw else self.log.messages
        step = self._renderer(text).extend(self.log.tokens.array, past, self.inbox, self.log.ended_with, limit)
        self.rendered = RenderedInbox(self.log, self.inbox, step)
        return step

    def _renderer(self, text: ModelText) -> DeltaRenderer:
        return self.options.renderer or DeltaRenderer(text.chat_template(), **self.options.template_options)

    def commit_input(self, text: ModelText) -> None:
        """Put the messages that wait into the log: an answer is asked for."""
        if self.inbox:
            self._commit(self._continuation(text))
        if not len(self.log):
            raise InvalidRequest("the session is empty: append some input first")
        if self.log.ended_with is not None:
            raise InvalidRequest("the last answer is complete: append some input first, or regenerate it")

    def _commit(self, step: Continuation) -> None:
        if step.ids or step.keep < len(self.log):
            turn = Turn("input", self.inbox, step.keep + len(step.ids))
            self.log = self.log.added(step.keep, step.ids, turn)
        self.inbox, self.rendered = (), None

    def _rebuilt(self, log: TokenLog, text: ModelText) -> TokenLog:
        """A log that was cut to a turn which the template has rewritten since: its messages, rendered again."""
        if log.is_known:
            return log
        messages, template = list(log.messages), text.chat_template()
        if log.turns[-1].kind == "input":
            return log.rebuilt(template.encode(messages, **self.options.template_options))
        *asked, answer = messages
        if set(answer) - {"role", "content"}:  # reasoning and calls are written by the template alone
            whole = template.encode(messages, add_generation_prompt=False, **self.options.template_options)
            return log.rebuilt(whole)
        said = text.tokenizer.encode(str(answer["content"]), add_special=False)
        return log.rebuilt([*template.encode(asked, **self.options.template_options), *said])

    # -- more than the context holds ----------------------------------------------------------------------------------

    def reserve(self, text: ModelText, max_model_len: int, num_tokens: int) -> None:
        """Leave `num_tokens` of the context for the answer to the inbox, if turns may be dropped for that."""
        if self.inbox and self.options.overflow == "drop_oldest_turns":
            self._fit(text, max_model_len, num_tokens)

    def _fit(self, text: ModelText, max_model_len: int, num_reserved: int) -> int:
        """The number of prompt tokens with the messages that wait, after the oldest turns were dropped if need be.

        So many tokens are to be left for the answer; where even dropping all turns leaves fewer, one is enough.
        """
        capacity, drops = max_model_len - num_reserved, self.options.overflow == "drop_oldest_turns"
        try:
            step = self._continuation(text, len(self.log) + 2 * max_model_len if drops else max_model_len)
        except TooManyTokens as error:
            # Dropping turns does not help new messages that are far too long by themselves.
            raise _too_long(error.at_least - (len(self.log) if drops else 0), max_model_len) from None
        total = step.keep + len(step.ids)
        if total > capacity and drops:
            total = self._drop_oldest_turns(text, capacity, step)
        if total >= max_model_len:
            raise ContextOverflow(context_overflow(max_model_len, total, 1))
        return total

    def _drop_oldest_turns(self, text: ModelText, capacity: int, step: Continuation) -> int:
        """Begin the conversation later: with as much as the low-water mark allows, but at least the last exchange.

        What is left has to be computed once more, so it must be short enough to last for many turns. Returns the number
        of prompt tokens then, which exceeds the capacity only if the new messages alone do.
        """
        starts, mark = self._later_starts(), int(self.options.overflow_keep * capacity)
        # Each start leaves fewer tokens than the one before.
        at_mark = bisect.bisect_left(starts, -mark, key=lambda start: -self._num_prompt_from(start, text, step))
        last_exchange = max(0, len(starts) - 2)
        log, inbox, total = self.log, self.inbox, 0
        for start in starts[min(at_mark, last_exchange) :]:
            self.log, self.inbox = log, inbox
            self._start_at(start, text, step)
            after = self._continuation(text)
            total = after.keep + len(after.ids)
            if total <= capacity:
                break
        return total

    def _later_starts(self) -> list[_Start]:
        """Where the conversation could begin: at each user message but the first, or with what waits alone.

        The system prompt goes first in any case. Raw input can't be rendered again: all starts are after it.
        """
        turns = self.log.turns
        system = tuple(message for message in self.log.messages[:1] if message["role"] in SYSTEM_ROLES)
        movable = 1 + max((i for i, turn in enumerate(turns) if turn.is_raw), default=-1)
        starts = [
            _Start(number, (*system, *turn.messages[at:]))
            for number, turn in enumerate(turns[movable:], movable)
            if turn.kind == "input"
            for at, message in enumerate(turn.messages)
            if message["role"] == "user" and (number, at) != (0, len(system))
        ]
        return [*starts, _Start(len(turns), system)]

    def _num_prompt_from(self, start: _Start, text: ModelText, step: Continuation) -> int:
        """The number of prompt tokens if the conversation began there."""
        turns, encode = self.log.turns[start.turn :], text.chat_template().encode
        first_end = turns[0].end if turns else None
        if first_end is not None and self._is_exact_from(start, step):
            num_first = len(encode(start.messages, **self.options.template_options))
            return num_first + len(self.log) - first_end + len(step.ids)
        later = [message for turn in turns[1:] for message in turn.messages]
        return len(encode([*start.messages, *later, *self.inbox], **self.options.template_options))

    def _is_exact_from(self, start: _Start, step: Continuation) -> bool:
        """Are the ids of all turns from there on known, and do they stay as they are?"""
        return step.keep == len(self.log) and all(turn.end is not None for turn in self.log.turns[start.turn :])

    def _start_at(self, start: _Start, text: ModelText, step: Continuation) -> None:
        if start.turn == len(self.log.turns):
            self.log, self.inbox = TokenLog(has_dropped_turns=True), (*start.messages, *self.inbox)
            return
        ids = None
        if self._is_exact_from(start, step):
            num_replaced = sum(len(turn.messages) for turn in self.log.turns[: start.turn + 1])
            ids = self._renderer(text).opening(self.log.messages, num_replaced, start.messages)
        self.log = self.log.from_turn(start.turn, start.messages, ids)

    # -- answers ------------------------------------------------------------------------------------------------------

    def take_answer(
        self,
        token_ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: str | int | None,
        params: SamplingParams,
        tokenizer: Tokenizer,
        parsed: ParsedTurn | None = None,
    ) -> None:
        """The answer is over, however it ended: its ids are part of the log. What was cut short before goes on.

        `parsed`: its reasoning and tool calls, if it was read for them.
        """
        if not token_ids:
            return  # it was ended before it said anything: its input is still to be answered
        stop = stop_reason if isinstance(stop_reason, int) else None
        is_replayable = not self.log.turns or self.log.turns[-1].is_replayable
        begin, said = self._answer_so_far()
        ids = [*self.log.tokens.array[begin:].tolist(), *token_ids]
        said += tokenizer.decode(ids[:-1] if stop is not None else ids)
        message: Message = {"role": "assistant", "content": said}
        if parsed is not None and (parsed.calls or parsed.reasoning) and not self._goes_on:
            message = parsed.to_message()
        changes = self.options.changes_of(params)
        turn = Turn("answer", (message,), begin + len(ids), stop, finish_reason, changes, is_replayable)
        if self._goes_on:
            self.log = self.log.continued(token_ids, turn)
        else:
            self.log = self.log.added(len(self.log), token_ids, turn)

    @property
    def _goes_on(self) -> bool:
        """Is the last turn an answer that was cut short?"""
        return bool(self.log.turns) and self.log.turns[-1].kind == "answer"

    @property
    def said(self) -> list[int]:
        """The ids of an answer that was cut short, for a grammar that goes on with it."""
        return list(self.log.tokens.array[self._answer_so_far()[0] :].tolist())

    def _answer_so_far(self) -> tuple[int, str]:
        """Of an answer that was cut short: where its ids begin, or where they end and what they say."""
        if not self._goes_on:
            return len(self.log), ""
        begin = self.log.begin_of(len(self.log.turns) - 1)
        said = str(self.log.turns[-1].messages[0]["content"] or "")
        return (len(self.log), said) if begin is None else (begin, "")

    # -- going back ---------------------------------------------------------------------------------------------------

    def rewind(self, text: ModelText, at_turn: int | None, at_token: int | None) -> None:
        """Forget everything after a turn or a token."""
        if (at_turn is None) == (at_token is None):
            raise InvalidRequest("exactly one of at_turn and at_token is required")
        log = self.log
        if at_turn is not None:
            log = log.cut_at_turn(whole_number("at_turn", at_turn))
        elif at_token is not None:
            log = log.cut_at_token(whole_number("at_token", at_token), self._text_before(at_token, text))
        self.log, self.inbox = self._rebuilt(log, text), ()
        self.state = SessionState.APPENDING if self.is_unanswered else SessionState.IDLE

    def _text_before(self, count: int, text: ModelText) -> str:
        """What an answer has said up to a token of the log."""
        begin = max((turn.end for turn in self.log.turns if turn.end is not None and turn.end <= count), default=0)
        return text.tokenizer.decode(self.log.tokens.array[begin:count].tolist())

    @property
    def is_unanswered(self) -> bool:
        return bool(self.inbox) or bool(self.log.turns and self.log.turns[-1].kind == "input")

    def edit(self, turn: int, content: str, text: ModelText, max_model_len: int) -> int:
        """Another text for an input turn; everything after it is forgotten."""
        if not 0 <= whole_number("turn", turn) < len(self.log.turns) or self.log.turns[turn].kind != "input":
            raise InvalidRequest(f"turn {turn} is not an input turn of this session")
        old = self.log.turns[turn].messages
        if not old or old[-1]["role"] != "user":
            raise InvalidRequest(f"turn {turn} is not a user message")
        before = self.snapshot()
        self.rewind(text, turn, None)
        kept = [message for message in old[:-1] if message["role"] != "system" or self.system is None]
        try:
            return self.append([*kept, {**old[-1], "content": content}], text, max_model_len, raw=False)
        except BaseException:
            self.restore(before)
            raise

    def drop_answer(self, text: ModelText) -> None:
        """Forget the last answer, so that another can be drawn."""
        if not self.log.turns or self.log.turns[-1].kind != "answer" or self.inbox:
            raise InvalidRequest("the last turn of the session is not an answer; nothing to regenerate")
        self.rewind(text, len(self.log.turns) - 1, None)
        self.attempt += 1


def _too_long(at_least: int, max_model_len: int) -> ContextOverflow:
    """Input that is longer than the context is refused as soon as that is known."""
    return ContextOverflow(context_overflow(max_model_len, at_least, 1, is_exact=False))


def whole_number(name: str, value: Any) -> int:
    """A number that a caller gave; `InvalidRequest` for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an integer, not {value!r}")
    return value


def check_title(title: Any) -> str | None:
    """A session's title, as a caller gave it."""
    if title is None or (isinstance(title, str) and len(title) <= MAX_TITLE_CHARS):
        return title
    raise InvalidRequest(f"title must be a string of at most {MAX_TITLE_CHARS} characters", param="title")


def check_metadata(metadata: Any) -> dict[str, str]:
    """A session's metadata, as a caller gave it: a copy."""
    found = {} if metadata is None else metadata
    is_small = isinstance(found, Mapping) and len(found) <= MAX_METADATA
    if not is_small or not all(_is_entry(key, value) for key, value in found.items()):
        what = f"at most {MAX_METADATA} strings of at most {MAX_METADATA_CHARS} characters"
        keys = f"keys of at most {MAX_METADATA_KEY_CHARS} characters"
        raise InvalidRequest(f"metadata must be a mapping of {keys} to {what}", param="metadata")
    return dict(found)


def _is_entry(key: Any, value: Any) -> bool:
    is_text = isinstance(key, str) and isinstance(value, str)
    return is_text and len(key) <= MAX_METADATA_KEY_CHARS and len(value) <= MAX_METADATA_CHARS


def _beginning_of_answer(message: Message) -> Message:
    content = message.get("content")
    if message["role"] != "assistant" or not content or set(message) != {"role", "content"}:
        what = "the message to continue must be an assistant message with text content only"
        raise InvalidRequest(what, param="continue_final_message")
    return message


RESERVED = frozenset({"messages", "add_generation_prompt", "template", "self"})


def check_overflow_keep(value: Any) -> float:
    """A fraction of the context, as a caller gave it."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise InvalidRequest(f"overflow_keep must be a number from 0 to 1, not {value!r:.40}", param="overflow_keep")
    return float(value)


def check_template_options(options: Any) -> dict[str, Any]:
    """Options for a chat template, as a caller gave them."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise InvalidRequest("template_options must be a mapping")
    taken = RESERVED & set(options)
    if taken:
        raise InvalidRequest(f"template_options cannot set {', '.join(sorted(taken))}")
    return copy.deepcopy(dict(options))
