"""Request bodies, validated by pydantic, and their conversion to `SamplingParams`.

A body declares the supported fields; `fields.py` decides about others that clients are known to send, and unknown
ones are ignored. Types are checked here, limits come from `ServerConfig`, and values are checked by `SamplingParams`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StrictInt,
    StrictStr,
    WithJsonSchema,
    model_validator,
)

from tokenmill.errors import InvalidRequest
from tokenmill.params import (
    CONSTRAINTS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_TOKENS,
    SamplingParams,
    StructuredOutputs,
    min_json_chars,
    shown,
)
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError
from tokenmill.server.fields import (
    KNOWN,
    MAX_JSON_WORK,
    Content,
    Endpoint,
    Flag,
    Ids,
    JsonObject,
    JsonSchema,
    MuchWork,
    Number,
    Stop,
    Texts,
    TextsOrIds,
    at_most,
    json_work,
    list_of,
    read_json,
)
from tokenmill.session.session import MAX_METADATA, MAX_TITLE_CHARS, OVERFLOW_KEEP, Overflow, check_metadata
from tokenmill.text.tool_grammar import REMARKS, Tool, ToolUse

log = logging.getLogger(__name__)


class Body(BaseModel):
    """Undeclared fields are rejected or ignored."""

    model_config = ConfigDict(extra="allow")

    endpoint: ClassVar[Endpoint | None] = None
    """The dialect whose rules apply to undeclared fields; None if they are ignored."""

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, body: Any) -> Any:
        """First of all: with a rejected field, nothing else in the body matters."""
        others = [name for name in body if name not in cls.model_fields] if isinstance(body, dict) else []
        for name in others:
            field = KNOWN.get(name)
            if field is not None and cls.endpoint in field.where and not field.accepts(body[name], body):
                raise field.rejection()
        if others:
            log.debug("fields without effect: %s", ", ".join(f"{name!r:.40}" for name in others[:20]))
        return body


class StreamOptions(Body):
    include_usage: Flag = None
    continuous_usage_stats: Flag = None
    """Usage so far in every chunk."""


ModelName = Annotated[
    StrictStr | None, Field(description="May be left out where the server has one model (--no-default-model: never).")
]


Metadata = Annotated[dict[str, StrictStr] | None, at_most(MAX_METADATA)]


class Hinted(Body):
    """Fields of all endpoints that use the engine."""

    timeout_s: Annotated[Number, Field(gt=0)] | None = Field(None, description="Give up after so many seconds.")
    priority: Annotated[StrictInt, Field(ge=0, le=100)] | None = Field(
        None, description="Greater ones wait for smaller ones."
    )
    cache_salt: StrictStr | None = Field(
        None, min_length=1, max_length=256, description="KV is shared only between requests with the same salt."
    )
    max_context: Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        None, description="Maximum tokens of prompt and output together, below those of the model and the API key."
    )
    max_tokens_per_step: Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        None,
        description="Maximum prompt tokens in one engine step: others notice less of the request.",
    )


# In the OpenAPI document the bounds would be floats, which round these up to invalid values.
Seed = Annotated[StrictInt, Field(ge=-MAX_SEED - 1, le=MAX_SEED), WithJsonSchema({"type": "integer"})]


class Shared(Hinted):
    """Fields of all endpoints that generate."""

    max_stops: ClassVar[int | None] = None
    """Stop strings from clients of dialects other than OpenAI's."""

    stream: Flag = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: Seed | None = None
    stop: Stop = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number] | None, at_most(1 << 14)] = None
    # Extensions, named as in other servers.
    top_k: StrictInt | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: StrictInt | None = None
    stop_token_ids: Ids = None
    ignore_eos: Flag = None
    skip_special_tokens: Flag = None
    include_stop_str_in_output: Flag = None
    allowed_token_ids: Ids = None
    dry_multiplier: Number | None = None
    dry_base: Number | None = None
    dry_allowed_length: StrictInt | None = None
    xtc_probability: Number | None = None
    xtc_threshold: Number | None = None
    speculation: StrictStr | None = Field(
        None, description="Tokens verified several at a time: auto, off, lookup or draft. The output is the same."
    )
    # Structured output: vLLM's names, its older ones, llama-server's and SGLang's.
    structured_outputs: JsonObject = None
    guided_json: JsonSchema = None
    guided_regex: StrictStr | None = None
    guided_choice: Texts = None
    guided_grammar: StrictStr | None = None
    guided_whitespace_pattern: StrictStr | None = None
    structural_tag: JsonSchema = None
    json_schema: JsonSchema = None
    grammar: StrictStr | None = None
    ebnf: StrictStr | None = None
    regex: StrictStr | None = None

    def check(self, config: ServerConfig) -> None:
        """Check this server's limits, beyond those of `SamplingParams`."""
        stops, most = [self.stop] if isinstance(self.stop, str) else self.stop or [], self.max_stops or config.max_stops
        if len(stops) > most or not all(0 < len(one) <= config.max_stop_chars for one in stops):
            what = f"at most {most} strings of 1 to {config.max_stop_chars} characters each"
            raise ApiError(400, f"stop must have {what}", param="stop")
        bias = self.logit_bias or {}
        if len(bias) > config.max_logit_bias or any(abs(value) > 100 for value in bias.values()):
            what = f"at most {config.max_logit_bias} tokens, each with a bias of -100 to 100"
            raise ApiError(400, f"logit_bias: {what}", param="logit_bias")

    def changes(self) -> dict[str, Any]:
        """The parameters set by the request; all others have the defaults of its model or session."""
        given = {
            name: value
            for name in type(self).model_fields
            if name in SAME_NAMES and (value := getattr(self, name)) is not None
        }
        if self.seed is not None:
            given["seed"] = self.seed & MAX_SEED  # OpenAI's seeds may be negative; use their lower bits
        return given if CONSTRAINING.isdisjoint(self.model_fields_set) else given | self._constraint()

    @property
    def constraining(self) -> str:
        """The field that requests structured output, if any."""
        return next((name for name in type(self).model_fields if name in CONSTRAINING and getattr(self, name)), "model")

    def _constraint(self) -> dict[str, Any]:
        """`structured_outputs`, from whichever field requests them; None for plain text."""
        asked: dict[str, dict[str, Any] | None] = {}
        if self.structured_outputs:
            asked["structured_outputs"] = self.structured_outputs
        for name, kind in GUIDED.items():
            if getattr(self, name):
                asked[name] = {kind: getattr(self, name)}
        for name in type(self).model_fields:
            if name in FORMATS and getattr(self, name) is not None:
                wanted = format_of(name, getattr(self, name))
                asked |= {name: wanted} if wanted or not asked else {}
        if not asked:
            return {}
        (name, fields), *others = asked.items()
        if others:
            raise ApiError(400, f"{name} and {others[0][0]} are mutually exclusive", param=others[0][0])
        if fields is None:
            return {"structured_outputs": None}
        whitespace = {"whitespace_pattern": self.guided_whitespace_pattern} if self.guided_whitespace_pattern else {}
        return {"structured_outputs": structured_outputs(name, fields | whitespace)}


GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_schema": "json",
    "grammar": "grammar",
    "ebnf": "grammar",
    "regex": "regex",
}
"""Fields that are a constraint by themselves -> the field of `StructuredOutputs`."""
FORMATS = frozenset({"response_format", "text", "output_config", "output_format"})
CONSTRAINING = FORMATS | {"structured_outputs", *GUIDED}
NO_EFFECT = frozenset({"disable_any_whitespace", "disable_fallback", "backend", "disable_additional_properties"})
"""Options of vLLM's `structured_outputs` that may be false."""


def structured_outputs(name: str, fields: dict[str, Any]) -> StructuredOutputs:
    """Parse the field of this name, in vLLM's format; 400 if it is invalid."""
    given = {key: value for key, value in fields.items() if value is not None}
    if given.pop("disable_any_whitespace", False) is True and given.get("any_whitespace"):
        raise ApiError(400, f"{name}: any_whitespace and disable_any_whitespace contradict each other", param=name)
    given = {key: value for key, value in given.items() if key not in NO_EFFECT or value not in (False, "auto")}
    unknown = next((key for key in given if key not in StructuredOutputs.__dataclass_fields__), None)
    if unknown is not None:
        known = ", ".join((*CONSTRAINTS, "any_whitespace", "whitespace_pattern"))
        raise ApiError(400, f"{name}: {unknown!r:.60} is not supported; supported: {known}", param=name)
    try:
        return StructuredOutputs(**given)
    except InvalidRequest as error:
        raise ApiError(400, str(error).replace("structured_outputs", name, 1), param=name) from None


