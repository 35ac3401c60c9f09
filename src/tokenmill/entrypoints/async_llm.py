"""`AsyncLLM`: many generations at once for asyncio code; the engine runs on threads or in a process of its own.

Step results cross to the event loop by a `StepBridge`; detokenizing and stop strings happen there. A slow reader holds
up nobody but itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Self, Unpack

from tokenmill.contract import ModelHandle
from tokenmill.engine.client import EngineClient, ThreadClient
from tokenmill.engine.events import CoreSnapshot
from tokenmill.engine.pool import HANGS_AFTER_S, MakeSubscriber
from tokenmill.engine.request import Hints
from tokenmill.entrypoints.options import (
    EngineOptions,
    OpenedModel,
    check_options,
    num_workers,
    open_for_engine,
    runs_in_process,
    text_of,
)
from tokenmill.errors import EngineDead
from tokenmill.outputs import EmbeddingRequestOutput, End, RequestOutput, TokenLogprobs
from tokenmill.params import Pooling, SamplingParams
from tokenmill.pipeline.bridge import EngineStream, StepBridge
from tokenmill.pipeline.output import Generation
from tokenmill.pipeline.prompts import Intake, Prompt, embedding_output
from tokenmill.text.messages import Message
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.tool_grammar import ToolUse
from tokenmill.text.turn_parser import TurnPlan

if TYPE_CHECKING:
    from tokenmill.entrypoints.process import ProcessClient


def open_engine(
    model: str | ModelHandle, options: EngineOptions, *, client: EngineClient | None = None
) -> tuple[OpenedModel, EngineClient]:
    """A model, and an engine for it: on threads of this process, or in one of its own that alone loads the weights."""
    check_options(options)
    if client is None and runs_in_process(model, options):
        return open_process(str(model), options)
    opened, handle = open_for_engine(model, options)
    try:
        if client is None:
            cores = num_workers(options)
            client = ThreadClient(handle, opened.config, opened.limits, opened.draft, num_cores=cores)
        return opened, client
    except BaseException:
        opened.close()
        raise


def open_process(model: str, options: EngineOptions, *, offline: bool = False) -> tuple[OpenedModel, ProcessClient]:
    """An engine process for a model, and what is known of the model here."""
    from tokenmill.entrypoints.process import ProcessClient  # with packages of the extra `server`

    sent = {
        name: value
        for name, value in options.items()
        if name not in ("engine", "tokenizer", "tool_format") and value is not None
    }
    client = ProcessClient(model, sent, offline=offline)
    try:
        text = text_of(client.model, options)
    except BaseException:
        client.close()
        raise
    return OpenedModel(client.model, text, client.config, client.limits, is_ours=True), client


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
        self.opened, self._client = open_engine(model, options, client=client)
        """The model, its tokenizer and template, and what the engine was made of; and the engine."""
        self.max_model_len = self._client.max_model_len
        """Maximum tokens of prompt and output of a request."""
        self._intake = Intake("async", self.opened.text, self.opened.model.info, self.max_model_len, seed)
        self.bridge = StepBridge(self._client, self.opened.config.queue_timeout_s)
        """To the event loops of its users; for others who use the engine as well: sessions."""
        self._running: dict[str, list[Generation]] = {}
        """By the caller's id: more than one may have the same."""
        self._closed = False

    @property
    def client(self) -> EngineClient:
        """The engine, for others who use it as well: sessions."""
        return self._client

    @property
    def embedding_size(self) -> int:
        return self.opened.model.info.hidden_size

    @property
    def is_ready(self) -> bool:
        """Does it take requests, and do the steps of a worker end?"""
        return not self._closed and bool(self._client.cores_alive) and self._client.seconds_silent < HANGS_AFTER_S

    @property
    def is_lost(self) -> bool:
        """Has the engine hung or failed so that it can't be replaced? Only a restart of this process helps."""
        return not self._closed and self._client.is_lost

    @property
    def num_cores(self) -> int:
        return self._client.num_cores

    def on_compiled(self, note: Callable[[float], None]) -> None:
        """Be told from now on how long the compilation of a grammar took (s), one at a time, on any thread."""
        self._intake.grammars.on_compiled = note

    def subscribe(self, core: int, make: MakeSubscriber) -> Callable[[], None]:
        """Hear what a core of the engine tells, from a snapshot on; returns the call that ends it.

        `make` gets the snapshot and gives the subscriber, which is called on a thread of the engine's client.
        """
        return self._client.subscribe(core, make)

    async def snapshot(self) -> list[CoreSnapshot | None]:
        """What each core of the engine is doing right now; None for one that is gone."""
        return await asyncio.to_thread(self._client.snapshots)

    def get_tokenizer(self) -> Tokenizer:
        return self.opened.text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend: used where a call gives no parameters."""
        return self.opened.text.sampling_params()

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt. Safe on any thread: a long text is better not tokenised on an event loop's."""
        _, ids = self._intake.prompt(prompt)
        return ids if isinstance(ids, list) else list(ids.tolist())

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

        What can't be run is refused at once, or with the first output if `structured_outputs` have to be compiled;
        what can starts when the first output is asked for. `hints` say whose request it is; after `timeout_s` it ends
        with `timeout`.
        """
        if self._intake.is_prepared(sampling_params):
            return self._run(self.generation(prompt, sampling_params, request_id, hints=hints, timeout_s=timeout_s))
        return self._prepare_and_run(prompt, sampling_params, request_id, hints=hints, timeout_s=timeout_s)

    async def _prepare_and_run(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, **options: Any
    ) -> AsyncGenerator[RequestOutput]:
        """Compile its grammar first: what is wrong with that is told when the first output is asked for."""
        await self.prepare(params)
        async with aclosing(self._run(self.generation(prompt, params, request_id, **options))) as outputs:
            async for output in outputs:
                yield output

    async def prepare(self, params: SamplingParams | None) -> None:
        """Compile the structured outputs that the parameters ask for, off the event loop, for `generation`."""
        await self._intake.prepare(params)

    async def _run(self, generation: Generation) -> AsyncGenerator[RequestOutput]:
        stream, output = self.open_stream([generation]), generation.new_output()
        try:
            while deltas := await stream.take():
                for delta in deltas:
                    generation.fold(output, delta)
                generation.note_usage(output)
                yield output
        finally:
            self.close_stream(stream)

    def generation(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        hints: Hints = Hints(),
        timeout_s: float | None = None,
        first_index: int = 0,
        plan: TurnPlan | None = None,
    ) -> Generation:
        """A request that can run, for `open_stream`: its choices count from `first_index`, `plan` reads its answers."""
        self._check_open()
        return self._intake.generation(prompt, sampling_params, request_id, hints, timeout_s, first_index, plan)

    async def prepare_plan(
        self, params: SamplingParams, use: ToolUse = ToolUse(), thinking_budget: int | None = None
    ) -> None:
        """Build what `plan` needs, off the event loop."""
        await self._intake.prepare_plan(params, use, thinking_budget)

    def plan(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        use: ToolUse = ToolUse(),
        thinking_budget: int | None = None,
    ) -> tuple[SamplingParams, TurnPlan | None]:
        """How the answer to a chat with these ids is constrained and read; event loops await `prepare_plan` first."""
        return self._intake.plan(prompt, params, use, thinking_budget)

    def open_stream(self, generations: Sequence[Generation]) -> EngineStream:
        """The deltas of generations that are read together. They start with the first `take`; close it in any case."""
        for generation in generations:
            self._running.setdefault(generation.request_id, []).append(generation)
        return EngineStream(self.bridge, generations)

    def close_stream(self, stream: EngineStream) -> None:
        """End a stream: generations that have not ended are cancelled."""
        for generation in stream.generations:
            running = self._running.get(generation.request_id, [])
            if generation in running:
                running.remove(generation)
            if not running:
                self._running.pop(generation.request_id, None)
            generation.cancel()

    def cancel(self, request_id: str) -> bool:
        """End what runs under this id, wherever it is: its readers see `cancelled`. False if nothing does."""
        running = self._running.get(request_id, [])
        for generation in running:
            generation.cancel()
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
        ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()

        def consume(_: int | None, end: End | None, __: TokenLogprobs | None) -> None:
            if end is not None and not ended.done():
                ended.set_result(end)

        self.bridge.submit(request, consume)
        try:
            return embedding_output(request, await ended, normalize=normalize)
        except asyncio.CancelledError:
            with suppress(EngineDead):
                self.bridge.cancel(request.request_id)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the AsyncLLM was closed")

    async def close(self, timeout_s: float | None = None) -> bool:
        """Stop the engine; generations that were not done end with `shutdown`.

        False if a step has not returned in time, or hangs: it may still use the model, which stays open.
        """
        self._closed = True
        self.bridge.end_all()
        has_stopped = await asyncio.to_thread(self._client.close, timeout_s) and not self._client.is_hung
        if has_stopped:
            self.opened.close()
        return has_stopped

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
