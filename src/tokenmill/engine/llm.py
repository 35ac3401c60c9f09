"""`LLM`: offline generation in the caller's thread, under vLLM's names."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from tokenmill.config import EngineConfig
from tokenmill.core import BackendLimits, ModelHandle
from tokenmill.engine.client import InlineClient
from tokenmill.engine.core import EngineCore
from tokenmill.engine.inputs import Generation, Prompt, RequestNames, pair_params
from tokenmill.errors import EngineDead
from tokenmill.outputs import GeneratedToken, RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.text.tokenizer import Tokenizer

UNLIMITED = 1 << 62


class LLM:
    """A model, and prompts to texts. One call at a time; calls from other threads wait their turn.

    Made from a loaded model by `tokenmill.LLM(name)`, which opens it, or from parts for tests and tools.
    """

    def __init__(
        self,
        model: ModelHandle,
        tokenizer: Tokenizer,
        config: EngineConfig = EngineConfig(),
        limits: BackendLimits = BackendLimits(),
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        # A batch is as long as its caller makes it: there is nobody to refuse it for.
        self._client = InlineClient(model, replace(config, max_queue=UNLIMITED, max_queue_tokens=None), limits)
        self._names = RequestNames("llm")
        self._lock = threading.Lock()
        self._closed = False

    @property
    def engine(self) -> EngineCore:
        """Token-level control: `add_sequence`, `step`, `run_until_complete`."""
        return self._client.core

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Texts or token ids in, one output each, in the same order. Nothing runs if one of them is wrong."""
        with self._lock:
            generations = self._prepare(_as_list(prompts), sampling_params)
            for generation in generations:
                self._submit(generation)
            self._client.run(lambda: all(generation.output.finished for generation in generations))
            return [generation.output for generation in generations]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """One prompt; the output so far after every step that added to it. Leaving the loop cancels the request."""
        with self._lock:
            (generation,) = self._prepare([prompt], sampling_params)
            self._submit(generation)
            try:
                while not generation.output.finished:
                    before = sum(len(choice.output.token_ids) for choice in generation.choices)
                    self._client.run(partial(_has_grown, generation, before))
                    yield generation.output
            finally:
                for choice in generation.choices:
                    self._client.cancel(choice.request.request_id)
                self._client.run(lambda: generation.output.finished)

    def close(self) -> None:
        """Free the engine. The model is its opener's."""
        self._closed = True
        self._client.close()

    def _prepare(self, prompts: Sequence[Prompt], params: Any) -> list[Generation]:
        if self._closed:
            raise EngineDead("the LLM was closed")
        length = self._client.max_model_len
        generations = [
            Generation(self._names.next(), prompt, one, self.tokenizer, length)
            for prompt, one in zip(prompts, pair_params(len(prompts), params), strict=True)
        ]
        for generation in generations:
            generation.check(self.model.info, length)
        return generations

    def _submit(self, generation: Generation) -> None:
        for i, choice in enumerate(generation.choices):
            self._client.submit(choice.request, partial(self._hear, generation, i))

    def _hear(self, generation: Generation, index: int, generated: GeneratedToken) -> None:
        delta = generation.take(index, generated)
        if delta is not None and delta.keep_tokens is not None and not generated.is_finished:
            self._client.finish(generated.request_id, delta.keep_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_grown(generation: Generation, before: int) -> bool:
    return generation.output.finished or sum(len(one.output.token_ids) for one in generation.choices) > before


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single text or a single list of ids is a list of one prompt."""
    if isinstance(prompts, str) or (prompts and all(isinstance(item, int) for item in prompts)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