def format_of(name: str, value: Mapping[str, Any]) -> dict[str, Any] | None:
    """Fields of `StructuredOutputs` for a field that describes the answer's format; None for plain text.

    OpenAI's `response_format` nests the schema one level deeper than its `text`, and than Anthropic's fields.
    """
    form = value.get("format") if name in ("text", "output_config") else value
    kind = "text" if form is None else form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag" and isinstance(form, Mapping):
        return {"structural_tag": {key: form.get(key) for key in ("structures", "triggers")}}
    if kind == "json_schema" and isinstance(form, Mapping):
        inner = form.get("json_schema") if name == "response_format" else form
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if isinstance(schema, Mapping):
            return {"json": schema}
        raise ApiError(400, f"{name}: json_schema requires a schema, which is a JSON object", param=name)
    raise ApiError(400, f"{name}: type must be text, json_object, json_schema or structural_tag", param=name)


SAME_NAMES = frozenset(SamplingParams.__dataclass_fields__) - {
    "max_tokens", "logprobs", "seed", "attempt", "structured_outputs",
}  # fmt: skip
"""Fields with the same name and meaning in `SamplingParams`."""


class SamplingFields(Shared):
    """Fields of chats and completions."""

    stream_options: StreamOptions | None = None
    n: StrictInt | None = None
    response_format: JsonObject = None
    # Extensions, named as in other servers.
    prompt_logprobs: StrictInt | None = None
    return_token_ids: Flag = None

    def check(self, config: ServerConfig) -> None:
        super().check(config)
        if self.n is not None and not 1 <= self.n <= config.max_n:
            raise ApiError(400, f"n must be from 1 to {config.max_n}", param="n")
        if self.stream_options is not None and not self.is_streamed:
            raise ApiError(400, "stream_options requires stream: true", param="stream_options")

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return bool(self.wants_usage and self.stream_options and self.stream_options.continuous_usage_stats)


Length = Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)] | None
TopLogprobs = Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None


# -- tools and reasoning ----------------------------------------------------------------------------------------------

MAX_TOOLS = 1024
MAX_NEW_ITEMS = 20
"""Maximum tools of a conversation in one request."""
MAX_PAST_CALLS, MAX_ARGUMENTS_WORK = 4096, MAX_JSON_WORK // 4
"""Maximum over all messages: past calls are checked on the event loop."""
NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,64}")
Tools = Annotated[
    Any,
    at_most(MAX_TOOLS),
    list_of(dict, "tools"),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
]
Choice = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", "none", "required"]},
                {"type": "object", "description": "Names the function to call."},
                {"type": "null"},
            ]
        }
    ),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


DeclaredTools = Annotated[Tools, Field(description="Functions that the model may call.")]
Parallel = Annotated[Flag, Field(description="False: one call in an answer at most.")]
Budget = Annotated[
    Annotated[StrictInt, Field(ge=0, le=MAX_TOKENS)] | None,
    Field(description="Force the end of thinking after this many tokens."),
]


def shown_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in the format of chat templates; in the Responses API a function's fields are not nested."""
    return [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        if "function" not in tool and tool.get("type", "function") == "function"
        else dict(tool)
        for tool in tools
    ]


def tool_use(tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """The functions that may be called, validated: 400 for contradictions."""
    declared = [_tool(place, tool) for place, tool in enumerate(shown_tools(tools or ()))]
    names = [tool.name for tool in declared]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"tools: the function {twice!r} is declared twice", param="tools")
    wanted, mode = _choice(choice)
    if not declared and mode not in ("auto", "none"):
        raise ApiError(400, "tool_choice requires tools", param="tool_choice")
    if unknown := sorted(set(wanted or ()) - set(names)):
        raise ApiError(400, f"tool_choice: there is no tool {unknown[0]!r}", param="tool_choice")
    if mode == "none":
        return ToolUse()
    chosen = tuple(tool for tool in declared if wanted is None or tool.name in wanted)
    _check_length(chosen)
    is_one = mode == "named" or parallel is False  # a named function is called once
    return ToolUse(chosen, required=mode != "auto", parallel=not is_one)


def _check_length(tools: Sequence[Tool]) -> None:
    """Their grammar is bounded as well, but only later, when the prompt is rendered and tokenized."""
    left = MAX_GRAMMAR_BYTES
    for tool in tools:
        left -= min_json_chars(tool.schema, left, REMARKS)
        if left < 0:
            what = f"at most {MAX_GRAMMAR_BYTES >> 10} KiB are allowed, without descriptions"
            raise ApiError(400, f"tools: the schemas are too long: {what}", param="tools")


