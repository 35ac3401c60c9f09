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
    """A stop string was found: so many of the generated tokens are kept, and the engine is to end the request unless it
    has ended already."""


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
        """For each token with complete text, the number of characters up to its end: which ones are visible?"""
        self._num_tokens = 0

    def push(self, output: GeneratedToken) -> TextDelta:
        """The delta of a token or of the end. After a delta with a finish reason nothing more may come."""
        is_stop_token = output.finish_reason is FinishReason.STOP and output.token_id in self._stop_ids
        shown = ""
        if output.token_id is not None and not is_stop_token:  # the stop token itself is not text
            self._num_tokens += 1
            shown = self._show(self._detokenizer.push(output.token_id))
        if output.is_finished and self._stops.found is None:
            shown += self._show(self._detokenizer.flush())
            shown += self._stops.flush()
        return self._delta(shown, output)

    @property
    def num_settled(self) -> int:
        """Tokens whose text is all visible: no stop string can take them back."""
        return bisect.bisect_right(self._ends, self._num_shown)

    def num_chars(self, num_tokens: int) -> int:
        """Characters of the text up to the end of so many tokens; those at its very end may have none."""
        known = min(num_tokens, len(self._ends))
        return self._ends[known - 1] if known else 0

    def _show(self, text: str) -> str:
        """What may be seen of new text."""
        self._num_chars += len(text)
        num_complete = self._num_tokens - self._detokenizer.num_open
        self._ends += [self._num_chars] * (num_complete - len(self._ends))
        shown = self._stops.push(text)
        self._num_shown += len(shown)
        return shown

    def _delta(self, shown: str, output: GeneratedToken) -> TextDelta:
        if self._stops.found is not None:
            keep = bisect.bisect_right(self._ends, self._num_shown)
            reason = FinishReason.STOP
            return TextDelta(shown, output.token_id, reason, self._stops.found, None, output.logprobs, keep)
        stop_token = output.token_id if output.finish_reason is FinishReason.STOP else None
        return TextDelta(shown, output.token_id, output.finish_reason, stop_token, output.error, output.logprobs)
