"""From step results to text deltas: the only path from token ids to text.

token ids -> characters (`Detokenizer`) -> stop strings (`StopStrings`) -> `OutputDelta`, and for requests with tools
or a reasoning model, -> `TurnParser`, which adds the parts. A whole output is the sum of its deltas, so streaming and
non-streaming answers cannot differ. Everything here runs on the reader's thread: an event
loop's, or that of `LLM`'s caller.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tokenmill.contract import IntArray
from tokenmill.engine.client import RequestClient
from tokenmill.engine.request import Draw, Hints, Limits, Request
from tokenmill.errors import EngineDead
from tokenmill.outputs import (
    CacheVerdict,
    CompletionOutput,
    End,
    FinishReason,
    OutputDelta,
    RequestOutput,
    StepResult,
    TokenLogprobs,
    Usage,
)
from tokenmill.params import SamplingParams
from tokenmill.text.detok import Detokenizer, StopStrings
from tokenmill.text.grammar import Grammar
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.turn_parser import HarmonyParser, TurnParser, TurnPlan

log = logging.getLogger(__name__)

Consumer = Callable[[int | None, End | None, TokenLogprobs | None], None]
"""Receives one request's row of a step result."""


class Engine(Protocol):
    """Where a generation's requests run; calls their consumers on the reader's thread."""

    def submit(self, request: Request, consumer: Consumer, core: int | None = None) -> None: ...

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None: ...

    def finish(self, request_id: str, keep_tokens: int) -> None: ...


def deliver(result: StepResult, consumers: dict[str, Consumer]) -> None:
    """Pass the rows of a step result to their requests' consumers; removes the consumer of a request that has ended."""
    ends, logprobs = result.ends, result.logprobs
    for place, (request_id, token_id) in enumerate(zip(result.request_ids, result.token_ids, strict=True)):
        end = ends.get(place) if ends else None
        consumer = consumers.get(request_id) if end is None else consumers.pop(request_id, None)
        if consumer is None:
            continue
        try:
            consumer(token_id, end, None if logprobs is None else logprobs[place])
        except Exception:  # a bug, but it must not affect the step's other requests
            log.exception("the consumer of request %s failed", request_id)


class DirectEngine:
    """An engine that runs on the reader's thread and delivers each step's results there."""

    def __init__(self, client: RequestClient) -> None:
        self._client = client
        self._consumers: dict[str, Consumer] = {}

    def submit(self, request: Request, consumer: Consumer, core: int | None = None) -> None:
        self._client.submit(request, self._deliver, core)
        self._consumers[request.request_id] = consumer

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self._client.cancel(request_id, reason)

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self._client.finish(request_id, keep_tokens)

    def _deliver(self, result: StepResult) -> None:
        deliver(result, self._consumers)


