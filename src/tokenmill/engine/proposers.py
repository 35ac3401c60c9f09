"""Proposers: who guesses what running requests will say next. Owned by the engine core's thread.

`LookupProposer` proposes what followed the same tokens before: in the request's own log, or in recent logs of its key,
which a `SuffixIndex` finds. `DraftProposer` proposes what a smaller model says. Their guesses are verified
(`speculation.py`), so they may be wrong; they cost time, never tokens.
"""

from __future__ import annotations

import logging
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract import BAD_ROW, Backend, Batch, IntArray, Output, Sampler, SampleRows, Sampling
from tokenmill.engine.cost_model import CostLine, LineFit
from tokenmill.engine.events import EventBus
from tokenmill.engine.kv_manager import KVManager
from tokenmill.engine.plan import num_common
from tokenmill.engine.request import Request
from tokenmill.errors import IntegrityError

log = logging.getLogger(__name__)

MOST_PROPOSED = 7
"""Tokens behind a request's own one: with it, what the CPU kernels compute for one reading of the weights."""
LONGEST_MATCH = 16
"""Tokens that a match is compared over: longer ones predict no better."""


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow a log; none: nothing is known."""

    tokens: tuple[int, ...] = ()
    """Below 0: the name of a row of the token table that the device knows, but not the host."""
    match: int = 0
    """How many of the log's last tokens they followed at their source: the more, the likelier they are right."""
    support: int = 1
    """What other places say of the first one: 2 if they agree, 1 if there are none, 0 if one of them does not."""


NO_PROPOSAL = Proposal()


class Proposer(Protocol):
    """Guesses what requests will say."""

    name: str

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Proposal]:
        """What follows the logs of these requests, at most so many tokens of each. Asked once a step."""
        ...

    def can_propose(self, request: Request) -> bool:
        """False: it has nothing to propose for the request, now or later."""
        ...

    def cost(self, num_requests: int) -> CostLine:
        """What tokens of so many requests take to propose, by position; nothing if that is negligible, or unknown."""
        ...

    def forget(self, request: Request) -> None:
        """The request has lost its row, for now or for good."""
        ...

    def keep(self, request: Request) -> None:
        """The request has ended well: its log may help others of its key and namespace."""
        ...


# -- lookup -----------------------------------------------------------------------------------------------------------

WAYS = 4
"""Places of an n-gram that are remembered."""
MIN_CAPACITY = 1 << 12
MOST_SHARED = 1 << 20
"""Tokens of ended requests that are remembered, of all keys together."""
SEPARATOR = -1
"""Between two logs: no match goes across it."""
MARGIN = 32
"""The ring's first tokens are repeated behind its end, so that what surrounds a place is one slice."""
FEW_ADDED = 16
"""Tokens up to which plain integers are faster than arrays."""
UINT64 = (1 << 64) - 1
HASH_FACTORS = (
    (
        0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
        0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53,
    ),
    (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F),
)  # fmt: skip
"""Of the n-grams that are looked up, longest first: the first one with a match decides."""


