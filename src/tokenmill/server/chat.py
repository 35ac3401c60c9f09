"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenmill.engine.request import context_overflow
from tokenmill.errors import ContextOverflow
from tokenmill.outputs import RequestOutput, TokenLogprobs, Usage
from tokenmill.server.calls import Call
from tokenmill.server.config import ServerConfig
from tokenmill.server.deltas import Delta, counted, usage, whole
from tokenmill.server.errors import ApiError
from tokenmill.server.models import ServedModel
from tokenmill.server.requests import ChatRequest
from tokenmill.server.session_turns import SessionTurn, existing
from tokenmill.server.sse import event


async def start_chat(call: Call, body: ChatRequest, model: ServedModel, config: ServerConfig) -> ChatAnswer:
    """Check it, turn the messages into a prompt, and add its generation to the call."""
    body.check(config)
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    if body.session_id is not None:
        hints = {"timeout_s": call.timeout_s, "priority": body.priority}
        options = {"must_fit": not config.clamp_max_tokens, "request_id": call.next_name, **hints, **body.changes()}
        turn = SessionTurn(model, existing(body.session_id), given=messages, **options)
        call.follow(turn.outputs(), turn.cancel)
        return ChatAnswer(call, body, model)
    defaults = call.llm.get_default_sampling_params()
    params = body.sampling(defaults, logprobs=body.num_logprobs())
    options = body.template_options(config)
    ids = await call.tokens(lambda: call.llm.chat_ids(messages, **options))
    check_room(ids, body.limit, call.llm.max_model_len, config)
    call.generate(ids, params, messages)
    return ChatAnswer(call, body, model)


def check_room(ids: Sequence[int], wanted: int | None, max_model_len: int, config: ServerConfig) -> None:
    """A requested length must fit beside the prompt, or is clamped: then the answer ends where the context does."""
    if wanted is not None and not config.clamp_max_tokens and len(ids) + wanted > max_model_len:
        raise ContextOverflow(context_overflow(max_model_len, len(ids), wanted))


class ChatAnswer:
    """One answer's identity, and its two forms."""

    def __init__(self, call: Call, body: ChatRequest, model: ServedModel) -> None:
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

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Without streaming."""
        (output,) = outputs
        choices = []
        for choice in output.outputs:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            choices.append(self._choice(whole(choice), {"message": message}))
        answer = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(outputs)}
        return {**answer, **self._about_prompt(output)}

    def opening(self, output: RequestOutput) -> bytes:
        """The first chunk of each choice has its role."""
        said = {"role": "assistant", "content": ""}
        more = self._about_prompt(output)  # once
        used = replace(output.usage, completion_tokens=0)  # the first token comes with the next chunk
        chunks = []
        for choice in output.outputs:
            made = self._choice(Delta(choice.index, "", 0, [], None, None), {"delta": said})
            chunks.append(self._chunk(made, used, **more))
            more = {}
        return b"".join(chunks)

    def delta(self, place: int, delta: Delta, output: RequestOutput) -> bytes:  # noqa: ARG002
        """Text, and at the end the finish reason in a chunk of its own, with an empty delta."""
        if not delta.text:
            return self._chunk(self._choice(delta, {"delta": {}}), output.usage)
        said = self._choice(replace(delta, finish_reason=None), {"delta": {"content": delta.text}})
        chunk = self._chunk(said, output.usage)
        if delta.finish_reason is None:
            return chunk
        end = replace(delta, text="", token_ids=[], logprobs=None)
        return chunk + self._chunk(self._choice(end, {"delta": {}}), output.usage)

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Usage, if it was asked for."""
        return event({**self._head, "choices": [], "usage": usage(outputs)}) if self._body.wants_usage else b""

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())

    def _chunk(self, choice: dict[str, Any], used: Usage, **more: Any) -> bytes:
        made = {**self._head, "choices": [choice], **more}
        if self._body.wants_usage:
            made["usage"] = counted([used]) if self._body.wants_usage_always else None
        return event(made)

    def _choice(self, delta: Delta, said: dict[str, Any]) -> dict[str, Any]:
        made = {
            "index": delta.index,
            **said,
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        return {**made, "token_ids": delta.token_ids} if self._body.return_token_ids else made

    def _logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if logprobs is None else {"content": self._forms.for_chat(token_ids, logprobs), "refusal": None}

    def _about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Extensions: the prompt's ids and log-probabilities, if they were asked for."""
        about: dict[str, Any] = {}
        if self._body.return_token_ids:
            about["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            about["prompt_logprobs"] = self._forms.for_prompt(output.prompt_token_ids, output.prompt_logprobs)
        return about
