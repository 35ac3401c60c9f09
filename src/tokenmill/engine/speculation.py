"""`Speculation`: asks proposers what running requests will say next, and decides how much of it is worth computing.

A `Proposer` guesses the tokens behind a request's log (`proposers.py`). Those that are worth it are computed in the
same step as the request's own token, each with a draw behind it (`StepPlan.verifications`); the draws decide, so the
output is the one without speculation. `Results` takes the draws as far as the proposal was right, and the scheduler
removes the KV of the rest. A proposal is never part of a log: whatever happens to its step, only KV is to be undone.

What is worth it is decided anew in every step: proposed tokens cost what the cost model says more rows cost, and are
right as often as they lately were, by proposer and by the length of the match. Lookup proposals that are not computed
are compared with the output all the same, so that a request that begins to copy is noticed. Owned by the engine core's
thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokenmill.engine.cost_model import CostLine, CostModel, Price
from tokenmill.engine.events import VerifiedEvent
from tokenmill.engine.plan import Draft
from tokenmill.engine.proposers import LONGEST_MATCH, MOST_PROPOSED, LookupProposer, Proposal, Proposer
from tokenmill.engine.request import Request
from tokenmill.engine.results import Verified
from tokenmill.engine.rows import RunningRows

EDGES = (1, 2, 3, 4, 6, 9, 13, LONGEST_MATCH)
NUM_LENGTHS, NUM_SUPPORTS = len(EDGES) + 1, 3
NUM_BUCKETS = NUM_LENGTHS * NUM_SUPPORTS
LENGTH_OF: list[int] = np.searchsorted(EDGES, np.arange(LONGEST_MATCH + 1), "right").tolist()
"""Match length -> class of lengths. With the support it makes a bucket, in which proposals are right equally often."""
PRIOR: list[float] = np.linspace([0.15, 0.3, 0.45], [0.8, 0.9, 0.95], NUM_LENGTHS).ravel().tolist()
DRAFT_PRIOR = [0.7] * NUM_BUCKETS
PRIOR_TRIALS = 8.0
OTHERS_TRIALS, DRAFT_OTHERS_TRIALS = 3.0, 10.0
"""Trials that what is known of all requests counts for in one of them: a draft model is right as often in most."""
FADE, FADE_ALL = 0.9, 0.995
"""Of what is known, with each trial: of a request, of all of them."""
CERTAIN = 0.97
"""No proposal is likelier than this."""
MIN_GAIN, MIN_DRAFT_GAIN = 1.03, 1.05
"""Tokens per second over those without proposals from which on proposals are worth it: any, and a draft model's."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 512
"""Tokens for which a draft model that does not pay is not asked; twice as many each time."""
FEW_TRIED, STEPS_TRIED = 2, 2
"""Tokens that it drafts then, to see whether it would pay now, and for how many steps: the first one is spent on
catching up, so only the next shows what drafting takes.
"""
PATIENCE = 4
"""Steps in a row without a worthwhile proposal after which a request is submitted ahead again."""
MOST_WATCHED = 16
"""Requests submitted ahead that are looked up for all the same: more would hold up their steps."""


