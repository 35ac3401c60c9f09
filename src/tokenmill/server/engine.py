"""What handlers ask of the engine: requests that end when their client goes, with errors as answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest

from tokenmill.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from tokenmill.server.errors import ended_badly

CLIENT_CLOSED = 499


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def first_output(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The first output of a request, so that one that can't be run is refused before anything is sent."""
    output = await anext(outputs)
    if output.finished:
        raise_if_bad(output)
    return output


def raise_if_bad(output: RequestOutput) -> None:
    """Raise an `ApiError` if a choice has ended otherwise than by being complete."""
    for choice in output.outputs:
        if choice.finish_reason is not None:
            error = ended_badly(choice.finish_reason, output.error)
            if error is not None:
                raise error


async def last_output(http: HttpRequest, outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    """The whole answer; `ClientGone` if its client leaves first, and the request is cancelled then."""

    async def read() -> RequestOutput:
        async for output in outputs:
            last = output
        return last

    reading = asyncio.ensure_future(read())
    leaving = asyncio.ensure_future(_leaves(http))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise ClientGone
        output = reading.result()
    finally:
        for task in (reading, leaving):
            task.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)
        await outputs.aclose()
    raise_if_bad(output)
    return output


async def _leaves(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


@dataclass
class Deltas:
    """What each choice has grown by since the last look."""

    _chars: dict[int, int] = field(default_factory=dict)
    _tokens: dict[int, int] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)

    def take(self, output: RequestOutput) -> list[Delta]:
        """The choices that have something new, each with what it is."""
        found = []
        for choice in output.outputs:
            chars, tokens = self._chars.get(choice.index, 0), self._tokens.get(choice.index, 0)
            ends = choice.finish_reason is not None and choice.index not in self._ended
            if choice.index in self._ended or (len(choice.text) == chars and not ends):
                continue
            found.append(_delta(choice, chars, tokens))
            self._chars[choice.index], self._tokens[choice.index] = len(choice.text), len(choice.token_ids)
            if ends:
                self._ended.add(choice.index)
        return found


@dataclass(frozen=True)
class Delta:
    index: int
    text: str
    offset: int
    """Characters of the choice before this text."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None


def _delta(choice: CompletionOutput, chars: int, tokens: int) -> Delta:
    logprobs = None if choice.logprobs is None else choice.logprobs[tokens:]
    return Delta(choice.index, choice.text[chars:], chars, choice.token_ids[tokens:], logprobs, choice.finish_reason)


def usage(output: RequestOutput) -> dict[str, Any]:
    """Tokens, as OpenAI counts them."""
    used = output.usage
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
    }
