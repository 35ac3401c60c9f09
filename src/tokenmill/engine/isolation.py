"""`Isolation`: after a step has failed, its requests are run alone, one by one, to find the one that makes it fail."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tokenmill.engine.plan import StepPlan
from tokenmill.engine.request import Request
from tokenmill.engine.rows import RunningRows
from tokenmill.errors import BackendError, ForwardFailed

MAX_FAILURES_IN_A_ROW = 2
"""Requests that may fail alone, one after the other, before the engine itself is given up."""


@dataclass(frozen=True)
class Suspect:
    """A request of a step that failed, and how many tokens it had in it."""

    request: Request
    num_tokens: int


class Isolation:
    """Who is still to be run alone, and how many have failed that way in a row."""

    def __init__(self) -> None:
        self.num_failed_steps = 0
        self._suspects: deque[Suspect] = deque()
        self._failures_in_a_row = 0

    def suspect(self, plan: StepPlan, rows: RunningRows) -> None:
        """A step failed: any of its requests may be the reason."""
        self.num_failed_steps += 1
        for row, lease, count in zip(plan.rows, plan.leases, plan.counts, strict=True):
            request = rows.requests[row]
            if request is not None and rows.lease[row] == lease:
                self._suspects.append(Suspect(request, int(count)))

    def next(self) -> Suspect | None:
        """The next one to run alone; those that have ended meanwhile are let go."""
        while self._suspects:
            suspect = self._suspects.popleft()
            if not suspect.request.is_finished:
                return suspect
        return None

    def note_success(self) -> None:
        self._failures_in_a_row = 0

    def note_failure(self, error: BackendError) -> None:
        """A request failed alone. That is its own fault; two in a row are the engine's, and the error is raised."""
        if isinstance(error, ForwardFailed):
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise error

    def clear(self) -> None:
        self._suspects.clear()