class Acceptance:
    """How often proposed tokens are right, by the length of the match before them: for each row, and for all."""

    def __init__(self, max_rows: int, prior: Sequence[float], others_trials: float = OTHERS_TRIALS) -> None:
        """`others_trials`: how many trials of its own the rate of all requests counts for in one of them."""
        self._others_trials = others_trials
        self._hits = [[0.0] * NUM_BUCKETS for _ in range(max_rows)]
        self._trials = [[0.0] * NUM_BUCKETS for _ in range(max_rows)]
        self._all_hits = [rate * PRIOR_TRIALS for rate in prior]
        self._all_trials = [PRIOR_TRIALS] * NUM_BUCKETS

    def reset(self, row: int) -> None:
        self._hits[row] = [0.0] * NUM_BUCKETS
        self._trials[row] = [0.0] * NUM_BUCKETS

    def learn(self, row: int, proposal: Proposal, num_agreed: int, num_proposed: int) -> None:
        """The first `num_agreed` tokens were right, and the next one wrong if there was one."""
        hits, trials = self._hits[row], self._trials[row]
        for i in range(min(num_agreed + 1, num_proposed)):
            bucket, hit = _bucket(proposal, i), float(i < num_agreed)
            hits[bucket] = FADE * hits[bucket] + hit
            trials[bucket] = FADE * trials[bucket] + 1
            self._all_hits[bucket] = FADE_ALL * self._all_hits[bucket] + hit
            self._all_trials[bucket] = FADE_ALL * self._all_trials[bucket] + 1

    def chances(self, row: int, proposal: Proposal, count: int) -> list[float]:
        """For each of so many tokens: how likely it and all before it are right."""
        found, chance = [], 1.0
        for i in range(count):
            bucket = _bucket(proposal, i)
            others = self._all_hits[bucket] / self._all_trials[bucket]
            weight = self._others_trials
            rate = (self._hits[row][bucket] + weight * others) / (self._trials[row][bucket] + weight)
            chance *= min(rate, CERTAIN)
            found.append(chance)
        return found


def _bucket(proposal: Proposal, place: int) -> int:
    """Of a proposal's token: each one that is right makes the match longer."""
    return LENGTH_OF[min(proposal.match + place, LONGEST_MATCH)] * NUM_SUPPORTS + proposal.support


DRAFTED = Proposal(match=LONGEST_MATCH)
"""What proposals of a draft model are like."""


@dataclass(frozen=True)
class Candidate:
    """A proposal for a row, and who made it."""

    proposer: str
    proposal: Proposal


@dataclass(frozen=True)
class _Guess:
    """A proposal that was not computed: what the request says next tells whether it was right."""

    lease: int
    position: int
    candidate: Candidate


@dataclass
class _Pause:
    """A row for which a draft model does not pay."""

    until: int
    """Length of the log up to which it is not asked..."""
    length: int
    """...so many tokens from when it began."""
    num_tried: int = 0
    """Steps since then in which it was tried again."""


