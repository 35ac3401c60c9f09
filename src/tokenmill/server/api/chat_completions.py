"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokenmill.engine.request import context_overflow
from tokenmill.errors import ContextOverflow
from tokenmill.outputs import OutputDelta, RequestOutput, TokenLogprobs, Usage
from tokenmill.pipeline.output import Generation
from tokenmill.server import schemas
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError
from tokenmill.server.middleware import caller_of
from tokenmill.server.models import ServedModel
from tokenmill.server.requests import ChatRequest, template_options
from tokenmill.server.served import Served
from tokenmill.server.sse import event, to_json
from tokenmill.server.streaming import Call, SessionSource, usage_of


def chat_routes(served: Served) -> APIRouter:
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["generation"])

    @api.post("/chat/completions", responses=schemas.generated(schemas.ChatCompletion))
    async def create_chat_completion(http: Request, body: ChatRequest) -> Response:
        """An answer to a conversation; with `session_id`, to what is new in one."""
        model = await served.requested_model(body.model)
        if body.session_id is not None and served.session(caller_of(http.scope), body.session_id)[0] is not model:
            raise ApiError(400, "the session belongs to another model", param="model")
        with served.call(http, body, model, "chatcmpl-") as call:
            return await call.respond(await start_chat(call, body, model, served.config), stream=bool(body.stream))

    return api


async def start_chat(call: Call, body: ChatRequest, model: ServedModel, config: ServerConfig) -> ChatWriter:
    """Check it, turn the messages into a prompt, and add its generation to the call."""
    body.check(config)
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    if body.session_id is not None:
        hints = {"timeout_s": call.timeout_s, "priority": body.priority}
        options = {"must_fit": not config.clamp_max_tokens, "request_id": call.next_name, **hints, **body.changes()}
        call.follow(SessionSource(model.sessions, _existing(body.session_id), given=messages, **options))
        return ChatWriter(call, body, model)
    params = body.sampling(model.default_params, logprobs=body.num_logprobs())
    options = template_options(body, config)
    ids = await call.tokens(lambda: call.llm.chat_ids(messages, **options))
    check_room(ids, body.limit, call.llm.max_model_len, config)
    call.generate(ids, params, messages)
    return ChatWriter(call, body, model)


def check_room(ids: Sequence[int], wanted: int | None, max_model_len: int, config: ServerConfig) -> None:
    """A requested length must fit beside the prompt, or is clamped: then the answer ends where the context does."""
    if wanted is not None and not config.clamp_max_tokens and len(ids) + wanted > max_model_len:
        raise ContextOverflow(context_overflow(max_model_len, len(ids), wanted))


def _existing(session_id: str) -> Callable[[], Awaitable[str]]:
    """For a `SessionSource`: a session that is there."""

    async def found() -> str:
        return session_id

    return found


class ChatWriter:
    """A chat completion: whole, or as chunks."""

    def __init__(self, call: Call, body: ChatRequest, model: ServedModel) -> None:
        self._call = call
        self._body = body
        self._forms = model.forms
        self._head = {
            "id": call.id,
            "object": "chat.completion.chunk",
            "created": call.created,
            "model": body.model or model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        if body.session_id is not None:
            self._head["session_id"] = body.session_id
        self._is_plain = not body.wants_usage and not body.return_token_ids and body.num_logprobs() is None
        """A chunk has nothing but its text, so that all around it is the same in each."""
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """For each choice, a plain chunk before and after its text."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = []
        for choice in output.outputs:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            ending = OutputDelta(
                choice.index, "", choice.token_ids, 0, choice.logprobs, finish_reason=choice.finish_reason
            )
            choices.append(self._choice(ending, {"message": message}))
        usage = usage_of([output.usage])
        about = self._about_prompt(self._call.generations[0])
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage, **about}

    def opening(self) -> bytes:
        """The first chunk of each choice has its role."""
        (generation,) = self._call.generations
        said = {"role": "assistant", "content": ""}
        more = self._about_prompt(generation)  # once
        used = replace(generation.usage, completion_tokens=0)  # the first token comes with the next chunk
        chunks = []
        for index in range(len(generation.choices)):
            chunks.append(self._chunk(self._choice(OutputDelta(index), {"delta": said}), used, **more))
            more = {}
        return b"".join(chunks)

    def delta(self, delta: OutputDelta) -> bytes:
        """Text, and at the end the finish reason in a chunk of its own, with an empty delta."""
        if self._is_plain and delta.finish_reason is None:
            before, after = self._around.get(delta.index) or self._plain(delta.index)
            return before + to_json(delta.text).encode() + after
        used = self._call.generations[0].usage
        if not delta.text:
            return self._chunk(self._choice(delta, {"delta": {}}), used)
        said = self._choice(delta._replace(finish_reason=None), {"delta": {"content": delta.text}})
        chunk = self._chunk(said, used)
        if delta.finish_reason is None:
            return chunk
        end = delta._replace(text="", token_ids=(), logprobs=None)
        return chunk + self._chunk(self._choice(end, {"delta": {}}), used)

    def closing(self) -> bytes:
        """Usage, if it was asked for."""
        if not self._body.wants_usage:
            return b""
        usage = usage_of([generation.usage for generation in self._call.generations])
        return event({**self._head, "choices": [], "usage": usage})

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())

    def _plain(self, index: int) -> tuple[bytes, bytes]:
        """What is before and after the text in each plain chunk of a choice."""
        mark = "<text>"
        chunk = self._chunk(self._choice(OutputDelta(index), {"delta": {"content": mark}}), Usage(0, 0))
        before, _, after = chunk.rpartition(to_json(mark).encode())
        self._around[index] = (before, after)
        return before, after

    def _chunk(self, choice: dict[str, Any], used: Usage, **more: Any) -> bytes:
        made = {**self._head, "choices": [choice], **more}
        if self._body.wants_usage:
            made["usage"] = usage_of([used]) if self._body.wants_usage_always else None
        return event(made)

    def _choice(self, delta: OutputDelta, said: dict[str, Any]) -> dict[str, Any]:
        made = {
            "index": delta.index,
            **said,
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        return {**made, "token_ids": list(delta.token_ids)} if self._body.return_token_ids else made

    def _logprobs(self, token_ids: Sequence[int], logprobs: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if logprobs is None else {"content": self._forms.for_chat(token_ids, logprobs), "refusal": None}

    def _about_prompt(self, generation: Generation) -> dict[str, Any]:
        """Extensions: the prompt's ids and log-probabilities, if they were asked for."""
        about: dict[str, Any] = {}
        if self._body.return_token_ids:
            about["prompt_token_ids"] = generation.prompt_token_ids
        if (logprobs := generation.prompt_logprobs) is not None:
            about["prompt_logprobs"] = self._forms.for_prompt(generation.prompt_token_ids, logprobs)
        return about
