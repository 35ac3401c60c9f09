"""From what a user asks to the engine's requests: prompts to ids, parameters to limits, n choices to n requests."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.core import ModelInfo
from tokenmill.engine.outputs import OutputStream, TextDelta
from tokenmill.engine.request import Draw, Hints, Limits, Request, check_request
from tokenmill.errors import InvalidRequest
from tokenmill.outputs import ENDED_WELL, CompletionOutput, GeneratedToken, RequestOutput, Usage
from tokenmill.params import SamplingParams
from tokenmill.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass
class Choice:
    """One of a request's choices on its way: the engine's request, the text so far."""

    request: Request
    stream: OutputStream
    output: CompletionOutput


class Generation:
    """A user's request: n engine requests, and the `RequestOutput` that they fill."""

    def __init__(
        self, request_id: str, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer, max_model_len: int
    ) -> None:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty")
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids)
        limits = Limits(
            max_new_tokens=params.max_tokens or max_model_len, min_new_tokens=params.min_tokens, stop_ids=stop_ids
        )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self.choices = [
            Choice(
                Request(f"{request_id}/{i}", ids, limits, Hints(), Draw(params=params, seed=seed, choice=i)),
                OutputStream(tokenizer, params, stop_ids),
                CompletionOutput(i, logprobs=None if params.logprobs is None else []),
            )
            for i in range(params.n)
        ]
        text = prompt if isinstance(prompt, str) else None
        outputs = [choice.output for choice in self.choices]
        self.output = RequestOutput(request_id, text, ids, outputs, Usage(len(ids), 0))

    def check(self, model: ModelInfo, max_model_len: int) -> None:
        """Raise `InvalidRequest` unless the engine can run it."""
        check_request(self.choices[0].request, model, max_model_len)

    def take(self, index: int, generated: GeneratedToken) -> TextDelta | None:
        """Add what the engine gave for a choice; None if that choice has ended already."""
        choice = self.choices[index]
        if choice.output.finish_reason is not None:
            return None
        delta = choice.stream.push(generated)
        output = choice.output
        output.text += delta.text
        if delta.token_id is not None:
            output.token_ids.append(delta.token_id)
            if output.logprobs is not None and delta.logprobs is not None:
                output.logprobs.append(delta.logprobs)
        if delta.finish_reason is not None:
            self._end(choice, delta)
        return delta

    def _end(self, choice: Choice, delta: TextDelta) -> None:
        output = choice.output
        output.finish_reason = delta.finish_reason.value if delta.finish_reason else None
        output.stop_reason = delta.stop_reason
        if delta.keep_tokens is not None:
            del output.token_ids[delta.keep_tokens :]
            if output.logprobs is not None:
                del output.logprobs[delta.keep_tokens :]
        if delta.finish_reason not in ENDED_WELL:
            self.output.error = delta.error or output.finish_reason
        if choice.request.draw.params.prompt_logprobs is not None and choice is self.choices[0]:
            self.output.prompt_logprobs = [None, *choice.request.prompt_logprobs]
        self.output.finished = all(one.output.finish_reason is not None for one in self.choices)
        self.output.usage = Usage(
            prompt_tokens=len(self.output.prompt_token_ids),
            completion_tokens=sum(len(one.output.token_ids) for one in self.choices),
            cached_tokens=self.choices[0].request.num_cached,
        )


class RequestNames:
    """Names for requests that bring none."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._numbers = itertools.count()

    def next(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"


def pair_params(num_prompts: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """One set of parameters for all prompts, or one each."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequest(f"{len(params)} SamplingParams for {num_prompts} prompts; give one, or one for each")
    return list(params)