class TextStage:
    """The text of one choice: detokenizes and matches stop strings. A token is emitted when all its text is."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stop_ids: frozenset[int],
        index: int = 0,
        plan: TurnPlan | None = None,
    ) -> None:
        # A parser needs the markers, which may be special tokens: only the others are skipped then.
        skips = params.skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special=skips and plan is None)
        self._hidden_ids = plan.hidden_ids(tokenizer) if plan is not None and skips else frozenset()
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        """Without stop strings, text is emitted as soon as it is complete."""
        self._stop_ids = stop_ids
        self._index = index
        self.num_settled = 0
        """Tokens emitted."""
        self.has_ended = False
        self.stop_string: str | None = None
        """The stop string that matched, if any."""
        self.ends: list[int] = []
        """For each token with complete text, its end as a number of characters."""
        self._ids: list[int] = []
        """Tokens not emitted yet..."""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._text = ""
        """...and their text that cannot be part of a stop string."""
        self._num_given = 0
        """Characters emitted."""
        self._num_chars = 0
        """Characters out of the detokenizer..."""
        self._num_texts = 0
        """...and tokens into it."""

    def push(self, token_id: int | None, end: End | None, logprobs: TokenLogprobs | None = None) -> OutputDelta | None:
        """What a token or the end of its request adds; None if nothing yet."""
        if token_id is not None:
            self._ids.append(token_id)
            if self._logprobs is not None and logprobs is not None:
                self._logprobs.append(logprobs)
            # The stop token itself is not part of the text.
            if end is None or end.finish_reason is not FinishReason.STOP or token_id not in self._stop_ids:
                text = "" if token_id in self._hidden_ids else self._detokenizer.push(token_id)
                self._num_texts += 1
                if (
                    end is None
                    and len(self._ids) == 1
                    and self._detokenizer.is_whole
                    and (self._stops is None or self._stops.passes(text))
                ):
                    # The common case: no other token is pending, and no stop string can take this one back.
                    self._num_chars += len(text)
                    self._num_given = self._num_chars
                    self.ends.append(self._num_chars)
                    offset, self.num_settled = self.num_settled, self.num_settled + 1
                    ids, self._ids = self._ids, []
                    scores, self._logprobs = self._logprobs, None if self._logprobs is None else []
                    return OutputDelta(self._index, text, ids, offset, scores)
                self._take(text)
        if end is not None and self.stop_string is None:
            if not self._detokenizer.is_whole:
                self._take(self._detokenizer.flush())
            self._text += "" if self._stops is None else self._stops.flush()
        if self.stop_string is not None:
            return self._give(self._num_visible(), len(self._text), End(FinishReason.STOP), self.stop_string)
        if end is not None:
            stop_token = token_id if end.finish_reason is FinishReason.STOP else None
            return self._give(self.num_settled + len(self._ids), len(self._text), end, stop_token)
        settled = self._num_visible()
        return self._give(settled, self.ends[settled - 1] - self._num_given) if settled > self.num_settled else None

    def fail(self, error: str) -> OutputDelta:
        """Abort: what was emitted stays, pending text is dropped."""
        self.has_ended = True
        return OutputDelta(self._index, offset=self.num_settled, finish_reason=FinishReason.ERROR.value, error=error)

    def _take(self, text: str) -> None:
        """Take new text: record where tokens end in it, and release what cannot be part of a stop string."""
        self._num_chars += len(text)
        num_complete = self._num_texts - (0 if self._detokenizer.is_whole else self._detokenizer.num_open)
        self.ends += [self._num_chars] * (num_complete - len(self.ends))
        if self._stops is None:
            self._text += text
        else:
            self._text += self._stops.push(text)
            self.stop_string = self._stops.found

    def _num_visible(self) -> int:
        """Tokens whose text has been released completely."""
        return bisect.bisect_right(self.ends, self._num_given + len(self._text))

    def _give(
        self, num_tokens: int, num_chars: int, end: End | None = None, stop_reason: str | int | None = None
    ) -> OutputDelta:
        """Emit the tokens up to this one, plus this many characters; all of them at the end."""
        count, offset = num_tokens - self.num_settled, self.num_settled
        text, self._text = self._text[:num_chars], self._text[num_chars:]
        ids, self._ids = self._ids[:count], self._ids[count:]
        self.num_settled, self._num_given = num_tokens, self._num_given + num_chars
        logprobs = None
        if self._logprobs is not None:
            logprobs, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        if end is None:
            return OutputDelta(self._index, text, ids, offset, logprobs)
        self.has_ended = True
        reason, error = end.finish_reason.value, end.error
        return OutputDelta(self._index, text, ids, offset, logprobs, reason, stop_reason, error)


@dataclass(slots=True)
class Choice:
    """One choice of a generation: an engine request and its text stage."""

    generation: Generation
    request: Request
    stage: TextStage
    parser: TurnParser | HarmonyParser | None = None
    """None if its text is content alone."""
    is_released: bool = False
    """Whether the engine has released the request: after a stop string, some steps later than its end."""
    num_reasoning: int = 0
    """Tokens of its reasoning."""

    def push(self, token_id: int | None, end: End | None, logprobs: TokenLogprobs | None) -> None:
        """Consume the request's row of a step result."""
        generation, stage = self.generation, self.stage
        self.is_released = end is not None
        if not stage.has_ended:
            if token_id is not None:
                generation.num_generated += 1
            try:
                delta = stage.push(token_id, end, logprobs)
                if self.parser is not None and delta is not None:
                    delta = self._parsed(self.parser, delta)
            except Exception as error:  # the tokenizer cannot decode the model's ids, or the parser fails
                log.exception("request %s: its tokens could not be detokenized or parsed", self.request.request_id)
                delta = stage.fail(f"{type(error).__name__}: {error}")
                generation.cancel(FinishReason.ERROR)
            if delta is not None and delta.finish_reason is None:
                generation.on_delta(delta)
            elif delta is not None:
                generation.finish(self, delta)
        if end is not None and generation.on_release is not None:
            generation.release()

    def _parsed(self, parser: TurnParser | HarmonyParser, delta: OutputDelta) -> OutputDelta:
        """The delta with its text parsed. An answer that ends with calls has the finish reason `tool_calls`."""
        was_reasoning, reason = parser.in_reasoning, delta.finish_reason
        parts = parser.push(delta.text)
        if was_reasoning or parser.in_reasoning:
            self.num_reasoning += len(delta.token_ids)
        if reason is not None:
            parts += parser.close(is_cut=reason != FinishReason.STOP.value)
            if parser.num_calls and reason == FinishReason.STOP.value:
                reason = FinishReason.TOOL_CALLS.value
        return delta._replace(parts=parts, finish_reason=reason)


