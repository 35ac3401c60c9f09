"""Ollama's API under `/api`: chat, generate, embeddings, and the models of the server.

Bodies are translated to a `ChatInput`, deltas to lines of JSON. `Lines` makes both a stream and a whole answer, so that
they say the same. Names may end in `:latest`, as Ollama's do.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tokenmill.backends.library import remove_model
from tokenmill.backends.loading import pull_model
from tokenmill.errors import ModelNotFound, TokenmillError
from tokenmill.outputs import OutputDelta, RequestOutput, TokenLogprobs, TurnPart, Usage
from tokenmill.server import schemas
from tokenmill.server.api.completions import infill_ids, infill_of
from tokenmill.server.api.embeddings import check_dimensions, embed_all
from tokenmill.server.api.operations import check_admin
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError, Dialect, model_not_found, to_api_error
from tokenmill.server.fields import Endpoint, Flag, Number, Texts, at_most
from tokenmill.server.middleware import Caller
from tokenmill.server.models import ModelEntry, Models, ServedModel
from tokenmill.server.requests import (
    Body,
    ChatInput,
    DeclaredTools,
    Hinted,
    Shared,
    TopLogprobs,
    check_calls,
    shown_tools,
    structured_outputs,
    tool_use,
    with_effort,
)
from tokenmill.server.served import Served
from tokenmill.server.sse import EventStream, Framing, PieceEvents, json_line
from tokenmill.server.streaming import Call, call_arguments

T = TypeVar("T")
VERSION = "0.13.0"
"""The version of Ollama whose API this is: tools compare it with what they need."""
NDJSON = "application/x-ndjson"
LATEST = ":latest"
DURATION = re.compile(r"(-?\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DONE_REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop"}
NEVER_S = 36_500 * 86_400.0
"""When models expire that are never unloaded: in a hundred years, as Ollama's do."""
LEVELS = ("low", "medium", "high")
PULL_POLL_S = 1.0
"""Between two lines of a download."""