def _choice(choice: Any) -> tuple[list[str] | None, str]:
    """The functions that a `tool_choice` names (None: all), and whether a call is required."""
    if choice is None or choice in ("auto", "none", "required"):
        return None, choice or "auto"
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        named = choice.get("function", choice)
        if isinstance(named, Mapping) and isinstance(named.get("name"), str):
            return [named["name"]], "named"
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if isinstance(listed, list) and 0 < len(listed) <= MAX_TOOLS and allowed.get("mode") in ("auto", "required"):
            names = [_choice({"type": "function", **one})[0] for one in listed if isinstance(one, Mapping)]
            return [name for one in names if one is not None for name in one], allowed["mode"]
    what = 'must be "auto", "none", "required", or an object that names a function'
    raise ApiError(400, f"tool_choice {what}", param="tool_choice")


def _tool(place: int, tool: Mapping[str, Any]) -> Tool:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        what = f"tools of type {shown(tool.get('type'))} are not supported; supported: function"
        raise ApiError(400, f"tools[{place}]: {what}", param="tools")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        what = "a name of 1 to 64 letters, digits, underscores, dashes and dots"
        raise ApiError(400, f"tools[{place}]: a function requires {what}, not {shown(name)}", param="tools")
    if schema is not None and (not isinstance(schema, Mapping) or schema.get("type", "object") != "object"):
        raise ApiError(400, f"tools[{place}]: the parameters of {name} must be a schema of an object", param="tools")
    return Tool(name, schema or {"type": "object", "properties": {}})


def session_use(declared: Sequence[Mapping[str, Any]], body: ChatFields) -> ToolUse | None:
    """The functions that a session's answer may call: those that the session was created with."""
    if body.tools:
        raise ApiError(400, "the tools of a session are declared when it is created", param="tools")
    if not declared and body.tool_choice is None:
        return None
    return tool_use(declared, body.tool_choice, body.parallel_tool_calls)


def check_calls(messages: Iterable[Mapping[str, Any]], param: str = "messages") -> None:
    """Validate tool calls of past messages: each has a name, and arguments that are a JSON object."""
    left, num_calls = MAX_ARGUMENTS_WORK, 0
    for message in messages:
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise ApiError(400, "tool_calls must be a list", param=param)
        num_calls += len(calls)
        if num_calls > MAX_PAST_CALLS:
            raise ApiError(400, f"at most {MAX_PAST_CALLS} tool calls in all messages", param=param)
        for call in calls:
            left -= _check_call(call, param, left)


def _check_call(call: Any, param: str, most_work: int) -> int:
    """Returns the amount of work to parse its arguments."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, "a tool call requires a function with a name", param=param)
    arguments = given = function.get("arguments") or {}
    what, text = f"the arguments of the call of {function['name'][:64]}", b""
    if isinstance(given, str):
        text = given.strip().encode()
        try:
            arguments = read_json(text, what, most_work) if text else {}
        except MuchWork as error:
            raise ApiError(400, f"{error}, with those of the calls before", param=param) from None
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{what} must be a JSON object, not {shown(given)}", param=param)
    return json_work(text, most_work)


def with_effort(options: dict[str, Any], effort: str | None) -> dict[str, Any]:
    """Template options for a `reasoning_effort`: some templates take it, others a switch for thinking."""
    if effort is None:
        return options
    level = effort if effort in ("low", "medium", "high") else "high" if effort == "xhigh" else "low"
    return {"reasoning_effort": level, "enable_thinking": effort != "none", **options}


@dataclass(frozen=True)
class ChatInput:
    """A conversation to be answered: the common form of all dialects' bodies."""

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    options: Mapping[str, Any]
    """Of the chat template."""
    use: ToolUse | None = None
    thinking_budget: int | None = None
    constraining: str = "model"
    """The field that requests structured output, for errors."""


# -- chat -------------------------------------------------------------------------------------------------------------

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Role
    content: Content = None


