"""`Speculation`: proposes what running requests will say next, and decides how much of it is worth computing.

A `Proposer` guesses the tokens behind a request's log. Those that are worth it are computed in the same step as the
request's own token, each with a draw behind it (`StepPlan.verifications`); what is drawn decides, so the output is the
one without speculation. `Results` takes the draws as far as the proposal was right, the scheduler removes the KV of the
rest. A proposal is never part of a log, so whatever happens to its step, nothing has to be undone but KV.

How many tokens are worth it is a question of the current step: they cost what the cost model says more rows cost, and
are right as often as they were lately after matches of that length. Proposals that are not computed are compared with
what is said, too, so that a request that begins to repeat something is noticed. Owned by the engine core's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract import IntArray
from tokenmill.engine.cost_model import CostModel
from tokenmill.engine.events import VerifiedEvent
from tokenmill.engine.plan import Draft
from tokenmill.engine.request import Request
from tokenmill.engine.results import Verified
from tokenmill.engine.rows import RunningRows

MOST_PROPOSED = 7
"""Tokens behind a request's own one: with it, what the CPU kernels compute for one reading of the weights."""
FEW_PROPOSED = 4
"""Tokens in a step, of all requests, before it is known what they cost."""
LONGEST_MATCH = 16
"""Tokens that a match is compared over: longer ones are no better."""
ORDERS = (6, 2)
"""Lengths of the n-grams that are looked up, in this order; the longest match of the first one that is found counts."""
WAYS = 4
"""Occurrences of an n-gram that are remembered."""
MIN_CAPACITY = 1 << 12
MOST_SHARED = 1 << 20
"""Tokens of ended requests that are remembered, of all keys together."""
SEPARATOR = -1
"""Between two logs: no match goes across it."""


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow a log; none: nothing is known."""

    tokens: tuple[int, ...] = ()
    match: int = 0
    """How many of the log's last tokens they followed where they come from: the more, the likelier they are right."""


NO_PROPOSAL = Proposal()


class Proposer(Protocol):
    """Guesses what requests will say. Its guesses are verified, so it may be wrong; it is asked once a step."""

    name: str

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Proposal]:
        """What follows the logs of these requests, at most so many tokens of each."""
        ...

    def forget(self, request: Request) -> None:
        """The request runs no more, for now or for good."""
        ...

    def keep(self, request: Request) -> None:
        """The request has ended well: what it has said may help others of its key and namespace."""
        ...


# -- proposals from what was said before ------------------------------------------------------------------------------


