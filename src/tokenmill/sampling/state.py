"""`SamplingState`: one row a request, as arrays on the host; what the draws of a step are made from.

Owned by the engine core's thread. Rows are those of the running requests, so a decode step picks its parameters with
one numpy index. A `RowRule` is what a request remembers between draws that the model does not see.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

import numpy as np

from tokenmill.contract import IntArray
from tokenmill.contract.draws import DRAW, FLOATS, Draws, TokenLists
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


COLDEST = 1e-5
"""A temperature below this leaves nothing but the likeliest token: it is greedy."""
LARGEST = float(np.finfo(np.float32).max)
_NO_TOKENS = np.zeros(0, dtype=np.int32)
Proposed = Mapping[int, Sequence[int]]
"""Place of a draw -> tokens between its row's log and it, as if they had been drawn."""
Listed = tuple[np.ndarray, np.ndarray | None]
"""Tokens, and a number for each where it has one."""


class SamplingState:
    """Parameters, keys and memories of the running requests."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.table = np.zeros(max_rows, dtype=DRAW)
        """What each row is drawn with; its positions are those of a step."""
        self.table["num_logprobs"] = -1
        self.is_plain_greedy = np.ones(max_rows, dtype=bool)
        """Nothing but the largest logit is asked for."""
        self.has_edits = np.zeros(max_rows, dtype=bool)
        """Bias, bans, allow-lists: edits of single logits before the penalties."""
        self.has_rules = np.zeros(max_rows, dtype=bool)
        self._edits: list[tuple[np.ndarray, np.ndarray] | None] = [None] * max_rows
        self._allowed: list[np.ndarray | None] = [None] * max_rows
        """The tokens of a row's allow-list; None: all."""
        self._early: list[tuple[np.ndarray, int] | None] = [None] * max_rows
        """(stop tokens, length of the log before which they are banned)."""
        self._rules: list[list[RowRule]] = [[] for _ in range(max_rows)]
        self._logs: list[Sequence[int]] = [()] * max_rows

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
        draw = self.table[row]
        for name in FLOATS:
            draw[name] = getattr(params, name)
        is_greedy = params.temperature < COLDEST
        if is_greedy:
            draw["temperature"] = 0
        draw["top_k"] = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        draw["seed"], draw["choice"], draw["attempt"] = seed, choice, params.attempt
        draw["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
        draw["num_prompt"] = num_prompt
        draw["is_filtered"] = params.top_k > 0 or params.top_p < 1 or params.typical_p < 1 or params.xtc_probability > 0
        has_penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        draw["has_penalties"] = has_penalties
        self._logs[row] = log
        has_bias = params.logit_bias or params.banned_token_ids
        self._edits[row] = _edits(params, self.vocab_size) if has_bias else None
        allowed = params.allowed_token_ids
        self._allowed[row] = None if allowed is None else np.unique(np.array(allowed, dtype=np.int32))
        early = sorted(token for token in stop_ids if token < self.vocab_size)
        self._early[row] = (
            (np.array(early, dtype=np.int32), num_prompt + params.min_tokens) if early and params.min_tokens else None
        )
        self._rules[row] = [Dry(params, log)] if params.dry_multiplier else []
        self.has_rules[row] = bool(self._rules[row])
        self.has_edits[row] = self._edits[row] is not None or allowed is not None or self._early[row] is not None
        is_raw = params.logprobs is None and not (self.has_edits[row] or has_penalties or self.has_rules[row])
        self.is_plain_greedy[row] = is_greedy and is_raw

    def detach(self, row: int) -> None:
        self._logs[row], self._rules[row] = (), []
        self._edits[row] = self._allowed[row] = self._early[row] = None

    def advance(self, row: int, token: int) -> None:
        """A token was drawn for a row that has rules."""
        for rule in self._rules[row]:
            rule.advance(token)

    # -- a step's draws -----------------------------------------------------------------------------------------------

    def draws(self, rows: IntArray, positions: IntArray, proposed: Proposed) -> Draws:
        """What is drawn for these rows, a token at each of the positions."""
        table = self.table[rows]
        table["position"] = positions
        edited, penalized, ruled = (
            which.nonzero()[0].tolist()
            for which in (self.has_edits[rows], table["has_penalties"], self.has_rules[rows])
        )
        allowed = {place: (ids, None) for place in edited if (ids := self._allowed[rows[place]]) is not None}
        histories = {place: (self._log(rows[place], proposed.get(place, ())), None) for place in penalized}
        return Draws(
            table,
            _lists(len(rows), allowed),
            _lists(len(rows), {place: self.edits(rows[place], proposed.get(place, ())) for place in edited}),
            _lists(len(rows), histories),
            _lists(len(rows), {place: self.taxes(rows[place], proposed.get(place, ())) for place in ruled}),
        )

    def _log(self, row: int, proposed: Sequence[int]) -> np.ndarray:
        log = np.asarray(self._logs[row], dtype=np.int32)
        return np.append(log, np.array(proposed, dtype=np.int32)) if proposed else log

    def edits(self, row: int, proposed: Sequence[int]) -> Listed:
        """Bias and bans: tokens, and what is added to their logits."""
        early, edits = self._early[row], self._edits[row]
        length = len(self._logs[row]) + len(proposed)
        banned = early[0] if early is not None and length < early[1] else _NO_TOKENS
        tokens, added = banned, np.full(len(banned), -np.inf, dtype=np.float32)
        if edits is not None:
            biased = ~np.isin(edits[0], banned)
            tokens = np.concatenate((edits[0][biased], tokens))
            added = np.concatenate((edits[1][biased], added))  # far from float32's end: params.MAX_BIAS
        return tokens, added

    def taxes(self, row: int, proposed: Sequence[int]) -> Listed:
        """What the rules take off: tokens, and the tax on each."""
        taxed: dict[int, float] = {}
        for rule in self._rules[row]:
            for token, tax in _following(rule, proposed).penalties().items():
                taxed[token] = taxed.get(token, 0.0) + tax
        taxes = [tax if math.isinf(tax) else min(tax, LARGEST) for tax in taxed.values()]
        return np.array(list(taxed), dtype=np.int32), np.array(taxes, dtype=np.float32)


def _lists(num_rows: int, found: Mapping[int, Listed]) -> TokenLists | None:
    """What was found for some places, in one piece; None if that is nothing."""
    if not any(len(tokens) for tokens, _ in found.values()):
        return None
    begin = np.zeros(num_rows + 1, dtype=np.int64)
    begin[np.array(list(found)) + 1] = [len(tokens) for tokens, _ in found.values()]
    values = [value for _, value in found.values() if value is not None]
    return TokenLists(
        begin.cumsum(),
        np.concatenate([tokens for tokens, _ in found.values()]),
        np.concatenate(values) if values else None,
    )


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
    return np.array(list(changes), dtype=np.int32), np.array(list(changes.values()), dtype=np.float32)