def ollama_routes(served: Served) -> APIRouter:
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["Ollama"])
    models, config = served.models, served.config

    async def on_files(work: Callable[[], T]) -> T:
        """What reads the files of models, off the event loop."""
        return await asyncio.to_thread(work)

    async def begin(http: Request, body: Asked, prefix: str) -> tuple[ServedModel, Call, int]:
        """The model, a call of it, and the time (ns) that loading it took."""
        began = time.perf_counter_ns()
        model = await models.use(_own_name(models, body.model), default_model=config.default_model)
        model.keep_alive_s = body.keep_alive_of(model)
        return model, served.call(http.state.caller, body, model, prefix), time.perf_counter_ns() - began

    async def respond(call: Call, model: ServedModel, body: Generating, writer: LineWriter) -> Response:
        given = body.chat(model, config)
        if given is not None:
            await call.chat(given, reasons=model.reasons)
        elif isinstance(body, GenerateRequest) and (body.raw or body.suffix):
            await body.start_raw(call, model, config)
        else:  # nothing is asked: the model is loaded, or may be unloaded
            if model.keep_alive_s == 0:
                await models.unload_idle()
            return writer.nothing(is_unloading=model.keep_alive_s == 0)
        return await call.respond(writer, stream=body.stream is not False)

    @api.post("/chat", responses=schemas.lines(schemas.OllamaChat))
    async def chat(http: Request, body: ChatBody) -> Response:
        """The next message of a conversation; streamed unless `stream` is false."""
        model, call, load_ns = await begin(http, body, "chat-")
        return await respond(call, model, body, LineWriter(call, body, model, load_ns))

    @api.post("/generate", responses=schemas.lines(schemas.OllamaGenerate))
    async def generate(http: Request, body: GenerateRequest) -> Response:
        """An answer to a prompt; with `raw`, its continuation."""
        model, call, load_ns = await begin(http, body, "gen-")
        return await respond(call, model, body, LineWriter(call, body, model, load_ns))

    refusals = schemas.errors(400, 401, 404, 413, 429, 499, 500, 503, shape=schemas.OllamaError)

    @api.post("/embed", responses={200: {"model": schemas.OllamaEmbed}, **refusals})
    async def embed(http: Request, body: EmbedRequest) -> Response:
        """Texts as vectors of length 1."""
        model, call, load_ns = await begin(http, body, "embd-")
        texts = ([body.input] if body.input else []) if isinstance(body.input, str) else body.input
        check_dimensions(body.dimensions, call.llm)
        found = await embed_all(call, texts, config.max_inputs, truncate=body.truncate is not False) if texts else []
        vectors = [one.outputs.embedding for one in found]
        total_ns = _since(call.caller)
        used = {"prompt_eval_count": sum(one.usage.prompt_tokens for one in found)}
        durations = {"total_duration": total_ns, "load_duration": load_ns}
        return JSONResponse({"model": body.model or model.name, "embeddings": vectors, **durations, **used})

    @api.post("/embeddings", responses={200: {"model": schemas.OllamaEmbedding}, **refusals})
    async def embeddings(http: Request, body: EmbeddingsRequest) -> Response:
        """The older form of `/api/embed`: one text."""
        _, call, _ = await begin(http, body, "embd-")
        found = await embed_all(call, [body.prompt], config.max_inputs, truncate=True) if body.prompt else []
        return JSONResponse({"embedding": found[0].outputs.embedding if found else []})

    @api.get("/tags", responses={200: {"model": schemas.OllamaModels}, **_errors(401, 503)})
    async def tags() -> Response:
        """The models that can be named, loaded or not."""
        entries = models.entries
        return JSONResponse({"models": await on_files(lambda: [_listed(one, served.started) for one in entries])})

    @api.get("/ps", responses={200: {"model": schemas.OllamaModels}, **_errors(401, 503)})
    async def running() -> Response:
        """The models that are loaded."""
        loaded = models.loaded
        return JSONResponse({"models": await on_files(lambda: [_running(one, served.started) for one in loaded])})

    @api.post("/show", responses={200: {"model": schemas.OllamaShow}, **_errors(400, 401, 404, 413, 503)})
    async def show(body: NamedModel) -> Response:
        """About one model; more if it is loaded."""
        entry = models.entry(_own_name(models, body.name_of()))
        return JSONResponse(await on_files(lambda: _shown(entry, served.started)))

    @api.get("/version", responses={200: {"model": schemas.OllamaVersion}, **_errors(401, 503)})
    async def version() -> Response:
        """The version of Ollama whose API this is."""
        return JSONResponse({"version": VERSION})

    @api.post("/pull", responses={**schemas.lines(schemas.OllamaStatus), **_errors(403)})
    async def pull(http: Request, body: PullRequest) -> Response:
        """Download a model and offer it under its name; with an admin key."""
        check_admin(http.state.caller)
        pulling = _pull(models, body.name_of())
        if body.stream is not False:
            framing = Framing(NDJSON, json_line({"status": "pulling"}))
            return EventStream(PieceEvents(pulling), http.state.caller, config, framing)
        last = b""
        async for line in pulling:
            last = line
        told = json.loads(last)
        return JSONResponse(told, 500 if "error" in told else 200)

    about_deleted: dict[int | str, dict[str, Any]] = {200: {"description": "It is gone."}}

    @api.delete("/delete", responses={**about_deleted, **_errors(400, 401, 403, 404, 409, 413, 503)})
    async def delete(http: Request, body: NamedModel) -> Response:
        """Remove a downloaded model from the disk; with an admin key."""
        check_admin(http.state.caller)
        name = body.name_of()
        await models.forget(name)
        try:
            await asyncio.to_thread(remove_model, name)
        except ModelNotFound:
            raise model_not_found(name) from None
        return Response(status_code=200)

    return api


def probe_route() -> APIRouter:
    """What Ollama's own command line asks first."""
    api = APIRouter()

    @api.head("/", include_in_schema=False)
    async def is_running() -> Response:
        return PlainTextResponse("Ollama is running")

    return api


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return schemas.errors(*statuses, shape=schemas.OllamaError)


# -- bodies -----------------------------------------------------------------------------------------------------------


