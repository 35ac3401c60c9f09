"""How a model writes tool calls and reasoning, derived from its chat template.

A template is rendered with calls of sentinel names and arguments. What lies between the sentinels is the format: what
opens a call, what separates its name from its arguments, how arguments are spelled, what separates and closes several
calls. `turn_parser.py` reads answers by it, `tool_grammar.py` constrains them to it. Templates that do not show their
calls get a format by name (`NAMED`); one that knows nothing of tools gets `GENERIC`, which the system message explains.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.text.messages import Message

ID_SLOT, INDEX_SLOT = "\ue000", "\ue001"
"""In the texts of a format: where a call's id or number stands."""
UNIT = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|.", re.DOTALL)
"""Texts are compared by markers and characters: half of a marker is never common to two."""
MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")

Render = Callable[[Sequence[Message], Mapping[str, Any]], str | None]
"""What a template writes for messages and options; None where it fails."""


@dataclass(frozen=True)
class JsonArguments:
    """Arguments as one JSON object."""

    item_separator: str = ", "
    key_separator: str = ": "


@dataclass(frozen=True)
class NamedArguments:
    """Arguments one by one: head, key, key_end, value, tail. Strings stand between quotes, or as they are."""

    head: str
    key_end: str
    string_open: str
    string_close: str
    tail: str
    separator: str
    true: str = "true"
    false: str = "false"
    null: str = "null"
    bare_keys: bool = False
    """Are the keys of nested objects written without quotes?"""

    @property
    def is_verbatim(self) -> bool:
        """Strings have no quotes: a value is the text up to the tail, and only the schema tells its type."""
        return not self.string_open

    @property
    def is_escaped(self) -> bool:
        """Strings are written with escapes, as in JSON and Python."""
        return self.string_open in ('"', "'")


@dataclass(frozen=True)
class CallFormat:
    """The texts around the name and the arguments of calls."""

    head: str
    """Before each name..."""
    name_end: str
    """...between the name and its arguments..."""
    tail: str
    """...and after them."""
    arguments: JsonArguments | NamedArguments = JsonArguments()
    opening: str = ""
    """Before the first of several calls, ..."""
    separator: str | None = ""
    """...between two of them (None: the template allows one call in a turn), ..."""
    closing: str = ""
    """...and after the last."""

    @property
    def trigger(self) -> str | None:
        """The marker that begins calls anywhere in a text; None: calls are recognized only where the turn begins."""
        found = MARKER.match(self.opening + self.head)
        return None if found is None else found.group()

    @property
    def is_list(self) -> bool:
        """Are calls listed within a section? Otherwise each stands by itself, and text may be between them."""
        return bool(self.closing) or bool((self.separator or "").strip())

    @property
    def texts(self) -> tuple[str, ...]:
        arguments = self.arguments
        named = isinstance(arguments, NamedArguments)
        inner = (arguments.head, arguments.key_end, arguments.string_open, arguments.tail) if named else ()  # type: ignore[union-attr]
        return (self.opening, self.head, self.name_end, self.tail, self.separator or "", self.closing, *inner)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]], ids: Sequence[str] = ()) -> str:
        """Calls as a model writes them."""
        written = []
        for place, (name, arguments) in enumerate(calls):
            slots = {ord(ID_SLOT): ids[place] if ids else f"call{place:05d}", ord(INDEX_SLOT): str(place)}
            head, name_end, tail = (text.translate(slots) for text in (self.head, self.name_end, self.tail))
            written.append(f"{head}{name}{name_end}{self._arguments(arguments)}{tail}")
        return self.opening + (self.separator or "").join(written) + self.closing

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        style = self.arguments
        if isinstance(style, JsonArguments):
            separators = (style.item_separator, style.key_separator)
            return json.dumps(arguments, ensure_ascii=False, separators=separators)
        written = [
            f"{style.head}{key}{style.key_end}{write_value(style, value)}{style.tail}"
            for key, value in arguments.items()
        ]
        return style.separator.join(written)


@dataclass(frozen=True)
class Reasoning:
    """The markers around a model's thinking."""

    opening: str
    closing: str