def check_messages(messages: Sequence[ChatMessage], config: ServerConfig) -> None:
    """Limits on media parts, and the cost of each."""
    if len(messages) > config.max_messages:
        raise ApiError(400, f"at most {config.max_messages} messages", param="messages")
    for message in messages:
        if isinstance(message.content, list) and len(message.content) > config.max_content_parts:
            what = f"at most {config.max_content_parts} parts in a message's content"
            raise ApiError(400, what, param="messages")
        if message.role == "tool" and not isinstance(getattr(message, "tool_call_id", None), str):
            raise ApiError(400, "a tool message requires tool_call_id", param="messages")
    if extras := [one.model_extra for one in messages if one.role == "assistant" and one.model_extra]:
        check_calls(extras)


def template_options(
    body: ChatRequest | TokenizeRequest | TemplateRequest | CreateSession, config: ServerConfig
) -> dict[str, Any]:
    """Variables for the chat template beside the messages: only those that templates are known to use."""
    options = dict(body.chat_template_kwargs or {})
    if set(options) - config.template_options:
        known = ", ".join(sorted(config.template_options))
        raise ApiError(400, f"chat_template_kwargs accepts: {known}", param="chat_template_kwargs")
    if isinstance(body, ChatFields):
        if body.reasoning_effort is not None:
            options = with_effort(options, body.reasoning_effort)
        if body.tools and body.tool_choice != "none":
            options["tools"] = shown_tools(body.tools)
    if isinstance(body, CreateSession):
        return options
    # The prompt ends where an answer begins, or the last message continues.
    if not body.continue_final_message:
        return {**options, "add_generation_prompt": body.add_generation_prompt is not False}
    if body.add_generation_prompt:
        what = "continue_final_message continues the last message, add_generation_prompt starts a new one"
        raise ApiError(400, f"{what}: they are mutually exclusive", param="continue_final_message")
    return {**options, "continue_final_message": True}


class ChatFields(SamplingFields):
    """Fields of chats and of sessions' answers."""

    endpoint = Endpoint.SESSIONS

    tools: DeclaredTools = None
    tool_choice: Choice = None
    parallel_tool_calls: Parallel = None
    thinking_token_budget: Budget = None

    reasoning_effort: Effort = Field(None, description="Told to the chat template; `none` turns thinking off.")

    max_tokens: Length = None
    max_completion_tokens: Length = None
    logprobs: Flag = None
    top_logprobs: TopLogprobs = None

    def changes(self) -> dict[str, Any]:
        given = super().changes()
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if most is not None:
            given["max_tokens"] = most
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs: true", param="top_logprobs")
        if self.logprobs is not None:
            given["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return given


class Prediction(Body):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        parts = [{"text": self.content}] if isinstance(self.content, str) else self.content or []
        return "".join(part["text"] for part in parts)


class ChatRequest(ChatFields):
    endpoint = Endpoint.CHAT

    model: ModelName = None
    prediction: Prediction | None = Field(
        None, description="What the answer is expected to say, proposed by speculation: it may come sooner."
    )
    messages: Annotated[list[ChatMessage], FailFast(), at_most(1 << 14), Field(min_length=1)]
    store: Flag = Field(None, description="Keep the completion, to be listed and retrieved later.")
    metadata: Metadata = None
    # Extensions.
    session_id: StrictStr | None = Field(
        None, max_length=256, description="Go on with this session: messages are only what is new."
    )
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    chat_template_kwargs: dict[str, Any] | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "smollm2-135m",
                    "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
                    "max_tokens": 32,
                }
            ]
        },
    )

    def check(self, config: ServerConfig) -> None:
        super().check(config)
        for name in (
            *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
            *("cache_salt", "reasoning_effort"),
        ):
            if self.session_id is not None and getattr(self, name) is not None:
                raise ApiError(400, f"{name} is not supported with session_id", param=name)
        check_messages(self.messages, config)


# -- other endpoints --------------------------------------------------------------------------------------------------


MAX_EXTRA_FILES = 256