class Options(Shared):
    """Sampling parameters under Ollama's names. Those that set up a model (`num_ctx`, ...) have no effect."""

    endpoint = Endpoint.OLLAMA
    max_stops: ClassVar[int | None] = 64

    num_predict: StrictInt | None = None
    repeat_penalty: Number | None = None
    repeat_last_n: StrictInt | None = None

    def changes(self) -> dict[str, Any]:
        given = super().changes()
        if self.seed is not None and self.seed < 0:  # Ollama draws one
            del given["seed"]
        if self.num_predict is not None and self.num_predict > 0:
            given["max_tokens"] = self.num_predict
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        return given


OPTIONS = {"type": "object", "description": "Sampling parameters: `temperature`, `num_predict`, `stop`, ..."}
KeepAlive = Annotated[
    StrictStr | Number | StrictInt | None,
    Field(description="Idle time before the model is unloaded: seconds or `5m`; 0: at once, negative: never."),
]


class Asked(Hinted):
    """What all requests for a model have."""

    endpoint = Endpoint.OLLAMA

    model: StrictStr | None = None
    options: Annotated[Options | None, WithJsonSchema({"anyOf": [OPTIONS, {"type": "null"}]})] = None
    keep_alive: KeepAlive = None

    def keep_alive_of(self, model: ServedModel) -> float | None:
        """Idle seconds before the model is unloaded. One that the server never unloads stays."""
        seconds = None if self.keep_alive is None else _seconds(self.keep_alive)
        if seconds is None or model.spec.keep_alive_s is None:
            return model.keep_alive_s
        return seconds if 0 <= seconds < NEVER_S else math.inf


def _seconds(given: str | float) -> float:
    """A duration as Ollama's clients give it: a number of seconds, or a text such as 1h30m."""
    if not isinstance(given, str):
        return float(given)
    parts = DURATION.findall(given)
    if "".join(number + unit for number, unit in parts) == given and parts:
        return float(sum(float(number) * UNITS_S[unit] for number, unit in parts))
    try:
        return float(int(given))
    except ValueError:
        what = f"keep_alive must be a number of seconds, or a duration such as 5m, not {given!r:.40}"
        raise ApiError(400, what, param="keep_alive") from None


def _format(value: Any) -> Any:
    if value in (None, "", "json") or isinstance(value, dict):
        return value
    raise ValueError('must be "json" or a JSON schema')


FORMAT = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}, {"type": "null"}]}
THINK = {"anyOf": [{"type": "boolean"}, {"enum": list(LEVELS)}, {"type": "null"}]}


class Generating(Asked):
    """What chat and generate have in common."""

    stream: Flag = None
    format: Annotated[Any, AfterValidator(_format), WithJsonSchema(FORMAT)] = None
    think: Annotated[StrictBool | Literal["low", "medium", "high"] | None, WithJsonSchema(THINK)] = None
    logprobs: Flag = None
    top_logprobs: TopLogprobs = None

    def chat(self, model: ServedModel, config: ServerConfig) -> ChatInput | None:
        """The conversation that it asks to be answered; None: it asks nothing."""
        raise NotImplementedError

    def changes(self, config: ServerConfig) -> dict[str, Any]:
        """Sampling parameters, over the model's own."""
        options = self.options or Options.model_validate({})
        options.check(config)
        given = options.changes()
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if self.format not in (None, ""):
            form = {"json_object": True} if self.format == "json" else {"json": self.format}
            given["structured_outputs"] = structured_outputs("format", form)
        return given

    def template_options(self) -> dict[str, Any]:
        if isinstance(self.think, str):
            return with_effort({}, self.think)
        return {} if self.think is None else {"enable_thinking": self.think}


class OllamaMessage(BaseModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "user", "assistant", "tool"]
    content: StrictStr | None = None
    thinking: StrictStr | None = None
    images: Texts = None
    tool_calls: Annotated[list[dict[str, Any]] | None, at_most(1024)] = None
    tool_name: StrictStr | None = None


