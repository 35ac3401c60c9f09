"""Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`.

A body is translated to a `ChatInput`, deltas to content blocks. A stream and a whole message are made by the same
`Blocks`, so that they say the same. KV is reused wherever a prefix is the same: `cache_control` is accepted, and only
decides under which name the tokens of a prompt are counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictInt, WithJsonSchema
from starlette.responses import JSONResponse, Response

from tokenmill.outputs import OutputDelta, RequestOutput, TurnPart, Usage
from tokenmill.params import MAX_TOKENS
from tokenmill.server import schemas
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError, Dialect
from tokenmill.server.fields import MOST_IDS, Endpoint, JsonObject, Texts, at_most
from tokenmill.server.models import ServedModel
from tokenmill.server.requests import (
    ChatInput,
    DeclaredTools,
    Length,
    ModelName,
    Shared,
    check_calls,
    shown_tools,
    tool_use,
    with_effort,
)
from tokenmill.server.served import Served
from tokenmill.server.sse import Framing, event
from tokenmill.server.streaming import Call, call_arguments, while_connected
from tokenmill.text.tool_grammar import ToolUse

EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = ("enabled", "disabled", "adaptive", "between_tools")
BILLING_PREFIX = "x-anthropic-billing-header:"
"""Begins a system block of Claude Code that differs in each request: in the prompt it would defeat the prefix cache."""


def message_routes(served: Served) -> APIRouter:
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["Anthropic"])

    @api.post("/messages", responses=schemas.generated(schemas.AnthropicMessage, schemas.AnthropicError))
    async def create_message(http: Request, body: MessagesRequest) -> Response:
        """An answer to a conversation, in Anthropic's format."""
        model = await served.models.use(body.model, default_model=served.config.default_model)
        call = served.call(http.state.caller, body, model, "msg_")
        await call.chat(body.chat(model, served.config), reasons=model.reasons)
        return await call.respond(MessageWriter(call, body, model), stream=bool(body.stream))

    refusals = schemas.errors(400, 401, 404, 413, 429, 503, shape=schemas.AnthropicError)

    @api.post("/messages/count_tokens", responses={200: {"model": schemas.AnthropicCount}, **refusals})
    async def count_message_tokens(http: Request, body: CountTokensRequest) -> Response:
        """The number of input tokens of a conversation."""
        model = await served.models.use(body.model, default_model=served.config.default_model)
        asked, template = body.chat(model, served.config), model.llm.opened.text.chat_template()

        def count() -> int:
            return len(template.encode(asked.messages, MOST_IDS, **asked.options))

        num_tokens = await while_connected(http.state.caller, served.texts.run(http.state.caller.body_bytes, count))
        return JSONResponse({"input_tokens": num_tokens})

    return api


def describe_model(model: dict[str, Any]) -> dict[str, Any]:
    """A model of `/v1/models` as Anthropic's clients expect it."""
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    about = {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}
    return {**about, "lifecycle": "active", "max_input_tokens": model["max_model_len"], "max_tokens": None}


