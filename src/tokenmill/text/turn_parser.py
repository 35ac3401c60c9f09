"""`TurnParser`: an answer's text, in pieces, to content, reasoning and tool calls.

What comes out does not depend on how the text is cut: a piece that may be part of a marker waits until that is decided.
Text that only looks like a call is content. The texts of a format are matched with any amount of whitespace where they
have some. Runs wherever text is made, one parser for each choice.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenmill.outputs import PartKind, TurnPart
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.tool_format import ID_SLOT, INDEX_SLOT, CallFormat, JsonArguments, NamedArguments, TurnFormat

ALPHANUMERIC = string.ascii_letters + string.digits
NAME = re.compile(r"[\w.\-]*")
SLOTS = {ID_SLOT: re.compile(r"[\w\-]*"), INDEX_SLOT: re.compile(r"[0-9]*")}
WORDS = {"True": True, "False": False, "None": None}


class ToolCall(NamedTuple):
    """A call, complete or as far as it came."""

    call_id: str
    name: str
    arguments: str

    def to_message(self) -> dict[str, Any]:
        """As OpenAI's messages have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ParsedTurn(NamedTuple):
    """An answer taken apart: the sum of its parts."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()

    @classmethod
    def of(cls, parts: Sequence[TurnPart]) -> ParsedTurn:
        content = "".join(part.text for part in parts if part.kind == "content")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        arguments: dict[int, list[str]] = {}
        for part in parts:
            if part.kind == "arguments":
                arguments.setdefault(part.call, []).append(part.text)
        started = (part for part in parts if part.kind == "call")
        calls = (ToolCall(one.call_id, one.name, "".join(arguments.get(one.call, ()))) for one in started)
        return cls(content, reasoning, tuple(calls))

    def to_message(self) -> dict[str, Any]:
        """As an assistant's message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message |= {
                "content": self.content or None,
                "tool_calls": [call.to_message() for call in self.calls],
            }
        return {**message, "reasoning_content": self.reasoning} if self.reasoning else message