@dataclass(frozen=True)
class TurnFormat:
    """How a model writes its turns."""

    name: str
    """`derived`, `generic`, or that of a named format."""
    calls: CallFormat | None = None
    """None: harmony, whose turns are made of messages."""
    reasoning: Reasoning | None = None
    long_ids: bool = True
    """May the ids of calls be other than nine letters and digits?"""

    @property
    def is_harmony(self) -> bool:
        return self.calls is None

    @property
    def reasons(self) -> bool:
        """May a turn begin with thinking?"""
        return self.reasoning is not None or self.is_harmony

    @property
    def is_generic(self) -> bool:
        return self.name == GENERIC_NAME

    @property
    def markers(self) -> frozenset[str]:
        """Texts that must reach the parser, special tokens or not."""
        if self.calls is None:
            return HARMONY_MARKERS
        texts = [*self.calls.texts, *((self.reasoning.opening, self.reasoning.closing) if self.reasoning else ())]
        return frozenset(found.group() for text in texts for found in MARKER.finditer(text))


def write_value(style: NamedArguments, value: Any, *, nested: bool = False) -> str:
    """A value as named arguments spell it."""
    if value is None or isinstance(value, bool):
        return style.null if value is None else style.true if value else style.false
    if style.is_verbatim and not nested:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)[1:-1] if style.is_escaped else value
        return f"{style.string_open}{text}{style.string_close}"
    if isinstance(value, Mapping):
        keys = [key if style.bare_keys else write_value(style, key, nested=True) for key in value]
        colon, comma = (":", ",") if style.bare_keys else (": ", ", ")
        values = [write_value(style, one, nested=True) for one in value.values()]
        return "{" + comma.join(f"{key}{colon}{one}" for key, one in zip(keys, values, strict=True)) + "}"
    if isinstance(value, list | tuple):
        comma = "," if style.bare_keys else ", "
        return "[" + comma.join(write_value(style, one, nested=True) for one in value) + "]"
    return json.dumps(value)


# -- formats by name --------------------------------------------------------------------------------------------------

GENERIC_NAME = "generic"
HARMONY_MARKERS = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>",
                             "<|return|>"})  # fmt: skip
_THINK = Reasoning("<think>", "</think>")
_TAGGED_JSON = CallFormat(
    head='<tool_call>\n{"name": "', name_end='", "arguments": ', tail="}\n</tool_call>", separator="\n"
)
_PYTHON = NamedArguments("", "=", '"', '"', "", ", ", "True", "False", "None")
_PYTHON_CALLS = CallFormat(head="", name_end="(", tail=")", arguments=_PYTHON, opening="[", separator=", ", closing="]")

GENERIC = TurnFormat(GENERIC_NAME, _TAGGED_JSON)
NAMED: Mapping[str, TurnFormat] = {
    form.name: form
    for form in (
        GENERIC,
        TurnFormat("hermes", _TAGGED_JSON),
        TurnFormat("harmony"),
        TurnFormat(
            "mistral",
            CallFormat(
                head='{"name": "', name_end='", "arguments": ', tail="}", opening="[TOOL_CALLS][", separator=", ",
                closing="]",
            ),
        ),
        TurnFormat("mistral-args", CallFormat(head="[TOOL_CALLS]", name_end="[ARGS]", tail="")),
        TurnFormat("pythonic", _PYTHON_CALLS),
        TurnFormat(
            "lfm2",
            replace(_PYTHON_CALLS, opening="<|tool_call_start|>[", closing="]<|tool_call_end|>"),
        ),
        TurnFormat(
            "qwen3-coder",
            CallFormat(
                head="<tool_call>\n<function=", name_end=">", tail="\n</function>\n</tool_call>", separator="\n",
                arguments=NamedArguments(
                    "\n<parameter=", ">\n", "", "", "\n</parameter>", "", "True", "False", "None"
                ),
            ),
        ),
        TurnFormat(
            "glm",
            CallFormat(
                head="<tool_call>", name_end="", tail="\n</tool_call>", separator="\n",
                arguments=NamedArguments("\n<arg_key>", "</arg_key>\n<arg_value>", "", "", "</arg_value>", ""),
            ),
            _THINK,
        ),
    )
}  # fmt: skip
"""By the names that `--tool-format` takes."""
SIGNATURES = (
    (("<|channel|>", "<|message|>", "<|call|>"), "harmony"),
    (("<|tool_list_start|>",), "lfm2"),
)
"""Texts of templates whose calls can't be derived, and the formats of their models."""


# -- derivation -------------------------------------------------------------------------------------------------------

ANSWER, REASON = "sentinel_answer", "sentinel_reason"
NAMES = ("sentinel_alpha", "sentinel_beta")
IDS = ("sentinel1", "sentinel2")
ASKED: Message = {"role": "user", "content": "sentinel_question"}
TOOLS: Sequence[Mapping[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "declared_tool",
            "description": "declared",
            "parameters": {
                "type": "object",
                "properties": {"declared_parameter": {"type": "string", "description": "declared"}},
                "required": ["declared_parameter"],
            },
        },
    }
]


