"""`Shelf`: what KV is parked after each verb of the KV manager, by the rules of docs/kv.md, in plain Python.

It stands before the manager's verbs. Of KV memory it takes what no rule decides: how long a sequence is, and which
blocks sequences share. Everything else it works out anew from lists of tokens, and compares: results, events, the order
in which KV will be evicted, sequence ids, and what sessions are told about KV that they have lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.engine.ledger import common_prefix
from tokenmill.contract import IntArray
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import Event, ParkedChange, ParkedEvent, Phase, RequestEvent
from tokenmill.engine.kv_manager import FAILURE, NUM_SHOWN, ROOM
from tokenmill.engine.prefix import Entry, Match, Namespace
from tokenmill.engine.request import Hints, Request
from tokenmill.kv.paged import PagedKV
from tokenmill.outputs import CacheVerdict, Divergence, FinishReason

Tokens = tuple[int, ...]
Told = tuple[ParkedChange, int, int, str | None, str, str | None, str]
"""An event: what happened, to which sequence of how many tokens, whose, and for whom."""


@dataclass(eq=False)
class Item:
    """A parked sequence."""

    seq: int
    tokens: Tokens
    namespace: Namespace
    owner: str | None
    key: str
    holder: Hashable
    base: int
    is_background: bool = False
    """Have only background requests used it? Few of these stay."""


@dataclass(eq=False)
class Running:
    """A leased sequence, with the prompt that others may find."""

    tokens: Tokens = ()
    namespace: Namespace = None
    num_computed: Callable[[], int] = lambda: 0


class Blocks:
    """Which blocks each sequence has, at one moment: enough to tell what giving up KV would free."""

    def __init__(self, kv: PagedKV) -> None:
        tables = kv.tables
        self.size = kv.block_size
        self.num_free = tables.pool.num_free
        self.of = {seq: tables.blocks_of(seq).tolist() for seq in tables.active()}
        self.length = {seq: kv.seq_pos_max(seq) + 1 for seq in self.of}

    def free(self) -> int:
        return self.num_free * self.size

    def exclusive(self, seqs: Iterable[int]) -> int:
        """Cells that only these sequences hold."""
        total, theirs = Counter[int](), Counter[int]()
        for blocks in self.of.values():
            total.update(blocks)
        for seq in seqs:
            theirs.update(self.of.get(seq, ()))
        return self.size * sum(count == total[block] for block, count in theirs.items())

    def share(self, seq: int, other: int, length: int) -> None:
        self.of[other] = self.of[seq][: -(-length // self.size)]

    def cut(self, seq: int, keep: int) -> None:
        held = self.of.pop(seq, [])
        kept = held[: -(-keep // self.size)]
        others = {block for blocks in self.of.values() for block in blocks}
        self.num_free += len(set(held[len(kept) :]) - others)
        self.length[seq] = keep
        if kept:
            self.of[seq] = kept


@dataclass
class Shelf:
    engine: EngineCore
    plain: list[Item] = field(default_factory=list)
    sessions: list[Item] = field(default_factory=list)
    """Least recently used first, both."""
    leased: dict[int, Running] = field(default_factory=dict)
    losses: dict[str, tuple[int, str, str | None, str]] = field(default_factory=dict)
    """Session -> tokens lost since it last ran; why, to whom and whose request that was, of the latest."""
    by: Request | None = None
    """The request that the verb in progress makes room for."""
    base: int = 0
    num_evicted: int = 0
    told: list[Told] = field(default_factory=list)
    expected: list[Told] = field(default_factory=list)
    blocks: Blocks = field(init=False)
    depth: int = 0
    """Of verbs that call others."""
    last_verb: str = ""
    misplaced: list[RequestEvent] = field(default_factory=list)
    """Requests whose KV is parked though they have failed, or not though they have not."""

    def __post_init__(self) -> None:
        kv = self.engine.kv
        self.engine.events.subscribe(self._note)
        looking = (self.match, self.divergence, self.verdict, self.announce)
        starting = (self.start, self.fork, self.release, self.park, self.import_)
        for verb in (*looking, *starting, self.drop_owner, self.make_room, self.resync, self.evict_all):
            setattr(kv, verb.__name__, self._beside(getattr(kv, verb.__name__), verb))

    def _beside(self, real: Callable[..., Any], model: Callable[..., None]) -> Callable[..., Any]:
        """The verb, and beside it what it must have done."""

        def verb(*given: Any, **named: Any) -> Any:
            if self.depth:
                return real(*given, **named)
            self.told, self.expected, self.blocks = [], [], Blocks(self.engine.kv.kv)  # type: ignore[arg-type]
            self.depth, self.last_verb = 1, real.__name__
            try:
                result = real(*given, **named)
            finally:
                self.depth = 0
            model(result, *given, **named)
            assert self.told == self.expected, f"{real.__name__}: {self.told}, not {self.expected}"
            self._compare()
            return result

        return verb

    def _note(self, event: Event) -> None:
        if isinstance(event, ParkedEvent):
            names = (event.owner, event.key, event.by, event.by_key)
            self.told.append((event.change, event.seq, event.num_tokens, *names))
        elif isinstance(event, RequestEvent) and event.phase is Phase.ENDED and event.num_computed:
            verb = "release" if event.finish_reason is FinishReason.ERROR else "park"
            self.misplaced += [event] if self.last_verb != verb else []

    def _compare(self) -> None:
        kv = self.engine.kv
        for shelf, items in ((kv._plain, self.plain), (kv._sessions, self.sessions)):
            found = [(one.seq, one.entry.tokens.tolist(), one.owner, one.key, one.base) for one in shelf.values()]
            assert found == [(one.seq, list(one.tokens), one.owner, one.key, one.base) for one in items]
        assert list(kv._background) == [one.seq for one in self.plain if one.is_background]
        losses = {owner: (loss.num_tokens, loss.reason, loss.by, loss.by_key) for owner, loss in kv._losses.items()}
        assert losses == self.losses
        assert set(kv._leased) == set(self.leased)
        assert kv.num_evicted == self.num_evicted

    def check_accounts(self) -> None:
        """Tokens that several sequences share count once; ids are free, leased or parked; what failed is not kept."""
        kv = self.engine.kv
        assert not self.misplaced
        assert kv.parked_tokens.total == num_distinct(self._items())
        assert kv.parked_tokens.plain == num_distinct(self._items()) - num_distinct(self.sessions)
        used = [*self.leased, *(item.seq for item in self._items())]
        free = set(range(self.engine._executor.backend.capabilities.max_seqs)) - set(used)
        assert len(used) == len(set(used))
        assert sorted(kv._free_seqs) == sorted(free)

    # -- verbs that look ----------------------------------------------------------------------------------------------

    def match(self, result: Match, tokens: IntArray, hints: Hints) -> None:
        wanted = tokens[:-1].tolist()
        found = [(common_prefix(wanted, list(one.tokens)), one) for one in self._known(hints.namespace)]
        if not self._can_copy_parts:
            found = [(length, one) for length, one in found if isinstance(one, Item) and length == len(one.tokens)]
        usable = [(self._usable(one, length), one) for length, one in found]
        longest = max((length for length, _ in usable), default=0)
        assert (result.length, result.coming) == (longest, max((length for length, _ in found), default=0))
        candidates = [one for length, one in usable if length == longest > 0]
        if not candidates:
            assert result.entry is None
            return
        own = None if hints.owner is None else self._held_by(hints.owner)
        assert self._item_or_running(result.entry) in ([own] if own in candidates else candidates)

    def divergence(self, result: Divergence | None, request: Request) -> None:
        known = self._known(request.hints.namespace)
        shared = max((common_prefix(request.tokens, list(one.tokens)) for one in known), default=0)
        there = [one.tokens for one in known if common_prefix(request.tokens, list(one.tokens)) == shared]
        longest = max((len(tokens) for tokens in there), default=0)
        if shared == 0 or shared >= min(longest, len(request.tokens)):
            assert result is None
            return
        shown = slice(shared, shared + NUM_SHOWN)
        assert result is not None
        assert (result.at, result.asked) == (shared, tuple(request.tokens[shown]))
        assert result.held in {tokens[shown] for tokens in there if len(tokens) > shared}

    def verdict(self, result: CacheVerdict, request: Request, num_cached: int, divergence: Divergence | None) -> None:
        lost = self.losses.pop(request.hints.owner or "", None)
        assert (result.num_cached, result.divergence) == (num_cached, divergence)
        loss = result.loss
        assert (None if loss is None else (loss.num_tokens, loss.reason, loss.by, loss.by_key)) == lost

    # -- verbs that start and end -------------------------------------------------------------------------------------

    def start(self, result: tuple[int, int] | None, match: Match, request: Request) -> None:
        self.by, owner = request, request.hints.owner
        entry = self._item_or_running(match.entry)
        own = self._held_by(owner)
        if own is not None and entry is not None and own is not entry:
            is_held = own.namespace == entry.namespace and begins(entry.tokens[: match.length], own.tokens)
            if is_held:
                self._give_up(own, ParkedChange.REPLACED)
        is_theirs = isinstance(entry, Item) and request.hints.is_background and not entry.is_background
        may_take = isinstance(entry, Item) and (not is_theirs if entry.owner is None else entry.owner == owner)
        if isinstance(entry, Item) and match.length == len(entry.tokens) and may_take:
            self._take_over(result, entry, match.length, ParkedChange.TAKEN)
        elif not self._lease(result, unless=entry) and isinstance(entry, Item):
            self._note_evicted(entry, ROOM)
            self._take_over(result, entry, match.length, ParkedChange.EVICTED)
        elif result is not None:
            seq, length = result
            self.leased[seq] = Running()
            assert length == match.length
            if match.entry is not None:
                self.blocks.share(match.entry.seq, seq, length)
            if isinstance(entry, Item):
                self._touch(entry, request.hints)
        self._keep_few_plain()

    def _take_over(self, result: tuple[int, int] | None, item: Item, length: int, change: ParkedChange) -> None:
        self._unpark(item, change)
        self.leased[item.seq] = Running()
        is_possible = length == len(item.tokens) or self._can_remove_parts
        assert result == (item.seq, length if is_possible else 0)
        self.blocks.cut(item.seq, length if is_possible else 0)

    def _lease(self, result: Any, unless: Item | Running | None = None) -> bool:
        """An id that is free, or else that of the parked sequence that is worth least; False if that is `unless`."""
        if len(self.leased) + len(self._items()) < self.engine._executor.backend.capabilities.max_seqs:
            return True
        if not self._items():
            assert not result
            return False
        costs = [(self._num_exclusive(item), item) for item in self._items()]
        lost, victim = min(costs, key=lambda one: (one[0] > 0, one[1].owner is not None, one[1].base + one[0]))
        self.base = max(self.base, victim.base + lost)
        if victim is unless:
            return False
        self._evict(victim)
        return True

    def announce(self, _: None, seq: int, tokens: IntArray, *about: Any) -> None:
        if self._reuses:
            self.leased[seq] = Running(tuple(tokens.tolist()), *about)

    def fork(self, result: int | None, source: int, length: int, request: Request) -> None:
        self.by = request
        if not self._can_copy_parts and length != self.blocks.length.get(source, 0):
            assert result is None
        elif self._lease(result):
            assert result is not None
            self.leased[result] = Running()

    def release(self, _: None, seq: int) -> None:
        del self.leased[seq]

    def park(self, _: None, seq: int, tokens: Sequence[int], num_prompt: int, hints: Hints) -> None:
        del self.leased[seq]
        length = self.blocks.length.get(seq, 0)
        keep = min(length, len(tokens))
        if not self._reuses or keep == 0 or (keep < length and not self._can_remove_parts):
            return
        holder = (hints.namespace, tuple(tokens[:num_prompt])) if hints.owner is None else hints.owner
        item = Item(seq, tuple(tokens[:keep]), hints.namespace, hints.owner, hints.key, holder, self.base)
        own = self._held_by(holder)
        covering = [one for one in self._rivals(item, own) if self._covers(one, item)]
        if covering:
            self._touch(own if own in covering else self._touched_of(covering), hints)
            return
        replaced = [own] if own is not None else []
        covered = [one for one in self._rivals(item, None) if self._covers(item, one) and one is not own]
        for one in [*replaced, *sorted(covered, key=lambda one: len(one.tokens))]:
            self._give_up(one, ParkedChange.REPLACED)
        others = any(not one.is_background for one in [*replaced, *covered])
        item.is_background = hints.is_background and item.owner is None and not others
        (self.plain if item.owner is None else self.sessions).append(item)
        self._expect(ParkedChange.PARKED, item)
        behind = self._behind()
        if item.is_background and len(behind) > self.engine.kv._most_background:
            self._give_up(behind[0], ParkedChange.REPLACED)

    def _rivals(self, item: Item, own: Item | None) -> list[Item]:
        """Parked KV beside which the item may be superfluous: its holder's, and of a plain one all plain requests'."""
        plain = self.plain if item.owner is None else []
        return [one for one in [*([own] if own is not None else []), *plain] if one.namespace == item.namespace]

    def _touched_of(self, covering: list[Item]) -> Item:
        """Which of several that hold all of a request's KV was of use is not laid down."""
        latest = list(self.engine.kv._plain)[-1]
        return next(one for one in covering if one.seq == latest)

    def import_(self, result: bool, tokens: IntArray, _: bytes, hints: Hints) -> None:
        cells = -(-len(tokens) // self.blocks.size) * self.blocks.size
        self.by = None  # no request has asked for it
        if not self._reuses or not self._make_room(cells, None):
            assert not result
        elif self._lease(result) and result:
            seq = next((seq for change, seq, *_ in self.told if change is ParkedChange.PARKED), -1)
            self.leased[seq] = Running()
            self.blocks.length[seq] = len(tokens)
            self.park(None, seq, tokens.tolist(), len(tokens), hints)

    def drop_owner(self, _: None, owner: str) -> None:
        self.losses.pop(owner, None)
        item = self._held_by(owner)
        if item is not None:
            self._give_up(item, ParkedChange.RELEASED)

    # -- verbs that give KV up ----------------------------------------------------------------------------------------

    def make_room(self, result: bool, cells: int, by: Request | None, keep: Entry | None = None) -> None:
        self.by = by
        assert result == self._make_room(cells, self._item_or_running(keep))
        assert not result or self.blocks.free() >= cells

    def _make_room(self, cells: int, keep: Item | Running | None) -> bool:
        if self.blocks.free() >= cells:
            return True
        candidates = [item for item in self._items() if item is not keep]
        if self.blocks.free() + self.blocks.exclusive(item.seq for item in candidates) < cells:
            return False
        while self.blocks.free() < cells:
            self._shorten(next(item for item in self._items() if item is not keep), cells - self.blocks.free())
        return True

    def _shorten(self, item: Item, cells: int) -> None:
        keep, before = len(item.tokens) - cells, self.blocks.free()
        if keep <= 0 or not self._can_remove_parts:
            self._evict(item)
            return
        self._lose(item, cells, ROOM)
        item.tokens = item.tokens[:keep]
        self.blocks.cut(item.seq, keep)
        others = [one for one in self._rivals(item, None) if one is not item]
        if self.blocks.free() == before or any(self._covers(one, item) for one in others):
            self._evict(item)
        else:
            self._expect(ParkedChange.SHORTENED, item)

    def _keep_few_plain(self) -> None:
        most = self.engine._executor.backend.capabilities.parked_cells
        while most is not None and (excess := self.blocks.exclusive(one.seq for one in self.plain) - most) > 0:
            self._shorten(self._items()[0], excess)

    def resync(self, _: None) -> None:
        self.by = None
        for item in self._items():
            if self.blocks.length.get(item.seq, 0) != len(item.tokens):
                self._evict(item, FAILURE)

    def evict_all(self, _: None, reason: str = ROOM, by: Request | None = None) -> None:
        self.by = by
        for item in self._items():
            self._evict(item, reason)

    def _evict(self, item: Item, reason: str = ROOM) -> None:
        self._note_evicted(item, reason)
        self._give_up(item, ParkedChange.EVICTED)

    def _note_evicted(self, item: Item, reason: str) -> None:
        self.num_evicted += 1
        self._lose(item, len(item.tokens), reason)

    def _lose(self, item: Item, num_tokens: int, reason: str) -> None:
        by = self.by if reason == ROOM else None
        if item.owner is not None:
            total = num_tokens + self.losses.get(item.owner, (0,))[0]
            names = (None, "") if by is None else (by.request_id, by.hints.key)
            self.losses[item.owner] = (total, reason, *names)

    def _give_up(self, item: Item, change: ParkedChange) -> None:
        self._unpark(item, change)
        self.blocks.cut(item.seq, 0)

    def _unpark(self, item: Item, change: ParkedChange) -> None:
        (self.plain if item.owner is None else self.sessions).remove(item)
        self._expect(change, item)

    def _expect(self, change: ParkedChange, item: Item) -> None:
        by = self.by if change in (ParkedChange.EVICTED, ParkedChange.SHORTENED) else None
        names = (item.owner, item.key, None if by is None else by.request_id, "" if by is None else by.hints.key)
        self.expected.append((change, item.seq, len(item.tokens), *names))

    # -- rules --------------------------------------------------------------------------------------------------------

    def _items(self) -> list[Item]:
        """In the order in which cells are taken from them."""
        return [*self._behind(), *(one for one in self.plain if not one.is_background), *self.sessions]

    def _behind(self) -> list[Item]:
        return [one for one in self.plain if one.is_background]

    def _known(self, namespace: Namespace) -> list[Item | Running]:
        known: list[Item | Running] = [*self._items(), *self.leased.values()]
        return [one for one in known if one.namespace == namespace and one.tokens]

    def _usable(self, one: Item | Running, length: int) -> int:
        return length if isinstance(one, Item) else min(length, one.num_computed())

    def _num_exclusive(self, item: Item) -> int:
        others = [one for one in self._known(item.namespace) if one is not item]
        shared = [self._usable(one, common_prefix(list(item.tokens), list(one.tokens))) for one in others]
        return len(item.tokens) - max(shared, default=0)

    def _covers(self, item: Item, other: Item) -> bool:
        is_enough = self._can_copy_parts or len(item.tokens) == len(other.tokens)
        return is_enough and begins(item.tokens, other.tokens)

    def _held_by(self, holder: Hashable) -> Item | None:
        return next((item for item in self._items() if item.holder == holder), None)

    def _item_or_running(self, entry: Entry | None) -> Item | Running | None:
        if entry is None:
            return None
        return next((item for item in self._items() if item.seq == entry.seq), None) or self.leased[entry.seq]

    def _touch(self, item: Item, by: Hints) -> None:
        item.is_background = item.is_background and by.is_background
        shelf = self.plain if item.owner is None else self.sessions
        shelf.remove(item)
        shelf.append(item)
        item.base = self.base

    @property
    def _reuses(self) -> bool:
        return self.engine.config.prefix_caching

    @property
    def _can_copy_parts(self) -> bool:
        return self.engine._executor.backend.capabilities.partial_cp

    @property
    def _can_remove_parts(self) -> bool:
        return self.engine._executor.backend.capabilities.partial_rm


def begins(tokens: Tokens, beginning: Tokens) -> bool:
    return tokens[: len(beginning)] == beginning


def num_distinct(items: list[Item]) -> int:
    """Tokens of sequences, those at the same place after the same ones counted once."""
    total, before = 0, None
    for item in sorted(items, key=lambda one: (repr(one.namespace), one.tokens)):
        shared = 0
        if before is not None and before.namespace == item.namespace:
            shared = common_prefix(list(before.tokens), list(item.tokens))
        total, before = total + len(item.tokens) - shared, item
    return total
