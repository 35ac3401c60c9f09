"""From API calls to engine requests: prompts to ids, parameters to limits, n choices to n requests."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenmill.contract import IntArray, ModelInfo
from tokenmill.engine.request import Hints, Limits, Request, check_request, context_overflow
from tokenmill.errors import ContextOverflow, InvalidRequest, RequestFailed, TooManyTokens
from tokenmill.outputs import ENDED_WELL, EmbeddingOutput, EmbeddingRequestOutput, End, Usage
from tokenmill.params import Pooling, SamplingParams, StructuredOutputs, id_array, token_ids
from tokenmill.pipeline.output import Generation
from tokenmill.text.messages import Message
from tokenmill.text.model_text import ModelText
from tokenmill.text.tool_grammar import ToolUse, plan_turn
from tokenmill.text.turn_parser import TurnPlan

Prompt = str | Sequence[int] | IntArray | Mapping[str, Any]
"""A text, token ids, or as in vLLM {"prompt": text} or {"prompt_token_ids": ids}."""


ID_SEPARATOR = "~"
"""Separates the caller's request id from the engine's suffix.

The suffix makes it unique: a caller's id may be reused, even concurrently."""


def callers_name(request_id: str) -> str:
    """The caller's id of an engine request; the whole id if the caller gave none."""
    name, is_named, _ = request_id.rpartition(ID_SEPARATOR)
    return name if is_named else request_id