def list_models(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`/v1/models`, in one page."""
    data = [describe_model(model) for model in models]
    ids = [model["id"] for model in data] or [None]
    return {"data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


# -- from the body to a conversation ----------------------------------------------------------------------------------


STRING = {"type": "string"}


def _block(kind: str, **required: Any) -> dict[str, Any]:
    properties = {"type": {"const": kind}, **required}
    return {"type": "object", "properties": properties, "required": list(properties)}


CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    _block("text", text=STRING),
                    _block("tool_use", id=STRING, name=STRING, input={"type": "object"}),
                    _block("tool_result", tool_use_id=STRING),
                    _block("thinking", thinking=STRING, signature=STRING),
                    _block("redacted_thinking", data=STRING),
                ]
            },
        },
    ]
}
SYSTEM = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": _block("text", text=STRING)},
        {"type": "null"},
    ]
}


class GivenMessage(BaseModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, WithJsonSchema(CONTENT)]


class CountTokensRequest(Shared):
    """What both endpoints understand: all that a prompt is made of."""

    endpoint = Endpoint.MESSAGES
    max_stops: ClassVar[int | None] = 64

    model: ModelName = None
    messages: Annotated[list[GivenMessage], FailFast(), at_most(1 << 16), Field(min_length=1)]
    system: Annotated[Any, WithJsonSchema(SYSTEM)] = None
    tools: DeclaredTools = None
    tool_choice: JsonObject = None
    thinking: JsonObject = Field(None, description="`enabled` with `budget_tokens`, `adaptive` or `disabled`.")
    output_config: JsonObject = Field(None, description="`format`: a JSON schema; `effort`: told to the template.")
    output_format: JsonObject = Field(None, description="The older name of `output_config.format`.")
    stop_sequences: Texts = None
    max_tokens: Length = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello"}]}],
        }
    )

    def chat(self, model: ServedModel, config: ServerConfig) -> ChatInput:
        """The conversation that it asks to be answered, checked."""
        self.check(config)
        thinks, budget = self._thinking()
        options = with_effort({"enable_thinking": thinks}, self._effort())
        use = None
        tools = [_tool(place, tool) for place, tool in enumerate(self.tools or ())]
        if tools or self.tool_choice is not None:
            use = self._tool_use(tools)
        if use is not None and use.tools:
            options["tools"] = shown_tools(tools)
        messages = [*self._system(), *(one for given in self.messages for one in _messages(given))]
        check_calls(messages)
        if len(messages) > config.max_messages:
            raise ApiError(400, f"at most {config.max_messages} messages", param="messages")
        # A conversation that ends with the assistant's words is continued from there.
        is_prefilled = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        options["continue_final_message" if is_prefilled else "add_generation_prompt"] = True
        params = replace(model.chat_params, **self.changes())
        return ChatInput(messages, params, options, use, budget, self.constraining)

    def changes(self) -> dict[str, Any]:
        given = super().changes()
        return given if self.stop_sequences is None else {**given, "stop": self.stop_sequences}

    def check(self, config: ServerConfig) -> None:
        if self.stop is not None and self.stop_sequences is not None:
            raise ApiError(400, "stop and stop_sequences are mutually exclusive", param="stop")
        super().check(config)
        for message in self.messages:
            if isinstance(message.content, list) and len(message.content) > config.max_content_parts:
                what = f"at most {config.max_content_parts} blocks in a message's content"
                raise ApiError(400, what, param="messages")

    @property
    def marks_cache(self) -> bool:
        """Does it mark a prefix to be cached, anywhere?"""
        blocks = [self.system, self.tools, *(message.content for message in self.messages)]
        marked = (block for one in blocks if isinstance(one, list) for block in one if isinstance(block, dict))
        return any(block.get("cache_control") for block in ({**(self.model_extra or {})}, *marked))

    def _thinking(self) -> tuple[bool, int | None]:
        """Is the model told to think, and for how many tokens at most? Without the field it is told not to."""
        kind = None if self.thinking is None else self.thinking.get("type")
        if self.thinking is None or kind == "disabled":
            return False, None
        if kind not in THINKING:
            raise ApiError(400, f"thinking.type must be one of {', '.join(THINKING)}", param="thinking")
        budget = self.thinking.get("budget_tokens")
        if kind != "enabled":
            return True, None
        if type(budget) is not int or not 0 < budget <= MAX_TOKENS:
            what = f"thinking.budget_tokens must be an integer from 1 to {MAX_TOKENS}"
            raise ApiError(400, what, param="thinking")
        return True, budget

    def _effort(self) -> str | None:
        effort = (self.output_config or {}).get("effort")
        if effort not in (None, *EFFORTS):
            raise ApiError(400, f"output_config.effort must be one of {', '.join(EFFORTS)}", param="output_config")
        return "xhigh" if effort == "max" else effort

    def _tool_use(self, tools: list[dict[str, Any]]) -> ToolUse:
        choice = self.tool_choice or {"type": "auto"}
        kinds: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        kinds["tool"] = {"type": "function", "function": {"name": choice.get("name")}}
        kind = choice.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise ApiError(400, f"tool_choice.type must be one of {', '.join(kinds)}", param="tool_choice")
        is_one = choice.get("disable_parallel_tool_use")
        if is_one not in (None, True, False):
            raise ApiError(400, "tool_choice.disable_parallel_tool_use must be true or false", param="tool_choice")
        return tool_use(tools, kinds[kind], not is_one)

    def _system(self) -> list[dict[str, Any]]:
        if self.system is None or self.system == []:
            return []
        content = _texts(self.system, "system", "text")
        if isinstance(content, list):
            content = [part for part in content if not part["text"].startswith(BILLING_PREFIX)]
        return [{"role": "system", "content": content}] if content else []


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "smollm2-135m",
                    "max_tokens": 32,
                    "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
                }
            ]
        }
    )

    def changes(self) -> dict[str, Any]:
        return {**super().changes(), "max_tokens": self.max_tokens}


def _tool(place: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    kind = tool.get("type") or "custom"
    if kind != "custom":
        what = "tools that run on the server are not supported; supported: custom"
        raise ApiError(400, f"tools[{place}]: type {kind!r:.40}: {what}", param="tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


ROLE_OF = {"tool_result": "user", **dict.fromkeys(("tool_use", "thinking", "redacted_thinking"), "assistant")}
"""Whose messages have blocks of a type, where only one role's do."""


def _messages(given: GivenMessage) -> Iterable[dict[str, Any]]:
    """A message in OpenAI's form; the results of tools are messages of their own, before the rest of it."""
    if given.role == "system":
        yield {"role": "system", "content": _texts(given.content, "messages", "text")}
        return
    if isinstance(given.content, str):
        yield {"role": given.role, "content": given.content}
        return
    blocks = _blocks(given.content, "messages")
    for block in blocks:
        kind = block.get("type")
        role = ROLE_OF.get(kind, given.role) if isinstance(kind, str) else given.role
        if role != given.role:
            raise ApiError(400, f"{kind} blocks belong to messages of the {role}", param="messages")
    if not blocks and given.role == "user":
        raise ApiError(400, "the content of a user's message must not be empty", param="messages")
    results = [block for block in blocks if block.get("type") == "tool_result"]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    yield from map(_tool_result, results)
    # Thinking that was redacted was never shown: there is nothing in it for the model.
    kinds = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    rest = [block for block in blocks if block.get("type") not in kinds]
    thinking = [block.get("thinking") for block in blocks if block.get("type") == "thinking"]
    message: dict[str, Any] = {"role": given.role, "content": _texts(rest, "messages", *kinds, "text") if rest else ""}
    if thinking:
        if not all(isinstance(text, str) for text in thinking):
            raise ApiError(400, "a thinking block requires thinking, a string", param="messages")
        message["reasoning_content"] = "".join(map(str, thinking))
    if calls:
        message["tool_calls"] = [_past_call(block) for block in calls]
        message["content"] = message["content"] or None
    if rest or calls or given.role == "assistant":
        yield message


def _tool_result(block: Mapping[str, Any]) -> dict[str, Any]:
    name, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(name, str):
        raise ApiError(400, "a tool_result block requires tool_use_id", param="messages")
    told = "" if content is None or content == [] else _texts(content, "messages", "text")
    return {"role": "tool", "tool_call_id": name, "content": told}


def _past_call(block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(block.get("id"), str):
        raise ApiError(400, "a tool_use block requires id", param="messages")
    if not isinstance(given, dict):
        raise ApiError(400, "the input of a tool_use block must be an object", param="messages")
    function = {"name": block.get("name"), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


def _blocks(content: Any, param: str) -> list[dict[str, Any]]:
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise ApiError(400, f"{param}: content must be a string or a list of content blocks", param=param)


def _texts(content: Any, param: str, *supported: str) -> str | list[dict[str, Any]]:
    """Content that is text alone, as text parts. A document may be one."""
    if isinstance(content, str):
        return content
    parts = []
    for block in _blocks(content, param):
        source = block.get("source")
        text = block.get("text")
        if block.get("type") == "document" and isinstance(source, dict) and source.get("type") == "text":
            text = source.get("data")
        elif block.get("type") != "text":
            what = f"content blocks of type {block.get('type')!r:.40} are not supported; supported: "
            raise ApiError(400, what + ", ".join(supported), param=param)
        if not isinstance(text, str):
            raise ApiError(400, f"{param}: a text block requires text, a string", param=param)
        parts.append({"type": "text", "text": text})
    return parts


# -- from deltas to content blocks ------------------------------------------------------------------------------------

BLOCK_OF = {"content": "text", "reasoning": "thinking", "call": "tool_use", "arguments": "tool_use"}
"""The type of the block that a part of an answer belongs to."""
PING = event({"type": "ping"}, "ping")


class Blocks:
    """The content of an answer, block by block, and the events that tell of it."""

    def __init__(self, signature: str, *, shows_thinking: bool) -> None:
        self.content: list[dict[str, Any]] = []
        self._signature = signature
        """Of thinking: clients send it back, and it is not looked at."""
        self._shows_thinking = shows_thinking
        self._arguments = ""
        """JSON of the call that is open."""
        self._is_open = False

    def add(self, part: TurnPart) -> list[dict[str, Any]]:
        """Add a part to its block, a new one if need be."""
        if not part.text and part.kind != "call":
            return []
        told = []
        kind = BLOCK_OF[part.kind]
        if part.kind == "call" or not self._is_open or self.content[-1]["type"] != kind:
            told = [*self.end(), self._begin(kind, part)]
        if part.kind == "call":
            return told
        block, text = self.content[-1], part.text
        if part.kind == "content":
            block["text"] += text
            delta = {"type": "text_delta", "text": text}
        elif part.kind == "arguments":
            self._arguments += text
            delta = {"type": "input_json_delta", "partial_json": text}
        elif self._shows_thinking:
            block["thinking"] += text
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            return told
        return [*told, self._event("content_block_delta", delta=delta)]

    def end(self) -> list[dict[str, Any]]:
        """The block that is open is complete, or cut off."""
        if not self._is_open:
            return []
        self._is_open = False
        block, told = self.content[-1], []
        if block["type"] == "tool_use":
            block["input"] = call_arguments(self._arguments)
        elif block["type"] == "thinking":
            block["signature"] = self._signature
            delta = {"type": "signature_delta", "signature": self._signature}
            told.append(self._event("content_block_delta", delta=delta))
        return [*told, self._event("content_block_stop")]

    def _begin(self, kind: str, part: TurnPart) -> dict[str, Any]:
        block: dict[str, Any] = {"type": kind}
        if kind == "text":
            block |= {"text": "", "citations": None}
        elif kind == "thinking":
            block |= {"thinking": "", "signature": ""}
        else:
            block |= {"id": part.call_id, "name": part.name, "input": {}}
        self.content.append(block)
        self._arguments, self._is_open = "", True
        return self._event("content_block_start", content_block=dict(block))

    def _event(self, kind: str, **data: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self.content) - 1, **data}


class MessageWriter:
    """A message: whole, or as its events."""

    framing = Framing(keep_alive=PING)

    def __init__(self, call: Call, body: MessagesRequest, model: ServedModel) -> None:
        self._call = call
        self._max_model_len = model.llm.max_model_len
        self._marks_cache = body.marks_cache
        shows = body.thinking is None or body.thinking.get("display") != "omitted"
        self._blocks = Blocks(call.id, shows_thinking=shows)
        self._model_name = body.model or model.name
        self._has_pinged = False
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        (choice,) = output.outputs
        for part in [TurnPart("content", choice.text)] if choice.parts is None else choice.parts:
            self._blocks.add(part)
        self._blocks.end()
        end = self._ending(choice.finish_reason, choice.stop_reason, output.usage)
        return self._message(self._blocks.content, end, output.usage)

    def opening(self) -> bytes:
        used = replace(self._call.generations[0].usage, completion_tokens=0)
        return _event({"type": "message_start", "message": self._message([], self._end, used)})

    def delta(self, delta: OutputDelta) -> bytes:
        parts = [TurnPart("content", delta.text)] if delta.parts is None else delta.parts
        told = b"".join(_event(one) for part in parts for one in self._blocks.add(part))
        if delta.finish_reason is not None:
            used = self._call.generations[0].usage
            self._end = self._ending(delta.finish_reason, delta.stop_reason, used)
        if told and not self._has_pinged:
            self._has_pinged = True
            first, end, rest = told.partition(b"\n\n")
            return first + end + PING + rest
        return told

    def closing(self) -> bytes:
        told = [*self._blocks.end(), {"type": "message_delta", "delta": self._end, "usage": self._usage()}]
        return b"".join(map(_event, [*told, {"type": "message_stop"}]))

    def failed(self, error: ApiError) -> bytes:
        return event(Dialect.ANTHROPIC.error_body(error, self._call.caller.request_id), "error")

    def _ending(self, reason: str | None, stop: str | int | None, used: Usage) -> dict[str, Any]:
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        told = reasons.get(reason or "")
        if told == "max_tokens" and used.prompt_tokens + used.completion_tokens >= self._max_model_len:
            told = "model_context_window_exceeded"
        if told == "end_turn" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": told, "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]], end: dict[str, Any], used: Usage) -> dict[str, Any]:
        head = {"id": self._call.id, "type": "message", "role": "assistant", "model": self._model_name}
        return {**head, "content": content, **end, "usage": self._usage(used)}

    def _usage(self, used: Usage | None = None) -> dict[str, Any]:
        """The three counts of input tokens add up to the prompt: cached, to be cached from now on, and others."""
        used = used or self._call.generations[0].usage
        computed = used.prompt_tokens - used.cached_tokens
        return {
            "input_tokens": 0 if self._marks_cache else computed,
            "cache_creation_input_tokens": computed if self._marks_cache else 0,
            "cache_read_input_tokens": used.cached_tokens,
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"thinking_tokens": used.reasoning_tokens},
            "service_tier": "standard",
        }


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])