class SuffixIndex:
    """A ring of tokens in which the places of recent n-grams are found: 4 bytes a token, and 4 for each order.

    A hash of the n-gram names a bucket of `WAYS` places; a newer place replaces an older one of the same remainder.
    What is found is compared with the ring, so neither collisions nor places that were written over can mislead.
    """

    def __init__(self, capacity: int = MIN_CAPACITY) -> None:
        """`capacity`: a power of two."""
        self.num_added = 0
        """Tokens so far; token i lies at `i % capacity`, if it is one of the latest `capacity`."""
        self._ring: IntArray = np.full(capacity, SEPARATOR, dtype=np.int32)
        self._tables = {order: np.full((capacity // WAYS, WAYS), -1, dtype=np.int32) for order in ORDERS}
        self._shift = np.uint64(64 - max(1, (capacity // WAYS).bit_length() - 1))

    @property
    def capacity(self) -> int:
        return len(self._ring)

    @property
    def num_bytes(self) -> int:
        return self._ring.nbytes + sum(table.nbytes for table in self._tables.values())

    def latest(self) -> IntArray:
        """The tokens that are held, oldest first."""
        begin = max(0, self.num_added - self.capacity)
        held: IntArray = self._ring[np.arange(begin, self.num_added) & (self.capacity - 1)]
        return held

    def add(self, tokens: IntArray) -> None:
        """Append tokens. An n-gram is found once the token behind it is there."""
        tokens = tokens[-self.capacity :]
        begin, count = self.num_added, len(tokens)
        self._ring[np.arange(begin, begin + count) & (self.capacity - 1)] = tokens
        self.num_added += count
        for order, table in self._tables.items():
            first = max(begin - 1, order - 1, self.num_added - self.capacity + order - 1)
            places = np.arange(first, self.num_added - 1)  # of the last token of each n-gram
            if len(places):
                grams = self._ring[(places[:, None] - np.arange(order - 1, -1, -1)) & (self.capacity - 1)]
                table[self._buckets(grams), places % WAYS] = places

    def find(self, tail: IntArray, most: int) -> Proposal:
        """What followed the latest of the places that agree with the last tokens of a log the furthest."""
        oldest, mask = self.num_added - self.capacity, self.capacity - 1
        for order, table in self._tables.items():
            if len(tail) < order or self.num_added <= order:
                continue
            places = np.sort(table[self._buckets(tail[None, -order:])[0]])[::-1]
            backwards = np.arange(min(len(tail), LONGEST_MATCH))
            at = places[:, None] - backwards
            is_same = (self._ring[at & mask] == tail[::-1][: len(backwards)]) & (at >= max(oldest, 0))
            lengths = np.where(is_same.all(axis=1), len(backwards), is_same.argmin(axis=1))
            best = int(lengths.argmax())
            if lengths[best] >= order:
                return Proposal(self._behind(int(places[best]), most), int(lengths[best]))
        return NO_PROPOSAL

    def _behind(self, place: int, most: int) -> tuple[int, ...]:
        """The tokens that follow a place; a log that has begun to repeat itself goes on doing so."""
        count = min(most, self.num_added - 1 - place)
        tokens: list[int] = self._ring[np.arange(place + 1, place + 1 + count) & (self.capacity - 1)].tolist()
        if SEPARATOR in tokens:
            tokens = tokens[: tokens.index(SEPARATOR)]
        elif 0 < len(tokens) < most:
            tokens = (tokens * -(-most // len(tokens)))[:most]
        return tuple(tokens)

    def _buckets(self, grams: IntArray) -> NDArray[np.intp]:
        """Where the n-grams, [count, order], are remembered."""
        hashes = np.zeros(len(grams), dtype=np.uint64)
        for column in grams.T.astype(np.uint64):
            hashes = (hashes ^ column) * HASH_FACTOR
            hashes ^= hashes >> np.uint64(29)
        return (hashes >> self._shift).astype(np.intp)


HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class LookupProposer:
    """Proposes what followed the last tokens of a log before: in the log itself, or in recent ones of its key.

    Logs are shared inside one key and one namespace only: a proposal that is right comes sooner, which would tell a
    key what another one has said.
    """

    name = "lookup"

    def __init__(self, most_shared: int = MOST_SHARED) -> None:
        self._own: dict[str, SuffixIndex] = {}
        """By request: its log, as far as it has been added."""
        self._shared: OrderedDict[Hashable, SuffixIndex] = OrderedDict()
        """By key and namespace, the least recently used first."""
        self._most_shared = most_shared

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Proposal]:
        return [self._propose(request, count) for request, count in zip(requests, most, strict=True)]

    def _propose(self, request: Request, most: int) -> Proposal:
        index, log = self._own.get(request.request_id), request.token_array()
        predicted = request.draw.params.prediction_token_ids
        num_before = len(predicted) + 1 if predicted else 0
        if index is None or index.capacity < num_before + len(log):
            capacity = max(MIN_CAPACITY, 1 << (2 * (num_before + len(log)) - 1).bit_length())
            index = self._own[request.request_id] = SuffixIndex(capacity)
            if predicted:
                index.add(np.array([*predicted, SEPARATOR], dtype=np.int32))
        index.add(log[index.num_added - num_before :])
        num_said = len(log) - request.num_prompt
        is_early = num_said < min(LONGEST_MATCH, len(predicted))  # too little to be found by
        if is_early and tuple(request.output) == predicted[:num_said]:
            return Proposal(predicted[num_said : num_said + most], LONGEST_MATCH)
        tail = log[-LONGEST_MATCH:]
        found = index.find(tail, most)
        if found.match < LONGEST_MATCH and (shared := self._shared.get(_scope(request))) is not None:
            other = shared.find(tail, most)
            found = other if other.match > found.match else found
        return found

    def forget(self, request: Request) -> None:
        self._own.pop(request.request_id, None)

    def keep(self, request: Request) -> None:
        """Add the log to those of its key; what it began with and was computed before has been added then."""
        scope, log = _scope(request), request.token_array()
        log = log[max(0, min(request.num_cached, len(log)) - LONGEST_MATCH) :][-self._most_shared // 2 :]
        index = self._shared.pop(scope, None) or SuffixIndex(min(MIN_CAPACITY, self._most_shared))
        held = min(index.num_added, index.capacity)
        if held + len(log) > index.capacity < self._most_shared:
            index = _grown(index, min(self._most_shared, 1 << (4 * (held + len(log)) - 1).bit_length()))
        self._shared[scope] = index
        index.add(np.append(log, np.int32(SEPARATOR)).astype(np.int32))
        while sum(one.capacity for one in self._shared.values()) > self._most_shared and len(self._shared) > 1:
            self._shared.popitem(last=False)

    @property
    def num_bytes(self) -> int:
        """Memory of what ended requests have left."""
        return sum(index.num_bytes for index in self._shared.values())


def _scope(request: Request) -> Hashable:
    return request.hints.key, request.hints.namespace


def _grown(index: SuffixIndex, capacity: int) -> SuffixIndex:
    grown = SuffixIndex(capacity)
    grown.add(index.latest())
    return grown


# -- how much is worth it ---------------------------------------------------------------------------------------------

BUCKET_OF = np.searchsorted(
    [1, 2, 3, 4, 6, 9, 13, LONGEST_MATCH], np.arange(LONGEST_MATCH + MOST_PROPOSED + 1), "right"
)
"""Match length -> bucket, in each of which proposals are right about equally often."""
NUM_BUCKETS = int(BUCKET_OF.max()) + 1
PRIOR = np.linspace(0.3, 0.9, NUM_BUCKETS)
PRIOR_WEIGHT = 3.0
"""Trials that what is known of all requests counts for."""
FADE, FADE_ALL = 0.9, 0.995
"""Of what is known, with each trial: of a request, of all of them."""
CERTAIN = 0.97
"""No proposal is likelier than this."""
MIN_GAIN = 1.03
"""Expected tokens per second over those without proposals."""


class Acceptance:
    """How often proposed tokens are right, by the length of the match before them: for each row, and for all."""

    def __init__(self, max_rows: int) -> None:
        self._hits = np.zeros((max_rows, NUM_BUCKETS))
        self._trials = np.zeros((max_rows, NUM_BUCKETS))
        self._all_hits = PRIOR * 8
        self._all_trials = np.full(NUM_BUCKETS, 8.0)

    def reset(self, row: int) -> None:
        self._hits[row] = self._trials[row] = 0

    def learn(self, row: int, match: int, num_agreed: int, num_proposed: int) -> None:
        """The first `num_agreed` tokens were right, and the next one wrong if there was one."""
        for i in range(min(num_agreed + 1, num_proposed)):
            bucket, hit = BUCKET_OF[min(match + i, LONGEST_MATCH)], float(i < num_agreed)
            self._hits[row, bucket] = FADE * self._hits[row, bucket] + hit
            self._trials[row, bucket] = FADE * self._trials[row, bucket] + 1
            self._all_hits[bucket] = FADE_ALL * self._all_hits[bucket] + hit
            self._all_trials[bucket] = FADE_ALL * self._all_trials[bucket] + 1

    def chances(self, row: int, proposal: Proposal) -> NDArray[np.float64]:
        """For each of the tokens: how likely it and all before it are right. Each that is makes the match longer."""
        rates = (self._hits[row] + PRIOR_WEIGHT * self._all_hits / self._all_trials) / (
            self._trials[row] + PRIOR_WEIGHT
        )
        buckets = BUCKET_OF[np.minimum(proposal.match + np.arange(len(proposal.tokens)), LONGEST_MATCH)]
        return np.cumprod(np.minimum(rates[buckets], CERTAIN))


@dataclass(frozen=True)
class _Guess:
    """A proposal that was not computed: what the request says next tells whether it was right."""

    lease: int
    position: int
    proposal: Proposal


class Speculation:
    """Asks the proposers and shares out what is worth computing."""

    def __init__(self, rows: RunningRows, default: str, *, is_possible: bool, runs_ahead: bool) -> None:
        """`runs_ahead`: steps are submitted ahead, which requests that speculate give up: only if they are told to."""
        self.proposers: dict[str, Proposer] = {"lookup": LookupProposer()}
        self._rows = rows
        self._default = default
        self._is_possible = is_possible
        self._auto = "off" if runs_ahead else "lookup"
        self._acceptance = Acceptance(len(rows.requests))
        self._guesses: dict[int, _Guess] = {}
        """By row."""
        self._matches: dict[int, int] = {}
        """Of the proposals that are being verified, by row."""

    def proposer_of(self, request: Request) -> Proposer | None:
        """Who proposes for the request; None: nobody."""
        mode = request.draw.params.speculation or self._default
        name = self._auto if mode == "auto" else mode
        is_possible = self._is_possible and request.pooling is None
        return self.proposers.get(name) if is_possible else None

    def begin(self, request: Request) -> None:
        """The request has got a row."""
        self._rows.speculates[request.row] = self.proposer_of(request) is not None
        self._acceptance.reset(request.row)

    def forget(self, request: Request, *, is_complete: bool = False) -> None:
        """The request loses its row; complete, its log may help others."""
        proposer = self.proposer_of(request)
        if proposer is not None:
            self._guesses.pop(request.row, None)
            proposer.forget(request)
            if is_complete:
                proposer.keep(request)

    def propose(self, draft: Draft, cost: CostModel) -> dict[int, tuple[int, ...]]:
        """Row -> proposed tokens, for rows of the draft that decode: as many as make the step worth more."""
        rows = draft.decodes[self._rows.speculates[draft.decodes]]
        if not len(rows) or not self._may_pay(draft, cost):
            return {}
        requests = [request for row in rows.tolist() if (request := self._rows.requests[row]) is not None]
        self._check_guesses(requests)
        found = {request.row: proposal for request, proposal in self._ask(requests) if proposal.tokens}
        counts = self.allot(found, draft, cost)
        self._guesses |= {
            row: _Guess(int(self._rows.lease[row]), int(self._rows.num_tokens[row]), proposal)
            for row, proposal in found.items()
            if not counts[row]
        }
        self._matches = {row: proposal.match for row, proposal in found.items() if counts[row]}
        return {row: found[row].tokens[:count] for row, count in counts.items() if count}

    def _ask(self, requests: list[Request]) -> list[tuple[Request, Proposal]]:
        """Each request's proposer; what a grammar rules out is left out."""
        asked: dict[str, list[Request]] = {}
        for request in requests:
            proposer = self.proposer_of(request)
            if proposer is not None:
                asked.setdefault(proposer.name, []).append(request)
        found = []
        for name, some in asked.items():
            most = [self._most(request) for request in some]
            found += list(zip(some, self.proposers[name].propose(some, most), strict=True))
        return [(request, _allowed(request, proposal)) for request, proposal in found]

    def _most(self, request: Request) -> int:
        """Tokens that may be proposed: the last one of the log is drawn in any case."""
        row, quota = request.row, request.limits.max_tokens_per_step
        room = int(self._rows.limit[row] - self._rows.num_tokens[row]) - 1
        return max(0, min(room, MOST_PROPOSED, MOST_PROPOSED if quota is None else quota - 1))

    def _may_pay(self, draft: Draft, cost: CostModel) -> bool:
        """Would a token that is certain to be right be worth its row? Else nobody has to look for one."""
        price = cost.price(draft)
        return price is not None and CERTAIN * price.base > price.each * len(draft.decodes)

    def allot(self, found: Mapping[int, Proposal], draft: Draft, cost: CostModel) -> dict[int, int]:
        """How many tokens of each proposal to compute: those that give the step the most expected tokens a second."""
        counts, price = dict.fromkeys(found, 0), cost.price(draft)
        if not found or price is None:
            return counts
        chances = [self._acceptance.chances(row, proposal) for row, proposal in found.items()]
        owner = np.repeat(np.fromiter(found, np.int32), [len(one) for one in chances])
        chance = np.concatenate(chances)
        order = np.argsort(-chance, kind="stable")  # a row's own are in order: each is less likely than the one before
        order = order[: min(draft.budget, FEW_PROPOSED) if price.is_guessed else draft.budget]
        if not len(order):
            return counts
        num_sure = len(draft.decodes)
        tokens = num_sure + np.cumsum(chance[order])
        seconds = price.base + price.each * np.arange(1, len(order) + 1)
        best = int((tokens / seconds).argmax())
        if tokens[best] / seconds[best] > MIN_GAIN * num_sure / price.base:
            for row in owner[order[: best + 1]].tolist():
                counts[row] += 1
        return counts

    # -- what became of it --------------------------------------------------------------------------------------------

    def _check_guesses(self, requests: Sequence[Request]) -> None:
        """Compare what was proposed but not computed with what was said."""
        for request in requests:
            guess = self._guesses.pop(request.row, None)
            if guess is None or guess.lease != self._rows.lease[request.row]:
                continue
            said = request.tokens[guess.position : guess.position + 1]
            if said:
                self._acceptance.learn(request.row, guess.proposal.match, int(said[0] == guess.proposal.tokens[0]), 1)

    def learn(self, verified: Sequence[Verified]) -> None:
        for one in verified:
            row, num_proposed = one.verification.row, len(one.verification.tokens)
            self._acceptance.learn(row, self._matches.get(row, 0), one.num_agreed, num_proposed)
            one.request.num_proposed += num_proposed
            one.request.num_agreed += one.num_agreed

    def told(self, verified: Sequence[Verified], at: float) -> VerifiedEvent:
        names = [self.proposer_of(one.request) for one in verified]
        return VerifiedEvent(
            at,
            tuple("" if one is None else one.name for one in names),
            tuple(one.verification.row for one in verified),
            tuple(len(one.verification.tokens) for one in verified),
            tuple(one.num_agreed for one in verified),
            tuple(one.num_drawn for one in verified),
        )


def _allowed(request: Request, proposal: Proposal) -> Proposal:
    """As much of a proposal as the request's grammar allows."""
    if request.grammar is None or not proposal.tokens:
        return proposal
    return Proposal(proposal.tokens[: request.grammar.num_allowed(proposal.tokens)], proposal.match)