class SuffixIndex:
    """A ring of tokens in which the latest places of n-grams are found: 4 bytes a token, and 4 for each length.

    A multilinear hash of the n-gram names a bucket of `WAYS` places; a newer place replaces an older one of the same
    remainder. What is found is compared with the ring, so neither collisions nor overwritten places can mislead.
    """

    def __init__(self, capacity: int = MIN_CAPACITY) -> None:
        """`capacity`: a power of two, `MARGIN` at least."""
        self.capacity = capacity
        self.num_added = 0
        """Tokens so far; token i lies at `i % capacity`, if it is one of the latest `capacity`."""
        self._ring: IntArray = np.full(capacity + MARGIN, SEPARATOR, dtype=np.int32)
        self._bytes = self._ring.data.cast("B")
        self._tables = [(factors, np.full(capacity, -1, dtype=np.int32)) for factors in HASH_FACTORS]
        """For each length of n-grams: `WAYS` places a bucket."""
        self._shift = 64 - ((capacity // WAYS).bit_length() - 1)
        self._recent: list[int] = []
        """The latest tokens: as many as the longest n-gram has."""

    @property
    def num_bytes(self) -> int:
        return self._ring.nbytes + sum(table.nbytes for _, table in self._tables)

    def latest(self) -> IntArray:
        """The tokens that are held, oldest first."""
        head = self.num_added & (self.capacity - 1)
        if self.num_added <= self.capacity:
            return self._ring[: self.num_added].copy()
        return np.concatenate([self._ring[head : self.capacity], self._ring[:head]])

    def add(self, tokens: Sequence[int] | IntArray) -> None:
        """Append tokens. An n-gram is found once the token behind it is there."""
        if len(tokens) > FEW_ADDED:
            self._add_many(np.asarray(tokens, dtype=np.int32)[-self.capacity :])
            return
        for token in tokens:
            self._add_one(int(token))

    def _add_one(self, token: int) -> None:
        slot, recent = self.num_added & (self.capacity - 1), self._recent
        place = (slot - 1) & (self.capacity - 1)
        for factors, table in self._tables:
            if len(recent) >= len(factors):
                bucket = (sum(map(mul, factors, recent[-len(factors) :])) & UINT64) >> self._shift
                table[bucket * WAYS + place % WAYS] = place
        self._ring[slot] = token
        if slot < MARGIN:
            self._ring[self.capacity + slot] = token
        recent.append(token)
        if len(recent) > len(HASH_FACTORS[0]):
            del recent[0]
        self.num_added += 1

    def _add_many(self, tokens: IntArray) -> None:
        mask, slot, count = self.capacity - 1, self.num_added & (self.capacity - 1), len(tokens)
        before_end = min(count, self.capacity - slot)
        self._ring[slot : slot + before_end] = tokens[:before_end]
        self._ring[: count - before_end] = tokens[before_end:]
        self._ring[self.capacity :] = self._ring[:MARGIN]
        known = np.concatenate([np.array(self._recent, dtype=np.int32), tokens])
        wide = known.astype(np.uint64)
        for factors, table in self._tables:
            num_grams = len(known) - len(factors)  # the last one has no token behind it
            if num_grams > 0:
                hashes = np.zeros(num_grams, dtype=np.uint64)
                for i, factor in enumerate(factors):
                    hashes += wide[i : i + num_grams] * np.uint64(factor)
                last = self.num_added + count - 1
                places = np.arange(last - num_grams, last) & mask
                buckets = (hashes >> np.uint64(self._shift)).astype(np.int64)
                table[buckets * WAYS + places % WAYS] = places
        self._recent = known[-len(HASH_FACTORS[0]) :].tolist()
        self.num_added += count

    def find(self, tail: Sequence[int], most: int) -> Proposal:
        """What followed the place that agrees with the last tokens of a log the furthest; the latest of several."""
        tail = tail[-LONGEST_MATCH:]
        count = len(tail)
        wanted = int.from_bytes(struct.pack(f"<{count}i", *tail), "little")
        num_held, mask, last = min(self.num_added, self.capacity), self.capacity - 1, self.num_added - 1
        octets, size = self._bytes, 4 * count
        for factors, table in self._tables:
            if count < len(factors):
                continue
            bucket = ((sum(map(mul, factors, tail[-len(factors) :])) & UINT64) >> self._shift) * WAYS
            best, best_place, fewest, following = len(factors) - 1, -1, num_held, list[int]()
            for place in table[bucket : bucket + WAYS].tolist():
                num_behind = (last - place) & mask
                if place < 0 or not num_behind:
                    continue
                # How many tokens up to there are the last ones of the tail: the highest bytes of both as one number.
                end = 4 * (place + 1 if place >= LONGEST_MATCH else place + 1 + self.capacity)
                different = int.from_bytes(octets[end - size : end], "little") ^ wanted
                length = min(count - (different.bit_length() + 31) // 32, num_held - num_behind)
                if length >= len(factors):
                    following.append(int(self._ring[place + 1]))
                if length > best or (length == best and num_behind < fewest and best_place >= 0):
                    best, best_place, fewest = length, place, num_behind
            if best_place >= 0:
                support = 1 if len(following) == 1 else 2 if len(set(following)) == 1 else 0
                return Proposal(self._behind(best_place, fewest, most), best, support)
        return NO_PROPOSAL

    def _behind(self, place: int, num_behind: int, most: int) -> tuple[int, ...]:
        """The tokens that follow a place; a log that has begun to repeat itself goes on doing so."""
        tokens: list[int] = self._ring[place + 1 : place + 1 + min(most, num_behind)].tolist()
        if SEPARATOR in tokens:
            tokens = tokens[: tokens.index(SEPARATOR)]
        elif 0 < len(tokens) < most:
            tokens = (tokens * -(-most // len(tokens)))[:most]
        return tuple(tokens)


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

    def can_propose(self, request: Request) -> bool:  # noqa: ARG002
        return True

    def cost(self, num_requests: int) -> CostLine:  # noqa: ARG002
        return CostLine()

    def _propose(self, request: Request, most: int) -> Proposal:
        tokens, predicted = request.tokens, request.draw.params.prediction_token_ids
        num_before = len(predicted) + 1 if predicted else 0
        index = self._own.get(request.request_id)
        if index is None or index.capacity < num_before + len(tokens):
            index = self._own[request.request_id] = _sized_for(2 * (num_before + len(tokens)))
            if predicted:
                index.add([*predicted, SEPARATOR])
        index.add(tokens.array[index.num_added - num_before :])
        num_said = len(tokens) - request.num_prompt
        is_early = num_said < min(LONGEST_MATCH, len(predicted))  # too little to be found by
        if is_early and tuple(request.output) == predicted[:num_said]:
            return Proposal(predicted[num_said : num_said + most], LONGEST_MATCH)
        tail = tokens[-LONGEST_MATCH:]
        found = index.find(tail, most)
        if found.match < LONGEST_MATCH and (shared := self._shared.get(_scope(request))) is not None:
            other = shared.find(tail, most)
            found = other if other.match > found.match else found
        return found

    def forget(self, request: Request) -> None:
        self._own.pop(request.request_id, None)

    def keep(self, request: Request) -> None:
        """Add the log to those of its key; what it began with and was computed before has been added then."""
        scope, tokens = _scope(request), request.tokens.array
        tokens = tokens[max(0, min(request.num_cached, len(tokens)) - LONGEST_MATCH) :][-self._most_shared // 2 :]
        index = self._shared.pop(scope, None) or SuffixIndex(min(MIN_CAPACITY, self._most_shared))
        num_held = min(index.num_added, index.capacity)
        if num_held + len(tokens) > index.capacity < self._most_shared:
            grown = _sized_for(4 * (num_held + len(tokens)), self._most_shared)
            grown.add(index.latest())
            index = grown
        self._shared[scope] = index
        index.add(np.append(tokens, np.int32(SEPARATOR)))
        while sum(one.capacity for one in self._shared.values()) > self._most_shared and len(self._shared) > 1:
            self._shared.popitem(last=False)

    @property
    def num_bytes(self) -> int:
        """Memory of what ended requests have left."""
        return sum(index.num_bytes for index in self._shared.values())


def _scope(request: Request) -> Hashable:
    return request.hints.key, request.hints.namespace


def _sized_for(num_tokens: int, most: int = 1 << 30) -> SuffixIndex:
    return SuffixIndex(min(most, max(MIN_CAPACITY, 1 << (num_tokens - 1).bit_length())))


# -- a draft model ----------------------------------------------------------------------------------------------------

MOST_CAUGHT_UP = 512
"""Tokens that the draft model computes in one pass beside drafting: prompts, and what was said without it."""
SamplerOf = Callable[[IntArray, IntArray, Mapping[int, Sequence[int]]], Sampler | None]
"""Rows, positions and tokens proposed so far -> the sampler with which the requests' own tokens are drawn there."""


@dataclass(eq=False)
class _Held:
    """KV of one request in the draft model's memory."""

    seq: int
    num_computed: int
    """Tokens of the log that it holds..."""
    drafted: tuple[int, ...] = ()
    """...and proposed ones behind them, which the log may or may not say."""


@dataclass(frozen=True)
class _Turn:
    """What a request gets of one call: tokens of its log to catch up with, then so many drafted ones."""

    place: int
    """In the call."""
    request: Request
    held: _Held
    num_given: int
    num_drafted: int


@dataclass(frozen=True)
class TokenRows:
    """Rows of a backend's token table that belong to no request."""

    backend: Backend
    rows: IntArray


@dataclass(frozen=True)
class _Flight:
    """Drafts of one position, on their way."""

    places: NDArray[np.intp]
    """Of the turns that they are for."""
    sampling: Sampling
    rows: IntArray
    """Of the token table that they are in."""


@dataclass
class _Round:
    """What is drafted in one call."""

    turns: list[_Turn]
    began: float
    drafted: list[list[int]]
    """What is known so far, by turn."""
    flights: deque[_Flight] = field(default_factory=deque)
    keeps_two: bool = False
    """Do the last two drafts of a turn lie in different rows of the token table?"""

    def table_rows(self, position: int, places: NDArray[np.intp]) -> IntArray:
        """Of the draft model's token table, for these turns."""
        second = len(self.turns) if self.keeps_two and position % 2 else 0
        return (places + second).astype(np.int32)


class DraftProposer:
    """Proposes what a smaller model with the same vocabulary says, for all requests at once: one pass a position.

    Its backend has KV memory of its own, under a `KVManager` as the engine's is: prefixes are shared and parked. It
    follows the logs: a request is caught up with before it is drafted for, and KV of drafts that were not said is
    trimmed. Drafts are drawn with the request's own parameters and keys, so that two models that agree draw the same.
    A draft model that fails is given up; requests go on without it.

    Where both backends run ahead, the last drafts are not waited for: they are copied from token table to token table
    and proposed by the names of their rows, so that the step that verifies them is launched behind them.
    `await_drafts` says what they are.
    """

    name = "draft"

    def __init__(
        self,
        backend: Backend,
        vocab_sizes: tuple[int, int],
        max_context: int,
        sampler_of: SamplerOf,
        events: EventBus,
        ahead: TokenRows | None = None,
    ) -> None:
        """`vocab_sizes`: the draft model's, and that of the model it drafts for: they may be padded differently.

        `ahead`: where drafts may be put that are not waited for.
        """
        self._backend: Backend | None = backend
        self._capabilities = backend.capabilities
        self._own_vocab, self._vocab = vocab_sizes
        self._max_context = max_context
        self._sampler_of = sampler_of
        self._clock = events.clock
        self._kv = KVManager(backend.kv, backend.capabilities, EventBus(events.clock))
        self._held: dict[str, _Held] = {}
        self._ahead = ahead
        self._round: _Round | None = None
        """The latest call's, if some of its drafts are not known yet..."""
        self._named: dict[int, int] = {}
        """...and those that were named, once they are known."""
        self._latest = 0.0, 0.0
        """When the latest call began, and how long it took."""
        self._costs: dict[int, LineFit] = {}
        """Number of requests, as a power of two -> what drafted positions take."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Proposal]:
        found = [NO_PROPOSAL] * len(requests)
        if self._backend is None:
            return found
        self.await_drafts()
        self._named = {}
        try:
            turns = self._turns(requests, most)
            if turns:
                for turn, tokens in zip(turns, self._draft(self._backend, turns), strict=True):
                    found[turn.place] = Proposal(tokens, LONGEST_MATCH)
        except Exception as error:  # of any kind: proposals are never worth an engine
            self._give_up(error)
        return found

    def await_drafts(self) -> Mapping[int, int]:
        """Wait for the drafts that are on their way: name -> token, of those of the latest call that can be said."""
        current, self._round = self._round, None
        if current is None or self._backend is None:
            return self._named
        try:
            for flight in current.flights:
                tokens = self._collect(self._backend, current, flight)
                named = zip((-1 - flight.rows).tolist(), tokens, strict=True)
                self._named |= {name: token for name, token in named if self._can_be_said(token)}
            self._finish(current)
        except Exception as error:  # as in `propose`
            self._give_up(error)
        return self._named

    def _give_up(self, error: Exception) -> None:
        log.error("the draft model failed and is given up: %s: %s", type(error).__name__, error)
        self.close()

    def can_propose(self, request: Request) -> bool:
        return self._backend is not None and len(request.tokens) < self._max_context

    def cost(self, num_requests: int) -> CostLine:
        known = self._costs.get(num_requests.bit_length())
        return CostLine() if known is None else known.line

    def _note_time(self, turns: list[_Turn], seconds: float) -> None:
        """A call has taken so long, from its first launch until its last draft was known."""
        num_positions = max(turn.num_drafted for turn in turns)
        if num_positions and sum(turn.num_given for turn in turns) <= 2 * len(turns):
            self._costs.setdefault(len(turns).bit_length(), LineFit(least_times=2)).observe(num_positions, seconds)

    # -- following the logs -------------------------------------------------------------------------------------------

    def _turns(self, requests: Sequence[Request], most: Sequence[int]) -> list[_Turn]:
        turns, left, cells = [], MOST_CAUGHT_UP, 0
        for place, (request, count) in enumerate(zip(requests, most, strict=True)):
            room = self._max_context - len(request.tokens)
            if count < 1 or room < 1:
                continue
            held = self._follow(request)
            if held is None:
                continue
            num_owed = len(request.tokens) - held.num_computed
            is_behind = num_owed > MOST_PROPOSED + 1  # else it has been drafted for: others' prompts do not stop that
            num_given = min(num_owed, left) if is_behind else num_owed
            if num_given < 1:
                continue
            num_drafted = min(count, room) if num_given == num_owed else 0
            given = request.tokens[held.num_computed : held.num_computed + num_given]
            if max(given) >= self._own_vocab:  # a token that only the other model has
                continue
            needed = self._kv.cells_for(num_given + num_drafted)
            if self._kv.make_room(cells + needed, by=None):
                turns.append(_Turn(place, request, held, num_given, num_drafted))
                cells, left = cells + needed, left - num_given * is_behind
        return turns

    def _follow(self, request: Request) -> _Held | None:
        """The KV of the request, trimmed to what its log says; its last token is still to be computed."""
        held = self._held.get(request.request_id)
        if held is None:
            held = self._start(request)
        elif held.drafted or held.num_computed >= len(request.tokens):
            self._trim_to_log(request, held)
        return held

    def _trim_to_log(self, request: Request, held: _Held) -> None:
        num_agreed = num_common(request.tokens[held.num_computed :], held.drafted)
        held.num_computed = min(held.num_computed + num_agreed, len(request.tokens) - 1)
        held.drafted = ()
        self._kv.trim(held.seq, held.num_computed)

    def _start(self, request: Request) -> _Held | None:
        tokens, hints = request.tokens.array, replace(request.hints, owner=None)
        leased = self._kv.start(self._kv.match(tokens, hints), request)
        if leased is None:
            return None
        held = self._held[request.request_id] = _Held(*leased)
        num_prompt = request.num_prompt
        computed = lambda: min(held.num_computed, num_prompt)  # noqa: E731
        self._kv.announce(held.seq, tokens[:num_prompt], hints.namespace, computed)
        return held

    def forget(self, request: Request) -> None:
        """Park its KV: it may come back, or another request may begin with the same tokens."""
        self.await_drafts()
        held = self._held.pop(request.request_id, None)
        if held is None or self._backend is None:
            return
        try:
            self._trim_to_log(request, held)
            hints = replace(request.hints, owner=None)
            self._kv.park(held.seq, request.tokens.array, request.num_prompt, hints)
        except Exception as error:  # as in `propose`
            self._give_up(error)

    def keep(self, request: Request) -> None:
        """Its KV is parked already."""

    def close(self) -> None:
        """Free the draft model's backend; nothing is proposed any more."""
        self._held.clear()
        self._round = None
        if self._backend is not None:
            backend, self._backend = self._backend, None
            backend.close()

    def check_integrity(self, *, is_idle: bool) -> None:
        """Raise `IntegrityError` if the books do not balance; when idle, nothing but parked KV may be left."""
        self.await_drafts()
        if self._backend is None:
            return
        self._kv.check_integrity()
        if is_idle and (self._held or self._kv.num_leased):
            raise IntegrityError("an idle draft model holds KV that is not parked")
        for name, held in self._held.items():
            if self._kv.length(held.seq) != held.num_computed + len(held.drafted):
                raise IntegrityError(f"the draft model's KV of {name} is not as long as its tokens")

    # -- drafting -----------------------------------------------------------------------------------------------------

    def _draft(self, backend: Backend, turns: list[_Turn]) -> list[tuple[int, ...]]:
        """Catch up with the logs, and draft: one pass for each position, over all requests that go so far."""
        keeps_two = 2 * len(turns) <= self._capabilities.max_seqs
        current = _Round(turns, self._clock(), [[] for _ in turns], keeps_two=keeps_two)
        seqs = np.array([turn.held.seq for turn in turns], dtype=np.int32)
        counts = np.array([turn.num_drafted for turn in turns], dtype=np.int32)
        lengths = np.array([len(turn.request.tokens) for turn in turns], dtype=np.int32)
        rows = np.array([turn.request.row for turn in turns], dtype=np.int32)
        needs_tokens = any(turn.request.draw.params.needs_history for turn in turns)
        depth = 0 if needs_tokens else self._capabilities.depth
        batch = _catching_up(turns)
        for i in range(max(1, int(counts.max()))):
            while len(current.flights) > depth:
                flight = current.flights.popleft()
                for place, token in zip(flight.places, self._collect(backend, current, flight), strict=True):
                    if not self._can_be_said(token):  # nothing follows it
                        counts[place] = min(counts[place], len(current.drafted[place]))
            places = np.flatnonzero(counts > i)
            if i and not len(places):
                break
            if i:
                batch = Batch(
                    token=-1 - current.table_rows(i - 1, places),
                    pos=lengths[places] + np.int32(i - 1),
                    seq_ids=seqs[places][:, None],
                    output=np.full(len(places), Output.LOGITS, dtype=np.uint8),
                )
            forward = backend.forward(batch)
            if not len(places):
                backend.collect(forward)
                break
            drafted = current.drafted
            before = {at: drafted[place] for at, place in enumerate(places.tolist())} if needs_tokens and i else {}
            sampler = self._sampler_of(rows[places], lengths[places] + np.int32(i), before)
            drawn = SampleRows(np.arange(len(places), dtype=np.int32), current.table_rows(i, places), sampler)
            sampling = backend.sample(forward, drawn)
            current.flights.append(_Flight(places, sampling, drawn.table_row))
        if not self._name(backend, current):
            while current.flights:
                self._collect(backend, current, current.flights.popleft())
        proposed = [self._said(tokens) for tokens in current.drafted]
        if not current.flights:
            self._finish(current)
            return proposed
        self._round = current
        for flight in current.flights:
            for place, name in zip(flight.places.tolist(), (-1 - flight.rows).tolist(), strict=True):
                if len(proposed[place]) >= len(current.drafted[place]):  # nothing before it is wrong
                    proposed[place] += (name,)
        return proposed

    def _name(self, backend: Backend, current: _Round) -> bool:
        """Put drafts that are on their way where the other backend finds them. False if they are to be waited for."""
        ahead, flights = self._ahead, current.flights
        needs_tokens = any(one.request.draw.params.needs_history or one.request.grammar for one in current.turns)
        if ahead is None or needs_tokens or not flights or not current.keeps_two:
            return False
        own = np.concatenate([flight.rows for flight in flights])
        if len(own) > len(ahead.rows) or not ahead.backend.take_sampled(backend, own, ahead.rows[: len(own)]):
            return False
        ends = np.cumsum([len(flight.rows) for flight in flights])
        named = np.split(ahead.rows[: len(own)], ends[:-1])
        current.flights = deque(replace(one, rows=rows) for one, rows in zip(flights, named, strict=True))
        return True

    def _collect(self, backend: Backend, current: _Round, flight: _Flight) -> list[int]:
        tokens: list[int] = backend.collect(flight.sampling).ids.tolist()
        for place, token in zip(flight.places.tolist(), tokens, strict=True):
            current.drafted[place].append(token)
        return tokens

    def _finish(self, current: _Round) -> None:
        """All drafts of a call are known."""
        for turn, tokens in zip(current.turns, current.drafted, strict=True):
            turn.held.num_computed += turn.num_given
            turn.held.drafted = tuple(tokens[:-1])  # the last one was drawn, not computed
        self._latest = current.began, self._clock() - current.began
        self._note_time(current.turns, self._latest[1])

    def took_since(self, at: float) -> float:
        """Seconds of the latest call, if that has begun since then."""
        began, seconds = self._latest
        return seconds if began >= at else 0.0

    def _said(self, tokens: list[int]) -> tuple[int, ...]:
        """The drafted tokens up to one that cannot be said."""
        cut = next((i for i, token in enumerate(tokens) if not self._can_be_said(token)), len(tokens))
        return tuple(tokens[:cut])

    def _can_be_said(self, token: int) -> bool:
        """False where none could be drawn, and of a token that the other model does not have."""
        return token != BAD_ROW and token < self._vocab


def _catching_up(turns: list[_Turn]) -> Batch:
    """The tokens of the logs that are still to be computed; a request that is drafted for asks for its last logits."""
    token: list[int] = []
    pos: list[IntArray] = []
    output = []
    for turn in turns:
        begin, count = turn.held.num_computed, turn.num_given
        token += turn.request.tokens[begin : begin + count]
        pos.append(np.arange(begin, begin + count, dtype=np.int32))
        output += [int(Output.NONE)] * (count - 1) + [int(Output.LOGITS if turn.num_drafted else Output.NONE)]
    seqs = np.repeat(np.array([turn.held.seq for turn in turns], dtype=np.int32), [turn.num_given for turn in turns])
    return Batch(
        token=np.array(token, dtype=np.int32),
        pos=np.concatenate(pos),
        seq_ids=seqs[:, None],
        output=np.array(output, dtype=np.uint8),
    )
