"""`OutputStream`: from a request's tokens to its text, one piece at a time. The only way from ids to text there is.

tokens -> characters (`Detokenizer`) -> stop strings (`StopStrings`) -> deltas. A non-streaming answer is the sum of its
deltas, so the two can't differ. Runs on any one thread; nothing of it is kept when the request has ended.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from tokenmill.outputs import FinishReason, GeneratedToken, TokenLogprobs
from tokenmill.params import SamplingParams
from tokenmill.text.detok import Detokenizer
from tokenmill.text.stops import StopStrings
from tokenmill.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextDelta:
    """What one token added."""

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None
    keep_tokens: int | None = None
    """A stop string was found: the engine is to end the request and keep so many of its generated tokens."""


class OutputStream:
    """The text of one choice."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._stop_ids = stop_ids
        self._num_chars = 0
        """Characters given to the stop matcher so far."""
        self._num_shown = 0
        self._ends: list[int] = []
        """For each token, the number of characters up to its end: which tokens lie inside the visible text?"""
        self._num_open = 0
        """Tokens at the end whose text is not complete."""

    def push(self, output: GeneratedToken) -> TextDelta:
        """The delta of a token or of the end. After a delta with a finish reason nothing more may come."""
        if output.token_id is None:
            return self._end(self._flush(), output)
        if output.finish_reason is FinishReason.STOP and output.token_id in self._stop_ids:
            return self._end(self._flush(), output)  # the stop token itself is not text
        shown = self._show(self._detokenizer.push(output.token_id))
        if self._stops.found is None and output.is_finished:
            shown += self._flush()
        if self._stops.found is not None:
            return self._stopped(shown, output)
        return (
            self._end(shown, output)
            if output.is_finished
            else TextDelta(shown, output.token_id, logprobs=output.logprobs)
        )

    def _show(self, text: str) -> str:
        self._num_chars += len(text)
        self._num_open += 1
        if not self._detokenizer.is_holding:
            self._ends += [self._num_chars] * self._num_open
            self._num_open = 0
        shown = self._stops.push(text)
        self._num_shown += len(shown)
        return shown

    def _flush(self) -> str:
        text = self._detokenizer.flush()
        shown = self._stops.push(text)
        if self._stops.found is None:
            shown += self._stops.flush()
        self._num_shown += len(shown)
        return shown

    def _stopped(self, shown: str, output: GeneratedToken) -> TextDelta:
        keep = bisect.bisect_right(self._ends, self._num_shown)
        return TextDelta(
            shown, output.token_id, FinishReason.STOP, self._stops.found, logprobs=output.logprobs, keep_tokens=keep
        )

    def _end(self, shown: str, output: GeneratedToken) -> TextDelta:
        reason = output.token_id if output.finish_reason is FinishReason.STOP else None
        if self._stops.found is not None:
            return TextDelta(shown, output.token_id, FinishReason.STOP, self._stops.found, logprobs=output.logprobs)
        return TextDelta(shown, output.token_id, output.finish_reason, reason, output.error, output.logprobs)