class Generation:
    """A user's request: n engine requests, from their start until the engine has released the last one."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        ids: Sequence[int] | IntArray,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        engine_id: str,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        hints: Hints,
        timeout_s: float | None,
        first_index: int = 0,
        plan: TurnPlan | None = None,
        grammar: Grammar | None = None,
        said: Sequence[int] = (),
        prefix: Sequence[int] = (),
    ) -> None:
        self.request_id = request_id
        """The caller's request id; those of the engine's requests are longer."""
        self.prompt = prompt
        self.params = params
        self.plan = plan
        """How its answers are parsed; None if they are content alone."""
        self.first_index = first_index
        """Index of its first choice, if several generations answer one call."""
        # A tokenizer may define end tokens that the model has no logit for.
        ends = () if params.ignore_eos else (i for i in tokenizer.eos_ids if i < vocab_size)
        stop_ids = frozenset((*params.stop_token_ids, *ends))
        limits = Limits(
            max_new_tokens=params.max_tokens or max_model_len,
            min_new_tokens=params.min_tokens,
            stop_ids=stop_ids,
            max_context=hints.quota.max_context,
            max_tokens_per_step=hints.quota.max_tokens_per_step,
            timeout_s=timeout_s,
        )
        self.choices = [
            Choice(
                self,
                Request(
                    f"{engine_id}/{i}",
                    ids,
                    limits,
                    hints,
                    Draw(params=params, seed=seed, choice=i, prefix=tuple(prefix)),
                    grammar=None if grammar is None else grammar.start(said),
                ),
                TextStage(tokenizer, params, stop_ids, first_index + i, plan),
                None if plan is None else plan.open_parser(),
            )
            for i in range(params.n)
        ]
        self.num_generated = 0
        """Computed tokens; a stop string removes some of them from the output."""
        self.is_finished = False
        """Whether all choices have ended."""
        self._engine: Engine | None = None
        self.on_delta: Callable[[OutputDelta], None]
        self.on_release: Callable[[], None] | None = None

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    def start(
        self,
        engine: Engine,
        on_delta: Callable[[OutputDelta], None],
        on_release: Callable[[], None] | None = None,
        core: int | None = None,
    ) -> None:
        """Submit its requests. `on_release` is called once, when the engine has released all of them."""
        self._engine, self.on_delta, self.on_release = engine, on_delta, on_release
        for choice in self.choices:
            engine.submit(choice.request, choice.push, core)

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Cancel the running choices; their last deltas follow when the engine has released them."""
        if self._engine is None:
            return
        for choice in self.choices:
            if not choice.is_released:
                with suppress(EngineDead):  # the engine is closing: the request has ended or is about to
                    self._engine.cancel(choice.request.request_id, reason)

    def finish(self, choice: Choice, delta: OutputDelta) -> None:
        """Emit the last delta of a choice. After a stop string, the engine is told to finish its request."""
        if self._engine is not None and choice.stage.stop_string is not None and not choice.is_released:
            with suppress(EngineDead):
                self._engine.finish(choice.request.request_id, choice.stage.num_settled)
        self.is_finished = all(choice.stage.has_ended for choice in self.choices)
        self.on_delta(delta._replace(usage=self.usage) if self.is_finished else delta)

    def release(self) -> None:
        """The engine has released a request."""
        if self.on_release is not None and all(choice.is_released for choice in self.choices):
            self.on_release()

    # -- statistics ---------------------------------------------------------------------------------------------------

    @property
    def prompt_token_ids(self) -> list[int]:
        ids: list[int] = self.choices[0].request.tokens.prompt.tolist()
        return ids

    @property
    def usage(self) -> Usage:
        first = self.choices[0].request
        num_reasoning = 0 if self.plan is None else sum(choice.num_reasoning for choice in self.choices)
        # A prefix hit may extend into tokens that a grammar forces at the start of the output.
        num_cached = min(first.num_cached, first.num_prompt)
        num_agreed = num_rejected = 0
        for choice in self.choices:
            num_agreed += choice.request.num_agreed
            num_rejected += choice.request.num_proposed - choice.request.num_agreed
        return Usage(first.num_prompt, self.num_generated, num_cached, num_reasoning, num_agreed, num_rejected)

    @property
    def cache(self) -> CacheVerdict | None:
        """Cache statistics; None before the request has started, or if the engine runs in its own process."""
        return self.choices[0].request.verdict

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One per prompt token, None for the first; None if not requested or incomplete."""
        request = self.choices[0].request
        is_asked = self.params.prompt_logprobs is not None
        if is_asked and (self.is_finished or len(request.prompt_logprobs) == request.num_prompt - 1):
            return [None, *request.prompt_logprobs]
        return None

    # -- the accumulated output ---------------------------------------------------------------------------------------

    def new_output(self) -> RequestOutput:
        """An empty output to accumulate its deltas in."""
        outputs = [
            CompletionOutput(i, logprobs=self._no_logprobs(), parts=None if self.plan is None else [])
            for i in range(len(self.choices))
        ]
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, self.usage)

    def _no_logprobs(self) -> list[TokenLogprobs] | None:
        return None if self.params.logprobs is None else []

    def fold(self, output: RequestOutput, delta: OutputDelta) -> None:
        """Add a delta to the output so far."""
        choice = output.outputs[delta.index - self.first_index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        if choice.logprobs is not None and delta.logprobs is not None:
            choice.logprobs += delta.logprobs
        if choice.parts is not None and delta.parts is not None:
            choice.parts += delta.parts
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            if delta.is_failure:
                output.error = delta.error or delta.finish_reason
            output.finished = all(one.finish_reason is not None for one in output.outputs)
            self.note_usage(output)

    def note_usage(self, output: RequestOutput) -> None:
        """Update the fields beside the text, also for readers of an unfinished output."""
        output.usage, output.cache = self.usage, self.cache
        if output.prompt_logprobs is None:
            output.prompt_logprobs = self.prompt_logprobs