class ChatBody(Generating):
    messages: Annotated[list[OllamaMessage] | None, FailFast(), at_most(1 << 16)] = None
    tools: DeclaredTools = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello"}], "stream": False}]
        }
    )

    def chat(self, model: ServedModel, config: ServerConfig) -> ChatInput | None:
        if not self.messages:
            return None
        if len(self.messages) > config.max_messages:
            raise ApiError(400, f"at most {config.max_messages} messages", param="messages")
        options, use = {**self.template_options(), "add_generation_prompt": True}, None
        if self.tools:
            use, options["tools"] = tool_use(self.tools, None, None), shown_tools(self.tools)
        messages = list(as_messages(self.messages))
        check_calls(messages)
        return ChatInput(messages, replace(model.chat_params, **self.changes(config)), options, use, None, "format")


class GenerateRequest(Generating):
    prompt: StrictStr | None = None
    system: StrictStr | None = None
    suffix: StrictStr | None = Field(
        None, description="What follows the answer, for models with fill-in-the-middle tokens."
    )
    raw: Flag = Field(None, description="The prompt is continued as it is, without the chat template.")
    images: Texts = None

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "smollm2-135m", "prompt": "Why is the sky blue?", "stream": False}]}
    )

    def chat(self, model: ServedModel, config: ServerConfig) -> ChatInput | None:
        _refuse_images(self.images)
        if not self.prompt or self.raw or self.suffix:
            return None
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        options = {**self.template_options(), "add_generation_prompt": True}
        return ChatInput(messages, replace(model.chat_params, **self.changes(config)), options, None, None, "format")

    async def start_raw(self, call: Call, model: ServedModel, config: ServerConfig) -> None:
        """Add what follows the prompt to the call, or what belongs between it and the suffix."""
        params, infill = replace(model.chat_params, **self.changes(config)), infill_of(model) if self.suffix else None
        if params.structured_outputs is not None:
            await call.compile(params, "format")
        before, after = self.prompt or "", self.suffix or ""
        if infill is not None:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *infill.stop_ids))
            ids = await call.tokens(lambda: infill_ids(infill, model, before, after))
        else:
            ids = await call.tokens(lambda: call.llm.prompt_ids(before))
        call.generate(ids, params, params.max_tokens)


class EmbedRequest(Asked):
    input: Annotated[
        Any,
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]}),
    ]
    truncate: Flag = Field(None, description="False: reject texts that exceed the context instead of cutting them.")
    dimensions: StrictInt | None = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "smollm2-135m", "input": ["a text"]}]})


class EmbeddingsRequest(Asked):
    prompt: StrictStr | None = None


class NamedModel(Body):
    """A model by its name; `name` is the older field."""

    model: StrictStr | None = None
    name: StrictStr | None = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "smollm2-135m"}]})

    def name_of(self) -> str:
        name = self.model or self.name
        if not name:
            raise ApiError(400, "model is required", param="model")
        return name


class PullRequest(NamedModel):
    stream: Flag = None


def _refuse_images(images: Sequence[str] | None) -> None:
    if images:
        raise ApiError(400, "images are not supported: there is no media input", param="images")


