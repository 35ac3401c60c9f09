"""`Session`: one conversation. State and rules of what may follow what; it runs nothing by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from tokenmill.errors import ContextOverflow, InvalidRequest
from tokenmill.outputs import CompletionOutput
from tokenmill.params import SamplingParams, token_ids
from tokenmill.session.turns import TokenLog, Turn
from tokenmill.text.delta import Continuation, DeltaRenderer
from tokenmill.text.messages import Message, check_messages
from tokenmill.text.model_text import ModelText
from tokenmill.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenmill.session.live import Answer, LiveTurn
    from tokenmill.session.master import Command

Overflow = Literal["error", "drop_oldest_turns"]
Input = str | Sequence[int] | Sequence[Message]


class SessionState(Enum):
    IDLE = "idle"
    APPENDING = "appending"
    """It has input that is not answered."""
    GENERATING = "generating"
    ENDED = "ended"


@dataclass(frozen=True)
class SessionOptions:
    """What a session is created with, and its forks inherit."""

    sampling: SamplingParams
    seed: int
    overflow: Overflow = "error"
    template_options: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    """Whose session it is, for fairness between keys."""
    priority: int = 0


class Session:
    """A token log, its pending input, and the operations that wait for it. Owned by the service's event loop."""

    __slots__ = (
        "answer",
        "attempt",
        "core",
        "inbox",
        "last_used",
        "live",
        "log",
        "options",
        "session_id",
        "state",
        "system",
        "waiting",
    )

    def __init__(self, session_id: str, core: int, options: SessionOptions, system: str | None, now: float) -> None:
        self.session_id = session_id
        self.core = core
        """The engine core it is routed to, for life."""
        self.options = options
        self.system = system
        self.log = TokenLog()
        self.inbox: tuple[Message, ...] = ()
        """Messages that came since the last answer: rendered together when it is asked for."""
        self.state = SessionState.IDLE
        self.attempt = 0
        """Counts regenerations, so that each draws anew."""
        self.live: LiveTurn | None = None
        """The answer on its way."""
        self.answer: Answer | None = None
        """The last one that is over, for readers who come back."""
        self.waiting: deque[Command] | None = None
        """Operations that came while it was generating; None spares the memory of an idle one."""
        self.last_used = now

    @property
    def num_bytes(self) -> int:
        """What its log costs."""
        pending = sum(len(str(message.get("content", ""))) for message in self.inbox)
        return self.log.num_bytes + pending

    def snapshot(self) -> tuple[Any, ...]:
        """Everything that an operation may change, to be put back if it fails."""
        return self.log.copy(), self.inbox, self.state, self.attempt

    def restore(self, before: tuple[Any, ...]) -> None:
        self.log, self.inbox, self.state, self.attempt = before

    # -- input --------------------------------------------------------------------------------------------------------

    def append(self, given: Input, text: ModelText, max_model_len: int, *, raw: bool) -> int:
        """Take new input in; the tokens that the next answer will start from. Nothing has changed if it raises."""
        ids = self._raw_ids(given, text, raw)
        if ids is not None:
            return self._append_raw(ids, text, max_model_len)
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        checked = check_messages(messages)
        before = (self.log, self.inbox)
        self._reopen_input()
        self.inbox = (*self._opening(), *self.inbox, *checked)
        try:
            step = self._continuation(self.inbox, text)
            if step.keep + len(step.ids) >= max_model_len:
                step = self._make_room(self.inbox, text, max_model_len, step)
        except BaseException:
            self.log, self.inbox = before
            raise
        self.state = SessionState.APPENDING
        return step.keep + len(step.ids)

    def _reopen_input(self) -> None:
        """Messages that are in the log and not answered go back to the inbox: more come, and all are one turn."""
        last = self.log.turns[-1] if self.log.turns else None
        if last is not None and last.kind == "input" and last.messages and last.end is not None:
            self.log = self.log.copy()
            self.log.cut_at_turn(len(self.log.turns) - 1)
            self.inbox = (*last.messages, *self.inbox)

    def _opening(self) -> tuple[Message, ...]:
        """The system prompt, before the first input."""
        is_first = self.system is not None and not self.log.turns and not self.inbox
        return ({"role": "system", "content": self.system},) if is_first else ()

    def _raw_ids(self, given: Input, text: ModelText, raw: bool) -> list[int] | None:
        if isinstance(given, str):
            return text.tokenizer.encode(given, add_special=not len(self.log)) if raw else None
        if isinstance(given, Sequence) and len(given) and isinstance(given[0], Mapping):
            return None
        ids = token_ids("input", given)
        outside = max(ids, default=0)
        if outside >= text.tokenizer.vocab_size:
            raise InvalidRequest(f"token {outside} is outside the vocabulary of {text.tokenizer.vocab_size}")
        return list(ids)

    def _append_raw(self, ids: list[int], text: ModelText, max_model_len: int) -> int:
        """Ids that go in as they are, after any messages that wait."""
        if not ids:
            raise InvalidRequest("the input is empty")
        waiting = self._continuation(self.inbox, text) if self.inbox else Continuation(len(self.log), [])
        total = waiting.keep + len(waiting.ids) + len(ids)
        if total >= max_model_len:
            raise ContextOverflow(f"{total} tokens; the context of {max_model_len} has no room for an answer")
        self._commit(waiting)
        turn = Turn("input", (), len(self.log) + len(ids))
        if self.log.turns and self.log.turns[-1].kind == "input":  # one turn until it is answered
            last = self.log.turns.pop()
            turn = Turn("input", last.messages, turn.end)
        self.log.add(len(self.log), ids, turn)
        self.state = SessionState.APPENDING
        return len(self.log)

    def _continuation(self, inbox: Sequence[Message], text: ModelText) -> Continuation:
        renderer = DeltaRenderer(text.chat_template(), **self.options.template_options)
        # Where something went in as it was, the messages are not all there is: nothing may be rendered anew from them.
        past = [] if self.log.has_raw_input else self.log.messages
        return renderer.extend(self.log.tokens, past, inbox, self.log.ended_with)

    def _make_room(
        self, inbox: Sequence[Message], text: ModelText, max_model_len: int, step: Continuation
    ) -> Continuation:
        """The conversation has outgrown the context: an error, or the oldest turns go."""
        total = step.keep + len(step.ids)
        if self.options.overflow == "error":
            raise ContextOverflow(f"{total} tokens; the context of {max_model_len} has no room for an answer")
        template = text.chat_template()
        past = self.log.messages
        system = [message for message in past[:1] if message["role"] == "system"]
        rest = past[len(system) :]
        while rest:
            rest = rest[next((i for i in range(1, len(rest)) if rest[i]["role"] == "user"), len(rest)) :]
            ids = template.encode([*system, *rest, *inbox], **self.options.template_options)
            if len(ids) < max_model_len:
                self.log = TokenLog()
                self.log.turns = [Turn("input", (*system, *rest), None)] if system or rest else []
                return Continuation(0, ids)
        raise ContextOverflow(f"{total} tokens; this input alone has no room in the context of {max_model_len}")

    def commit_input(self, text: ModelText) -> None:
        """Put the messages that wait into the log: an answer is asked for."""
        if self.inbox:
            self._commit(self._continuation(self.inbox, text))
        elif not len(self.log) and self.log.turns:  # the template has rewritten what is left: render it
            self._rebuild(text)
        if not len(self.log):
            raise InvalidRequest("the session is empty: append some input first")
        if self.log.ended_with is not None:
            raise InvalidRequest("the last answer is complete: append some input first, or regenerate it")

    def _commit(self, step: Continuation) -> None:
        if step.ids or step.keep < len(self.log):
            self.log.add(step.keep, step.ids, Turn("input", self.inbox, step.keep + len(step.ids)))
        self.inbox = ()

    def _rebuild(self, text: ModelText) -> None:
        """The ids of the messages, rendered anew: their own are no longer known."""
        ids = text.chat_template().encode(self.log.messages, **self.options.template_options)
        turns, self.log = self.log.turns, TokenLog()
        messages = tuple(message for turn in turns for message in turn.messages)
        self.log.add(0, ids, Turn("input", messages, len(ids)))

    # -- answers ------------------------------------------------------------------------------------------------------

    def take_answer(self, output: CompletionOutput, tokenizer: Tokenizer) -> None:
        """The answer is over, however it ended: its ids are part of the log. What was cut short before goes on."""
        if not output.token_ids:
            return  # it was ended before it said anything: its input is still to be answered
        begin = len(self.log)
        if self.log.turns and self.log.turns[-1].kind == "answer":
            self.log.turns.pop()
            begin = self.log.begin_of(len(self.log.turns))
        stop = output.stop_reason if isinstance(output.stop_reason, int) else None
        ids = [*self.log.tokens[begin:], *output.token_ids]
        said = tokenizer.decode(ids[:-1] if stop is not None else ids)
        message: Message = {"role": "assistant", "content": said}
        turn = Turn("answer", (message,), begin + len(ids), stop, output.finish_reason)
        self.log.add(len(self.log), output.token_ids, turn)

    # -- going back ---------------------------------------------------------------------------------------------------

    def rewind(self, text: ModelText, at_turn: int | None, at_token: int | None) -> None:
        """Forget everything after a turn or a token."""
        if (at_turn is None) == (at_token is None):
            raise InvalidRequest("say at_turn or at_token, one of them")
        log = self.log.copy()
        if at_turn is not None:
            log.cut_at_turn(at_turn)
        elif at_token is not None:
            log.cut_at_token(at_token, self._text_before(at_token, text))
        self.log, self.inbox = log, ()
        self.state = SessionState.APPENDING if self.is_unanswered else SessionState.IDLE

    def _text_before(self, count: int, text: ModelText) -> str:
        """What an answer has said up to a token of the log."""
        begin = max((turn.end for turn in self.log.turns if turn.end is not None and turn.end <= count), default=0)
        return text.tokenizer.decode(self.log.tokens[begin:count].tolist())

    @property
    def is_unanswered(self) -> bool:
        return bool(self.inbox) or bool(self.log.turns and self.log.turns[-1].kind == "input")

    def edit(self, turn: int, content: str, text: ModelText, max_model_len: int) -> int:
        """Another text for an input turn; everything after it is forgotten."""
        if not 0 <= turn < len(self.log.turns) or self.log.turns[turn].kind != "input":
            raise InvalidRequest(f"turn {turn} is no input of this session")
        old = self.log.turns[turn].messages
        if not old or old[-1]["role"] != "user":
            raise InvalidRequest(f"turn {turn} is no message of the user's")
        before = (self.log, self.inbox, self.state)
        self.rewind(text, turn, None)
        kept = [message for message in old[:-1] if message["role"] != "system" or self.system is None]
        try:
            return self.append([*kept, {**old[-1], "content": content}], text, max_model_len, raw=False)
        except BaseException:
            self.log, self.inbox, self.state = before
            raise

    def drop_answer(self, text: ModelText) -> None:
        """Forget the last answer, so that another can be drawn."""
        if not self.log.turns or self.log.turns[-1].kind != "answer" or self.inbox:
            raise InvalidRequest("the last turn of the session is no answer; there is nothing to regenerate")
        self.rewind(text, len(self.log.turns) - 1, None)
        self.attempt += 1
