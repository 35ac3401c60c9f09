"""Items, of which responses and conversations consist: from what clients send to messages, and as they are stored."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from fastapi import Query

from tokenmill.params import shown
from tokenmill.server.errors import ApiError
from tokenmill.server.fields import read_json
from tokenmill.server.requests import Role, check_calls

TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
"""Of the id of an item of each type."""
KNOWN = ", ".join((*PREFIXES, "item_reference"))
Item = dict[str, Any]
Message = dict[str, Any]


def item_id(kind: str, name: str | None = None) -> str:
    """An id for an item of this type; `name` tells an answer's items from those of others."""
    return f"{PREFIXES[kind]}_{name or secrets.token_hex(16)}"


def response_of(name: str) -> str | None:
    """The id of the response that has an output item of this id, if it may be one."""
    _, _, rest = name.partition("_")
    return f"resp_{rest[:32]}" if len(rest) > 32 else None


def encrypted(reasoning: str) -> str:
    """`encrypted_content` of a reasoning item: what the model thought, opaque. It is no secret from its caller."""
    return base64.b64encode(reasoning.encode()).decode()


# -- from clients -----------------------------------------------------------------------------------------------------


def as_items(given: Any, param: str = "input") -> list[Item]:
    """What a request says, as the items that are stored: each has an id, and content in parts."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise ApiError(400, f"{param} must be a string or a list of items", param=param)
    found = [_as_item(item, param) for item in items]
    names = Counter(item["id"] for item in found)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise ApiError(400, f"two items have the id {twice!r:.80}", code="duplicate_item", param=param)
    return found


def _as_item(item: Any, param: str) -> Item:
    kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
    if kind == "item_reference" and isinstance(item.get("id"), str):
        return {"type": kind, "id": item["id"]}
    if not isinstance(item, dict) or not isinstance(kind, str) or kind not in PREFIXES:
        raise ApiError(400, f"input items of type {shown(kind)} are not supported; supported: {KNOWN}", param=param)
    name = item.get("id")
    has_name = isinstance(name, str) and 0 < len(name) <= 128
    made = {"status": "completed", **item, "type": kind, "id": name if has_name else item_id(kind)}
    if kind == "message" and isinstance(item.get("content"), str):
        is_answer = item.get("role") == "assistant"
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if is_answer else {}
        made["content"] = [{"type": "output_text" if is_answer else "input_text", "text": item["content"], **more}]
    elif kind == "reasoning":
        made.setdefault("summary", [])
    return made


def as_messages(
    items: Sequence[Item], most_parts: int, *, known_calls: Collection[str] | None = (), param: str = "input"
) -> list[Message]:
    """Items as messages. Calls that follow each other are one message, and so is what the model thought before them.

    `known_calls` are those that were made before; None: whatever they are.
    """
    messages: list[Message] = []
    known, thought = set(known_calls or ()), ""
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            thought += _thought(item)
            continue
        if kind == "function_call_output":
            messages.append(_call_output(item, most_parts, param))
            if known_calls is not None and item["call_id"] not in known:
                what = f"no function call found for the output with call_id {shown(item['call_id'])}"
                raise ApiError(400, what, param=param)
        elif kind == "function_call":
            known.add(_add_call(messages, item, param))
        else:
            messages.append(dict(as_message(item, most_parts, param)))
        if thought and messages[-1]["role"] == "assistant" and "reasoning_content" not in messages[-1]:
            messages[-1]["reasoning_content"] = thought
        thought = ""
    if not messages:
        raise ApiError(400, f"{param} must have a message", param=param)
    check_calls(messages, param)
    return messages


def call_ids(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """Of all calls in a conversation."""
    return {call["id"] for message in messages for call in message.get("tool_calls") or () if "id" in call}


def _thought(item: Item) -> str:
    """What a reasoning item says; it is the template's to show it to the model or not."""
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    said = "".join(text for text in texts if isinstance(text, str))
    if said or not isinstance(item.get("encrypted_content"), str):
        return said
    try:
        return base64.b64decode(item["encrypted_content"], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):  # of another server
        return ""


def _add_call(messages: list[Message], item: Item, param: str) -> str:
    """Returns its id."""
    arguments = item.get("arguments")
    if item.get("status") == "incomplete" and isinstance(arguments, str):  # the answer was cut off in it
        arguments = _whole_or_none(arguments)
    function = {"name": item.get("name"), "arguments": arguments}
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise ApiError(400, "a function_call item requires call_id", param=param)
    call = {"id": call_id, "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    return call_id


def _whole_or_none(arguments: str) -> str:
    """Arguments that are JSON still; else none."""
    try:
        return arguments if isinstance(read_json(arguments.encode(), "arguments"), dict) else "{}"
    except ValueError:
        return "{}"


def _call_output(item: Item, most_parts: int, param: str) -> Message:
    if not isinstance(item.get("call_id"), str):
        raise ApiError(400, "a function_call_output item requires call_id", param=param)
    told = as_message({"role": "tool", "content": item.get("output")}, most_parts, param)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": told["content"]}


def as_message(item: Any, most_parts: int, param: str = "input") -> dict[str, str]:
    """One message of a list that a client gave."""
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        kind = item.get("type") if isinstance(item, dict) else type(item).__name__
        raise ApiError(400, f"input items of type {shown(kind)} are not supported; supported: {KNOWN}", param=param)
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or role not in get_args(Role):
        raise ApiError(400, f"unknown role {shown(role)}", param=param)
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list) or not 1 <= len(content) <= most_parts:
        raise ApiError(400, f"content must be a string or a list of 1 to {most_parts} parts", param=param)
    texts = []
    for part in content:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if not isinstance(kind, str) or kind not in TEXT_PARTS or not isinstance(text, str):
            raise ApiError(400, "only text parts are supported", param=param)
        texts.append(text)
    return {"role": role, "content": "".join(texts)}


# -- pages of lists ---------------------------------------------------------------------------------------------------

Limit = Annotated[int, Query(ge=1, le=100, description="Objects on a page.")]
After = Annotated[str | None, Query(max_length=256, description="The last object of the page before: `last_id`.")]
Order = Annotated[Literal["asc", "desc"], Query(description="By creation time.")]


def page_of(data: list[Item], *, has_more: bool) -> dict[str, Any]:
    """A page in OpenAI's shape."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}


def item_page(
    items: Sequence[Item], limit: int, after: str | None, order: str, shape: Callable[[Item], Item] = dict
) -> dict[str, Any]:
    """A page of items that are in the order of their creation."""
    ordered = list(items if order == "asc" else reversed(items))
    if after is not None:
        place = next((place for place, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise ApiError(404, f"no item {after!r:.80}", param="after")
        ordered = ordered[place + 1 :]
    return page_of([shape(item) for item in ordered[:limit]], has_more=len(ordered) > limit)