class CompletionRequest(SamplingFields):
    endpoint = Endpoint.COMPLETIONS

    model: ModelName = None
    prompt: TextsOrIds
    max_tokens: StrictInt | None = None
    suffix: StrictStr | None = Field(
        None, description="What follows the completion, for models with fill-in-the-middle tokens."
    )
    echo: Flag = None
    logprobs: StrictInt | None = None

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 16}]},
    )

    @property
    def scores_only(self) -> bool:
        """Whether nothing is generated: the prompt is returned, optionally with log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def check(self, config: ServerConfig) -> None:
        super().check(config)
        if self.logprobs is not None and not 0 <= self.logprobs <= config.max_completion_logprobs:
            raise ApiError(400, f"logprobs must be from 0 to {config.max_completion_logprobs}", param="logprobs")
        if self.suffix and self.echo:
            raise ApiError(400, "suffix and echo are mutually exclusive", param="suffix")


class InfillRequest(Shared):
    """llama-server's infill request. Its other fields have no effect."""

    max_stops: ClassVar[int | None] = 16

    model: ModelName = None
    input_prefix: StrictStr = ""
    input_suffix: StrictStr = ""
    input_extra: Annotated[
        Any,
        at_most(MAX_EXTRA_FILES),
        list_of(dict, "objects with filename and text"),
        WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
    ] = Field(None, description="Other files of the project: each has a `filename` and a `text`.")
    prompt: StrictStr = Field("", description="How the middle begins.")
    n_predict: Annotated[StrictInt, Field(ge=-1, le=MAX_TOKENS)] = Field(-1, description="-1: no limit.")

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n", "n_predict": 16}]
        }
    )

    @property
    def files(self) -> list[tuple[str, str]]:
        """Names and texts of the other files; 400 if malformed."""
        found = [(one.get("filename", "tmp"), one.get("text")) for one in self.input_extra or ()]
        if not all(isinstance(name, str) and isinstance(text, str) for name, text in found):
            raise ApiError(400, "input_extra must be a list of objects with filename and text", param="input_extra")
        return found


class EmbeddingRequest(Hinted):
    endpoint = Endpoint.EMBEDDINGS

    model: ModelName = None
    input: TextsOrIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: StrictInt | None = None
    pooling: Literal["last", "mean"] = "last"

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "smollm2-135m", "input": ["a text", "another"]}]}
    )


class TokenizeRequest(Body):
    """A text or a conversation, with vLLM's field names (`prompt`, `messages`) or llama-server's (`content`)."""

    endpoint = Endpoint.TOKENIZE

    model: StrictStr | None = None
    prompt: StrictStr | None = Field(None, description="Tokenized as a prompt is: special tokens are added.")
    content: StrictStr | None = Field(None, description="Tokenized as it is: special tokens in it are parsed.")
    messages: Annotated[list[ChatMessage] | None, FailFast(), Field(min_length=1), at_most(1 << 16)] = None
    add_special_tokens: Flag = Field(None, description="Add BOS and the like. Default: true for `prompt`, else false.")
    add_special: Flag = Field(None, description="Another name of `add_special_tokens`.")
    parse_special: Flag = Field(
        None, description="Special tokens in the text are meant as such. Default: true for `content`, else false."
    )
    return_token_strs: Flag = Field(None, description="Add `token_strs`, the text of each token.")
    with_pieces: Flag = Field(None, description="Each of `tokens` is an object: its `id`, and its text as `piece`.")
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    chat_template_kwargs: dict[str, Any] | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "Hello there"}],
            "anyOf": [{"required": [name]} for name in ("prompt", "content", "messages")],
        }
    )

    def check(self, config: ServerConfig) -> None:
        """Exactly one of the three, and its options."""
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if not given:
            raise ApiError(400, "prompt, content or messages is required", param="prompt")
        is_same = given == ["prompt", "content"] and self.prompt == self.content  # of either server
        if len(given) > 1 and not is_same:
            what = f"only one of prompt, content and messages is allowed, not {' and '.join(given)}"
            raise ApiError(400, what, param=given[1])
        if None not in (self.add_special_tokens, self.add_special) and self.add_special != self.add_special_tokens:
            raise ApiError(400, "add_special and add_special_tokens contradict each other", param="add_special")
        if self.messages is None:
            return
        check_messages(self.messages, config)
        for name in ("add_special_tokens", "add_special", "parse_special"):
            if getattr(self, name):
                what = "the chat template adds special tokens to messages"
                raise ApiError(400, f"{name} must be false for messages: {what}", param=name)

    @property
    def adds_special(self) -> bool:
        named = self.add_special_tokens if self.add_special is None else self.add_special
        return self.prompt is not None if named is None else named

    @property
    def parses_special(self) -> bool:
        return self.prompt is None if self.parse_special is None else self.parse_special