class Intake:
    """Turns API calls into requests, and rejects those that can never run. One per entry point; thread-safe."""

    def __init__(self, prefix: str, text: ModelText, model: ModelInfo, max_model_len: int, seed: int | None) -> None:
        self.text = text
        self._model = model
        self._max_model_len = max_model_len
        self._prefix = f"{prefix}-{secrets.token_hex(4)}"
        """Distinguishes request ids of entry points that share an engine."""
        self._numbers = itertools.count()
        self.grammars = text.grammars(model.vocab_size)
        self._seeds = secrets.SystemRandom() if seed is None else random.Random(seed)

    def generation(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        hints: Hints = Hints(),
        timeout_s: float | None = None,
        first_index: int = 0,
        plan: TurnPlan | None = None,
        said: Sequence[int] = (),
        prefix: Sequence[int] = (),
    ) -> Generation:
        """A request to continue a prompt; without parameters, with the model's own.

        `said`: tokens at the prompt's end that belong to an interrupted output: a grammar continues after
        them. `prefix`: tokens that the output begins with, undrawn, where its parameters permit. Blocks while
        `structured_outputs` are compiled: on an event loop, await `prepare` first.
        """
        params = self.text.sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        text, ids = self.prompt(prompt)
        name = f"{self._prefix}-{next(self._numbers)}"
        generation = Generation(
            request_id or name,
            text,
            ids,
            params,
            self.text.tokenizer,
            engine_id=name if request_id is None else f"{request_id}{ID_SEPARATOR}{name}",
            vocab_size=self._model.vocab_size,
            max_model_len=self._max_model_len,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            hints=hints,
            timeout_s=timeout_s,
            first_index=first_index,
            plan=plan,
            grammar=None if params.structured_outputs is None else self.grammars.compile(params.structured_outputs),
            said=said,
            prefix=prefix,
        )
        check_request(generation.choices[0].request, self._model, self._max_model_len)
        return generation

    async def prepare(self, params: SamplingParams | None) -> None:
        """Compile the structured outputs off the event loop; `InvalidRequest` if that is not possible."""
        # Parameters of any other type are rejected where they are used.
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            await self.compile(params.structured_outputs)

    async def compile(self, outputs: StructuredOutputs) -> None:
        """Compile them off the event loop, unless they are cached."""
        if self.grammars.cached(outputs) is None:
            await asyncio.to_thread(self.grammars.compile, outputs)

    async def prepare_plan(self, params: SamplingParams, use: ToolUse, thinking_budget: int | None) -> None:
        """Wait for the grammar compiler's tokenizer off the event loop, if `plan` will need it."""
        if use.tools or thinking_budget is not None or params.structured_outputs is not None:
            tokenizer = self.grammars.warm()
            if not tokenizer.done():
                await asyncio.to_thread(tokenizer.exception)  # `plan` raises it

    def is_prepared(self, params: SamplingParams | None) -> bool:
        """Whether `generation` has nothing to compile."""
        outputs = params.structured_outputs if isinstance(params, SamplingParams) else None
        return outputs is None or self.grammars.cached(outputs) is not None

    def embedding(
        self,
        prompt: Prompt,
        pooling: str | Pooling,
        request_id: str | None = None,
        hints: Hints = Hints(),
        timeout_s: float | None = None,
    ) -> Request:
        """An embedding request for a text."""
        try:
            kind = Pooling(pooling)
        except ValueError:
            known = ", ".join(repr(one.value) for one in Pooling)
            raise InvalidRequest(f"pooling {pooling!r} is not supported; supported: {known}", param="pooling") from None
        _, ids = self.prompt(prompt)
        quota = hints.quota
        limits = Limits(
            max_new_tokens=1,
            max_context=quota.max_context,
            max_tokens_per_step=quota.max_tokens_per_step,
            timeout_s=timeout_s,
        )
        name = f"{self._prefix}-{next(self._numbers)}"
        engine_id = name if request_id is None else f"{request_id}{ID_SEPARATOR}{name}"
        request = Request(engine_id, ids, limits, hints, pooling=kind)
        check_request(request, self._model, self._max_model_len)
        return request

    def chat_ids(self, messages: Sequence[Message], chat_template: str | None = None, /, **options: Any) -> list[int]:
        """The prompt of a conversation, rendered by the model's template (or the caller's)."""
        template = self.text.chat_template(chat_template)
        try:
            return template.encode(messages, self._max_model_len, **options)
        except TooManyTokens as error:
            raise self._overflow(error) from None

    def plan(
        self, prompt: Sequence[int] | IntArray, params: SamplingParams, use: ToolUse, thinking_budget: int | None
    ) -> tuple[SamplingParams, TurnPlan | None]:
        """How the answer to a chat is constrained and parsed, given the end of its prompt. None if it is plain text.

        Blocks while the grammar compiler's tokenizer is built: on an event loop, await `prepare_plan` first.
        """
        form = self.text.chat_template().turn_format
        if not form.reasons and not use.tools:
            return params, None
        return plan_turn(form, self.text.tokenizer, prompt, params, use, thinking_budget, self.grammars.markers)

    def prompt(self, prompt: Prompt) -> tuple[str | None, list[int] | IntArray]:
        """A prompt's text, if any, and its ids: a long prompt is converted once."""
        if isinstance(prompt, Mapping):
            prompt = _from_mapping(prompt)
        if isinstance(prompt, str):
            try:
                ids: list[int] | IntArray = self.text.tokenizer.encode(prompt, limit=self._max_model_len)
            except TooManyTokens as error:
                raise self._overflow(error) from None
        elif isinstance(prompt, np.ndarray) and prompt.dtype == np.int32 and prompt.ndim == 1:
            ids = prompt  # of a session's log
        elif isinstance(prompt, Sequence) and len(prompt) > self._max_model_len:  # before each of them is checked
            raise ContextOverflow(context_overflow(self._max_model_len, len(prompt), 1))
        else:
            ids = id_array("prompt", prompt)
        if not len(ids):
            raise InvalidRequest("the prompt is empty", param="prompt")
        return prompt if isinstance(prompt, str) else None, ids

    def _overflow(self, error: TooManyTokens) -> ContextOverflow:
        """Tokenize, but reject a prompt as soon as it is known to exceed the context."""
        return ContextOverflow(context_overflow(self._max_model_len, error.at_least, 1, is_exact=False))


def pair_params(num_prompts: int, params: Any) -> list[SamplingParams | None]:
    """One set of parameters for all prompts, or one each."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or len(params) != num_prompts:
        count = len(params) if isinstance(params, Sequence) else type(params).__name__
        raise InvalidRequest(f"{count} SamplingParams for {num_prompts} prompts; give one, or one for each")
    return list(params)


def embedding_output(request: Request, end: End, *, normalize: bool) -> EmbeddingRequestOutput:
    """The result of an embedding request; `RequestFailed` if it failed."""
    if end.finish_reason not in ENDED_WELL:
        reason = end.finish_reason.value
        raise RequestFailed(f"{request.request_id}: {end.error or reason}", finish_reason=reason)
    values = request.embedding
    length = math.sqrt(math.fsum(value * value for value in values)) if normalize else 1.0
    output = EmbeddingOutput([value / length for value in values] if length > 0 else values)
    return EmbeddingRequestOutput(
        request.request_id, list(request.tokens), output, Usage(request.num_prompt, 0, request.num_cached)
    )


def _from_mapping(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if ids is not None:
        return token_ids("prompt_token_ids", ids)
    if not isinstance(text, str):
        raise InvalidRequest("a prompt is a text, a list of token ids, or has one of 'prompt' and 'prompt_token_ids'")
    return text
