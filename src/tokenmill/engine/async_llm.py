"""`AsyncLLM`: many generations at once for asyncio code; the engine runs on threads of its own.

The engine's threads only append to a request's mailbox and wake the event loop; detokenising and stop strings happen on
the loop. So a slow reader holds up nobody but itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from typing import Self

from tokenmill.config import EngineConfig
from tokenmill.core import BackendLimits, ModelHandle
from tokenmill.engine.client import EngineClient, ThreadClient
from tokenmill.engine.inputs import Generation, Prompt, RequestNames
from tokenmill.errors import EngineDead
from tokenmill.outputs import GeneratedToken, RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.text.tokenizer import Tokenizer


class Mailbox:
    """What the engine's threads have for one generation, and the call that wakes its reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[int, GeneratedToken]] = deque()
        self._filled = asyncio.Event()

    def put(self, index: int, generated: GeneratedToken) -> None:
        """On an engine's thread."""
        self._letters.append((index, generated))
        try:
            self._loop.call_soon_threadsafe(self._filled.set)
        except RuntimeError:
            return  # the loop is closed: nobody reads any more

    async def take(self) -> list[tuple[int, GeneratedToken]]:
        """On the loop: all there is, at least one."""
        while not self._letters:
            self._filled.clear()
            if not self._letters:
                await self._filled.wait()
        letters = []
        while self._letters:
            letters.append(self._letters.popleft())
        return letters


class AsyncLLM:
    """A model, and prompts to streams of texts."""

    def __init__(
        self,
        model: ModelHandle,
        tokenizer: Tokenizer,
        config: EngineConfig = EngineConfig(),
        limits: BackendLimits = BackendLimits(),
        *,
        client: EngineClient | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._client = client or ThreadClient(model, config, limits)
        self._names = RequestNames("async")
        self._closed = False

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """The output so far, each time it has grown. Leaving the loop cancels the request."""
        if self._closed:
            raise EngineDead("the AsyncLLM was closed")
        params = sampling_params or SamplingParams()
        length = self._client.max_model_len
        generation = Generation(request_id or self._names.next(), prompt, params, self.tokenizer, length)
        generation.check(self.model.info, length)
        mailbox = Mailbox(asyncio.get_running_loop())
        try:
            for i, choice in enumerate(generation.choices):
                self._client.submit(choice.request, partial(mailbox.put, i))
            while not generation.output.finished:
                for index, generated in await mailbox.take():
                    self._take(generation, index, generated)
                yield generation.output
        finally:
            if not self._closed:
                for choice in generation.choices:
                    if choice.output.finish_reason is None:
                        self._client.cancel(choice.request.request_id)

    def _take(self, generation: Generation, index: int, generated: GeneratedToken) -> None:
        delta = generation.take(index, generated)
        if delta is not None and delta.keep_tokens is not None and not generated.is_finished:
            self._client.finish(generated.request_id, delta.keep_tokens)

    async def close(self) -> None:
        """Stop the engine; generations that were not done end with `shutdown`."""
        self._closed = True
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
