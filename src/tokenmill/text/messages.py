"""Messages and template options: what a caller hands in, checked before a template sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenmill.errors import InvalidRequest

Message = Mapping[str, Any]

ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function"})
"""Roles that templates know. Some write them into special tokens ('<|' + role + '|>'), so they count as their own."""

MAX_DEPTH = 100
"""Of lists and objects in each other."""


def check_messages(messages: Any) -> list[Message]:
    """Messages as templates expect them: a role and a text each. Lists of text parts are joined to one text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    return [_check_message(message) for message in messages]


def _check_message(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        what = f"a message is an object with a role and a content, not {message!r:.80}"
        raise InvalidRequest(what, param="messages")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return {**message, "content": "".join(map(str, texts))}
    raise InvalidRequest("the content of a message must be a text or a list of text parts", param="messages")


def with_strings(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """The same JSON value with every string in it changed, keys included."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"messages or template options are nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        pairs = value.items()
        return {with_strings(key, change, depth + 1): with_strings(one, change, depth + 1) for key, one in pairs}
    if isinstance(value, list | tuple):
        return [with_strings(one, change, depth + 1) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise InvalidRequest(f"messages and template options are JSON values, and {type(value).__name__} is none")


def message_with_strings(message: Message, change: Callable[[str], str]) -> Message:
    """`with_strings`, but a role that templates know stays as it is."""
    changed: Message = with_strings(message, change)
    return {**changed, "role": str(message["role"])} if message["role"] in ROLES else changed