class Speculation:
    """Asks the proposers and shares out what is worth computing."""

    def __init__(self, rows: RunningRows, default: str, *, is_possible: bool, runs_ahead: bool) -> None:
        """`runs_ahead`: steps are submitted ahead, which a request gives up while it speculates."""
        self.proposers: dict[str, Proposer] = {}
        self._acceptance: dict[str, Acceptance] = {}
        self._rows = rows
        self._default = default
        self._is_possible = is_possible
        self._runs_ahead = runs_ahead
        self._guesses: dict[int, _Guess] = {}
        """By row."""
        self._verifying: dict[int, Candidate] = {}
        """By row: what was last given to a step to be verified."""
        self._pauses: dict[tuple[int, str], _Pause] = {}
        """By row and proposer."""
        self._idle_steps: dict[int, int] = {}
        """By row: steps in a row in which nothing was proposed."""
        self._ahead: set[int] = set()
        """Rows of requests that speculate but are submitted ahead for now, since nothing was worth proposing."""
        self.use(LookupProposer(), PRIOR)

    def use(self, proposer: Proposer, prior: Sequence[float] = DRAFT_PRIOR) -> None:
        """Let a proposer take part. `prior`: how often it is right, by match length, until more is known."""
        self.proposers[proposer.name] = proposer
        others_trials = OTHERS_TRIALS if proposer.name == "lookup" else DRAFT_OTHERS_TRIALS
        self._acceptance[proposer.name] = Acceptance(len(self._rows.requests), prior, others_trials)

    def proposers_of(self, request: Request) -> list[Proposer]:
        """Who proposes for the request, cheapest first; none if it does not speculate."""
        if not self._is_possible or request.pooling is not None:
            return []
        mode = request.draw.params.speculation or self._default
        if mode == "auto":
            return [one for one in self.proposers.values() if one.name != "lookup" or not self._runs_ahead]
        proposer = self.proposers.get(mode)
        return [] if proposer is None else [proposer]

    def has_begun(self, row: int) -> bool:
        """Does the row's request speculate, now or while that pays?"""
        return bool(self._rows.speculates[row]) or row in self._ahead

    @property
    def is_watching(self) -> bool:
        """Are there requests that speculate, but are submitted ahead for now?"""
        return bool(self._ahead)

    def begin(self, request: Request) -> None:
        """The request has got a row."""
        row = request.row
        self._rows.speculates[row] = bool(self.proposers_of(request))
        self._idle_steps.pop(row, None)
        self._ahead.discard(row)
        for name, acceptance in self._acceptance.items():
            acceptance.reset(row)
            self._pauses.pop((row, name), None)

    def forget(self, request: Request, *, is_complete: bool = False) -> None:
        """The request loses its row; complete, its log may help others."""
        self._guesses.pop(request.row, None)
        self._ahead.discard(request.row)
        for proposer in self.proposers_of(request):
            proposer.forget(request)
            if is_complete:
                proposer.keep(request)

    def propose(self, draft: Draft, cost: CostModel) -> dict[int, tuple[int, ...]]:
        """Row -> proposed tokens, for rows of the draft that decode: as many as make the step worth more."""
        rows = draft.decodes[self._rows.speculates[draft.decodes]]
        requests = [request for row in rows.tolist() if (request := self._rows.requests[row]) is not None]
        if draft.background_s is not None:  # the time for background requests does not cover their proposals
            behind = [request for request in requests if request.hints.is_background]
            requests = [request for request in requests if not request.hints.is_background]
            if self._runs_ahead:
                self._let_ahead(behind, {})
        price = cost.price(draft) if requests else None
        if price is None or not self._may_pay(draft, price):
            if self._runs_ahead:
                self._let_ahead(requests, {})
            return {}
        self._check_guesses(requests)
        found = self._ask(requests, draft, price)
        counts = self.allot(found, draft, price)
        if self._runs_ahead:
            self._let_ahead(requests, counts)
        for row, candidate in found.items():
            if not counts[row] and candidate.proposal.tokens[0] >= 0:
                self._guesses[row] = _Guess(int(self._rows.lease[row]), int(self._rows.num_tokens[row]), candidate)
        self._verifying |= {row: candidate for row, candidate in found.items() if counts[row]}
        return {row: found[row].proposal.tokens[:count] for row, count in counts.items() if count}

    def _may_pay(self, draft: Draft, price: Price) -> bool:
        """Would as many tokens as can be proposed pay off if they were certain? Otherwise no proposer is asked."""
        cost, most = price.proposed, MOST_PROPOSED * len(draft.decodes)
        return CERTAIN * MOST_PROPOSED * price.base > cost.entry + cost.each * most

    def watch(self, draft: Draft, cost: CostModel) -> None:
        """Let requests that are submitted ahead speculate again once that is expected to pay.

        Their latest tokens are not known, so a lookup is a step behind: it has to promise one token more.
        """
        rows = [row for row in draft.decodes.tolist() if row in self._ahead]
        if draft.background_s is not None:
            rows = [row for row in rows if not self._rows.is_background[row]]
        price = cost.price(draft) if rows and len(rows) <= MOST_WATCHED else None
        if price is None or not self._may_pay(draft, price):
            return
        requests = [request for row in rows if (request := self._rows.requests[row]) is not None]
        self._check_guesses(requests)
        for request in requests:
            for proposer in self.proposers_of(request):
                if self._promises(request, proposer, price):
                    self._ahead.discard(request.row)
                    self._rows.speculates[request.row] = True

    def _promises(self, request: Request, proposer: Proposer, price: Price) -> bool:
        if proposer.name != "lookup":
            return self._is_asked(request, proposer)
        proposal = _allowed(request, proposer.propose([request], [self._most(request)])[0])
        if not proposal.tokens:
            return False
        candidate = Candidate(proposer.name, proposal)
        self._guesses[request.row] = _Guess(int(self._rows.lease[request.row]), len(request.tokens), candidate)
        cost = price.proposed
        return sum(self._chances(request.row, candidate)) > 1 + MIN_GAIN * (cost.entry + cost.each) / price.base

    def _let_ahead(self, requests: Sequence[Request], counts: Mapping[int, int]) -> None:
        """Requests for which nothing is worth proposing go on without speculation, for now."""
        for request in requests:
            row = request.row
            idle = self._idle_steps[row] = 0 if counts.get(row) else self._idle_steps.get(row, 0) + 1
            may_come = any(self._is_asked(request, one) for one in self.proposers_of(request))
            if idle >= PATIENCE or (idle and not may_come):
                self._rows.speculates[row] = False
                self._ahead.add(row)
                self._idle_steps[row] = PATIENCE - 1  # the next time at once

    # -- who is asked -------------------------------------------------------------------------------------------------

    def _ask(self, requests: list[Request], draft: Draft, price: Price) -> dict[int, Candidate]:
        """The most promising proposal for each row, without what its grammar rules out.

        A proposer that takes time is asked only where what it proposes is likely to be worth that.
        """
        found: dict[int, Candidate] = {}
        for name, proposer in self.proposers.items():
            asked = [request for request in requests if proposer in self.proposers_of(request)]
            if name == "lookup":
                most = [self._most(request) for request in asked]
            else:
                asked, most = self._worth_drafting(name, asked, found, draft, price)
            if not asked:
                continue
            for request, proposal in zip(asked, proposer.propose(asked, most), strict=True):
                if proposal.tokens:
                    found[request.row] = Candidate(name, _allowed(request, proposal))
        return {row: candidate for row, candidate in found.items() if candidate.proposal.tokens}

    def _most(self, request: Request) -> int:
        """Tokens that may be proposed: the last one of the log is drawn in any case."""
        row, quota = request.row, request.limits.max_tokens_per_step
        room = int(self._rows.limit[row] - self._rows.num_tokens[row]) - 1
        return max(0, min(room, MOST_PROPOSED, MOST_PROPOSED if quota is None else quota - 1))

    def _worth_drafting(
        self, name: str, requests: list[Request], found: Mapping[int, Candidate], draft: Draft, price: Price
    ) -> tuple[list[Request], list[int]]:
        """The requests to draft for, and how many tokens: what gives the step the most expected tokens a second."""
        proposer, num_sure = self.proposers[name], len(draft.decodes)
        asked, chances = list[Request](), list[list[float]]()
        share_s, drafting = price.base / num_sure, proposer.cost(len(requests))
        own = CostLine(drafting.entry / max(1, len(requests)), drafting.each / max(1, len(requests))) + price.proposed
        for request in requests:
            most = self._most(request)
            if not most or not self._is_asked(request, proposer):
                continue
            expected, candidate = self._acceptance[name].chances(request.row, DRAFTED, most), found.get(request.row)
            other = [] if candidate is None else self._chances(request.row, candidate)
            if not other or _best(expected, 1, share_s, own).rate > _best(other, 1, share_s, price.proposed).rate:
                asked.append(request)
                chances.append(expected)
        if not asked:
            return [], []
        gains = [sum(some) for some in itertools.zip_longest(*chances, fillvalue=0.0)]  # by position
        gains = gains[: max(1, price.most // len(asked))]
        verifying = CostLine(price.proposed.entry, price.proposed.each * len(asked))
        count = _best(gains, num_sure, price.base, verifying + proposer.cost(len(asked)), MIN_DRAFT_GAIN).count
        if count:
            return asked, [min(count, len(expected)) for expected in chances]
        tried = [request for request in asked if self._is_tried(request, name)]
        return tried, [min(FEW_TRIED, self._most(request)) for request in tried]

    def _chances(self, row: int, candidate: Candidate) -> list[float]:
        acceptance, proposal = self._acceptance[candidate.proposer], candidate.proposal
        return acceptance.chances(row, proposal, len(proposal.tokens))

    def _is_asked(self, request: Request, proposer: Proposer) -> bool:
        """False while the proposer is paused for the request, and once it has nothing more to propose for it."""
        pause = self._pauses.get((request.row, proposer.name))
        is_paused = pause is not None and len(request.tokens) < pause.until
        return not is_paused and proposer.can_propose(request)

    def _is_tried(self, request: Request, name: str) -> bool:
        """The draft model does not pay for the request: try it for some steps after a pause, then pause again."""
        pause = self._pauses.get((request.row, name))
        if pause is not None and pause.num_tried < STEPS_TRIED:
            pause.num_tried += 1
            return True
        length = FIRST_PAUSE if pause is None else min(2 * pause.length, LONGEST_PAUSE)
        self._pauses[request.row, name] = _Pause(len(request.tokens) + length, length)
        return False

    # -- how much is worth it -----------------------------------------------------------------------------------------

    def allot(self, found: Mapping[int, Candidate], draft: Draft, price: Price) -> dict[int, int]:
        """How many tokens of each proposal to compute: those that give the step the most expected tokens a second."""
        counts = dict.fromkeys(found, 0)
        chances = [(chance, row) for row, candidate in found.items() for chance in self._chances(row, candidate)]
        # Likeliest first. A row's own stay in order: each is less likely than the one before it.
        chances.sort(key=lambda one: -one[0])
        chances = chances[: min(draft.budget, price.most)]
        worth = _best([chance for chance, _ in chances], self._num_sure(draft), price.base, price.proposed)
        for _, row in chances[: worth.count]:
            counts[row] += 1
        return counts

    def _num_sure(self, draft: Draft) -> int:
        """Tokens that the step gives in any case. Those of background prompts, too: they get the time that is left."""
        chunks = {} if draft.background_s is None else draft.chunks
        return len(draft.decodes) + sum(count for row, count in chunks.items() if self._rows.is_background[row])

    # -- what became of it --------------------------------------------------------------------------------------------

    def _check_guesses(self, requests: Sequence[Request]) -> None:
        """Compare what was proposed but not computed with what was said."""
        for request in requests:
            guess = self._guesses.pop(request.row, None)
            if guess is None or guess.lease != self._rows.lease[request.row]:
                continue
            if len(request.tokens) > guess.position:
                proposal = guess.candidate.proposal
                hit = int(request.tokens[guess.position] == proposal.tokens[0])
                self._acceptance[guess.candidate.proposer].learn(request.row, proposal, hit, 1)

    def learn(self, verified: Sequence[Verified]) -> None:
        for one in verified:
            row, num_proposed = one.verification.row, len(one.verification.tokens)
            candidate = self._verifying.get(row)
            if candidate is not None:
                acceptance = self._acceptance[candidate.proposer]
                acceptance.learn(row, candidate.proposal, one.num_agreed, num_proposed)
            one.request.num_proposed += num_proposed
            one.request.num_agreed += one.num_agreed

    def told(self, verified: Sequence[Verified], at: float) -> VerifiedEvent:
        made_by = [self._verifying.get(one.verification.row) for one in verified]
        return VerifiedEvent(
            at,
            tuple("" if one is None else one.proposer for one in made_by),
            tuple(one.verification.row for one in verified),
            tuple(len(one.verification.tokens) for one in verified),
            tuple(one.num_agreed for one in verified),
            tuple(one.num_drawn for one in verified),
        )


@dataclass(frozen=True)
class _Worth:
    count: int
    """How many proposed tokens to compute..."""
    rate: float
    """...and the tokens per second that are expected then."""


def _best(gains: Sequence[float], num_sure: int, base_s: float, cost: CostLine, min_gain: float = MIN_GAIN) -> _Worth:
    """How many of these expected tokens, in order, give a step the most tokens per second; none for less than the gain.

    Without them, the step gives `num_sure` tokens in `base_s`.
    """
    tokens, best = float(num_sure), _Worth(0, min_gain * num_sure / base_s)
    for count, gain in enumerate(gains, 1):
        tokens += gain
        rate = tokens / (base_s + cost.entry + count * cost.each)
        if rate > best.rate:
            best = _Worth(count, rate)
    return best


def _allowed(request: Request, proposal: Proposal) -> Proposal:
    """As much of a proposal as the request's grammar allows."""
    if request.grammar is None or not proposal.tokens:
        return proposal
    return replace(proposal, tokens=proposal.tokens[: request.grammar.num_allowed(proposal.tokens)])