def as_messages(given: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Messages in OpenAI's form. Calls have no ids here: results belong to them by name and order."""
    pending: list[tuple[str, str]] = []
    num_calls = 0
    for message in given:
        _refuse_images(message.images)
        made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "tool":
            same = [one for one in pending if one[1] == message.tool_name] or pending
            made["tool_call_id"] = same[0][0] if same else _call_id(num_calls)
            pending = [one for one in pending if one[0] != made["tool_call_id"]]
        elif message.role == "assistant":
            if message.thinking:
                made["reasoning_content"] = message.thinking
            if message.tool_calls:
                calls = [_call(call, num_calls + place) for place, call in enumerate(message.tool_calls)]
                num_calls += len(calls)
                pending = [(call["id"], call["function"]["name"]) for call in calls]
                made |= {"content": message.content or None, "tool_calls": calls}
        yield made


def _call(given: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = given.get("function")
    arguments = function.get("arguments", {}) if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, dict):
        raise ApiError(400, "a tool call requires a function with a name and an object of arguments", param="messages")
    told = {"name": function.get("name"), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _call_id(number), "type": "function", "function": told}


def _call_id(number: int) -> str:
    """The same in each request, so that the prompt is; nine letters and digits, the only form every template takes."""
    return f"call{number % 100_000:05}"


# -- answers ----------------------------------------------------------------------------------------------------------


class Lines:
    """The messages of a stream. A call is told once its arguments are complete."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._call: TurnPart | None = None
        self._arguments = ""

    def add(self, part: TurnPart) -> list[dict[str, Any]]:
        """What a part lets the answer say."""
        if part.kind == "arguments":
            self._arguments += part.text
            return []
        told = self.end()
        if part.kind == "call":
            self._call = part
        elif part.text:
            told.append({"content": part.text} if part.kind == "content" else {"content": "", "thinking": part.text})
        return told

    def end(self) -> list[dict[str, Any]]:
        """The call that is open is complete, or cut off."""
        if self._call is None:
            return []
        call, arguments = self._call, call_arguments(self._arguments)
        function = {"index": self._num_calls, "name": call.name, "arguments": arguments}
        self._call, self._arguments, self._num_calls = None, "", self._num_calls + 1
        return [{"content": "", "tool_calls": [{"id": call.call_id, "function": function}]}]


def joined_lines(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One message that says all that the lines say."""
    whole: dict[str, Any] = {"content": "".join(line["content"] for line in lines)}
    if thinking := "".join(line.get("thinking", "") for line in lines):
        whole["thinking"] = thinking
    if calls := [call for line in lines for call in line.get("tool_calls", ())]:
        whole["tool_calls"] = calls
    return whole


def parts_of(text: str, parts: Sequence[TurnPart] | None) -> Sequence[TurnPart]:
    return [TurnPart("content", text)] if parts is None else parts


class LineWriter:
    """An answer of chat or generate: whole, or as lines of JSON."""

    def __init__(self, call: Call, body: Generating, model: ServedModel, load_ns: int) -> None:
        self._call = call
        self._is_chat = isinstance(body, ChatBody)
        self._forms = model.forms
        self._model_name = body.model or model.name
        self._load_ns = load_ns
        self._lines = Lines()
        self._reason: str | None = None
        self.framing = Framing(NDJSON, json_line(self._line({"content": ""})))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        (choice,) = output.outputs
        told = [line for part in parts_of(choice.text, choice.parts) for line in self._lines.add(part)]
        said = joined_lines([*told, *self._lines.end()])
        return self._line(said, choice.token_ids, choice.logprobs) | self._end(choice.finish_reason, output.usage)

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: OutputDelta) -> bytes:
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
        told = [line for part in parts_of(delta.text, delta.parts) for line in self._lines.add(part)]
        if not told and delta.logprobs:
            told = [{"content": ""}]
        scored = [(delta.token_ids, delta.logprobs), *([((), None)] * len(told))]
        return b"".join(json_line(self._line(line, *scores)) for line, scores in zip(told, scored, strict=False))

    def closing(self) -> bytes:
        last = b"".join(json_line(self._line(line)) for line in self._lines.end())
        used = self._call.generations[0].usage
        return last + json_line(self._line({"content": ""}) | self._end(self._reason, used))

    def failed(self, error: ApiError) -> bytes:
        return json_line(Dialect.OLLAMA.error_body(error, self._call.caller.request_id))

    def nothing(self, *, is_unloading: bool) -> Response:
        """The answer to a request that only loads the model, or says when to unload it."""
        reason = "unload" if is_unloading else "load"
        return JSONResponse(self._line({"content": ""}) | {"done": True, "done_reason": reason})

    def _line(
        self, said: Mapping[str, Any], ids: Sequence[int] = (), scores: Sequence[TokenLogprobs] | None = None
    ) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._model_name, "created_at": _timestamp(time.time())}
        if self._is_chat:
            line["message"] = {"role": "assistant", **said}
        else:
            line |= {"response": said["content"], **({"thinking": said["thinking"]} if "thinking" in said else {})}
        if scores:
            line["logprobs"] = self._forms.for_chat(ids, scores)
        return {**line, "done": False}

    def _end(self, reason: str | None, used: Usage) -> dict[str, Any]:
        """How it ended, and where the time went, in nanoseconds."""
        total, first = _since(self._call.caller), self._call.caller.first_token_at
        until_first = total if first is None else round(1e9 * (first - self._call.caller.began))
        return {
            "done": True,
            "done_reason": DONE_REASONS.get(reason or "", "stop"),
            "total_duration": total,
            "load_duration": self._load_ns,
            "prompt_eval_count": used.prompt_tokens,
            "prompt_eval_duration": max(0, until_first - self._load_ns),
            "eval_count": used.completion_tokens,
            "eval_duration": total - until_first,
        }


