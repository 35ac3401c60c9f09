"""Which replica gets a request, and how many replicas there should be: pure functions, without Ray.

A request has a routing key, which the proxy derives from its path and body. Requests of a session go to the replica
that owns the session's root on a consistent-hash ring, forks with their root. Stateless requests with the same opening
prefer the same replica, as long as its load is within a bound of the mean. All others go to the less loaded of two.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from typing import Any

POINTS = 100
"""Of each member on the ring. The share of a member then varies by about a tenth."""
LOAD_FACTOR = 1.25
"""A replica takes stateless requests for their prefix up to this multiple of the mean load."""
MIN_LOAD_BOUND = 4
"""Floor of that bound: below it, a prefix hit outweighs an even load."""
MOST_RANKS = 3
"""Replicas of a session that are tried one after the other: its owner, and those next on the ring."""


# -- keys -------------------------------------------------------------------------------------------------------------


class Affinity(Enum):
    """What keeps requests with the same key together."""

    SESSION = "s"
    """State: they go to the key's owner unless that is full or gone."""
    PREFIX = "p"
    """A prompt prefix in the KV cache: they go to the key's owner unless that is loaded more than the others."""


@dataclass(frozen=True)
class RoutingKey:
    affinity: Affinity
    value: str

    def header(self) -> str:
        """As it travels from the proxy's middleware to its router."""
        return f"{self.affinity.value}:{self.value}"

    @classmethod
    def read(cls, header: str) -> RoutingKey | None:
        """A header as the middleware wrote it. One that a client sent to a proxy without it names a session."""
        if not header:
            return None
        kind, colon, value = header.partition(":")
        if colon and kind in (Affinity.SESSION.value, Affinity.PREFIX.value):
            return cls(Affinity(kind), value)
        return cls(Affinity.SESSION, root_of(header))


SESSION_PATH = re.compile(r"(?:/v1)?/sessions/(?!restore$)([^/]+)(?:/|$)")
GENERATES = re.compile(
    r"(?:/v1)?/(?:chat/completions|completions|responses|messages)|/api/(?:chat|generate)|/infill|/completion"
)
"""Paths of stateless requests with a prompt."""
MAX_OPENING = 4096
"""Characters of an opening's text that count."""


def root_of(session_id: str) -> str:
    """The session that a fork descends from: `{root}.{fork}`."""
    return session_id.partition(".")[0]


def key_of_path(path: str) -> RoutingKey | None:
    """The key of a request whose path names a session."""
    found = SESSION_PATH.match(path)
    return None if found is None else RoutingKey(Affinity.SESSION, root_of(found[1]))


def has_opening(method: str, path: str) -> bool:
    """Does the body decide where this request goes?"""
    return method == "POST" and GENERATES.fullmatch(path) is not None


def key_of_body(body: bytes, api_key: str = "") -> RoutingKey | None:
    """The key of a stateless request: what its prompt begins with, as far as the next turn repeats it."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    opening = _opening(given)
    return None if opening is None else RoutingKey(Affinity.PREFIX, _digest(f"{api_key}\n{opening}"))


def _opening(body: Mapping[str, Any]) -> str | None:
    """A name that the client gave, or the text up to the first message of the user."""
    for name in ("conversation", "prompt_cache_key"):
        if isinstance(named := body.get(name), str) and named:
            return f"{name}\n{named}"
    turns = next((body[name] for name in ("messages", "input", "prompt") if body.get(name)), None)
    if turns is None:
        return None
    parts: list[Any] = [body.get("model"), body.get("system"), body.get("instructions")]
    if isinstance(turns, list):
        for turn in turns[:MAX_OPENING]:
            parts.append(turn)
            if isinstance(turn, dict) and turn.get("role") == "user":
                break
    else:
        parts.append(turns)
    return json.dumps(parts, ensure_ascii=False)[:MAX_OPENING]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=12).hexdigest()


# -- the ring ---------------------------------------------------------------------------------------------------------


class HashRing:
    """Consistent hashing: when a member joins or leaves, only its share of the keys moves.

    Every router has the same ring for the same members. An update costs the new members' points and one merge.
    """

    def __init__(self, members: Iterable[str] = (), points: int = POINTS) -> None:
        self._num_points = points
        self._members: frozenset[str] = frozenset()
        self._points: list[tuple[int, str]] = []
        self._places: list[int] = []
        self.update(members)

    @property
    def members(self) -> frozenset[str]:
        return self._members

    def update(self, members: Iterable[str]) -> None:
        now = frozenset(members)
        if now == self._members:
            return
        kept = [point for point in self._points if point[1] in now]
        new = [(_place(f"{member}:{i}"), member) for member in now - self._members for i in range(self._num_points)]
        self._points = sorted(kept + new)
        self._places = list(map(itemgetter(0), self._points))
        self._members = now

    def walk(self, key: str) -> Iterator[str]:
        """All members, from the key's owner on in the order in which they would inherit it."""
        start, seen = bisect_right(self._places, _place(key)), set[str]()
        for i in range(len(self._points)):
            member = self._points[(start + i) % len(self._points)][1]
            if member not in seen:
                seen.add(member)
                yield member
                if len(seen) == len(self._members):
                    return

    def owner(self, key: str) -> str | None:
        return next(self.walk(key), None)


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


# -- policies ---------------------------------------------------------------------------------------------------------


def rank(
    key: RoutingKey | None,
    ring: HashRing,
    loads: Mapping[str, int],
    *,
    factor: float = LOAD_FACTOR,
    chance: random.Random | None = None,
) -> list[list[str]]:
    """Replicas for a request, best first; of those in one rank the least loaded one is to be taken.

    `loads` has the requests that each replica is working on, of every replica that may be chosen.
    """
    if not loads:
        return []
    if key is None:
        two = (chance or random).sample(sorted(loads), min(2, len(loads)))
        return [two, [name for name in loads if name not in two]] if len(loads) > len(two) else [two]
    if key.affinity is Affinity.SESSION:
        ranks = []
        for name in ring.walk(key.value):
            if name in loads:
                ranks.append([name])
                if len(ranks) == MOST_RANKS:
                    break
        return ranks
    bound = load_bound(loads.values(), factor)
    within = next((name for name in ring.walk(key.value) if name in loads and loads[name] < bound), None)
    rest = [name for name in loads if name != within]
    return [[name] if isinstance(name, str) else name for name in (within, rest) if name]


def load_bound(loads: Iterable[int], factor: float = LOAD_FACTOR) -> int:
    """Requests that a replica may have with the next one, so that none has far more than `factor` times the mean."""
    counts = list(loads)
    return max(MIN_LOAD_BOUND, math.ceil(factor * (sum(counts) + 1) / len(counts)))


@dataclass(frozen=True)
class ReplicaLoad:
    """What a replica reports for autoscaling."""

    prefill_queue_s: float
    """Time that the prompt tokens which wait for computation will take."""
    kv_usage: float
    """Fraction of KV memory that running requests take."""


@dataclass(frozen=True)
class ScalingTargets:
    """A deployment that exceeds one of them on average is scaled up."""

    prefill_queue_s: float = 1.0
    kv_usage: float = 0.85

    def replicas(self, loads: Sequence[ReplicaLoad]) -> int:
        """How many replicas would bring the mean of both below its target."""
        queue_s, usage = sum(one.prefill_queue_s for one in loads), sum(one.kv_usage for one in loads)
        return max(1, math.ceil(round(max(queue_s / self.prefill_queue_s, usage / self.kv_usage), 6)))
