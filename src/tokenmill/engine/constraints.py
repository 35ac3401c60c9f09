"""`Constraints`: grammars of the running requests: masks for a step's draws, forced tokens where only one is allowed.

A grammar state belongs to its request and follows its log, so it survives preemption, lost steps and a restart of the
engine (where it is rebuilt from the log). It is up to date once a step has been collected. The forward pass of the next
step may be in flight by then, but not its draw, which is launched with the masks; these are computed while the device
is busy.

Forced tokens are appended to a log without being drawn. The next step computes all of them in one chunk, by
the scheduler's one rule, and draws what follows the last one. Forced tokens are certain and need no
verification. Those proposed by speculation are verified by the draws of their step, for which there are masks, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from tokenmill.contract.backend import Mask
from tokenmill.engine.plan import StepPlan
from tokenmill.engine.request import Request
from tokenmill.engine.rows import RunningRows
from tokenmill.text.grammar import GrammarState, MaskWriter

ALL_ALLOWED = np.uint32(0xFFFFFFFF)
NO_TOKENS: tuple[int, ...] = ()


class Course(Enum):
    """How an output continues after a token."""

    OPEN = "open"
    COMPLETE = "complete"
    """The grammar is complete, and no end-of-sequence token is to be drawn."""
    BROKEN = "broken"
    """The grammar has failed."""


@dataclass(frozen=True)
class Followed:
    """The effect of a token on its request's grammar."""

    course: Course = Course.OPEN
    proposal: Sequence[int] = NO_TOKENS
    """Forced tokens that follow."""
    error: str | None = None


@dataclass(frozen=True)
class StepMasks:
    """Masks for a step's draws, and the requests whose grammar has failed."""

    masks: Mask | None = None
    """None if no row is constrained."""
    failed: tuple[tuple[Request, str], ...] = ()


class Constraints:
    """Owned by the engine core's thread, like the rows."""

    def __init__(self, rows: RunningRows, vocab_size: int, *, proposes: bool) -> None:
        self._rows = rows
        self._proposes = proposes
        """If off, forced tokens are drawn one per step from masks that allow nothing else: for comparison."""
        self._writer = MaskWriter(vocab_size)

    def begin(self, request: Request, longest: int) -> list[int]:
        """Undrawn tokens that a new request's output begins with: a prefix to resume after, those its grammar forces.

        Never all of an output, up to a log of this length. With log-probabilities, every token is drawn.
        """
        state, room = request.grammar, max(longest - 1 - len(request.tokens), 0)
        prefix = () if request.draw.params.logprobs is not None else request.draw.prefix
        begun = _before_stop(request, prefix[:room])
        if state is None:
            return begun
        begun = begun[: max(state.num_allowed(begun) - 1, 0)]  # one that completes the grammar has to be drawn
        state.advance(begun)
        if not self._may_propose(request):
            return begun
        forced = _before_stop(request, state.forced()[: room - len(begun)])
        return begun + forced if state.advance(forced) else begun

    def follow(self, request: Request, tokens: Sequence[int]) -> Followed:
        """The request's log has grown by these tokens."""
        state = request.grammar
        if state is None:
            return Followed()
        if not state.advance(tokens):
            return Followed(Course.BROKEN, error=f"its grammar cannot be followed: {state.error}")
        if state.is_complete:
            return self._complete(request, state)
        return Followed(proposal=state.forced()) if self._may_propose(request) else Followed()

    def _complete(self, request: Request, state: GrammarState) -> Followed:
        """Only an end-of-sequence token may follow: drawn if there are several, forced if there is one, else omitted.

        If the request's own parameters rule all of them out, the output ends without one.

        A session always draws it: the step that does so computes the forced tokens before it, which
        the next turn would have to compute otherwise.
        """
        params = request.draw.params
        ends = (state.eos_ids & request.stop_ids).difference(params.banned_token_ids)
        if params.allowed_token_ids is not None:
            ends = ends.intersection(params.allowed_token_ids)
        if not ends or len(request.output) < request.limits.min_new_tokens:
            return Followed(Course.COMPLETE)
        is_proposed = len(ends) == 1 and request.hints.owner is None and self._may_propose(request)
        return Followed(proposal=tuple(ends)) if is_proposed else Followed()

    def _may_propose(self, request: Request) -> bool:
        return self._proposes and request.takes_proposals

    def are_on(self, plan: StepPlan) -> bool:
        """Whether the plan draws for a constrained request."""
        return bool(self._rows.is_constrained[plan.sampled_rows].any())

    def masks(self, plan: StepPlan) -> StepMasks:
        """The mask of each of the plan's draws; all ones for requests that are unconstrained or have ended."""
        rows = plan.sampled_rows
        is_held = self._rows.is_constrained[rows] & (self._rows.lease[rows] == plan.sampled_leases)
        drawn = [
            (place, request, request.grammar)
            for place, row in zip(is_held.nonzero()[0].tolist(), rows[is_held].tolist(), strict=True)
            if (request := self._rows.requests[row]) is not None and request.grammar is not None
        ]
        drawn += self._after_proposals(plan)
        if not drawn:
            return StepMasks()
        places = np.array([place for place, _, _ in drawn], dtype=np.int32)
        masks = self._writer.write([state for _, _, state in drawn], places, len(rows) + len(plan.more_rows))
        failed = []
        for place, request, state in drawn:
            if (error := state.error) is not None:
                failed.append((request, f"its grammar cannot be followed: {error}"))
                masks[place] = ALL_ALLOWED
            elif not self._may_propose(request) and (forced := state.forced()):
                masks[place] &= _only(forced[0], masks.shape[1])
        return StepMasks(masks, tuple(failed))

    def _after_proposals(self, plan: StepPlan) -> list[tuple[int, Request, GrammarState]]:
        """The draws after proposed tokens, with each one's grammar state; none after a token the grammar rejects."""
        drawn = []
        for one in plan.verifications:
            request = self._rows.requests[one.row]
            if self._rows.lease[one.row] != one.lease or request is None or (state := request.grammar) is None:
                continue
            first = len(plan.sampled_rows) + one.first_draw
            for i, token in enumerate(one.tokens):
                state = state.fork()
                if not state.advance((token,)):
                    break  # the draw before it differs
                drawn.append((first + i, request, state))
        return drawn


def _before_stop(request: Request, tokens: Sequence[int]) -> list[int]:
    """The tokens before the first that would end the request."""
    return list(itertools.takewhile(lambda token: token not in request.stop_ids, tokens))


def _only(token: int, width: int) -> Mask:
    mask = np.zeros(width, dtype=np.uint32)
    mask[token // 32] = np.uint32(1) << np.uint32(token % 32)
    return mask