def turn_format(render: Render, source: str) -> TurnFormat:
    """The format of a template's turns: derived from what it writes, else by its signature, else generic."""
    reasoning = _derive_reasoning(render, source)
    by_signature = next((name for texts, name in SIGNATURES if all(text in source for text in texts)), None)
    if by_signature is not None:
        named = NAMED[by_signature]
        return replace(named, reasoning=reasoning) if named.calls is not None else named
    calls = _derive_calls(render)
    if calls is None:
        return replace(GENERIC, reasoning=reasoning)
    return TurnFormat("derived", calls, reasoning, long_ids=_takes_long_ids(render))


def _call(place: int, arguments: Mapping[str, Any], call_id: str | None = None) -> dict[str, Any]:
    function = {"name": NAMES[place], "arguments": dict(arguments)}
    return {"id": call_id or IDS[place], "type": "function", "function": function}


def _turn(render: Render, calls: Sequence[Mapping[str, Any]], content: str | None = None, **more: Any) -> str | None:
    """What a template writes for an assistant's turn after the question. Templates differ in what no content is."""
    for empty in (content, content or ""):
        message = {"role": "assistant", "content": empty, **({"tool_calls": list(calls)} if calls else {}), **more}
        if (text := _region(render, message)) is not None and "None" not in text:
            return text
    return None


def _region(render: Render, message: Message) -> str | None:
    options = {"tools": TOOLS, "add_generation_prompt": False}
    before, text = render([ASKED], options), render([ASKED, message], options)
    return text[len(before) :] if before is not None and text is not None and text.startswith(before) else None


def _derive_calls(render: Render) -> CallFormat | None:
    """How calls are written, or None if the template does not tell."""
    plain = _turn(render, (), ANSWER)
    one = _turn(render, [_call(0, {})])
    if plain is None or one is None or NAMES[0] not in one or ANSWER not in plain:
        return None
    begin, end = plain.split(ANSWER, 1)
    arguments = _derive_json(render) or _derive_named(render)
    if arguments is None:
        return None
    style, probe = arguments
    single, pair = _turn(render, [_call(0, probe)]), _turn(render, [_call(0, probe), _call(1, probe)])
    cut = None if single is None else _around_call(single, 0, style, probe)
    if cut is None:
        return None
    before, name_end, after = cut
    if pair is None or NAMES[1] not in pair:  # one call in a turn at most
        head, opening, separator, rest = _without(before, begin), "", None, ""
        tail = after.removesuffix(end)
    else:
        first, second = _around_call(pair, 0, style, probe), _around_call(pair, 1, style, probe)
        if first is None or second is None:
            return None
        name_end = _with_index(first[1], second[1])
        # Between the first call's arguments and the second's name are a tail, a separator and a head.
        between = pair[len(pair) - len(first[2]) : len(pair) - len(first[2]) + first[2].find(NAMES[1])]
        between, before = _with_ids(between), _with_ids(before)
        head = _common_end(before, between).lstrip()
        opening = _without(before[: len(before) - len(head)], begin)
        between = between[: len(between) - len(head)]
        last = _with_ids(second[2])
        rest = last.removesuffix(end)
        tail = _common_start(rest, between)
        if isinstance(style, JsonArguments) or tail.strip():
            tail = tail.rstrip()
        separator = between[len(tail) :]
        rest = "" if rest == last and end else rest[len(tail) :].rstrip()
    tail, name_end, head = _with_ids(tail), _with_ids(name_end), _with_ids(head)
    if isinstance(style, NamedArguments):
        split = _split_named(render, style, tail)
        if split is None:
            return None
        name_end, style, tail = split
    if not head and not opening:
        return None
    return CallFormat(head, name_end, tail, style, opening, separator, rest)


def _around_call(
    text: str, place: int, style: JsonArguments | NamedArguments, probe: Mapping[str, Any]
) -> tuple[str, str, str] | None:
    """The texts before a call's name, between it and its arguments, and after those."""
    at = text.find(NAMES[place])
    if at < 0:
        return None
    after_name = at + len(NAMES[place])
    if isinstance(style, NamedArguments):  # told apart from its arguments by `_split_named`
        return text[:at], "", text[after_name:]
    found = _find_json(text, after_name, probe)
    return None if found is None else (text[:at], text[after_name : found[0]], text[found[1] :])


