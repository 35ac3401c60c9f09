"""`PrefixIndex`: which sequence already holds the longest prefix of these tokens.

A radix tree over token ids, with one root per namespace (KV of other weights, adapters or salts never matches). Every
sequence with KV is an `Entry`: a path from the root that spells its tokens. Parked entries are fully computed. Running
ones may be behind: their prompt is indexed before it is computed, which lets a request wait for a running one that is
computing the same prefix. A lookup costs the length of the prompt, not the size of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tokenmill.contract import IntArray
from tokenmill.errors import IntegrityError
from tokenmill.outputs import Divergence

Namespace = Hashable
NO_TOKENS: IntArray = np.zeros(0, dtype=np.int32)


@dataclass(eq=False, slots=True)
class Entry:
    """A sequence in the index. `num_computed` is read when needed, so that a running one needs no updates."""

    seq: int
    tokens: IntArray
    namespace: Namespace
    num_computed: Callable[[], int]
    parked: bool
    owner: str | None = None
    """The session it is parked for."""
    node: Node | None = field(default=None, repr=False)

    @property
    def is_indexed(self) -> bool:
        return self.node is not None


@dataclass(frozen=True)
class Match:
    """The longest usable prefix, and the longest one that a running entry is computing."""

    length: int = 0
    entry: Entry | None = None
    coming: int = 0
    """Tokens that will be usable once a running request has computed its prompt; at least `length`."""
    neighbour: Entry | None = None
    """That request's entry, if it is worth more than `entry`."""


class Node:
    """An edge of tokens, with the entries whose path goes through all of it."""

    __slots__ = ("children", "end", "ending", "entries", "num_owned", "num_plain", "parent", "tokens")

    def __init__(self, tokens: IntArray, end: int, parent: Node | None) -> None:
        self.tokens = tokens
        """A part of the tokens of one of its entries."""
        self.end = end
        """Tokens from the root to the end of this edge."""
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.entries: dict[Entry, None] = {}
        self.ending: dict[Entry, None] = {}
        """Entries that end at the end of this edge."""
        self.num_plain = 0
        """Among `entries`, parked ones of plain requests..."""
        self.num_owned = 0
        """...and of sessions."""

    @property
    def begin(self) -> int:
        """Number of tokens from the root to the beginning of this edge."""
        return self.end - len(self.tokens)

    def show(self, begin: int) -> None:
        """Take the tokens from `begin` on from the latest entry: edges have no copies of their own."""
        self.tokens = next(reversed(self.entries)).tokens[begin : self.end]

    @property
    def is_parked(self) -> bool:
        return self.num_plain + self.num_owned > 0

    @property
    def is_plain(self) -> bool:
        """Whether it is parked for plain requests only."""
        return self.num_plain > 0 and self.num_owned == 0


