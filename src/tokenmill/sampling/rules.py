"""`RowRule`: what a request remembers between draws that the model does not see. DRY here; grammars later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np

from tokenmill.params import SamplingParams


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
        self._tokens = list(tokens)

    def penalties(self) -> dict[int, float]:
        params = self._params
        tokens = np.asarray(self._tokens[-params.dry_range :] if params.dry_range else self._tokens)
        taxed: dict[int, float] = {}
        for end, length in _repeats(tokens):
            if length >= params.dry_allowed_length:
                tax = params.dry_multiplier * params.dry_base ** min(length - params.dry_allowed_length, 64)
                token = int(tokens[end])
                taxed[token] = max(tax, taxed.get(token, 0.0))
        return taxed

    def advance(self, token: int) -> None:
        self._tokens.append(token)

    def rollback(self, count: int) -> None:
        del self._tokens[len(self._tokens) - count :]

    def fork(self) -> Dry:
        return Dry(self._params, self._tokens)


def _repeats(tokens: np.ndarray) -> list[tuple[int, int]]:
    """(i, length): the `length` tokens before place i are also the last ones; token i is what followed them then."""
    if len(tokens) < 2:
        return []
    last = tokens[-1]
    places = np.flatnonzero(tokens[:-1] == last)
    found = []
    for place in places.tolist():
        length = 1
        while length <= place and tokens[place - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        found.append((place + 1, length))
    return found
