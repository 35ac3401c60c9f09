"""`AsyncLLM`: many generations at once for asyncio code; the engine runs on threads of its own.

The engine's threads only append to a request's mailbox and wake the event loop; detokenising and stop strings happen on
the loop. So a slow reader holds up nobody but itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, Unpack

from tokenmill.contract import ModelHandle
from tokenmill.engine.client import EngineClient, ThreadClient
from tokenmill.engine.pool import MakeSubscriber
from tokenmill.engine.request import Hints
from tokenmill.engine.stats import CoreSnapshot
from tokenmill.entrypoints.options import EngineOptions, OpenedModel, open_for_engine
from tokenmill.errors import EngineDead
from tokenmill.outputs import EmbeddingRequestOutput, GeneratedToken, RequestOutput
from tokenmill.params import Pooling, SamplingParams
from tokenmill.pipeline.prompts import Generation, Intake, Prompt, embedding_output
from tokenmill.text.messages import Message
from tokenmill.text.tokenizer import Tokenizer

HANGS_AFTER_S = 5.0
"""A step that takes longer has hung, as far as readiness goes."""


class Bell:
    """Wakes an event loop from the engine's threads: once for all that has come since it last woke."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._rung: deque[asyncio.Event] = deque()
        self._is_on_its_way = False

    def ring(self, event: asyncio.Event) -> None:
        """On an engine's thread: set the event, on the loop."""
        self._rung.append(event)
        if not self._is_on_its_way:
            self._is_on_its_way = True
            try:
                self.loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                return  # the loop is closed: nobody reads any more

    def _wake(self) -> None:
        self._is_on_its_way = False  # before looking: what comes now rings again
        while self._rung:
            self._rung.popleft().set()


class Mailbox:
    """What the engine's threads have for one generation, and the event that wakes its reader."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._letters: deque[tuple[int, GeneratedToken]] = deque()
        self._filled = asyncio.Event()

    def put(self, index: int, generated: GeneratedToken) -> None:
        """On an engine's thread."""
        self._letters.append((index, generated))
        self._bell.ring(self._filled)

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
    """A model, and prompts to streams of texts. Many at once, from one event loop.

    `model` and the options are those of `LLM`; `client` is an engine that runs elsewhere, of the same model.
    """

    def __init__(
        self,
        model: str | ModelHandle,
        *,
        seed: int | None = None,
        client: EngineClient | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._opened = open_for_engine(model, options)
        try:
            self._client = client or ThreadClient(self._opened.model, self._opened.config, self._opened.limits)
        except BaseException:
            self._opened.close()
            raise
        length = self._client.max_model_len
        self._intake = Intake("async", self._opened.text, self._opened.model.info, length, seed)
        self._bell: Bell | None = None
        self._running: dict[str, list[Generation]] = {}
        """By the caller's id: more than one may have the same."""
        self._closed = False

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and output of a request."""
        return self._client.max_model_len

    @property
    def opened(self) -> OpenedModel:
        """The model, its tokenizer and template, and what the engine was made of."""
        return self._opened

    @property
    def client(self) -> EngineClient:
        """The engine, for others who use it as well: sessions."""
        return self._client

    @property
    def embedding_size(self) -> int:
        return self._opened.model.info.hidden_size

    @property
    def is_ready(self) -> bool:
        """Does it take requests, and do its steps end?"""
        return not self._closed and bool(self._client.cores_alive) and self._client.seconds_silent < HANGS_AFTER_S

    @property
    def num_cores(self) -> int:
        return self._client.num_cores

    def subscribe(self, core: int, make: MakeSubscriber) -> Callable[[], None]:
        """Hear what a core of the engine tells, from a snapshot on; returns the call that ends it.

        `make` gets the snapshot and gives the subscriber, which is called on the engine's thread. `Unsupported` if the
        engine runs in a process of its own.
        """
        return self._client.subscribe(core, make)

    async def snapshot(self) -> list[CoreSnapshot | None]:
        """What each core of the engine is doing right now; None for one that is gone."""
        return await asyncio.to_thread(self._client.snapshots)

    def get_tokenizer(self) -> Tokenizer:
        return self._opened.text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend: used where a call gives no parameters."""
        return self._opened.text.sampling_params()

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt. Safe on any thread: a long text is better not tokenised on an event loop's."""
        return self._intake.prompt(prompt)[1]

    def chat_ids(
        self, messages: Sequence[Message], chat_template: str | None = None, /, **template_options: Any
    ) -> list[int]:
        """The ids of a conversation up to where the model answers. Safe on any thread."""
        return self._intake.chat_ids(messages, chat_template, **template_options)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise `InvalidRequest` if the prompt can't be embedded: it is empty, too long, or not the model's."""
        self._intake.embedding(prompt, Pooling.LAST)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        hints: Hints = Hints(),
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """The output so far, one object that grows, each time it has. Leaving the loop cancels the request.

        What can't be run is refused at once; what can starts when the first output is asked for. `hints` say whose
        request it is; after `timeout_s` it ends with `timeout`.
        """
        self._check_open()
        return self._run(self._intake.generation(prompt, sampling_params, request_id, hints, timeout_s))

    async def _run(self, generation: Generation) -> AsyncGenerator[RequestOutput]:
        self._check_open()
        mailbox = self._mailbox()
        name = generation.output.request_id
        self._running.setdefault(name, []).append(generation)
        try:
            for i, choice in enumerate(generation.choices):
                self._client.submit(choice.request, partial(mailbox.put, i))
            while not generation.output.finished:
                for index, generated in await mailbox.take():
                    generation.deliver(index, generated, self._client.finish)
                yield generation.output
        finally:
            self._running[name].remove(generation)
            if not self._running[name]:
                del self._running[name]
            self._cancel_all(generation)

    def cancel(self, request_id: str) -> bool:
        """End what runs under this id, wherever it is: its readers see `cancelled`. False if nothing does."""
        running = self._running.get(request_id, [])
        for generation in running:
            self._cancel_all(generation)
        return bool(running)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """The answer to a conversation, as `generate` gives it."""
        ids = self.chat_ids(messages, chat_template, **(chat_template_kwargs or {}))
        return self.generate(ids, sampling_params, request_id)

    async def embed(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        pooling: str | Pooling = "last",
        normalize: bool = True,
        hints: Hints = Hints(),
        timeout_s: float | None = None,
    ) -> EmbeddingRequestOutput:
        """The embedding of a text: the last token's hidden state, or the mean of all; of length 1 unless told."""
        self._check_open()
        request = self._intake.embedding(prompt, pooling, request_id, hints, timeout_s)
        mailbox = self._mailbox()
        self._client.submit(request, partial(mailbox.put, 0))
        try:
            ((_, end),) = await mailbox.take()
        except asyncio.CancelledError:
            self._cancel(request.request_id)
            raise
        return embedding_output(request, end, normalize=normalize)

    def _mailbox(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        if self._bell is None or self._bell.loop is not loop:
            self._bell = Bell(loop)
        return Mailbox(self._bell)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the AsyncLLM was closed")

    def _cancel_all(self, generation: Generation) -> None:
        for choice in generation.choices:
            if choice.output.finish_reason is None:
                self._cancel(choice.request.request_id)

    def _cancel(self, request_id: str) -> None:
        with suppress(EngineDead):
            self._client.cancel(request_id)

    async def close(self) -> None:
        """Stop the engine; generations that were not done end with `shutdown`."""
        self._closed = True
        await asyncio.to_thread(self._client.close)
        self._opened.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
