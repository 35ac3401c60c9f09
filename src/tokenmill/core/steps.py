"""`StepQueue`: the steps that were submitted and not collected yet, oldest first. Every backend keeps one."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from tokenmill.errors import ForwardFailed, InvalidOperation


class Step:
    """A submitted forward: what all backends' `Forward` handles have in common."""

    def __init__(self, number: int) -> None:
        self.number = number
        """The KV memory's name for what this step wrote."""
        self.collected = False
        self.failure: ForwardFailed | None = None

    def raise_failure(self) -> None:
        """Raise the step's failure, if it has one, with a traceback of its own each time."""
        if self.failure is not None:
            raise again(self.failure)


S = TypeVar("S", bound=Step)


class StepQueue(Generic[S]):
    """Keeps steps in order and within the depth; a failed step takes the later ones with it."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._steps: deque[S] = deque()

    def check_room(self) -> None:
        """Raise unless one more step may be submitted now."""
        if len(self._steps) > self._depth:
            raise InvalidOperation(f"{len(self._steps)} steps in flight at depth {self._depth}; collect one first")

    def submit(self, step: S) -> None:
        self._steps.append(step)

    def check_turn(self, step: S) -> None:
        """Raise unless this step may be collected now: it has been before, or it is the oldest one."""
        step.raise_failure()
        if not step.collected and (not self._steps or self._steps[0] is not step):
            raise InvalidOperation("steps are collected in the order they were submitted")

    def settle(self, step: S) -> None:
        """The oldest step is done."""
        if not step.collected:
            self._steps.popleft()
            step.collected = True

    def fail(self, failure: ForwardFailed) -> list[S]:
        """The oldest step failed: it and all later ones are over. Returns them."""
        failed = list(self._steps)
        self._steps.clear()
        for step in failed:
            step.failure = failure if step is failed[0] else _discarded(failure)
        return failed

    def __len__(self) -> int:
        return len(self._steps)


def again(failure: ForwardFailed) -> ForwardFailed:
    """The same failure, to be raised once more."""
    copy = ForwardFailed(str(failure), fatal=failure.fatal)
    copy.__cause__ = failure
    return copy


def _discarded(cause: ForwardFailed) -> ForwardFailed:
    discarded = ForwardFailed(f"discarded: it followed a step that failed ({cause})", fatal=cause.fatal)
    discarded.__cause__ = cause
    return discarded
