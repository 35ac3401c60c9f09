"""`KVManager`: ownership of KV. The only caller of KV mutators, and the only place that knows `Capabilities`.

A sequence id is *leased* to a running request, *parked* with the KV of a finished or preempted one, or free. Parked KV
is a cache: indexed by its tokens for later requests, and evicted when cells or ids run short. Nothing is pinned.

A session has at most one parked sequence, as has a plain prompt: newer KV replaces it. KV that is a prefix of a longer
parked sequence of plain requests is not kept beside it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from tokenmill.contract import Batch, Capabilities, IntArray, KVMemory
from tokenmill.engine.events import EventBus, ParkedChange, ParkedEvent, ParkedTokens, ParkedView
from tokenmill.engine.prefix import Entry, Match, Namespace, PrefixIndex, common_prefix
from tokenmill.engine.request import Hints, Request
from tokenmill.errors import IntegrityError, InvalidOperation, OutOfKV
from tokenmill.outputs import CacheVerdict, Divergence, Loss

ROOM, WEIGHTS, FAILURE = "room", "weights", "failure"
"""Why parked KV was evicted."""
NUM_SHOWN = 16
"""Tokens reported from where a prompt diverges from cached KV."""
MOST_LOSSES = 10_000
FEW_VICTIMS = 8
"""Parked sequences whose cells are counted first, doubled each round: bounds the cost of a full cache."""
MOST_BACKGROUND = 64
"""Parked sequences that only background requests have used: thousands of lines do not push out what others left."""
MOST_CANDIDATES = 256
"""Least recently used parked sequences compared when an id is needed: bounds the cost of starting a request."""


@dataclass(eq=False, slots=True)
class ParkedSequence:
    """Cached KV without a running request: a sequence and its tokens."""

    entry: Entry
    key: str
    holder: Hashable
    """The owner, which has at most one parked sequence: a session, or the prompt of plain requests."""
    base: int
    """`KVManager._base` when it was last used."""

    @property
    def seq(self) -> int:
        return self.entry.seq

    @property
    def owner(self) -> str | None:
        """The session, or None for a plain request."""
        return self.entry.owner


class KVManager:
    """Leases sequences, shares prefixes, parks, evicts. Owned by the engine core's thread."""

    def __init__(
        self, kv: KVMemory, capabilities: Capabilities, events: EventBus, *, reuse: bool = True, num_rows: int = 0
    ) -> None:
        self.kv = kv
        self.index = PrefixIndex()
        self.num_cells = kv.stats().num_cells
        self.num_evicted = 0
        """Parked sequences evicted for lack of room."""
        self._capabilities = capabilities
        self._events = events
        self._reuse = reuse
        self._free_seqs = list(range(capabilities.max_seqs - 1, -1, -1))
        self._leased: dict[int, Entry | None] = {}
        self._plain: OrderedDict[int, ParkedSequence] = OrderedDict()
        self._sessions: OrderedDict[int, ParkedSequence] = OrderedDict()
        """Least recently used first, both."""
        self._background: OrderedDict[int, ParkedSequence] = OrderedDict()
        """The plain ones that only background requests have used, in the same order: the first to go."""
        self._most_background = max(MOST_BACKGROUND, num_rows)  # all that run may be preempted, and resume from theirs
        self._held: dict[Hashable, ParkedSequence] = {}
        """By owner."""
        self._base = 0
        """The highest cost paid for a sequence evicted for its id: see `_cheapest`."""
        self._losses: OrderedDict[str, Loss] = OrderedDict()
        """What sessions have lost since they last ran; the most recent are dropped last."""
        self._since = events.clock()

    # -- cache verdicts -----------------------------------------------------------------------------------------------

    def divergence(self, request: Request) -> Divergence | None:
        """Where the prompt of a starting request diverges from cached KV."""
        return self.index.divergence(request.tokens.array, request.hints.namespace, NUM_SHOWN) if self._reuse else None

    def verdict(self, request: Request, num_cached: int, divergence: Divergence | None) -> CacheVerdict:
        """Why a request that starts now has this much cached and not more."""
        loss = self._losses.pop(request.hints.owner or "", None)
        is_found = self._reuse and self._capabilities.partial_cp
        return CacheVerdict(num_cached, divergence, loss, self._since, is_found)

    def _note_loss(self, parked: ParkedSequence, num_tokens: int, reason: str, by: Request | None) -> None:
        """Record what a session lost, and for which request, if any."""
        if parked.owner is None:
            return
        before = self._losses.pop(parked.owner, None)
        total = num_tokens + (before.num_tokens if before is not None else 0)
        name, key = (None, "") if by is None else (by.request_id, by.hints.key)
        self._losses[parked.owner] = Loss(self._events.clock(), reason, name, key, total)
        while len(self._losses) > MOST_LOSSES:
            self._losses.popitem(last=False)

    # -- starting and ending ------------------------------------------------------------------------------------------

    def match(self, tokens: IntArray, hints: Hints) -> Match:
        """The KV that these tokens can start from. The last token is always computed, since its logits are needed."""
        if not self._reuse:
            return Match()
        wanted, whole_only = tokens[:-1], not self._capabilities.partial_cp
        match = self.index.match(wanted, hints.namespace, whole_only=whole_only)
        own = self._held.get(hints.owner) if hints.owner is not None else None
        if own is None or own.entry.namespace != hints.namespace:
            return match
        length = common_prefix(own.entry.tokens, wanted)
        is_usable = length == len(own.entry.tokens) if whole_only else length > 0
        return replace(match, entry=own.entry) if is_usable and length == match.length else match

    def start(self, match: Match, request: Request) -> tuple[int, int] | None:
        """Lease a sequence with the matched prefix: (sequence, its tokens). None if no sequence id is available."""
        leased = self._start(match, request)
        self._keep_few_parked(request)  # now, so that the new request gets their cells
        return leased

    def _start(self, match: Match, request: Request) -> tuple[int, int] | None:
        entry, owner = match.entry, request.hints.owner
        self._leave_behind(match, owner)
        if entry is None:
            seq = self._lease(request)
            return None if seq is None else (seq, 0)
        if entry.parked and match.length == len(entry.tokens) and self._may_take_over(entry, request.hints):
            return self._take_over(entry, match.length, ParkedChange.TAKEN)
        seq = self._lease(request, unless=entry)
        if seq is None and entry.parked:
            self._note_evicted(self._parked(entry.seq), ROOM, request)
            return self._take_over(entry, match.length, ParkedChange.EVICTED, request)
        if seq is None:
            return None
        self._touch(entry, request.hints)
        self.kv.seq_cp(entry.seq, seq, 0, match.length)
        return seq, match.length

    def _may_take_over(self, entry: Entry, by: Hints) -> bool:
        """Sessions keep their KV, and background requests leave that of others where it is."""
        is_for_all = not by.is_background or entry.seq in self._background
        return entry.owner == by.owner if entry.owner is not None else is_for_all

    def _leave_behind(self, match: Match, owner: str | None) -> None:
        """Free a session's parked KV if what it starts from holds at least as much."""
        own = self._held.get(owner) if owner is not None else None
        if own is not None and match.entry is not None and own.entry is not match.entry:
            matched = match.entry.tokens[: match.length]
            if own.entry.namespace == match.entry.namespace and _begins(matched, own.entry.tokens):
                self._give_up(own, ParkedChange.REPLACED)

    def _take_over(self, entry: Entry, length: int, change: ParkedChange, by: Request | None = None) -> tuple[int, int]:
        """Continue a parked sequence itself instead of a copy."""
        self._unpark(entry.seq, change, by)
        self._leased[entry.seq] = None
        if not self._trim(entry.seq, length):
            self.kv.seq_rm(entry.seq)
            length = 0
        return entry.seq, length

    def announce(self, seq: int, tokens: IntArray, namespace: Namespace, num_computed: Callable[[], int]) -> None:
        """Make the prompt of a running sequence available to others, as far as it is computed."""
        if self._reuse and len(tokens):
            entry = Entry(seq, tokens, namespace, num_computed, parked=False)
            self.index.insert(entry)
            self._leased[seq] = entry

    def fork(self, source: int, length: int, request: Request) -> int | None:
        """Lease a sequence with the first `length` tokens of a leased one. None if no id is left."""
        if not self._capabilities.partial_cp and length != self.length(source):
            return None
        seq = self._lease(request)
        if seq is not None:
            self.kv.seq_cp(source, seq, 0, length)
        return seq

    def length(self, seq: int) -> int:
        """Tokens that the sequence holds."""
        return self.kv.seq_pos_max(seq) + 1

    def release(self, seq: int) -> None:
        """Free the sequence and its KV."""
        self._forget_lease(seq)
        self._free(seq)

    def park(self, seq: int, tokens: IntArray, num_prompt: int, hints: Hints) -> None:
        """Keep a leased sequence's KV as cache, trimmed to these tokens (the rest was surplus).

        Replaces what its owner had parked. Freed instead if other parked KV holds all of it.
        """
        self._forget_lease(seq)
        keep = min(self.length(seq), len(tokens))
        if not self._reuse or keep == 0 or not self._trim(seq, keep):
            self._free(seq)
            return
        holder = (hints.namespace, tokens[:num_prompt].tobytes()) if hints.owner is None else hints.owner
        kept = tokens[:keep].copy()
        entry = Entry(seq, kept, hints.namespace, kept.__len__, parked=True, owner=hints.owner)
        covering = self._covering(entry, self._held.get(holder))
        if covering is not None:
            self._touch(covering.entry, hints)
            self._free(seq)
            return
        replaced = self._replaced_by(entry, self._held.get(holder))
        is_plain = hints.owner is None
        is_background = is_plain and hints.is_background and all(one.seq in self._background for one in replaced)
        for one in replaced:
            self._give_up(one, ParkedChange.REPLACED)
        self.index.insert(entry)
        parked = ParkedSequence(entry, hints.key, holder, self._base)
        (self._plain if is_plain else self._sessions)[seq] = parked
        self._held[holder] = parked
        self._tell(parked, ParkedChange.PARKED)
        if is_background:
            self._background[seq] = parked
            if len(self._background) > self._most_background:
                self._give_up(next(iter(self._background.values())), ParkedChange.REPLACED)

    def _covering(self, entry: Entry, own: ParkedSequence | None = None) -> ParkedSequence | None:
        """Parked KV that makes an entry redundant: its owner's own, or for a plain one any plain request's."""
        if own is not None and own.entry.namespace == entry.namespace and self._covers(own.entry, entry):
            return own
        others = self.index.covering(entry.tokens, entry.namespace) if entry.owner is None else ()
        for other in others:
            if other is not entry and other.seq in self._plain and self._covers(other, entry):
                return self._plain[other.seq]
        return None

    def _replaced_by(self, entry: Entry, own: ParkedSequence | None) -> list[ParkedSequence]:
        """Parked KV that an entry makes redundant: its owner's, and for a plain one that of other prompts."""
        replaced = [own] if own is not None else []
        if entry.owner is None:
            others = self.index.covered(entry.tokens, entry.namespace)
            plain = [self._plain[other.seq] for other in others if other.seq in self._plain]
            replaced += [parked for parked in plain if parked is not own and self._covers(entry, parked.entry)]
        return replaced

    def _covers(self, entry: Entry, other: Entry) -> bool:
        """Whether anything that could start from `other` could start from `entry` as well."""
        is_same_length = len(entry.tokens) == len(other.tokens)
        return (is_same_length or self._capabilities.partial_cp) and _begins(entry.tokens, other.tokens)

    def export(self, owner: str) -> tuple[IntArray, bytes] | None:
        """Tokens and KV bytes parked for a session. None if there is nothing to export."""
        parked = self._held.get(owner)
        if parked is None or not self._capabilities.state_bytes:
            return None
        return parked.entry.tokens, self.kv.export(parked.seq)

    def import_(self, tokens: IntArray, state: bytes, hints: Hints) -> bool:
        """Park exported bytes as the KV of these tokens, if they fit; may evict parked KV of others."""
        is_possible = self._reuse and self._capabilities.state_bytes
        if not is_possible or not self.make_room(self._cells(len(tokens)), by=None):
            return False
        seq = self._lease(by=None)
        if seq is None:
            return False
        try:
            self.kv.import_(seq, state)
        except (InvalidOperation, OutOfKV):
            self.release(seq)
            return False
        if self.kv.seq_pos_min(seq) != 0 or self.length(seq) != len(tokens):
            self.release(seq)
            return False
        self.park(seq, tokens, len(tokens), hints)
        return True

    def drop_owner(self, owner: str) -> None:
        """A session ended: free its parked KV."""
        self._losses.pop(owner, None)
        parked = self._held.get(owner)
        if parked is not None:
            self._give_up(parked, ParkedChange.RELEASED)

    def _touch(self, entry: Entry, by: Hints) -> None:
        """Mark as recently used."""
        if not by.is_background:
            self._background.pop(entry.seq, None)
        for shelf in (self._plain, self._sessions, self._background):
            if entry.seq in shelf:
                shelf.move_to_end(entry.seq)
                shelf[entry.seq].base = self._base

    # -- room ---------------------------------------------------------------------------------------------------------

    def free(self) -> int:
        return self.kv.free()

    def needed(self, batch: Batch) -> int:
        return self.kv.needed(batch)

    def cells_for(self, num_tokens: int) -> int:
        """Upper bound on the cells that `num_tokens` more tokens of one sequence take, including a copied block."""
        block = self.kv.block_size
        return (1 + -(-(num_tokens - 1) // block)) * block

    def make_room(self, cells: int, by: Request | None, keep: Entry | None = None) -> bool:
        """Evict parked KV, except `keep`, until this many cells are free; False if evicting all of it is not enough.

        `by` is the request that needs them, if any; recorded with sessions that lose KV.
        """
        missing = cells - self.kv.free()
        if missing <= 0:
            return True
        if not self._can_free(missing, keep):
            return False
        while self.kv.free() < cells:
            victim = self._oldest(keep)
            if victim is None:
                return False
            self._shorten(victim, cells - self.kv.free(), by)
        return True

    def _can_free(self, cells: int, keep: Entry | None) -> bool:
        """Whether evicting all parked KV except `keep` frees that many cells. Usually a few sequences tell."""
        parked = (one.seq for one in self._all_parked() if one.entry is not keep)
        victims = list[int]()
        while more := list(itertools.islice(parked, max(FEW_VICTIMS, len(victims)))):
            victims += more
            if self.kv.exclusive(victims) >= cells:
                return True
        return False

    def _keep_few_parked(self, by: Request) -> None:
        """If parked KV slows down every step, evict that of plain requests beyond a limit when a request starts.

        Sessions' KV stays: recomputing a conversation costs more than it slows the others down.
        """
        most = self._capabilities.parked_cells
        if most is None:
            return
        while (excess := self.kv.exclusive(self._plain.keys()) - most) > 0:
            self._shorten(next(self._all_parked()), excess, by)

    def _cells(self, num_tokens: int) -> int:
        return -(-num_tokens // self.kv.block_size) * self.kv.block_size

    def _shorten(self, parked: ParkedSequence, cells: int, by: Request | None) -> None:
        """Remove cells from the end of parked KV, or all of it: others may share its beginning."""
        keep = len(parked.entry.tokens) - cells
        before = self.kv.free()
        if keep <= 0 or not self._trim(parked.seq, keep):
            self._evict(parked, ROOM, by)
            return
        entry = parked.entry
        lost = len(entry.tokens) - keep
        self.index.remove(entry)
        entry.tokens = entry.tokens[:keep]
        self.index.insert(entry)
        self._note_loss(parked, lost, ROOM, by)
        if self.kv.free() == before or self._covering(entry) is not None:
            self._evict(parked, ROOM, by)
        else:
            self._tell(parked, ParkedChange.SHORTENED, by)

    def _all_parked(self) -> Iterator[ParkedSequence]:
        """Eviction order of cells: background requests' first, then plain ones', each by least recent use."""
        yield from self._background.values()
        yield from (parked for seq, parked in self._plain.items() if seq not in self._background)
        yield from self._sessions.values()

    def _oldest(self, keep: Entry | None = None) -> ParkedSequence | None:
        return next((parked for parked in self._all_parked() if parked.entry is not keep), None)

    def _cheapest(self) -> tuple[ParkedSequence, int] | None:
        """The parked sequence with the least valuable id, and its cost: the tokens that it alone holds.

        Fully shared ones first, then plain requests'. Costs count from the highest one paid when the
        KV was last used (GreedyDual), so that long KV that is no longer used does not stay forever.
        """
        first = itertools.islice(self._all_parked(), MOST_CANDIDATES)
        costs = [(one, self.index.num_exclusive(one.entry)) for one in first]
        if not costs:
            return None
        found, lost = min(costs, key=lambda cost: (cost[1] > 0, cost[0].owner is not None, cost[0].base + cost[1]))
        return found, found.base + lost

    def _evict(self, parked: ParkedSequence, reason: str, by: Request | None) -> None:
        self._note_evicted(parked, reason, by)
        self._give_up(parked, ParkedChange.EVICTED, by)

    def _note_evicted(self, parked: ParkedSequence, reason: str, by: Request | None) -> None:
        self.num_evicted += 1
        self._note_loss(parked, len(parked.entry.tokens), reason, by)

    def _give_up(self, parked: ParkedSequence, change: ParkedChange, by: Request | None = None) -> None:
        self._unpark(parked.seq, change, by)
        self._free(parked.seq)

    def _tell(self, parked: ParkedSequence, change: ParkedChange, by: Request | None = None) -> None:
        if self._events.is_heard:
            length = len(parked.entry.tokens)
            self._events.emit(
                ParkedEvent(
                    self._events.clock(),
                    change,
                    parked.seq,
                    length,
                    self.parked_tokens,
                    parked.owner,
                    parked.key,
                    None if by is None else by.request_id,
                    "" if by is None else by.hints.key,
                )
            )

    # -- sequence ids -------------------------------------------------------------------------------------------------

    def _lease(self, by: Request | None, unless: Entry | None = None) -> int | None:
        """Allocate a sequence id, evicting parked KV if needed. None if impossible, or if it would evict `unless`."""
        if not self._free_seqs:
            found = self._cheapest()
            if found is None:
                return None
            victim, cost = found
            self._base = max(self._base, cost)
            if victim.entry is unless:
                return None
            self._evict(victim, ROOM, by)
        seq = self._free_seqs.pop()
        self._leased[seq] = None
        return seq

    def _free(self, seq: int) -> None:
        self.kv.seq_rm(seq)
        self._free_seqs.append(seq)

    def _forget_lease(self, seq: int) -> None:
        entry = self._leased.pop(seq)
        if entry is not None:
            self.index.remove(entry)

    def _parked(self, seq: int) -> ParkedSequence:
        return self._plain[seq] if seq in self._plain else self._sessions[seq]

    def _unpark(self, seq: int, change: ParkedChange, by: Request | None = None) -> None:
        parked = self._plain.pop(seq, None) or self._sessions.pop(seq)
        self._background.pop(seq, None)
        del self._held[parked.holder]
        self.index.remove(parked.entry)
        self._tell(parked, change, by)

    def _trim(self, seq: int, length: int) -> bool:
        return self.length(seq) == length or self.kv.seq_rm(seq, length)

    def trim(self, seq: int, length: int) -> None:
        """Remove a leased sequence's KV beyond its first `length` tokens: the rest was rejected."""
        if not self._trim(seq, length):
            raise IntegrityError(f"sequence {seq} cannot be rolled back to {length} tokens")

    @property
    def can_roll_back(self) -> bool:
        return self._capabilities.partial_rm

    # -- after a late failure, and checks -----------------------------------------------------------------------------

    def resync(self) -> None:
        """Steps were lost after the fact: drop parked KV that is no longer complete."""
        for parked in list(self._all_parked()):
            if self.length(parked.seq) != len(parked.entry.tokens):
                self._evict(parked, FAILURE, by=None)

    @property
    def num_parked(self) -> int:
        return len(self._plain) + len(self._sessions)

    @property
    def parked_tokens(self) -> ParkedTokens:
        return ParkedTokens(self.index.num_parked_tokens, self.index.num_plain_tokens)

    @property
    def num_parked_tokens(self) -> int:
        return self.index.num_parked_tokens

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def parked_views(self) -> tuple[ParkedView, ...]:
        """All parked KV, by sequence."""
        parked = sorted(self._all_parked(), key=lambda one: one.seq)
        return tuple(ParkedView(one.seq, len(one.entry.tokens), one.owner, one.key) for one in parked)

    def evict_all(self, reason: str = ROOM, by: Request | None = None) -> None:
        """Evict all parked KV."""
        while (victim := self._oldest()) is not None:
            self._evict(victim, reason, by)

    def check_integrity(self) -> None:
        """Every sequence id is free, leased or parked; parked KV is as long as its tokens, and none is redundant."""
        self.index.check_integrity()
        used = [*self._leased, *self._plain, *self._sessions]
        if sorted([*self._free_seqs, *used]) != list(range(self._capabilities.max_seqs)):
            raise IntegrityError("a sequence id is lost or has two users")
        if {id(parked) for parked in self._all_parked()} != {id(parked) for parked in self._held.values()}:
            raise IntegrityError("a session or a prompt has lost its parked sequence, or has two")
        if self._background.keys() - self._plain.keys():
            raise IntegrityError("a background request has a parked sequence that is not there")
        for parked in self._all_parked():
            if self.length(parked.seq) != len(parked.entry.tokens):
                raise IntegrityError(f"parked sequence {parked.seq} is not as long as its tokens")
            if self._covering(parked.entry) is not None:
                raise IntegrityError(f"parked sequence {parked.seq} holds nothing that another one does not")
        for seq in self._free_seqs:
            if self.length(seq):
                raise IntegrityError(f"free sequence {seq} still holds KV")


def _begins(tokens: IntArray, beginning: IntArray) -> bool:
    return len(beginning) <= len(tokens) and bool((tokens[: len(beginning)] == beginning).all())