def new_call_id() -> str:
    """Nine letters and digits: the only form that every template takes."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))


class Unfinished(Exception):
    """More text is needed to decide."""


class Mismatch(Exception):
    """The text is not what the format says."""


class BrokenOff(Mismatch):
    """The text is over before it is what the format says."""


class _Pieces:
    """A parser that works on a buffer: each state takes something from its beginning, or waits for more."""

    def __init__(self) -> None:
        self._text = ""
        self._is_over = self._is_cut = False
        self._parts: list[TurnPart] = []
        self._state: Callable[[], None]
        self.num_calls = 0
        self.num_ended = 0
        """Calls that are complete, and the list of calls if they are in one."""
        self.in_reasoning = False

    def push(self, text: str) -> list[TurnPart]:
        """What a piece of text adds."""
        self._text += text
        while True:
            try:
                self._state()
            except Unfinished:
                break
        parts, self._parts = self._parts, []
        return _joined(parts)

    def close(self, *, is_cut: bool = False) -> list[TurnPart]:
        """The text is over: what waited is decided. `is_cut`: it would have gone on, and half a marker is not text."""
        self._is_over, self._is_cut = True, is_cut
        return self.push("")

    @property
    def num_waiting(self) -> int:
        """Characters that are not decided on."""
        return len(self._text)

    def _say(self, kind: PartKind, text: str) -> None:
        if text:
            self._parts.append(TurnPart(kind, text, self.num_calls - 1 if kind == "arguments" else 0))

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken


def _joined(parts: list[TurnPart]) -> list[TurnPart]:
    """Neighbours of a kind as one."""
    merged: list[TurnPart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is not None and part.kind != "call" and (last.kind, last.call) == (part.kind, part.call):
            merged[-1] = last._replace(text=last.text + part.text)
        else:
            merged.append(part)
    return merged


def match(pattern: str, text: str, slots: dict[str, str] | None = None) -> int:
    """How much of a text a pattern takes from its beginning. Whitespace in it stands for any amount of whitespace.

    `Mismatch` if the text begins otherwise, `Unfinished` if it is too short to tell.
    """
    at = place = 0
    while place < len(pattern):
        one = pattern[place]
        place += 1
        if one.isspace():
            while place < len(pattern) and pattern[place].isspace():
                place += 1
            while at < len(text) and text[at].isspace():
                at += 1
            if at == len(text):  # more of it may come
                raise Unfinished
        elif one in SLOTS:
            found = SLOTS[one].match(text, at)
            end = at if found is None else found.end()
            if end == len(text):
                raise Unfinished
            if end == at:
                raise Mismatch
            if slots is not None:
                slots[one] = text[at:end]
            at = end
        elif at == len(text):
            raise Unfinished
        elif text[at] != one:
            raise Mismatch
        else:
            at += 1
    return at


class TurnParser(_Pieces):
    """For formats whose calls stand in the text between markers."""

    def __init__(
        self,
        form: TurnFormat,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        starts_in_reasoning: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`tools`: schemas by name; without any, calls are text."""
        super().__init__()
        assert form.calls is not None
        self._format: CallFormat = form.calls
        self._reasoning = form.reasoning
        self._tools = tools or {}
        self._trigger = self._format.trigger if self._tools else None
        self._new_id = new_id
        self._is_silent = True
        """Has no content been said?"""
        self._after_call = False
        self._drops_space = False
        """Is whitespace that comes next between markers?"""
        self._taken = ""
        """Of a call that is not certain yet: content, if it is none."""
        self._name = ""
        self._slots: dict[str, str] = {}
        self._schema: Mapping[str, Any] = {}
        self._num_arguments = 0
        self._withheld: list[str] | None = None
        """Arguments of a call whose id comes after them."""
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.in_reasoning = starts_in_reasoning
        self._state = self._skip_into_reasoning if starts_in_reasoning else self._begin

    # -- text and reasoning -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first text of a turn: reasoning, a call that needs no marker, or content."""
        stripped = self._text.lstrip()
        if not stripped:
            return self._over() if self._is_over else self._wait()
        if self._reasoning is not None and self._starts_with(stripped, self._reasoning.opening):
            self._text = stripped[len(self._reasoning.opening) :]
            self.in_reasoning = True
            self._state = self._skip_into_reasoning
            return None
        self._state = self._content
        if self._tools and self._format.trigger is None:
            self._text, self._taken = stripped, self._text[: len(self._text) - len(stripped)]
            self._state = self._head
        return None

    def _starts_with(self, text: str, marker: str) -> bool:
        if text.startswith(marker):
            return True
        if marker.startswith(text):
            if not self._is_over:
                raise Unfinished
            if self._is_cut:
                self._over()
                raise Unfinished
        return False

    def _skip_into_reasoning(self) -> None:
        self._text = self._text.lstrip()
        if not self._text and not self._is_over:
            raise Unfinished
        self._state = self._think

    def _think(self) -> None:
        assert self._reasoning is not None
        closing = self._reasoning.closing
        at = self._text.find(closing)
        if at >= 0:
            self._say("reasoning", self._text[:at].rstrip())
            self._text = self._text[at + len(closing) :]
            self.in_reasoning, self._drops_space, self._state = False, True, self._content
        elif self._is_over:
            self._say("reasoning", self._text[: self._num_left(closing)].rstrip())
            self._over()
        else:
            self._say("reasoning", self._take(_num_settled(self._text, closing)))
            raise Unfinished

    def _content(self) -> None:
        if self._drops_space:
            self._text = self._text.lstrip()
            if self._text:
                self._drops_space = False
        at = -1 if self._trigger is None else self._text.find(self._trigger)
        if self._trigger is not None and at >= 0:
            self._say_content(self._take(at).rstrip())
            self._taken = self._take(len(self._trigger))
            self._state = self._head
        elif self._is_over:
            text = self._text if self._trigger is None else self._text[: self._num_left(self._trigger)]
            self._say_content(text.rstrip() if self.num_calls else text)
            self._over()
        elif self._trigger is None:
            self._say_content(self._take(len(self._text)))
            raise Unfinished
        else:
            self._say_content(self._take(_num_settled(self._text, self._trigger)))
            raise Unfinished

    def _num_left(self, marker: str) -> int:
        """Characters of a text that is over, without half a marker where it was cut."""
        return _num_before(self._text, marker) if self._is_cut else len(self._text)

    def _say_content(self, text: str) -> None:
        if not text:
            return
        if self.num_calls and not self._is_silent and self._after_call:
            text = "\n" + text
        self._after_call = self._is_silent = False
        self._say("content", text)

    def _over(self) -> None:
        self._text = ""
        self._state = self._wait

    def _wait(self) -> None:
        raise Unfinished

    # -- calls --------------------------------------------------------------------------------------------------------

    def _attempt(self, pattern: str, then: Callable[[], None]) -> None:
        """Take what the format says comes next; otherwise what was taken is content."""
        try:
            count = self._match(pattern)
        except Mismatch as error:
            self._abandon(is_cut=self._is_cut and isinstance(error, BrokenOff))
        else:
            self._taken += self._take(count)
            self._state = then

    def _match(self, pattern: str) -> int:
        try:
            return match(pattern, self._text, self._slots)
        except Unfinished:
            if self._is_over:
                raise BrokenOff from None
            raise

    def _abandon(self, *, is_cut: bool) -> None:
        """It is no call: the text stays, and the marker does not count again. Of one that was cut, nothing stays."""
        if is_cut:
            return self._over()
        self._say_content(self._taken)
        self._taken = ""
        self._withheld = None
        self._state = self._content
        return None

    def _head(self) -> None:
        skipped = self._taken if self._trigger and self._taken == self._trigger else ""
        self._attempt((self._format.opening + self._format.head)[len(skipped) :], self._read_name)

    def _read_name(self) -> None:
        found = NAME.match(self._text)
        end = 0 if found is None else found.end()
        if end == len(self._text) and not self._is_over:
            raise Unfinished
        if self._text[:end] not in self._tools:
            return self._abandon(is_cut=self._is_cut and end == len(self._text))
        self._name = self._take(end)
        self._taken += self._name
        self._slots = {}
        self._state = self._after_name
        return None

    def _after_name(self) -> None:
        self._attempt(self._format.name_end, self._start_call)

    def _start_call(self) -> None:
        schema = self._tools.get(self._name, {})
        self._schema = schema.get("properties") or {} if isinstance(schema, Mapping) else {}
        self.num_calls += 1
        self._num_arguments, self._depth, self._in_string, self._is_escaped = 0, 0, False, False
        self._withheld = [] if ID_SLOT in self._format.tail else None
        if self._withheld is None:
            self._announce()
        is_json = isinstance(self._format.arguments, JsonArguments)
        self._state = self._json_arguments if is_json else self._next_argument

    def _announce(self) -> None:
        call_id = self._slots.get(ID_SLOT) or self._new_id()
        self._parts.append(TurnPart("call", "", self.num_calls - 1, call_id, self._name))
        self._taken = ""

    def _argue(self, text: str) -> None:
        if self._withheld is not None:
            self._withheld.append(text)
        else:
            self._say("arguments", text)

    def _json_arguments(self) -> None:
        """A JSON object goes out as it comes; its end is where its braces are balanced."""
        text = self._text
        if self._depth == 0 and text[:1] != "{":
            stripped = text.lstrip()
            if not stripped and not self._is_over:
                raise Unfinished
            if stripped[:1] != "{":
                self._argue("{}")
                self._state = self._end_call
                return
            text = self._text = stripped
        for at, one in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif one == "\\":
                    self._is_escaped = True
                elif one == '"':
                    self._in_string = False
            elif one == '"':
                self._in_string = True
            elif one in "{[":
                self._depth += 1
            elif one in "}]":
                self._depth -= 1
                if not self._depth:
                    self._argue(self._take(at + 1))
                    self._state = self._end_call
                    return
        self._argue(self._take(len(text)))
        if self._is_over:
            self._end_call()
            return
        raise Unfinished

    def _end_call(self) -> None:
        """After the arguments."""
        try:
            count = self._match(self._format.tail)
        except Mismatch as error:
            count = len(self._text) if self._is_cut and isinstance(error, BrokenOff) else 0
        self._take(count)
        if self._withheld is not None:
            self._announce()
            withheld, self._withheld = self._withheld, None
            for text in withheld:
                self._say("arguments", text)
        self._taken = ""
        self._after_call = self._drops_space = True
        self._state = self._next_call if self._format.is_list else self._content
        if not self._format.is_list:
            self.num_ended = self.num_calls

    def _next_call(self) -> None:
        """Of a list of calls: another one, or its end."""
        if self._format.closing:
            try:
                self._take(self._match(self._format.closing))
            except BrokenOff:
                if self._is_cut:
                    return self._over()
            except Mismatch:
                pass
            else:
                self.num_ended, self._state = self.num_calls, self._content
                return None
        try:
            self._taken = self._take(self._match((self._format.separator or "") + self._format.head))
        except Mismatch as error:
            if self._is_cut and isinstance(error, BrokenOff):
                return self._over()
            self.num_ended, self._state = self.num_calls, self._content
        else:
            self._state = self._read_name
        return None

    # -- arguments one by one -----------------------------------------------------------------------------------------

    @property
    def _style(self) -> NamedArguments:
        assert isinstance(self._format.arguments, NamedArguments)
        return self._format.arguments

    def _next_argument(self) -> None:
        style, skip = self._style, 0
        if self._num_arguments and style.separator:
            try:
                skip = self._match(style.separator)
            except Mismatch:
                skip = 0
        tail = self._format.tail
        if tail.strip() and not skip:
            try:
                match(tail, self._text)
            except Mismatch:
                pass
            except Unfinished:
                if not self._is_over:
                    raise
            else:
                return self._end_arguments()
        try:
            head = self._match_after(style.head, skip)
        except Mismatch as error:
            is_cut = self._is_cut and isinstance(error, BrokenOff)
            return self._cut_off() if is_cut else self._end_arguments()
        self._read_argument(head)
        return None

    def _match_after(self, pattern: str, skip: int) -> int:
        try:
            return skip + match(pattern, self._text[skip:])
        except Unfinished:
            if self._is_over:
                raise BrokenOff from None
            raise

    def _end_arguments(self) -> None:
        self._argue("}" if self._num_arguments else "{}")
        self._state = self._end_call

    def _read_argument(self, start: int) -> None:
        """A key and its value, once both are complete."""
        style = self._style
        mark = style.key_end.strip()
        at = self._text.find(mark, start)
        if at < 0:
            return self._cut_off() if self._is_over else self._wait()
        key, at = self._text[start:at].strip(), at + len(mark)
        if style.is_verbatim:
            space = style.key_end[len(style.key_end.rstrip()) :]
            if len(self._text) < at + len(space) and not self._is_over:
                raise Unfinished
            at += len(space) if self._text.startswith(space, at) else 0
            close = style.tail.strip()
            end = self._text.find(close, at)
            if end < 0:
                return self._cut_off() if self._is_over else self._wait()
            value = self._text[at:end]
            space = style.tail[: len(style.tail) - len(style.tail.lstrip())]
            read: Any = _typed(value.removesuffix(space), self._schema.get(key))
            end += len(close)
        else:
            try:
                read, end = read_value(self._text, at, style)
            except Unfinished:
                if not self._is_over:
                    raise
                return self._cut_off()
            except Mismatch:
                return self._cut_off()
        self._argue(("{" if not self._num_arguments else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._argue(json.dumps(read, ensure_ascii=False))
        self._num_arguments += 1
        self._take(end)
        return None

    def _cut_off(self) -> None:
        """The answer ended within an argument, or it is malformed: the arguments so far are the call's."""
        self._text = ""
        self._end_arguments()


def _num_before(text: str, marker: str) -> int:
    """Characters at the beginning that can't be part of a marker."""
    keep = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)
    return len(text) - keep


def _num_settled(text: str, marker: str) -> int:
    """The same, without whitespace that may stand before the marker."""
    return len(text[: _num_before(text, marker)].rstrip())


def _typed(text: str, schema: Any) -> Any:
    """A value without quotes: what it is depends on the schema, and without one on its look."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    if text in WORDS and "string" not in kinds:
        return WORDS[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) or ("string" in kinds and _kind(value) not in kinds) else value


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows; none: any."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return set(kind)
    if "enum" in schema or "const" in schema:
        return {_kind(one) for one in schema.get("enum", [schema.get("const")])}
    several = schema.get("anyOf") or schema.get("oneOf") or ()
    return set().union(*map(_kinds, several))


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return names.get(type(value), "null")


def read_value(text: str, at: int, style: NamedArguments) -> tuple[Any, int]:
    """A quoted, bracketed or bare value of named arguments, and where it ends."""
    at = _skip_space(text, at)
    quote = style.string_open
    if text.startswith(quote, at):
        return _read_string(text, at + len(quote), style.string_close, is_escaped=style.is_escaped)
    if quote.startswith(text[at:]):
        raise Unfinished
    if text[at] in "\"'":
        return _read_string(text, at + 1, text[at], is_escaped=True)
    if text[at] == "[":
        return _read_items(text, at + 1, style)
    if text[at] == "{":
        return _read_object(text, at + 1, style)
    found = re.compile(r"[^\s,\[\]{}()<>]+").match(text, at)
    if found is None:
        raise Mismatch
    if found.end() == len(text):
        raise Unfinished
    word = found.group()
    if word in WORDS:
        return WORDS[word], found.end()
    try:
        return json.loads(word), found.end()
    except ValueError:
        return word, found.end()


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    if at == len(text):
        raise Unfinished
    return at


def _read_string(text: str, at: int, close: str, *, is_escaped: bool) -> tuple[str, int]:
    if not is_escaped:
        end = text.find(close, at)
        if end < 0:
            raise Unfinished
        return text[at:end], end + len(close)
    found = re.compile(rf"(?:[^\\{close}]|\\.)*", re.DOTALL).match(text, at)
    end = at if found is None else found.end()
    if end >= len(text) or text[end] != close:
        raise Unfinished
    body = text[at:end] if close == '"' else text[at:end].replace("\\'", "'").replace('"', '\\"')
    try:
        value = json.loads(f'"{body}"', strict=False)
    except ValueError:
        value = body
    return value, end + 1


def _read_items(text: str, at: int, style: NamedArguments) -> tuple[list[Any], int]:
    items: list[Any] = []
    while True:
        at = _skip_space(text, at)
        if text[at] == "]":
            return items, at + 1
        if text[at] == ",":
            at += 1
            continue
        item, at = read_value(text, at, style)
        items.append(item)


def _read_object(text: str, at: int, style: NamedArguments) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while True:
        at = _skip_space(text, at)
        if text[at] == "}":
            return found, at + 1
        if text[at] == ",":
            at += 1
            continue
        if style.bare_keys and not text.startswith(style.string_open, at):
            end = text.find(":", at)
            if end < 0:
                raise Unfinished
            key: Any = text[at:end].strip()
        else:
            key, end = read_value(text, at, style)
            end = _skip_space(text, end)
            if text[end] != ":":
                raise Mismatch
        found[str(key)], at = read_value(text, end + 1, style)


# -- harmony ----------------------------------------------------------------------------------------------------------

ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
RECIPIENT = re.compile(r"to=functions\.([\w.\-]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(_Pieces):
    """For gpt-oss: a turn is made of messages, each with a header that says what it is.

    `analysis` is reasoning, a message to `functions.NAME` is a call, everything else is content.
    """

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        super().__init__()
        self._tools = tools or {}
        self._new_id = new_id
        self._state = self._header
        self._kind: PartKind = "content"

    def _header(self) -> None:
        at = self._text.find("<|message|>")
        if at < 0:
            if self._is_over and not self._is_cut:  # a model that does not keep to the format
                self._say("content", MARKERS.sub("", self._take(len(self._text))))
            raise Unfinished
        header = self._take(at + len("<|message|>"))
        recipient, channel = RECIPIENT.search(header), CHANNEL.search(header)
        if recipient is not None and recipient.group(1) in self._tools:
            self.num_calls += 1
            self._parts.append(TurnPart("call", "", self.num_calls - 1, self._new_id(), recipient.group(1)))
            self._kind = "arguments"
        else:
            self._kind = "reasoning" if channel is not None and channel.group(1) == "analysis" else "content"
        self.in_reasoning = self._kind == "reasoning"
        self._state = self._body

    def _body(self) -> None:
        ends = [at for end in ENDS if (at := self._text.find(end)) >= 0]
        if ends:
            self._say(self._kind, self._take(min(ends)))
            found = MARKERS.match(self._text)
            self._take(len(found.group()) if found and found.group() != "<|start|>" else 0)
            self.in_reasoning, self._state = False, self._header
            self.num_ended = self.num_calls
            return
        count = len(self._text)
        if not self._is_over or self._is_cut:
            count = min(_num_before(self._text, end) for end in ENDS)
        self._say(self._kind, self._take(count))
        raise Unfinished


MARKERS = re.compile("|".join(map(re.escape, (*ENDS, "<|channel|>", "<|message|>", "<|constrain|>"))))


def open_parser(
    form: TurnFormat,
    tools: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    starts_in_reasoning: bool = False,
    new_id: Callable[[], str] = new_call_id,
) -> TurnParser | HarmonyParser:
    """The parser of a format; `tools` are the schemas of the functions that may be called, by name."""
    if form.is_harmony:
        return HarmonyParser(tools, new_id=new_id)
    return TurnParser(form, tools, starts_in_reasoning=starts_in_reasoning, new_id=new_id)


def end_of_calls(form: TurnFormat, names: Collection[str], text: str, count: int) -> int | None:
    """How many characters of a text are up to the end of its first `count` calls; None if it has fewer."""
    parser = open_parser(form, {name: {} for name in names})
    for place, character in enumerate(text, 1):
        parser.push(character)
        if parser.num_ended >= count:
            # What ends a harmony message is the model's end of turn, which belongs to what follows.
            return place - parser.num_waiting - (len("<|call|>") if form.is_harmony else 0)
    return None


@dataclass(frozen=True)
class TurnPlan:
    """How the answers to a request are read."""

    form: TurnFormat
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the functions that may be called."""
    starts_in_reasoning: bool = False
    """Has the prompt opened the thinking?"""

    def open_parser(self) -> TurnParser | HarmonyParser:
        return open_parser(self.form, self.tools, starts_in_reasoning=self.starts_in_reasoning)

    def hidden_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that are no markers: they stay out of the text."""
        markers = self.form.markers
        return frozenset(number for text, number in tokenizer.special_tokens.items() if text not in markers)