def _find_json(text: str, start: int, value: Mapping[str, Any]) -> tuple[int, int] | None:
    """Where a JSON object stands in a text."""
    at = text.find("{", start)
    while at >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            found, end = None, 0
        if found == value:
            return at, end
        at = text.find("{", at + 1)
    return None


def _derive_json(render: Render) -> tuple[JsonArguments, Mapping[str, Any]] | None:
    probe = {"key_one": "value_one", "key_two": {"key_three": [1, 2]}}
    text = _turn(render, [_call(0, probe)])
    found = None if text is None else _find_json(text, text.find(NAMES[0]), probe)
    if text is None or found is None:
        return None
    written = text[found[0] : found[1]]
    key_separator = written[written.index('"key_one"') + len('"key_one"') : written.index('"value_one"')]
    item_separator = written[written.index('"value_one"') + len('"value_one"') : written.index('"key_two"')]
    return JsonArguments(item_separator, key_separator), probe


def _derive_named(render: Render) -> tuple[NamedArguments, Mapping[str, Any]] | None:
    """How single arguments are written; the texts around all of them are found by `_split_named`."""

    def texts(first: Any, second: Any) -> list[str] | None:
        """What is around the keys and values of two arguments, whose values are given as they are written."""
        written = [one if isinstance(one, str) else str(one) for one in (first, second)]
        text = _turn(render, [_call(0, {"key_one": first, "key_two": second})])
        pattern = f"{NAMES[0]}(.*?)key_one(.*?){written[0]}(.*?)key_two(.*?){written[1]}(.*)"
        found = None if text is None else re.fullmatch(".*?" + pattern, text, re.DOTALL)
        return None if found is None else list(found.groups())

    strings, numbers = texts("value_one", "value_two"), texts(7101, 7102)
    if strings is None or numbers is None:
        return None
    key_end = numbers[1]
    string_open = strings[1].removeprefix(key_end)
    string_close = strings[2].removesuffix(numbers[2])
    true, false, null = (_word(render, value) for value in (True, False, None))
    nested = _turn(render, [_call(0, {"key_one": {"key_two": 7101}})])
    bare = nested is not None and re.search(r"[{,]\s*key_two", nested) is not None
    style = NamedArguments(
        numbers[0], key_end, string_open, string_close, numbers[4], numbers[2], true, false, null, bare
    )
    return style, {"key_one": 7101}


def _word(render: Render, value: bool | None) -> str:
    """How a template spells true, false or null."""
    options = {"tools": TOOLS, "add_generation_prompt": False}
    message = {"role": "assistant", "content": "", "tool_calls": [_call(0, {"key_one": value, "key_two": 7102})]}
    text = render([ASKED, message], options) or ""
    candidates = {True: ("true", "True"), False: ("false", "False"), None: ("null", "None")}[value]
    after = text[text.rfind("key_one") :]
    found = [word for word in candidates if re.search(rf"\b{word}\b", after)]
    return found[0] if found else candidates[0]


def _split_named(render: Render, style: NamedArguments, tail: str) -> tuple[str, NamedArguments, str] | None:
    """What belongs to the call and what to each argument, from a call without arguments, with one and with two.

    `style` comes with all that is before the first key as head, after the last value as tail, and between as separator.
    """
    empty = _turn(render, [_call(0, {})])
    one = _turn(render, [_call(0, {"key_one": 7101})])
    if empty is None or one is None:
        return None
    bare = empty[empty.find(NAMES[0]) + len(NAMES[0]) :]
    last = one[one.find("7101") + len("7101") :]
    first, between = style.head, style.separator
    for cut in range(len(bare) + 1):
        start, end = bare[:cut], bare[cut:]
        if not first.startswith(start) or not last.endswith(end):
            continue
        head, value_tail = first[cut:], last[: len(last) - len(end)]
        if not between.startswith(value_tail) or not between[len(value_tail) :].endswith(head):
            continue
        if value_tail.count("<") != value_tail.count(">"):  # the cut would go through a marker
            continue
        separator = between[len(value_tail) : len(between) - len(head)]
        # The end of the call, without what ends the turn: as much of it as the caller has found.
        call_tail = _common_tail(end, tail, value_tail)
        return start, replace(style, head=head, tail=value_tail, separator=separator), call_tail
    return None


def _common_tail(end: str, tail: str, value_tail: str) -> str:
    """The tail of a call without arguments: `end` begins with it, and so does `tail` behind a value."""
    at = tail.find("7101")
    rest = tail[at + len("7101") :] if at >= 0 else tail
    return rest.removeprefix(value_tail) if rest.removeprefix(value_tail) in end else end