class TemplateRequest(Body):
    """A conversation, as in llama-server's /apply-template."""

    endpoint = Endpoint.TOKENIZE

    model: StrictStr | None = None
    messages: Annotated[list[ChatMessage], FailFast(), at_most(1 << 14), Field(min_length=1)]
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    chat_template_kwargs: dict[str, Any] | None = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Hello"}]}]})


class LoadModel(Body):
    model: StrictStr


class UnloadModel(LoadModel):
    force: Flag = Field(None, description="Also while it is used: its requests and sessions end.")


class DetokenizeRequest(Body):
    model: StrictStr | None = None
    tokens: Annotated[Any, list_of(int, "token ids"), WithJsonSchema({"type": "array", "items": {"type": "integer"}})]

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [19556, 665]}]})


def _conversation_name(value: Any) -> Any:
    name = value.get("id") if isinstance(value, dict) else value
    if value is None or (isinstance(name, str) and 0 < len(name) <= 256):
        return value
    raise ValueError("must be the id of a conversation, or an object with its id")


ConversationName = Annotated[
    Any,
    AfterValidator(_conversation_name),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
                {"type": "null"},
            ],
            "description": "Go on with this conversation: input and output are added to it.",
        }
    ),
]


class ResponsesRequest(Shared):
    """A request of the Responses API. With `previous_response_id` it contains new items only."""

    endpoint = Endpoint.RESPONSES

    model: ModelName = None
    input: Annotated[
        Any,
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]}),
    ]
    instructions: StrictStr | None = None
    max_output_tokens: Length = None
    top_logprobs: TopLogprobs = None
    include: Texts = None
    metadata: Metadata = None
    tools: DeclaredTools = None
    tool_choice: Choice = None
    parallel_tool_calls: Parallel = None
    thinking_token_budget: Budget = None
    reasoning: dict[str, Any] | None = Field(None, description="`effort` is told to the chat template.")
    previous_response_id: StrictStr | None = Field(None, max_length=256)
    conversation: ConversationName = None
    store: Flag = Field(None, description="False: the response can't be retrieved, nor gone on from.")
    background: Flag = Field(None, description="Answer at once, and run without the client: it is polled for.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto`: drop the oldest turns of a conversation that exceeds the context, instead of a 400."
    )
    text: JsonObject = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "smollm2-135m", "input": "What is the capital of Japan?", "max_output_tokens": 32}]
        },
    )

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        name: str | None = given["id"] if isinstance(given, dict) else given
        return name

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def check(self, config: ServerConfig) -> None:
        super().check(config)
        check_metadata(self.metadata)
        if self.conversation is not None and self.previous_response_id is not None:
            what = "conversation and previous_response_id are mutually exclusive"
            raise ApiError(400, what, param="previous_response_id")
        if self.background and not self.is_stored:
            raise ApiError(400, "background requires store: true", param="background")
        if isinstance(self.input, list) and len(self.input) > config.max_messages:
            raise ApiError(400, f"at most {config.max_messages} items", param="input")
        effort = (self.reasoning or {}).get("effort")
        if effort not in (None, *EFFORTS):
            raise ApiError(400, f"reasoning.effort must be one of {', '.join(EFFORTS)}", param="reasoning")

    def use(self) -> ToolUse | None:
        """The functions that may be called, validated."""
        if not self.tools and self.tool_choice is None:
            return None
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def template_options(self) -> dict[str, Any]:
        """Variables for the chat template beside the messages."""
        options = with_effort({}, (self.reasoning or {}).get("effort"))
        return {**options, "tools": shown_tools(self.tools)} if self.tools and self.tool_choice != "none" else options

    def changes(self) -> dict[str, Any]:
        given = super().changes()
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        if self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ()):
            given["logprobs"] = self.top_logprobs or 0
        return given


class UpdateMetadata(Body):
    """New metadata for a stored object."""

    metadata: Metadata

    model_config = ConfigDict(json_schema_extra={"examples": [{"metadata": {"topic": "travel"}}]})


Items = Annotated[Any, list_of(dict, "items"), WithJsonSchema({"type": "array", "items": {"type": "object"}})]


class CreateConversation(Body):
    items: Annotated[Items, at_most(MAX_NEW_ITEMS)] | None = None
    metadata: Metadata = None

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"items": [{"role": "user", "content": "Hello"}], "metadata": {"topic": "x"}}]}
    )


class CreateItems(Body):
    items: Annotated[Items, at_most(MAX_NEW_ITEMS)]

    model_config = ConfigDict(json_schema_extra={"examples": [{"items": [{"role": "user", "content": "Hello"}]}]})


