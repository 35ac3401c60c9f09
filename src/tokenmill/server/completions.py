"""`POST /v1/completions`: text in, text out, several prompts at once."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.outputs import RequestOutput
from tokenmill.server.config import ServerConfig
from tokenmill.server.engine import Delta, Deltas, first_output, last_output, raise_if_bad, usage
from tokenmill.server.errors import ApiError, model_not_found, to_api_error
from tokenmill.server.requests import CompletionRequest
from tokenmill.server.sse import DONE, EventStream, event

Prompt = str | list[int]


async def completions(http: HttpRequest, body: CompletionRequest, llm: AsyncLLM, config: ServerConfig) -> Response:
    """What follows each of the prompts, whole or as a stream."""
    if body.model != config.model_name:
        raise model_not_found(body.model)
    body.check(config)
    prompts = prompts_of(body.prompt, config.max_prompts)
    if body.echo:
        raise ApiError(400, "echo is not offered yet", param="echo")
    more: dict[str, Any] = {"logprobs": body.logprobs}
    if body.max_tokens is not None:
        more["max_tokens"] = body.max_tokens
    params = body.sampling(llm.get_default_sampling_params(), **more)
    name = f"cmpl-{secrets.token_hex(12)}"
    requests: list[Any] = [llm.generate(prompt, params, f"{name}-{i}") for i, prompt in enumerate(prompts)]
    answer = _Answer(name, int(time.time()), body, llm)
    if not body.stream:
        outputs = await _all(http, requests)
        return JSONResponse(answer.whole(outputs))
    first = await asyncio.gather(*(first_output(request) for request in requests))
    events = answer.events(list(first), requests)
    return EventStream(events, keep_alive_s=config.keep_alive_s, send_timeout_s=config.send_timeout_s)


async def _all(http: HttpRequest, requests: Sequence[Any]) -> list[RequestOutput]:
    """All answers; if one of them fails the others are cancelled."""
    tasks = [asyncio.ensure_future(last_output(http, request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def prompts_of(prompt: Any, most: int) -> list[Prompt]:
    """One prompt or several, as texts or as ids."""
    several = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else [prompt]
    if not 1 <= len(several) <= most:
        raise ApiError(400, f"at most {most} prompts, not {len(several)}", param="prompt")
    return several


class _Answer:
    """The answer to one call: choice i of prompt p has the index p * n + i."""

    def __init__(self, name: str, created: int, body: CompletionRequest, llm: AsyncLLM) -> None:
        self._name = name
        self._created = created
        self._body = body
        self._n = body.n or 1
        self._tokenizer = llm.get_tokenizer()

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for place, output in enumerate(outputs):
            for choice in output.outputs:
                whole = Delta(choice.index, choice.text, 0, choice.token_ids, choice.logprobs, choice.finish_reason)
                choices.append(self._choice(place, whole))
        return {**self._head(), "choices": choices, "usage": _sum([usage(output) for output in outputs])}

    async def events(
        self, outputs: list[RequestOutput], requests: Sequence[AsyncGenerator[RequestOutput]]
    ) -> AsyncGenerator[bytes]:
        """Chunks of all prompts as they come; then usage, if asked for."""
        queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException] = asyncio.Queue()
        readers = [
            asyncio.ensure_future(_read(place, output, requests[place], queue)) for place, output in enumerate(outputs)
        ]
        deltas, ended = [Deltas() for _ in outputs], set[int]()
        try:
            while len(ended) < len(outputs):
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                place, outputs[place] = item[0], item[1]
                for delta in deltas[place].take(outputs[place]):
                    if delta.finish_reason is not None:
                        raise_if_bad(outputs[place])
                    yield event({**self._head(), "choices": [self._choice(place, delta)]})
                if outputs[place].finished:  # an output grows in place, so more than one look may find it so
                    ended.add(place)
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                yield event({**self._head(), "choices": [], "usage": _sum([usage(one) for one in outputs])})
        except Exception as error:  # the status has been sent: the error goes into the stream
            yield event(to_api_error(error).body())
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            for request in requests:
                await request.aclose()
        yield DONE

    def _head(self) -> dict[str, Any]:
        return {"id": self._name, "object": "text_completion", "created": self._created, "model": self._body.model}

    def _choice(self, place: int, delta: Delta) -> dict[str, Any]:
        made: dict[str, Any] = {
            "index": place * self._n + delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }
        return {**made, "token_ids": delta.token_ids} if self._body.return_token_ids else made

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        tokens = [self._text(token) for token in delta.token_ids]
        return {
            "tokens": tokens,
            "token_logprobs": [max(score.logprob, -9999.0) for score in delta.logprobs],
            "top_logprobs": [
                {self._text(token): max(value, -9999.0) for token, value in score.top} for score in delta.logprobs
            ],
            "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=delta.offset)) if tokens else [],
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)


async def _read(place: int, output: RequestOutput, request: AsyncGenerator[RequestOutput], queue: Any) -> None:
    """Bring the outputs of one prompt to where they are sent from."""
    try:
        queue.put_nowait((place, output))
        async for grown in request:
            queue.put_nowait((place, grown))
    except Exception as error:
        queue.put_nowait(error)


def _sum(parts: list[dict[str, Any]]) -> dict[str, Any]:
    total = {name: sum(part[name] for part in parts) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    cached = sum(part["prompt_tokens_details"]["cached_tokens"] for part in parts)
    return {**total, "prompt_tokens_details": {"cached_tokens": cached}}
