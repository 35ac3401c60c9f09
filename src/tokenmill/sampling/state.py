"""`SamplingState`: one row a request, as arrays on the host; what a step's sampler reads.

Owned by the engine core's thread. Rows are those of the running requests, so a decode step picks its parameters with
one numpy index per column. A `RowRule` is what a request remembers between draws that the model does not see.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
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


FLOATS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
          "xtc_probability", "xtc_threshold")  # fmt: skip
COLDEST = 1e-5
"""A temperature below this leaves nothing but the likeliest token: it is greedy."""
LARGEST = float(np.finfo(np.float32).max)
_NO_TOKENS = np.zeros(0, dtype=np.int64)
Proposed = Mapping[int, Sequence[int]]
"""Place of a draw -> tokens between its row's log and it, as if they had been drawn."""


class SamplingState:
    """Parameters, keys and memories of the running requests."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.floats = {name: np.zeros(max_rows, dtype=np.float32) for name in FLOATS}
        self.top_k = np.zeros(max_rows, dtype=np.int64)
        self.seed = np.zeros(max_rows, dtype=np.int64)
        self.choice = np.zeros(max_rows, dtype=np.int64)
        self.attempt = np.zeros(max_rows, dtype=np.int64)
        self.num_logprobs = np.full(max_rows, -1, dtype=np.int64)
        self.is_plain_greedy = np.ones(max_rows, dtype=bool)
        """Nothing but the largest logit is asked for."""
        self.is_raw = np.ones(max_rows, dtype=bool)
        """Drawn from the model's own logits, and only the id is asked for."""
        self.is_filtered = np.zeros(max_rows, dtype=bool)
        """The draw needs the tokens in order of likelihood."""
        self.has_penalties = np.zeros(max_rows, dtype=bool)
        self.has_edits = np.zeros(max_rows, dtype=bool)
        """Bias, bans, allow-lists: edits of single logits before the penalties."""
        self.has_rules = np.zeros(max_rows, dtype=bool)
        self._edits: list[tuple[np.ndarray, np.ndarray] | None] = [None] * max_rows
        self.allowed: list[np.ndarray | None] = [None] * max_rows
        """The tokens of a row's allow-list; None: all."""
        self._early: list[tuple[np.ndarray, int] | None] = [None] * max_rows
        """(stop tokens, length of the log before which they are banned)."""
        self._rules: list[list[RowRule]] = [[] for _ in range(max_rows)]
        self._logs: list[Sequence[int]] = [()] * max_rows
        self._num_prompt = np.zeros(max_rows, dtype=np.int64)

    def attach(
        self,
        row: int,
        params: SamplingParams,
        log: Sequence[int],
        num_prompt: int,
        *,
        seed: int,
        choice: int = 0,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        """A request takes the row. `log` is its live list of tokens."""
        for name in FLOATS:
            self.floats[name][row] = getattr(params, name)
        is_greedy = params.temperature < COLDEST
        if is_greedy:
            self.floats["temperature"][row] = 0
        self.top_k[row] = params.top_k if params.top_k > 0 else self.vocab_size
        self.seed[row], self.choice[row], self.attempt[row] = seed, choice, params.attempt
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._logs[row], self._num_prompt[row] = log, num_prompt
        has_bias = params.logit_bias or params.banned_token_ids
        self._edits[row] = _edits(params, self.vocab_size) if has_bias else None
        self.allowed[row] = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids)
        early = sorted(token for token in stop_ids if token < self.vocab_size)
        self._early[row] = (
            (np.array(early, dtype=np.int64), num_prompt + params.min_tokens) if early and params.min_tokens else None
        )
        self._rules[row] = [Dry(params, log)] if params.dry_multiplier else []
        self.has_rules[row] = bool(self._rules[row])
        self.has_penalties[row] = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.has_edits[row] = (
            self._edits[row] is not None or self.allowed[row] is not None or self._early[row] is not None
        )
        self.is_filtered[row] = (
            params.top_k > 0 or params.top_p < 1 or params.typical_p < 1 or params.xtc_probability > 0
        )
        is_edited = self.has_edits[row] or self.has_penalties[row] or self.has_rules[row]
        self.is_plain_greedy[row] = is_greedy and params.logprobs is None and not is_edited
        self.is_raw[row] = params.logprobs is None and not is_edited

    def detach(self, row: int) -> None:
        self._logs[row], self._rules[row] = (), []
        self._edits[row] = self.allowed[row] = self._early[row] = None

    def advance(self, row: int, token: int) -> None:
        """A token was drawn for a row that has rules."""
        for rule in self._rules[row]:
            rule.advance(token)

    # -- what a step's sampler asks -----------------------------------------------------------------------------------

    def histories(self, rows: np.ndarray, places: np.ndarray, proposed: Proposed) -> tuple[np.ndarray, np.ndarray]:
        """[places, tokens]: those seen in prompt or output, some of them more than once; how often each was drawn."""
        logs = [self._log(row, proposed.get(place, ())) for place, row in zip(places, rows[places], strict=True)]
        seen = np.zeros((len(places), max(map(len, logs))), dtype=np.int64)
        counts = np.zeros(seen.shape, dtype=np.float32)
        for i, (row, log) in enumerate(zip(rows[places].tolist(), logs, strict=True)):
            drawn = np.bincount(log[self._num_prompt[row] :], minlength=self.vocab_size)
            seen[i, : len(log)], seen[i, len(log) :] = log, log[-1]
            counts[i] = drawn[seen[i]]
        return seen, counts

    def _log(self, row: int, proposed: Sequence[int]) -> np.ndarray:
        return np.asarray([*self._logs[row], *proposed] if proposed else self._logs[row], dtype=np.int64)

    def edits(
        self, rows: np.ndarray, places: np.ndarray, proposed: Proposed
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bias and bans: (place in `rows`, token, what is added) of each logit, for the rows at `places`."""
        at, tokens, added = [_NO_TOKENS], [_NO_TOKENS], [np.zeros(0, dtype=np.float32)]
        for place in places.tolist():
            row = rows[place]
            early, edits = self._early[row], self._edits[row]
            if early is None and edits is None:  # it has an allow-list
                continue
            length = len(self._logs[row]) + len(proposed.get(place, ()))
            banned = early[0] if early is not None and length < early[1] else _NO_TOKENS
            if edits is not None:
                biased = ~np.isin(edits[0], banned)
                tokens.append(edits[0][biased])
                added.append(edits[1][biased])  # far from float32's end: params.MAX_BIAS
            tokens.append(banned)
            added.append(np.full(len(banned), -np.inf, dtype=np.float32))
            at.append(np.full(sum(map(len, tokens)) - sum(map(len, at)), place, dtype=np.int64))
        return np.concatenate(at), np.concatenate(tokens), np.concatenate(added)

    def taxes(
        self, rows: np.ndarray, places: np.ndarray, proposed: Proposed
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the rules take off: (place in `rows`, token, tax) of each logit, for the rows at `places`."""
        found: list[tuple[int, int, float]] = []
        for place in places.tolist():
            taxed: dict[int, float] = {}
            for rule in self._rules[rows[place]]:
                for token, tax in _following(rule, proposed.get(place, ())).penalties().items():
                    taxed[token] = taxed.get(token, 0.0) + tax
            found += [(place, token, tax if math.isinf(tax) else min(tax, LARGEST)) for token, tax in taxed.items()]
        at, tokens, taxes = zip(*found, strict=True) if found else ((), (), ())
        return np.array(at, dtype=np.int64), np.array(tokens, dtype=np.int64), np.array(taxes, dtype=np.float32)


def _following(rule: RowRule, tokens: Sequence[int]) -> RowRule:
    """The rule as it will be after these tokens."""
    if tokens:
        rule = rule.fork()
        for token in tokens:
            rule.advance(token)
    return rule


def _edits(params: SamplingParams, vocab_size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(tokens, what is added to their logits); minus infinity bans."""
    changes = dict(params.logit_bias) | dict.fromkeys(params.banned_token_ids, -np.inf)
    changes = {token: change for token, change in changes.items() if token < vocab_size}
    if not changes:
        return None
    return np.array(list(changes), dtype=np.int64), np.array(list(changes.values()), dtype=np.float32)
