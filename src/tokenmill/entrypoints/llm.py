"""`LLM`: offline generation in the caller's thread, under vLLM's names."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, Unpack

from tokenmill.contract import ModelHandle
from tokenmill.engine.client import InlineClient, QueuedClient, ThreadClient
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Request
from tokenmill.entrypoints.async_llm import open_process
from tokenmill.entrypoints.options import (
    EngineOptions,
    OpenedModel,
    check_options,
    num_workers,
    open_for_engine,
    runs_in_process,
)
from tokenmill.errors import EngineDead, InvalidRequest, Unsupported
from tokenmill.outputs import EmbeddingRequestOutput, End, RequestOutput, TokenLogprobs
from tokenmill.params import Pooling, SamplingParams
from tokenmill.pipeline.output import DirectEngine, Generation
from tokenmill.pipeline.prompts import Intake, Prompt, embedding_output, pair_params
from tokenmill.progress import ProgressLine
from tokenmill.text.messages import Message
from tokenmill.text.model_text import ModelText
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.turn_parser import TurnPlan


class LLM:
    """A model, and prompts to texts. Calls from several threads take turns; a stream lets others in between steps.

    `model` is a name (docs/models.md), a Hugging Face directory, a .gguf file, "fake", or an open model. The options
    are those of `EngineOptions`. Requests without a seed get one that follows from `seed`, so that a program gives the
    same texts each time it runs; None takes a new one each time.
    """

    def __init__(self, model: str | ModelHandle, *, seed: int | None = 0, **options: Unpack[EngineOptions]) -> None:
        check_options(options)
        self._client: InlineClient | QueuedClient
        if options.get("engine") == "process" and runs_in_process(model, options):
            self._opened, client = open_process(str(model), options, offline=True)
            self._client = QueuedClient(client)
        else:
            self._opened, handle = open_for_engine(model, options, offline=True)
            config, limits, workers = self._opened.config, self._opened.limits, num_workers(options)
            draft = self._opened.draft
            try:
                if workers == 1:
                    self._client = InlineClient(handle, config, limits, draft)
                else:
                    self._client = QueuedClient(ThreadClient(handle, config, limits, draft, num_cores=workers))
            except BaseException:
                self._opened.close()
                raise
        self._direct = DirectEngine(self._client)
        length = self._client.max_model_len
        self._intake = Intake("llm", self._opened.text, self._opened.model.info, length, seed)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def engine(self) -> EngineCore:
        """Token-level control: `add_sequence`, `step`, `run_until_complete`. Not with several workers or a process."""
        if isinstance(self._client, QueuedClient):
            raise Unsupported("the engine does not run in this thread; use one worker and engine='thread'")
        return self._client.core

    @property
    def opened(self) -> OpenedModel:
        """The model, and all that belongs to it."""
        return self._opened

    def get_tokenizer(self) -> Tokenizer:
        return self._opened.text.tokenizer

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's authors recommend, with changes. Used where a call gives no parameters."""
        return self._opened.text.sampling_params(**changes)

    @property
    def text(self) -> ModelText:
        """The model's tokenizer, chat template and recommended sampling parameters."""
        return self._opened.text

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to where the model answers, as its own template writes it."""
        return self._intake.chat_ids(messages)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise `InvalidRequest` if the prompt can't be run: it is empty, too long, or not the model's."""
        self._intake.generation(prompt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Texts or token ids in, one output each, in the same order. Nothing runs if one of them is wrong.

        A batch that takes longer than a second shows its progress on a terminal; `use_tqdm` (vLLM's name for it) turns
        that off or on.
        """
        with self._lock:
            self._check_open()
            wanted = _as_list(prompts)
            pairs = zip(wanted, pair_params(len(wanted), sampling_params), strict=True)
            generations = [self._intake.generation(prompt, params) for prompt, params in pairs]
            return self._run(generations, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One conversation or several; the model's answer to each. Messages have a `role` and a `content`."""
        first = messages[0] if messages else None
        several: Any = [messages] if first is None or isinstance(first, Mapping) else messages
        options = dict(chat_template_kwargs or {})
        prompts: list[Prompt] = [self._intake.chat_ids(one, chat_template, **options) for one in several]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, plan: TurnPlan | None = None
    ) -> Iterator[RequestOutput]:
        """One prompt; the output so far after every step that added to it, one object that grows.

        With a `plan`, reasoning and tool calls are told apart (`CompletionOutput.parts`). Leaving the loop cancels the
        request.
        """
        generation = self._intake.generation(prompt, sampling_params, plan=plan)
        with self._lock:
            self._check_open()
            output = self._start(generation)
        try:
            while not output.finished:
                with self._lock:
                    self._client.run(partial(_has_grown, generation, generation.num_generated))
                generation.note_usage(output)  # of tokens, too, whose text is not complete
                yield output
        finally:
            with self._lock:
                self._cancel([choice.request for choice in generation.choices])

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: str | Pooling = "last", normalize: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each text: the last token's hidden state, or the mean of all; of length 1 unless told."""
        with self._lock:
            self._check_open()
            requests = [self._intake.embedding(prompt, pooling) for prompt in _as_list(prompts)]
            ends: dict[str, End] = {}
            try:
                for request in requests:
                    self._direct.submit(request, partial(_note_end, ends, request.request_id))
                self._client.run(lambda: len(ends) == len(requests))
            finally:
                self._cancel(requests)
            return [embedding_output(one, ends[one.request_id], normalize=normalize) for one in requests]

    def close(self) -> None:
        """Free the engine, and the model if it was opened here."""
        with self._lock:
            self._closed = True
            self._client.close()
            if not self._client.is_hung:  # else a step may still use the model
                self._opened.close()

    def _run(self, generations: list[Generation], show_progress: bool | None) -> list[RequestOutput]:
        left = iter(generations)
        first = next(left, None)
        num_done = 0
        try:
            outputs = [self._start(generation) for generation in generations]
            with ProgressLine("generating", len(generations), show=show_progress) as progress:

                def is_done() -> bool:
                    # The first one that is not done is looked at, not all of them in every step.
                    nonlocal first, num_done
                    while first is not None and first.is_finished:
                        first, num_done = next(left, None), num_done + 1
                    progress.update(num_done, partial(_rate, generations))
                    return first is None

                self._client.run(is_done)
        finally:
            self._cancel([choice.request for one in generations for choice in one.choices])
        return outputs

    def _cancel(self, requests: Sequence[Request]) -> None:
        """End what has not ended: the caller has left early, by an exception or by leaving a loop."""
        for request in requests:
            self._client.cancel(request.request_id)
        self._client.run(lambda: not any(self._client.is_open(request.request_id) for request in requests))

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the LLM was closed")

    def _start(self, generation: Generation) -> RequestOutput:
        """Start it; the output that grows while the engine is run."""
        output = generation.new_output()
        generation.start(self._direct, partial(generation.fold, output))
        return output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_grown(generation: Generation, before: int) -> bool:
    return generation.is_finished or generation.num_generated > before


def _note_end(ends: dict[str, End], request_id: str, _: int | None, end: End | None, __: TokenLogprobs | None) -> None:
    if end is not None:
        ends[request_id] = end


def _rate(generations: list[Generation], elapsed_s: float) -> str:
    return f"requests, {sum(one.num_generated for one in generations) / elapsed_s:,.0f} tok/s"


def _as_list(prompts: Any) -> list[Prompt]:
    """A single prompt of any kind is a list of one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    try:
        items = list(prompts)
    except TypeError:
        raise InvalidRequest(f"prompts must be strings or lists of token ids, not {type(prompts).__name__}") from None
    is_one = bool(items) and not any(isinstance(item, (str, Mapping)) or hasattr(item, "__len__") for item in items)
    return [items] if is_one else items