def _with_ids(text: str) -> str:
    for call_id in IDS:
        text = text.replace(call_id, ID_SLOT)
    return text


def _with_index(first: str, second: str) -> str:
    """The texts between name and arguments of two calls as one: a number in them that counts is a slot."""
    first, second = _with_ids(first), _with_ids(second)
    if first == second:
        return first
    pieces = [re.split(r"(\d+)", one) for one in (first, second)]
    if len(pieces[0]) != len(pieces[1]):
        return first
    return "".join(a if a == b else INDEX_SLOT for a, b in zip(*pieces, strict=True))


def _without(text: str, begin: str) -> str:
    """The text after what begins every turn."""
    if text.startswith(begin):
        return text[len(begin) :].lstrip()
    return text.removeprefix(begin.rstrip()).lstrip()


def _common_start(a: str, b: str) -> str:
    common = []
    for one, other in zip(UNIT.findall(a), UNIT.findall(b), strict=False):
        if one != other:
            break
        common.append(one)
    return "".join(common)


def _common_end(a: str, b: str) -> str:
    common = []
    for one, other in zip(reversed(UNIT.findall(a)), reversed(UNIT.findall(b)), strict=False):
        if one != other:
            break
        common.append(one)
    return "".join(reversed(common))


def _takes_long_ids(render: Render) -> bool:
    return _turn(render, [_call(0, {"key_one": 1}, "call_0123456789abcdef")]) is not None


def _derive_reasoning(render: Render, source: str) -> Reasoning | None:
    """The markers around thinking: from how a past turn's is written, else the usual ones if the template has them."""
    thought = {"reasoning_content": REASON, "reasoning": REASON, "thinking": REASON}
    for calls in ((), [_call(0, {"key_one": "value_one"})]):
        text = _turn(render, calls, "" if calls else ANSWER, **thought)
        if text is None or REASON not in text:
            continue
        before, after = text.split(REASON, 1)
        opening, closing = [*MARKER.finditer(before)][-1:], MARKER.search(after)
        if opening and closing:
            return Reasoning(before[opening[0].start() :].rstrip(), closing.group())
    return _THINK if _THINK.closing in source else None


def with_short_ids(message: Message) -> Message:
    """A message whose call ids are nine letters and digits, for templates that take no others."""
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [
            {**call, "id": _short(str(call.get("id")))} if isinstance(call, Mapping) else call for call in calls
        ]
    return changed


def _short(call_id: str) -> str:
    is_short = len(call_id) == 9 and call_id.isascii() and call_id.isalnum()
    return call_id if is_short else hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:9]


# -- templates without tools ------------------------------------------------------------------------------------------


def calls_in_content(messages: Sequence[Message], calls: CallFormat) -> list[Message]:
    """Messages whose tool calls are part of their text, as the model has written them."""
    written: list[Message] = []
    for message in messages:
        past = message.get("tool_calls")
        if isinstance(past, list) and past:
            said = (message.get("content"), _past_calls(past, calls))
            message = {"role": message["role"], "content": "\n".join(one for one in said if one)}
        written.append(message)
    return written


def generic_messages(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A conversation for a template that knows no tools: they go into the system message, and calls into content."""
    written: list[Message] = []
    for place, message in enumerate(calls_in_content(messages, _TAGGED_JSON)):
        if message["role"] != "tool":
            written.append(message)
            continue
        result = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        if place and messages[place - 1]["role"] == "tool":  # the results of one turn are one message
            result = f"{written.pop()['content']}\n{result}"
        written.append({"role": "user", "content": result})
    if not tools:
        return written
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = '<tool_call>\n{"name": <function name>, "arguments": <arguments as JSON>}\n</tool_call>'
    text = f"You may call these functions:\n{lines}\n\nTo call a function, answer in this form:\n{example}"
    if written and written[0]["role"] in ("system", "developer"):
        return [{**written[0], "content": f"{written[0]['content']}\n\n{text}"}, *written[1:]]
    return [{"role": "system", "content": text}, *written]


def _past_calls(past: Sequence[Any], calls: CallFormat) -> str:
    """Past calls as text; what is no call is left out."""
    pairs: list[tuple[str, Mapping[str, Any]]] = []
    for call in past:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        pairs.append((function["name"], arguments if isinstance(arguments, Mapping) else {}))
    return calls.write(pairs) if pairs else ""