def _since(caller: Caller) -> int:
    """Nanoseconds since the request came."""
    return round(1e9 * (time.monotonic() - caller.began))


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# -- models -----------------------------------------------------------------------------------------------------------


def _own_name(models: Models, name: str | None) -> str | None:
    """The server's name of a model: Ollama's clients add a tag to names that have none."""
    if name is None or not name.endswith(LATEST) or models.has(name):
        return name
    return name.removesuffix(LATEST)


def _listed(entry: ModelEntry, started: int) -> dict[str, Any]:
    name, model = entry.spec.name, entry.model
    details = _details(model)
    # Not of its files, which may be many gigabytes: clients only tell models apart by it.
    digest = hashlib.sha256(name.encode()).hexdigest()
    about = {"name": name, "model": name, "modified_at": _timestamp(started), "digest": digest, "details": details}
    return {**about, "size": 0 if model is None else model.files[1]}


def _running(model: ServedModel, started: int) -> dict[str, Any]:
    about = _listed(ModelEntry(model.spec), started) | {"size": model.files[1], "details": _details(model)}
    limit_s = model.keep_alive_s
    left_s = None if limit_s is None or math.isinf(limit_s) else limit_s - (time.monotonic() - model.last_used)
    expires = datetime.now(UTC) + (timedelta(seconds=NEVER_S if left_s is None else max(0.0, left_s)))
    told = {"expires_at": expires.isoformat().replace("+00:00", "Z"), "context_length": model.llm.max_model_len}
    return {**about, **told, "size_vram": 0}


def _details(model: ServedModel | None) -> dict[str, Any]:
    path = None if model is None else model.llm.opened.model.path
    family = "" if model is None else model.files[0]
    form = "" if path is None else "gguf" if path.suffix == ".gguf" else "safetensors"
    about = {"parent_model": "", "format": form, "family": family, "families": [family] if family else []}
    held_as = "" if model is None else model.llm.opened.model.info.form
    return {**about, "parameter_size": "", "quantization_level": held_as}


def _shown(entry: ModelEntry, started: int) -> dict[str, Any]:
    model = entry.model
    listed = _listed(entry, started)
    info: dict[str, Any] = {}
    capabilities, template, parameters = ["completion"], "", ""
    if model is not None:
        about, text = model.llm.opened.model.info, model.llm.opened.text
        family = model.files[0] or "unknown"
        info = {"general.architecture": family, f"{family}.context_length": model.llm.max_model_len}
        info |= {f"{family}.embedding_length": about.hidden_size, f"{family}.block_count": len(about.layers)}
        capabilities += ["tools"] if text.template is not None else []
        capabilities += ["thinking"] if model.reasons else []
        capabilities += ["insert"] if text.infill is not None else []
        template = "" if text.template is None else text.template.source
        parameters = "\n".join(f"{name} {value}" for name, value in sorted(text.defaults.items()))
    told = {"modelfile": "", "parameters": parameters, "template": template, "details": listed["details"]}
    return {**told, "model_info": info, "capabilities": capabilities, "modified_at": listed["modified_at"]}


async def _pull(models: Models, name: str) -> AsyncGenerator[bytes]:
    """Download a model: lines that say so until it is there. It is loaded on first use."""
    yield json_line({"status": "pulling manifest"})
    pulling = asyncio.ensure_future(asyncio.to_thread(pull_model, name))
    try:
        while not pulling.done():
            await asyncio.wait({pulling}, timeout=PULL_POLL_S)
            if not pulling.done():
                yield json_line({"status": f"pulling {name}"})
        pulling.result()
        await models.offer_cached(name)
    except (TokenmillError, ApiError) as error:
        told = ApiError(404, str(error)) if isinstance(error, ModelNotFound) else to_api_error(error)
        yield json_line(Dialect.OLLAMA.error_body(told, ""))
        return
    yield json_line({"status": "success"})
