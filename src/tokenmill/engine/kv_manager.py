"""`KVManager`: whose KV is whose. The only caller of KV mutators, and the only place that knows `Capabilities`.

A sequence id is *leased* to a running request, *parked* with the KV of a finished or preempted one, or free. Parked KV
is a cache: it is indexed by its tokens for whoever comes next, and evicted when cells or ids run short: plain requests'
first, sessions' last, each by least recent use. Nothing is ever pinned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.core import Batch, Capabilities, IntArray, KVMemory
from tokenmill.engine.events import EventBus, ParkedChange, ParkedEvent
from tokenmill.engine.prefix import Entry, Match, Namespace, PrefixIndex
from tokenmill.engine.request import Hints, Request
from tokenmill.engine.stats import ParkedView
from tokenmill.errors import IntegrityError, InvalidOperation, OutOfKV
from tokenmill.outputs import CacheVerdict, Divergence, Loss

ROOM, WEIGHTS, FAILURE = "room", "weights", "failure"
"""Why parked KV was given up."""
NUM_SHOWN = 16
"""Tokens that are told where a prompt leaves what is known."""
MOST_LOSSES = 10_000


@dataclass(eq=False)
class Parked:
    """KV that nobody is running: a sequence, the tokens it holds, and whose it is (None: a plain request's)."""

    entry: Entry
    owner: str | None
    key: str

    @property
    def seq(self) -> int:
        return self.entry.seq


class KVManager:
    """Leases sequences, shares prefixes, parks, evicts. One thread owns it: the engine core's."""

    def __init__(self, kv: KVMemory, capabilities: Capabilities, events: EventBus, *, reuse: bool = True) -> None:
        self.kv = kv
        self.index = PrefixIndex()
        self.num_cells = kv.stats().num_cells
        self.num_evicted = 0
        """Parked sequences given up to make room."""
        self._capabilities = capabilities
        self._events = events
        self._reuse = reuse
        self._free_seqs = list(range(capabilities.max_seqs - 1, -1, -1))
        self._leased: dict[int, Entry | None] = {}
        self._plain: OrderedDict[int, Parked] = OrderedDict()
        self._sessions: OrderedDict[int, Parked] = OrderedDict()
        self._cells_parked = 0
        self._losses: OrderedDict[str, Loss] = OrderedDict()
        """What sessions have lost since they last ran, latest first to go."""
        self._since = events.clock()
        self.serving: Request | None = None
        """Whom room is made for now."""

    # -- why ----------------------------------------------------------------------------------------------------------

    def divergence(self, request: Request) -> Divergence | None:
        """Where a request that is about to start leaves what is known."""
        return self.index.divergence(request.token_array(), request.hints.namespace, NUM_SHOWN) if self._reuse else None

    def verdict(self, request: Request, num_cached: int, divergence: Divergence | None) -> CacheVerdict:
        """Why a request that starts now has so much cached and not more."""
        loss = self._losses.pop(request.hints.owner or "", None)
        is_found = self._reuse and self._capabilities.partial_cp
        return CacheVerdict(num_cached, divergence, loss, self._since, is_found)

    def _note_loss(self, parked: Parked, num_tokens: int, reason: str) -> None:
        if parked.owner is None:
            return
        by = None if reason != ROOM else self.serving
        before = self._losses.pop(parked.owner, None)
        total = num_tokens + (before.num_tokens if before is not None else 0)
        name, key = (None, "") if by is None else (by.request_id, by.hints.key)
        self._losses[parked.owner] = Loss(self._events.clock(), reason, name, key, total)
        while len(self._losses) > MOST_LOSSES:
            self._losses.popitem(last=False)

    # -- starting and ending ------------------------------------------------------------------------------------------

    def match(self, tokens: IntArray, namespace: Namespace) -> Match:
        """What KV these tokens could start from. The last one is always computed: its logits are what is wanted."""
        if not self._reuse:
            return Match()
        return self.index.match(tokens[:-1], namespace, whole_only=not self._capabilities.partial_cp)

    def start(self, match: Match, owner: str | None) -> tuple[int, int] | None:
        """Lease a sequence that holds the match: (sequence, tokens it holds). None if no sequence id can be had."""
        leased = self._start(match, owner)
        self._keep_few_parked()  # now, so that the new request gets their cells
        return leased

    def _start(self, match: Match, owner: str | None) -> tuple[int, int] | None:
        entry = match.entry
        if entry is None:
            seq = self._lease()
            return None if seq is None else (seq, 0)
        if entry.parked and match.length == len(entry.tokens) and self._parked(entry.seq).owner in (None, owner):
            return self._take_over(entry, match.length)
        seq = self._lease(keep=entry)
        if seq is None:
            return self._take_over(entry, match.length) if entry.parked else None
        self.touch(entry)
        self.kv.seq_cp(entry.seq, seq, 0, match.length)
        return seq, match.length

    def _take_over(self, entry: Entry, length: int) -> tuple[int, int]:
        """Go on with a parked sequence itself instead of a copy: it is used up, or its id is the last one left."""
        self._unpark(entry.seq, ParkedChange.TAKEN)
        self._leased[entry.seq] = None
        if not self._trim(entry.seq, length):
            self.kv.seq_rm(entry.seq)
            length = 0
        return entry.seq, length

    def announce(self, seq: int, tokens: IntArray, namespace: Namespace, num_computed: Callable[[], int]) -> None:
        """Let others find the prompt of a running sequence, as far as it is computed."""
        if self._reuse and len(tokens):
            entry = Entry(seq, tokens, namespace, num_computed, parked=False)
            self.index.insert(entry)
            self._leased[seq] = entry

    def fork(self, source: int, length: int) -> int | None:
        """Lease a sequence that holds the first `length` tokens of a leased one. None if it can't be had."""
        if not self._capabilities.partial_cp and length != self.length(source):
            return None
        seq = self._lease()
        if seq is not None:
            self.kv.seq_cp(source, seq, 0, length)
        return seq

    def length(self, seq: int) -> int:
        """How many tokens the sequence holds."""
        return self.kv.seq_pos_max(seq) + 1

    def release(self, seq: int) -> None:
        """The sequence and its KV are needed no more."""
        self._forget_lease(seq)
        self._free(seq)

    def park(self, seq: int, tokens: Sequence[int], hints: Hints) -> None:
        """Keep the KV of a leased sequence as cache, trimmed to these tokens (the rest was surplus)."""
        self._forget_lease(seq)
        keep = min(self.length(seq), len(tokens))
        if not self._reuse or keep == 0 or not self._trim(seq, keep):
            self._free(seq)
            return
        held = np.array(tokens[:keep], dtype=np.int32)
        entry = Entry(seq, held, hints.namespace, lambda: keep, parked=True)
        self.index.insert(entry)
        self._cells_parked += self._cells_of(entry)
        shelf = self._plain if hints.owner is None else self._sessions
        shelf[seq] = Parked(entry, hints.owner, hints.key)
        self._tell(shelf[seq], ParkedChange.PARKED)

    def export(self, owner: str) -> tuple[IntArray, bytes] | None:
        """The longest KV that is parked for a session: its tokens and its bytes. None: there is none to be had."""
        held = [parked for parked in self._sessions.values() if parked.owner == owner]
        if not held or not self._capabilities.state_bytes:
            return None
        longest = max(held, key=lambda parked: len(parked.entry.tokens))
        return longest.entry.tokens, self.kv.export(longest.seq)

    def import_(self, tokens: IntArray, state: bytes, hints: Hints) -> bool:
        """Park bytes that were exported as the KV of these tokens, if they fit; parked KV of others may go for it."""
        if not self._reuse or not self._capabilities.state_bytes or not self.make_room(self._cells(len(tokens))):
            return False
        seq = self._lease()
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
        self.park(seq, tokens.tolist(), hints)
        return True

    def drop_owner(self, owner: str) -> None:
        """A session ended: its parked KV is free."""
        self._losses.pop(owner, None)
        for parked in [parked for parked in self._sessions.values() if parked.owner == owner]:
            self._give_up(parked, ParkedChange.RELEASED)

    def touch(self, entry: Entry) -> None:
        """It was of use just now: evict it later."""
        for shelf in (self._plain, self._sessions):
            if entry.seq in shelf:
                shelf.move_to_end(entry.seq)

    # -- room ---------------------------------------------------------------------------------------------------------

    def free(self) -> int:
        return self.kv.free()

    def needed(self, batch: Batch) -> int:
        return self.kv.needed(batch)

    def cells_for(self, num_tokens: int) -> int:
        """The most cells that `num_tokens` more tokens of one sequence can take, a copied block included."""
        block = self.kv.block_size
        return (1 + -(-(num_tokens - 1) // block)) * block

    def make_room(self, cells: int, keep: Entry | None = None) -> bool:
        """Evict parked KV, but not `keep`, until that many cells are free; False if all of it would not be enough."""
        if self.kv.free() + self._parked_cells(keep) < cells:
            return False
        while self.kv.free() < cells:
            victim = self._oldest(keep)
            if victim is None:
                return False
            self._shorten(victim, cells - self.kv.free())
        return True

    def _keep_few_parked(self) -> None:
        """Where parked KV slows everybody down, plain requests' goes beyond a limit when somebody starts.

        Sessions' stays: to compute a conversation again costs more than it slows the others down.
        """
        most = self._capabilities.parked_cells
        if most is None:
            return
        while (excess := sum(self._cells_of(parked.entry) for parked in self._plain.values()) - most) > 0:
            self._shorten(next(iter(self._plain.values())), excess)

    def _parked_cells(self, keep: Entry | None) -> int:
        """The most cells that eviction could free; less where parked sequences share them."""
        kept = self._cells_of(keep) if keep is not None and keep.parked else 0
        return self._cells_parked - kept

    def _cells_of(self, entry: Entry) -> int:
        return self._cells(len(entry.tokens))

    def _cells(self, num_tokens: int) -> int:
        return -(-num_tokens // self.kv.block_size) * self.kv.block_size

    def _shorten(self, parked: Parked, cells: int) -> None:
        """Take cells off the end of parked KV, or all of it: its beginning is what others may share."""
        keep = len(parked.entry.tokens) - cells
        before = self.kv.free()
        if keep <= 0 or not self._trim(parked.seq, keep):
            self._evict(parked)
            return
        entry = parked.entry
        lost = len(entry.tokens) - keep
        self.index.remove(entry)
        self._cells_parked -= self._cells_of(entry)
        entry.tokens = entry.tokens[:keep]
        self._cells_parked += self._cells_of(entry)
        self.index.insert(entry)
        self._note_loss(parked, lost, ROOM)
        if self.kv.free() == before:
            self._evict(parked)
        else:
            self._tell(parked, ParkedChange.SHORTENED)

    def _oldest(self, keep: Entry | None = None) -> Parked | None:
        for shelf in (self._plain, self._sessions):
            for parked in shelf.values():
                if parked.entry is not keep:
                    return parked
        return None

    def _evict(self, parked: Parked, reason: str = ROOM) -> None:
        self.num_evicted += 1
        self._note_loss(parked, len(parked.entry.tokens), reason)
        self._give_up(parked, ParkedChange.EVICTED)

    def _give_up(self, parked: Parked, change: ParkedChange) -> None:
        self._unpark(parked.seq, change)
        self._free(parked.seq)

    def _tell(self, parked: Parked, change: ParkedChange) -> None:
        if self._events.is_heard:
            length = len(parked.entry.tokens)
            by = self.serving if change in (ParkedChange.EVICTED, ParkedChange.SHORTENED) else None
            names = (
                parked.owner,
                parked.key,
                None if by is None else by.request_id,
                "" if by is None else by.hints.key,
            )
            self._events.emit(ParkedEvent(self._events.clock(), change, parked.seq, length, *names))

    # -- sequence ids -------------------------------------------------------------------------------------------------

    def _lease(self, keep: Entry | None = None) -> int | None:
        if not self._free_seqs:
            victim = self._oldest(keep)
            if victim is None:
                return None
            self._evict(victim)
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

    def _parked(self, seq: int) -> Parked:
        return self._plain[seq] if seq in self._plain else self._sessions[seq]

    def _unpark(self, seq: int, change: ParkedChange) -> None:
        parked = self._plain.pop(seq, None) or self._sessions.pop(seq)
        self._tell(parked, change)
        self.index.remove(parked.entry)
        self._cells_parked -= self._cells_of(parked.entry)

    def _trim(self, seq: int, length: int) -> bool:
        return self.length(seq) == length or self.kv.seq_rm(seq, length)

    # -- after a late failure, and checks -----------------------------------------------------------------------------

    def resync(self) -> None:
        """Steps were lost after the fact: drop parked KV that no longer holds what it says."""
        for parked in [*self._plain.values(), *self._sessions.values()]:
            if self.length(parked.seq) != len(parked.entry.tokens):
                self._evict(parked, FAILURE)

    @property
    def num_parked(self) -> int:
        return len(self._plain) + len(self._sessions)

    @property
    def num_parked_tokens(self) -> int:
        return sum(len(parked.entry.tokens) for parked in [*self._plain.values(), *self._sessions.values()])

    def parked_views(self) -> tuple[ParkedView, ...]:
        """All parked KV, by sequence."""
        parked = sorted([*self._plain.values(), *self._sessions.values()], key=lambda one: one.seq)
        return tuple(ParkedView(one.seq, len(one.entry.tokens), one.owner, one.key) for one in parked)

    def evict_all(self, reason: str = ROOM) -> None:
        """Give up all parked KV."""
        while (victim := self._oldest()) is not None:
            self._evict(victim, reason)

    def check_integrity(self) -> None:
        """Every sequence id is free, leased or parked, and parked KV is as long as its tokens."""
        self.index.check_integrity()
        used = [*self._leased, *self._plain, *self._sessions]
        if sorted([*self._free_seqs, *used]) != list(range(self._capabilities.max_seqs)):
            raise IntegrityError("a sequence id is lost or has two users")
        for parked in [*self._plain.values(), *self._sessions.values()]:
            if self.length(parked.seq) != len(parked.entry.tokens):
                raise IntegrityError(f"parked sequence {parked.seq} is not as long as its tokens")
        for seq in self._free_seqs:
            if self.length(seq):
                raise IntegrityError(f"free sequence {seq} still holds KV")
