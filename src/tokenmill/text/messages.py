"""Messages and template options: what a caller hands in, checked before a template sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import InvalidRequest

Message = Mapping[str, Any]

ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function"})
"""Roles that templates know. Some write them into special tokens ('<|' + role + '|>'), so they count as their own."""


class GivenList(list[Any]):
    """A caller's list: templates may append to lists of their own, but not to this one."""


MAX_DEPTH = 100
"""Of lists and objects in each other."""

QUESTION: Message = {"role": "user", "content": "probe of a question"}
PROBE_CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "probe0000", "type": "function", "function": {"name": "call", "arguments": '{"probe": 1}'}}],
}
"""A message as OpenAI's clients send it back, to find out what a template makes of it."""


def check_messages(messages: Any) -> list[Message]:
    """Messages as templates expect them: a role and a text each. Lists of text parts are joined to one text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a non-empty list", param="messages")
    checked: list[Message] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            what = f"a message must be an object with role and content, not {message!r:.80}"
            raise InvalidRequest(what, param="messages")
        content = message.get("content")
        if isinstance(content, str) or (content is None and message.get("tool_calls")):
            checked.append(message)
        else:
            checked.append({**message, "content": _joined_parts(content)})
    return checked


def _joined_parts(content: Any) -> str:
    """The content of a message that is a list of text parts."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise InvalidRequest("the content of a message must be a string or a list of text parts", param="messages")


@dataclass(frozen=True)
class ToolCallForm:
    """How a template wants assistant messages with tool calls. In OpenAI's the content is null, arguments are JSON."""

    takes_null: bool
    """Null stays null; else it becomes an empty text."""
    takes_text: bool
    """Arguments stay text; else they become the object that the text stands for."""

    def of(self, message: Message) -> Message:
        content = message.get("content")
        if content is None and not self.takes_null:
            content = ""
        calls = message["tool_calls"]
        if not self.takes_text and isinstance(calls, list):
            calls = [_with_object(call) for call in calls]
        return {**message, "content": content, "tool_calls": calls}


def tool_call_form(text_of: Callable[[ToolCallForm], str | None]) -> ToolCallForm:
    """The form that suits a template, from what it writes for `PROBE_CALL` in each; None where it fails."""
    as_object = text_of(ToolCallForm(takes_null=False, takes_text=False))
    # Most encode the arguments themselves. One that does not would write an object as Python does.
    takes_text = as_object is None or "'probe'" in as_object
    empty = text_of(ToolCallForm(takes_null=False, takes_text=True)) if takes_text else as_object
    null = text_of(ToolCallForm(takes_null=True, takes_text=takes_text))
    # A template that knows null writes nothing for it. Others fail, or write the word.
    takes_null = null is not None and all(null.count(word) <= (empty or "").count(word) for word in ("None", "null"))
    return ToolCallForm(takes_null, takes_text)


def _with_object(call: Any) -> Any:
    """A tool call with its arguments as an object; as it is if they are none."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def with_strings(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """The same JSON value with every string in it changed, keys included."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"messages and template options must not be nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        pairs = value.items()
        return {with_strings(key, change, depth + 1): with_strings(one, change, depth + 1) for key, one in pairs}
    if isinstance(value, list | tuple):
        return GivenList(with_strings(one, change, depth + 1) for one in value)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise InvalidRequest(f"messages and template options must be JSON values, not {type(value).__name__}")


def num_chars(value: Any) -> int:
    """Characters of all strings in a JSON value, about what it takes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(num_chars(key) + num_chars(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return 8 * len(value) if value and isinstance(value[0], int) else sum(map(num_chars, value))
    return 8
