"""`RowRule`: what a request remembers between draws that the model does not see. DRY here; grammars later."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np

from tokenmill.params import SamplingParams

MOST_OVER = 64
"""A repeat that is longer than allowed by more than this costs no more: it is as good as banned."""


class RowRule(Protocol):
    """State of one request's sampling. It follows the log: forwards, backwards, and into forks."""

    def penalties(self) -> dict[int, float]:
        """Token -> what to take off its logit in the next draw; infinity bans it."""
        ...

    def advance(self, token: int) -> None:
        """A token was drawn."""
        ...

    def rollback(self, count: int) -> None:
        """The last tokens were taken back."""
        ...

    def fork(self) -> Self:
        """The same state, to go its own way."""
        ...


class Dry:
    """Don't repeat yourself: a token that would extend a repeat of length L costs multiplier * base^(L - allowed)."""

    def __init__(self, params: SamplingParams, tokens: Sequence[int]) -> None:
        self._params = params
        self._tokens = np.array(tokens, dtype=np.int64)
        self._lengths = repeat_lengths(self._tokens)

    def penalties(self) -> dict[int, float]:
        params = self._params
        begin = max(0, len(self._tokens) - params.dry_range) if params.dry_range else 0
        tokens = self._tokens[begin:]
        lengths = np.minimum(self._lengths[begin:], np.arange(len(tokens)))  # a repeat begins inside the range
        places = np.flatnonzero(lengths >= params.dry_allowed_length)
        places = places[np.argsort(lengths[places], kind="stable")]
        # The longest come last, so of a token's repeats the longest one counts.
        longest = dict(zip(tokens[places].tolist(), lengths[places].tolist(), strict=True))
        return {token: self._tax(length) for token, length in longest.items()}

    def advance(self, token: int) -> None:
        longer = np.where(self._tokens == token, self._lengths + 1, 0)
        self._lengths = np.concatenate([np.zeros(1, dtype=np.int64), longer])
        self._tokens = np.append(self._tokens, token)

    def rollback(self, count: int) -> None:
        self._tokens = self._tokens[: len(self._tokens) - count]
        self._lengths = repeat_lengths(self._tokens)

    def fork(self) -> Dry:
        return copy.copy(self)  # the arrays are replaced, never written to

    def _tax(self, length: int) -> float:
        params = self._params
        return params.dry_multiplier * params.dry_base ** min(length - params.dry_allowed_length, MOST_OVER)


def repeat_lengths(tokens: np.ndarray) -> np.ndarray:
    """For each place i: how many tokens before it are also the last ones; token i is what followed them then.

    The Z-function of the reversed log: every token is compared about twice, however repetitive the log is.
    """
    log = tokens[::-1].tolist()
    count = len(log)
    same = [0] * count  # same[k]: how many tokens from k on are those of the beginning
    begin = end = 0  # the match that reaches furthest
    for k in range(1, count):
        length = min(end - k, same[k - begin]) if k < end else 0
        while k + length < count and log[k + length] == log[length]:
            length += 1
        same[k] = length
        if k + length > end:
            begin, end = k, k + length
    # The `same[k]` tokens that end at place count - 1 - k stand before place count - k; none stand before place 0.
    return np.array([0, *same[:0:-1]][:count], dtype=np.int64)
