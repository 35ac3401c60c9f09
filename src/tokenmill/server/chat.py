"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.outputs import RequestOutput, TokenLogprobs
from tokenmill.server.config import ServerConfig
from tokenmill.server.engine import Deltas, first_output, last_output, raise_if_bad, usage
from tokenmill.server.errors import ApiError, model_not_found, to_api_error
from tokenmill.server.requests import ChatRequest
from tokenmill.server.sse import DONE, EventStream, event
from tokenmill.text.tokenizer import Tokenizer


async def chat_completions(http: HttpRequest, body: ChatRequest, llm: AsyncLLM, config: ServerConfig) -> Response:
    """An answer to a conversation, whole or as a stream."""
    if body.model != config.model_name:
        raise model_not_found(body.model)
    body.check(config)
    if not 1 <= len(body.messages) <= config.max_messages:
        raise ApiError(400, f"messages must be 1 to {config.max_messages}", param="messages")
    params = body.sampling(llm.get_default_sampling_params(), max_tokens=body.limit, logprobs=body.num_logprobs())
    messages = [message.model_dump() for message in body.messages]
    request_id = f"chatcmpl-{secrets.token_hex(12)}"
    outputs: Any = llm.chat(messages, params, request_id, chat_template_kwargs=body.chat_template_kwargs)
    answer = _Answer(request_id, int(time.time()), body, llm.get_tokenizer())
    if not body.stream:
        return JSONResponse(answer.whole(await last_output(http, outputs)))
    first = await first_output(outputs)
    return EventStream(
        answer.events(first, outputs), keep_alive_s=config.keep_alive_s, send_timeout_s=config.send_timeout_s
    )


class _Answer:
    """One answer's identity, and its two forms."""

    def __init__(self, request_id: str, created: int, body: ChatRequest, tokenizer: Tokenizer) -> None:
        self._id = request_id
        self._created = created
        self._body = body
        self._tokenizer = tokenizer

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        choices = []
        for choice in output.outputs:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            made = {
                "index": choice.index,
                "message": message,
                "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            choices.append(made if not self._body.return_token_ids else {**made, "token_ids": choice.token_ids})
        return {**self._head("chat.completion"), "choices": choices, "usage": usage(output)}

    async def events(self, first: RequestOutput, outputs: AsyncGenerator[RequestOutput]) -> AsyncGenerator[bytes]:
        """The first chunk of each choice has its role; the last one its finish reason; then usage, if asked for."""
        deltas, output = Deltas(), first
        try:
            for choice in first.outputs:
                yield event(self._chunk(choice.index, {"role": "assistant", "content": ""}))
            while True:
                for delta in deltas.take(output):
                    if delta.finish_reason is not None:
                        raise_if_bad(output)
                    said = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
                    yield event(self._chunk(delta.index, said, delta.token_ids, delta.logprobs, delta.finish_reason))
                if output.finished:
                    break
                output = await anext(outputs)
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                yield event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage(output)})
        except Exception as error:  # the status has been sent: the error goes into the stream
            yield event(to_api_error(error).body())
        finally:
            await outputs.aclose()
        yield DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        made: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(token_ids or [], logprobs),
            "finish_reason": finish_reason,
        }
        if self._body.return_token_ids and token_ids is not None:
            made["token_ids"] = token_ids
        return {**self._head("chat.completion.chunk"), "choices": [made]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._body.model}

    def _logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        pairs = zip(token_ids, logprobs, strict=False)
        content = [
            {**self._token(token, score.logprob), "top_logprobs": [self._token(*one) for one in score.top]}
            for token, score in pairs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token], skip_special=False)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}
