"""Which engine core a new session goes to, for life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, Protocol

from tokenmill.errors import ConfigError

Policy = Literal["round_robin", "least_loaded"]


class Routing(Protocol):
    def choose(self, opening: str | None, alive: Sequence[int]) -> int:
        """The core of a new session, one of those alive; `opening` is the system prompt it begins with."""
        ...

    def leave(self, core: int, opening: str | None) -> None:
        """A session of this core that began so has ended."""
        ...

    def stay(self, core: int, opening: str | None) -> None:
        """A fork has joined the core of its parent."""
        ...


class RoundRobin:
    """One core after the other."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._next = 0

    def choose(self, opening: str | None, alive: Sequence[int]) -> int:  # noqa: ARG002
        in_turn = [*range(self._next, self._num_cores), *range(self._next)]
        core: int = next(core for core in in_turn if core in alive)
        self._next = (core + 1) % self._num_cores
        return core

    def leave(self, core: int, opening: str | None) -> None:
        """It does not matter here."""

    def stay(self, core: int, opening: str | None) -> None:
        """Nor does this."""


class LeastLoaded:
    """The core with the fewest sessions; among those that are not much fuller, one that knows the opening."""

    SLACK = 2
    """Sessions that a core may have more than the emptiest and still be chosen for what it knows."""

    def __init__(self, num_cores: int) -> None:
        self._loads = [0] * num_cores
        self._knows: Counter[tuple[str, int]] = Counter()

    def choose(self, opening: str | None, alive: Sequence[int]) -> int:
        least = min(self._loads[core] for core in alive)
        cores = [core for core in alive if self._loads[core] <= least + self.SLACK]
        known = [core for core in cores if opening is not None and self._knows[opening, core]]
        core = min(known or cores, key=lambda one: self._loads[one])
        self.stay(core, opening)
        return core

    def leave(self, core: int, opening: str | None) -> None:
        self._loads[core] -= 1
        if opening is not None:
            self._knows[opening, core] -= 1
            self._knows += Counter()  # without those that are zero

    def stay(self, core: int, opening: str | None) -> None:
        """A fork has joined a core."""
        self._loads[core] += 1
        if opening is not None:
            self._knows[opening, core] += 1


def make_routing(policy: Policy, num_cores: int) -> Routing:
    if policy == "round_robin":
        return RoundRobin(num_cores)
    if policy == "least_loaded":
        return LeastLoaded(num_cores)
    raise ConfigError(f"routing {policy!r} is not known; known: 'round_robin', 'least_loaded'")