class CreateBatch(Body):
    input_file_id: StrictStr = Field(description="A file of requests, one JSON object a line, uploaded to /v1/files.")
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"] = Field(
        alias="endpoint", description="The one that all lines are for."
    )
    completion_window: StrictStr = Field(description="24h; other numbers of minutes, hours and days work as well.")
    metadata: Metadata = None
    output_expires_after: JsonObject = Field(
        None, description="When the files of results expire: `anchor` (`created_at`) and `seconds`. Default: 30 days."
    )

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"input_file_id": "file-abc123", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            ]
        }
    )


# -- sessions ---------------------------------------------------------------------------------------------------------


Given = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "object"}},
                {"type": "array", "minItems": 1, "items": {"type": "integer"}},
            ],
            "description": "A user's message, a list of messages, or token ids: only what is new.",
        }
    ),
]


Title = Annotated[StrictStr | None, Field(max_length=MAX_TITLE_CHARS, description="A name for lists of sessions.")]


class UpdateSession(Body):
    """Omitted fields stay as they are; null removes them."""

    title: Title = None
    metadata: Metadata = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"title": "Capitals", "metadata": {"topic": "travel"}}]})

    def changes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("title", "metadata") if name in self.model_fields_set}


class CreateSession(ChatFields):
    """A new conversation. Its sampling parameters apply to all answers that do not override them."""

    model: StrictStr | None = None
    system: StrictStr | None = Field(None, description="The system prompt.")
    messages: Given = Field(None, description="What was said before, if anything was.")
    title: Title = None
    metadata: Metadata = None
    overflow: Overflow = Field("error", description="What happens when the conversation outgrows the context.")
    overflow_keep: Annotated[Number, Field(ge=0, le=1)] = Field(
        OVERFLOW_KEEP, description="With `drop_oldest_turns`: the fraction of the context that is kept when turns go."
    )
    chat_template_kwargs: dict[str, Any] | None = None

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "smollm2-135m", "system": "Answer in one sentence."}]}
    )

    def check(self, config: ServerConfig) -> None:
        super().check(config)
        tool_use(self.tools, None, None)
        for name in ("tool_choice", "parallel_tool_calls", "thinking_token_budget"):
            if getattr(self, name) is not None:
                raise ApiError(400, f"{name} belongs to each answer of a session, not to the session", param=name)


class AppendInput(Body):
    input: Given
    raw: Flag = Field(None, description="A text goes in as it is, outside any message.")
    continue_final_message: Flag = Field(
        None,
        description="The last message, an assistant's, is the beginning of the next answer, which goes on with it.",
    )

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "What is the capital of Japan?"}]})


class AnswerRequest(ChatFields):
    """An answer to appended messages or to `input`; streamed by default."""

    input: Given = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "And of Italy?", "max_tokens": 32}]})

    def check(self, config: ServerConfig) -> None:
        super().check(config)
        for name in ("cache_salt", "prompt_logprobs"):
            if getattr(self, name) is not None:
                raise ApiError(400, f"{name} is not supported in sessions", param=name)
        if self.reasoning_effort is not None:
            what = "reasoning_effort is told to the chat template when a session is created"
            raise ApiError(400, what, param="reasoning_effort")

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False


class ResumeAnswer(Body):
    """Go on with an answer after the tokens that the client has of it."""

    answer_id: StrictStr | None = Field(None, description="`id` of the answer's events; null for the latest answer.")
    token_ids: list[StrictInt] = Field(description="All `token_ids` of the answer's events so far.")

    model_config = ConfigDict(json_schema_extra={"examples": [{"token_ids": [504, 3575]}]})


class ForkSession(Body):
    at_turn: StrictInt | None = Field(None, description="Number of turns to keep.")
    at_token: StrictInt | None = Field(None, description="Number of tokens to keep.")
    n: Annotated[StrictInt, Field(ge=1, le=64)] | None = None


class RewindSession(Body):
    at_turn: StrictInt | None = Field(None, description="Number of turns to keep.")
    at_token: StrictInt | None = Field(None, description="Number of tokens to keep.")


class EditTurn(Body):
    turn: StrictInt
    content: StrictStr


class SaveSession(Body):
    kv: Flag = Field(None, description="Put the KV into the file, too, so that it need not be computed again.")