class PrefixIndex:
    """match / insert / remove / check_integrity over parked and running sequences."""

    def __init__(self) -> None:
        self._roots: dict[Namespace, Node] = {}
        self.num_entries = 0
        self.num_parked_tokens = 0
        """Tokens of parked entries; shared ones count once."""
        self.num_plain_tokens = 0
        """Of these, tokens without a session."""

    def match(self, tokens: IntArray, namespace: Namespace = None, *, whole_only: bool = False) -> Match:
        """The best entry to start from. `whole_only`: only parked entries that can be taken whole."""
        best_length, best, coming, neighbour = 0, None, 0, None
        for node, matched in reversed(self._walk(tokens, namespace)):
            if matched <= best_length:
                break
            for entry in reversed(node.entries):
                if whole_only and not (entry.parked and len(entry.tokens) <= matched):
                    continue
                usable = matched if entry.parked else min(matched, entry.num_computed())
                if matched > coming:
                    coming, neighbour = matched, entry
                if usable > best_length:
                    best_length, best = usable, entry
                if best_length == matched:
                    break
        return Match(best_length, best, coming, neighbour if coming > best_length else None)

    def divergence(self, tokens: IntArray, namespace: Namespace, num_shown: int) -> Divergence | None:
        """The position of the first token that no entry has, and an entry's tokens there; None if they extend it.

        Looks at a single entry, since this runs for every request that starts.
        """
        path = self._walk(tokens, namespace)
        if not path:
            return None
        node, matched = path[-1]
        if matched == node.end and node.children:
            node = next(reversed(node.children.values()))
        latest = next(reversed(node.entries))
        if matched >= min(len(latest.tokens), len(tokens)):
            return None
        shown = slice(matched, matched + num_shown)
        return Divergence(matched, tuple(latest.tokens[shown].tolist()), tuple(tokens[shown].tolist()))

    def insert(self, entry: Entry) -> None:
        """Add an entry; its tokens must not be empty."""
        node = self._roots.setdefault(entry.namespace, Node(NO_TOKENS, 0, None))
        at = 0
        while at < len(entry.tokens):
            child = node.children.get(int(entry.tokens[at]))
            if child is None:
                child = Node(entry.tokens[at:], len(entry.tokens), node)
                node.children[int(child.tokens[0])] = child
            else:
                shared = common_prefix(child.tokens, entry.tokens[at:])
                if shared < len(child.tokens):
                    child = self._split(child, shared)
            child.entries[entry] = None
            self._count(child, entry, 1)
            at, node = child.end, child
        node.ending[entry] = None
        entry.node = node
        self.num_entries += 1

    def remove(self, entry: Entry) -> None:
        """Remove an entry, and the edges that it alone needed."""
        node, entry.node = entry.node, None
        self.num_entries -= 1
        if node is not None:
            del node.ending[entry]
        while node is not None and node.parent is not None:
            del node.entries[entry]
            self._count(node, entry, -1)
            parent = node.parent
            if not node.entries:
                del parent.children[int(node.tokens[0])]
            else:
                if np.may_share_memory(node.tokens, entry.tokens):
                    node.show(node.begin)
                if len(node.children) == 1:
                    self._join_if_one_way(node)
            node = parent
        if node is not None and not node.children:
            del self._roots[entry.namespace]

    def covering(self, tokens: IntArray, namespace: Namespace) -> Iterator[Entry]:
        """Entries that have all of these tokens as a prefix."""
        path = self._walk(tokens, namespace)
        if path and path[-1][1] == len(tokens):
            yield from path[-1][0].entries

    def covered(self, tokens: IntArray, namespace: Namespace) -> Iterator[Entry]:
        """Entries that are a prefix of these tokens."""
        for node, matched in self._walk(tokens, namespace):
            if matched == node.end:
                yield from node.ending

    def num_exclusive(self, entry: Entry) -> int:
        """Tokens of an entry whose KV no other one has: the loss if it is evicted."""
        node, num_shared = entry.node, 0
        while node is not None and node.end > num_shared:
            for other in node.entries:
                if other is not entry:
                    has = node.end if other.parked else min(node.end, other.num_computed())
                    num_shared = max(num_shared, has)
                    if num_shared == node.end:
                        break
            node = node.parent
        return len(entry.tokens) - num_shared

    def entries(self) -> Iterator[Entry]:
        for root in self._roots.values():
            for child in root.children.values():
                yield from child.entries

    # -- the tree -----------------------------------------------------------------------------------------------------

    def _walk(self, tokens: IntArray, namespace: Namespace) -> list[tuple[Node, int]]:
        """The edges that the tokens follow, each with the number of tokens matched up to its end."""
        path: list[tuple[Node, int]] = []
        node = self._roots.get(namespace)
        at = 0
        while node is not None and at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            shared = common_prefix(child.tokens, tokens[at:])
            at += shared
            path.append((child, at))
            node = child if shared == len(child.tokens) else None
        return path

    def _count(self, node: Node, entry: Entry, change: int) -> None:
        """Keep count of parked tokens as an entry joins or leaves an edge."""
        if not entry.parked:
            return
        was_parked, was_plain = node.is_parked, node.is_plain
        if entry.owner is None:
            node.num_plain += change
        else:
            node.num_owned += change
        self.num_parked_tokens += len(node.tokens) * (node.is_parked - was_parked)
        self.num_plain_tokens += len(node.tokens) * (node.is_plain - was_plain)

    def _split(self, node: Node, length: int) -> Node:
        """Split an edge; returns the upper half, which takes the node's place."""
        parent = node.parent
        if parent is None:
            raise IntegrityError("a root of the prefix index has no edge to split")
        upper = Node(node.tokens[:length], node.begin + length, parent)
        upper.entries = dict(node.entries)
        upper.num_plain, upper.num_owned = node.num_plain, node.num_owned
        parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.parent = node.tokens[length:], upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _join_if_one_way(self, node: Node) -> None:
        """Merge an edge with its only child if all its entries go on there."""
        (child,) = node.children.values()
        if len(child.entries) != len(node.entries) or node.parent is None:
            return
        child.show(node.begin)
        child.parent = node.parent
        node.parent.children[int(child.tokens[0])] = child

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every entry's path spells its tokens and every edge is needed."""
        seen = num_parked = num_plain = 0
        for namespace, root in self._roots.items():
            stack = [(root, root.tokens)]
            while stack:
                node, spelled = stack.pop()
                if node.parent is not None and (not node.entries or node.end != len(spelled)):
                    raise IntegrityError("an edge of the prefix index is unused or misplaced")
                if node.entries and not any(np.may_share_memory(node.tokens, one.tokens) for one in node.entries):
                    raise IntegrityError("an edge of the prefix index keeps the tokens of an entry that is gone")
                for entry in node.entries:
                    if entry.namespace != namespace or not np.array_equal(entry.tokens[: node.end], spelled):
                        raise IntegrityError(f"sequence {entry.seq} lies on a path that does not spell it")
                    is_end = entry.node is node and len(entry.tokens) == node.end
                    if is_end != (entry in node.ending):
                        raise IntegrityError(f"sequence {entry.seq} does not end where the prefix index says")
                    seen += is_end
                owners = [entry.owner for entry in node.entries if entry.parked]
                num_parked += len(node.tokens) if owners else 0
                num_plain += len(node.tokens) if owners and all(owner is None for owner in owners) else 0
                for first, child in node.children.items():
                    if (
                        child.parent is not node
                        or first != child.tokens[0]
                        or not child.entries.keys() <= (node.entries.keys() if node.parent else child.entries.keys())
                    ):
                        raise IntegrityError("a child of the prefix index is not its parent's")
                    stack.append((child, np.concatenate([spelled, child.tokens])))
        if seen != self.num_entries:
            raise IntegrityError(f"{self.num_entries} entries, {seen} of them found at their end")
        if (num_parked, num_plain) != (self.num_parked_tokens, self.num_plain_tokens):
            counted = f"{self.num_parked_tokens} ({self.num_plain_tokens} plain)"
            raise IntegrityError(f"{counted} parked tokens are counted, {num_parked} ({num_plain}) found")


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n
