"""`Ledger`: who must get what in each tick, by the rules of docs/scheduling.md, in plain Python.

It keeps books of its own on every request, from what goes into the engine and from the events that come out, and
compares them with every plan: deadlines, decodes, victims, chunks and admissions, each in its order. Only what depends
on KV memory is taken from the engine: how much of a prompt was cached, and that there was no room for a request.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.engine.core import EngineCore
from tokenmill.engine.cost_model import FIRST_CHUNK, WINDOW
from tokenmill.engine.events import Event, FailedStepEvent, Phase, RequestEvent, TickEvent, VerifiedEvent
from tokenmill.engine.plan import StepPlan
from tokenmill.engine.request import Request
from tokenmill.outputs import FinishReason


@dataclass
class Account:
    """One request."""

    request: Request
    """For its tokens, its limits and what it waits for; nothing that the scheduler has decided is read from it."""
    arrival: int
    arrived_at: float
    last_turn: int
    """The tick of its arrival, its start, its preemption or its latest tokens."""
    num_queued: int
    """Tokens it had when it was queued."""
    length: int
    """Of its log, as far as tokens have come home."""
    computed: int = 0
    pending: int = 0
    """Tokens that steps in flight draw for it."""
    row: int | None = None
    has_started: bool = False
    waits: bool = False
    """For a neighbour that computes its prefix."""
    was_served: bool = False
    """Was room made in its name when it started?"""

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def key(self) -> str:
        return self.request.hints.key

    @property
    def cls(self) -> tuple[str, int]:
        return self.key, self.request.hints.priority


@dataclass
class Ledger:
    engine: EngineCore
    is_roomy: bool
    """KV memory is never short: nobody is preempted or turned away for lack of it."""
    accounts: dict[str, Account] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    """Tokens by key."""
    last_level: int = 0
    """What the key had that left last."""
    last_start: dict[tuple[str, int], int] = field(default_factory=dict)
    """Class -> the tick in which one of it last started..."""
    starts_before: dict[tuple[str, int], int] = field(default_factory=dict)
    """...as it was before this tick."""
    prefills: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Prompt tokens of the latest steps that had some."""
    tick: int = 0
    num_arrived: int = 0
    has_failed: bool = False
    """A step has failed: what is run alone, and computed again, is not written down here."""
    leased_for: Request | None = None
    """The request in whose name room was made and a sequence leased, of the latest."""
    started: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ended: dict[str, FinishReason | None] = field(default_factory=dict)
    speculates: list[bool] = field(default_factory=list)
    """By row, before the tick: proposals are made for its request, so it waits for its last token."""

    def __post_init__(self) -> None:
        scheduler = self.engine.scheduler
        self.engine.events.subscribe(self._note)
        self._add, self._schedule = scheduler.add, scheduler.schedule
        scheduler.add = self.add  # type: ignore[method-assign]
        scheduler.schedule = self.schedule  # type: ignore[method-assign]
        for verb in ("start", "fork"):
            setattr(self.engine.kv, verb, self._noting(getattr(self.engine.kv, verb)))

    def _noting(self, lease: Callable[..., Any]) -> Callable[..., Any]:
        """The verb, which takes the request last; who it was is noted."""

        def noting(*given: Any) -> Any:
            self.leased_for = given[-1]
            return lease(*given)

        return noting

    # -- what comes in ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        is_full, gives_way = self._is_full(request), self._giving_way(request)
        is_refused = is_full and gives_way is None
        self._enter(request.hints.key)
        self.num_arrived += 1
        length = len(request.tokens)
        now = self.engine.events.clock()
        self.accounts[request.request_id] = Account(request, self.num_arrived, now, self.tick, length, length)
        self._add(request)
        reason = self.ended.get(request.request_id)
        assert (reason is FinishReason.OVERLOAD) == is_refused, f"{request} ended with {reason}; full: {is_refused}"
        if is_full and gives_way is not None:
            assert self.ended[gives_way] is FinishReason.OVERLOAD, f"{gives_way} did not give way to {request}"

    def _giving_way(self, request: Request) -> str | None:
        """The newest new one of the key with most requests, if that key has two more of them than the newcomer's."""
        waiting = self._waiting(self.accounts.values())
        counts = Counter(one.request.hints.key for one in (*waiting, *self._running(self.accounts.values())))
        new = [one for one in waiting if not one.has_started]
        most = max((counts[one.request.hints.key] for one in new), default=0)
        newest = [one for one in new if counts[one.request.hints.key] == most][-1:]
        if not newest or most < counts[request.hints.key] + 2:
            return None
        limit = self.engine.config.max_queue_tokens
        queued = sum(one.num_queued for one in waiting)
        fits = limit is None or queued - newest[0].num_queued + len(request.tokens) <= limit
        return newest[0].name if fits else None

    def _is_full(self, request: Request) -> bool:
        config, waiting = self.engine.config, self._waiting(self.accounts.values())
        num_free = config.max_num_seqs - len(self._running(self.accounts.values()))
        num_tokens = len(request.tokens) + sum(one.num_queued for one in waiting)
        is_long = config.max_queue_tokens is not None and num_tokens > config.max_queue_tokens
        return len(waiting) >= config.max_queue + num_free or (bool(waiting) and is_long)

    def _enter(self, key: str) -> None:
        """A key that comes back has what it had, but no less than anybody who is there, or whoever was there last."""
        keys = {one.key for one in self.accounts.values()}
        if key not in keys:
            self.served[key] = max(self.served[key], min((self.served[one] for one in keys), default=self.last_level))

    # -- what comes out -----------------------------------------------------------------------------------------------

    def _note(self, event: Event) -> None:
        if isinstance(event, FailedStepEvent):
            self.has_failed = True
        elif isinstance(event, TickEvent):
            self._collect(event)
        elif isinstance(event, VerifiedEvent):
            self._verify(event)
        elif isinstance(event, RequestEvent):
            self._enter_phase(event)

    def _collect(self, event: TickEvent) -> None:
        if event.plan.num_prefill:
            self.prefills.append(event.plan.num_prefill)
        for share in event.shares:
            if share.is_drawn:
                self.accounts[share.request_id].pending -= 1
                self.accounts[share.request_id].length += 1

    def _verify(self, event: VerifiedEvent) -> None:
        """Proposed tokens that were rejected count as if they had never been computed."""
        rows = {one.row: one for one in self.accounts.values() if one.row is not None}
        columns = (event.rows, event.num_proposed, event.num_agreed, event.num_drawn)
        for row, num_proposed, num_agreed, num_drawn in zip(*columns, strict=True):
            rows[row].length += num_drawn
            rows[row].computed -= num_proposed - num_agreed
            self.served[rows[row].key] -= num_proposed - num_agreed

    def _enter_phase(self, event: RequestEvent) -> None:
        account = self.accounts[event.request_id]
        if event.phase is Phase.PREFILL:
            self.started.append(event.request_id)
            account.row, account.computed, account.has_started = event.row, event.num_computed, True
            account.was_served = self.leased_for is account.request
            account.last_turn = self.last_start[account.cls] = self.tick
        elif event.phase is Phase.PREEMPTED:
            self.preempted.append(event.request_id)
            account.row, account.pending = None, 0
            account.last_turn, account.num_queued = self.tick, account.length
        elif event.phase is Phase.ENDED:
            self.ended[event.request_id] = event.finish_reason
            del self.accounts[event.request_id]
            if account.key not in {one.key for one in self.accounts.values()}:
                self.last_level = self.served[account.key]
            if account.cls not in {one.cls for one in self.accounts.values()}:
                self.last_start.pop(account.cls, None)

    # -- the tick -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        before = {name: replace(account) for name, account in self.accounts.items()}
        self.started, self.preempted, self.ended = [], [], {}
        self.starts_before = dict(self.last_start)
        self.speculates = self.engine.scheduler.rows.speculates.tolist()
        self.tick += 1
        plan = self._schedule()
        if not self.has_failed:
            self._check_deadlines(before)
            self._check_plan([one for name, one in before.items() if name not in self.ended], plan)
            self._check_queue()
        for one in self.accounts.values():
            one.waits = one.request.waits_on is not None
        if plan is not None:
            self._submit(plan)
        return plan

    def _check_deadlines(self, before: dict[str, Account]) -> None:
        """Those end whose own time is up, or that have waited too long without ever having started. No others."""
        now, queue_timeout_s = self.engine.events.clock(), self.engine.config.queue_timeout_s
        due = set()
        for name, one in before.items():
            own = one.request.limits.timeout_s
            if own is not None and now >= one.arrived_at + own:
                due.add(name)
            if queue_timeout_s is not None and not one.has_started and now >= one.arrived_at + queue_timeout_s:
                due.add(name)
        assert self.ended == dict.fromkeys(due, FinishReason.TIMEOUT), f"ended {self.ended}, due {due} at {now}"

    def _check_plan(self, accounts: list[Account], plan: StepPlan | None) -> None:
        config = self.engine.config
        in_order = self._ordered(self._running(accounts))
        left = self._without_victims(in_order)
        decoding = sorted(one.row for one in left if self._owes(one) == 1 and one.row is not None)
        step = Step(config.max_num_batched_tokens - len(decoding), self._most_prefill(left, decoding))
        given = {} if plan is None else dict(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True))
        for one in () if plan is None else plan.verifications:
            given[one.row] -= len(one.tokens)
        assert list(given)[: 0 if plan is None else plan.num_decode] == decoding, "who decodes"
        self._prefill(step, [one for one in left if self._owes(one) > 1], given)
        self._admit(step, accounts)
        self._use_up(step, given)
        assert given == {**dict.fromkeys(decoding, 1), **{one.row: count for one, count in step.chunks}}, (
            "who gets what"
        )
        assert list(given) == [*decoding, *(one.row for one, _ in step.chunks)], "in which order"
        if plan is not None:
            assert plan.tick == self.tick
            assert plan.num_tokens == sum(given.values()) + plan.num_proposed <= config.max_num_batched_tokens
            complete = [one.row for one, count in step.chunks if one.computed + count == one.length]
            assert plan.sampled_rows.tolist() == [*decoding, *complete], "who gets a token"
            rows = {one.row: one for one in [*left, *(one for one, _ in step.chunks)]}
            assert plan.positions.tolist() == [rows[row].length + rows[row].pending for row in [*decoding, *complete]]

    def _without_victims(self, in_order: list[Account]) -> list[Account]:
        """A victim is the last of all, or for a prompt's sake the last of those that are behind with theirs."""
        left = list(in_order)
        for name in self.preempted:
            behind = [one for one in left if self._owes(one) > 1]
            assert not self.is_roomy, f"{name} was preempted without need"
            assert name in {one.name for one in (left[-1:] + behind[-1:])}, f"{name} was preempted, not {left[-1]}"
            left = [one for one in left if one.name != name]
        return left

    def _most_prefill(self, left: list[Account], decoding: list[int]) -> int | None:
        """Prompt tokens in a step beside decodes: twice what was measured. (The target time is far away.)"""
        if not decoding and not any(one.pending for one in left):
            return None
        return max(FIRST_CHUNK, self.engine.config.min_prefill_chunk, 2 * max(self.prefills, default=0))

    def _prefill(self, step: Step, behind: list[Account], given: dict[int, int]) -> None:
        for one in behind:
            count = self._chunk(step, one)
            if count == 0:
                return
            if one.row in given:
                step.give(one, count)
            else:
                assert not self.is_roomy, f"{one} got nothing"

    def _admit(self, step: Step, accounts: list[Account]) -> None:
        """The first in order start, except those that wait for a neighbour; the first that can't stops the others."""
        started = [self.accounts[name] for name in self.started]
        free_rows = self.engine.config.max_num_seqs - len(self._running(accounts))
        if self.preempted or step.budget == 0:
            assert not started, "nobody starts when somebody has been preempted, or without a token to spare"
            return
        for one in self._ordered(self._waiting(accounts))[:free_rows]:
            if started and started[0].name == one.name:
                new = started.pop(0)
                assert new.was_served, f"room was made for {self.leased_for}, not for {new}"
                if count := self._chunk(step, new):
                    step.give(new, count)
            elif one.request.waits_on is not None:
                assert self._may_wait_for_prefix(one, accounts), f"{one} waits for nobody"
            else:
                assert not self.is_roomy or self._chunk(step, one) == 0, f"{one} could start"
                break
        assert not started, f"{started} went before others"

    def _use_up(self, step: Step, given: dict[int, int]) -> None:
        """If nobody decodes, the rest of the budget goes to the chunks, first ones first."""
        if step.most_prefill is not None:
            return
        for place, (one, count) in enumerate(step.chunks):
            more = min(self._most(one) - count, step.budget)
            if self.is_roomy or given.get(one.row or 0) != count:
                step.chunks[place] = (one, count + more)
                step.budget -= more

    def _check_queue(self) -> None:
        queue, waiting = self.engine.scheduler.queue, self._waiting(self.accounts.values())
        assert {one.request_id for one in queue} == {one.name for one in waiting}
        assert queue.num_tokens == sum(one.num_queued for one in waiting)

    def _submit(self, plan: StepPlan) -> None:
        rows = {one.row: one for one in self.accounts.values() if one.row is not None}
        for row, count in zip(plan.rows.tolist(), plan.counts.tolist(), strict=True):
            rows[row].computed += count
            rows[row].last_turn = self.tick
            self.served[rows[row].key] += count
        for row in plan.sampled_rows.tolist():
            rows[row].pending += 1

    # -- rules --------------------------------------------------------------------------------------------------------

    def _ordered(self, accounts: Iterable[Account]) -> list[Account]:
        """Aged ones by their last turn; then by priority, by what their key has had, by arrival."""

        def rank(one: Account) -> tuple[float, ...]:
            last_start = 0 if one.row is not None else self.starts_before.get(one.cls, 0)
            last_turn = max(one.last_turn, last_start)
            if self.tick - last_turn > self.engine.config.max_wait_ticks:
                return (0, last_turn, one.arrival)
            return (1, one.request.hints.priority, self.served[one.key], one.arrival)

        return sorted(accounts, key=rank)

    def _owes(self, one: Account) -> int:
        limit = one.request.max_tokens(self.engine.max_model_len)
        if one.pending and one.row is not None and self.speculates[one.row]:
            return 0  # what follows its last token is proposed once that is known
        return one.length + one.pending - one.computed if one.length + one.pending < limit else 0

    def _most(self, one: Account) -> int:
        need = one.length - one.computed
        return min(need, one.request.limits.max_tokens_per_step or need)

    def _chunk(self, step: Step, one: Account) -> int:
        count = min(self._most(one), self.engine.config.prefill_chunk, step.budget)
        return count if step.most_prefill is None else max(0, min(count, step.most_prefill - step.num_prefill))

    def _may_wait_for_prefix(self, one: Account, accounts: list[Account]) -> bool:
        """A neighbour is about to compute enough of its prompt, or still at what it waits for. But not forever."""
        config = self.engine.config
        running = [*self._running(accounts), *(self.accounts[name] for name in self.started)]
        running = [other for other in running if other.request.hints.namespace == one.request.hints.namespace]
        shared = [(common_prefix(one.request.tokens[:-1], other.request.tokens), other.computed) for other in running]
        coming = max((length for length, _ in shared), default=0)
        usable = max((min(length, computed) for length, computed in shared), default=0)
        is_worth_it = coming - usable >= max(1, config.min_shared_prefix)
        is_coming = one.waits and any(computed < length for length, computed in shared)
        return (is_worth_it or is_coming) and self.tick - one.last_turn <= config.max_wait_ticks

    def _running(self, accounts: Iterable[Account]) -> list[Account]:
        return [one for one in accounts if one.row is not None]

    def _waiting(self, accounts: Iterable[Account]) -> list[Account]:
        return [one for one in accounts if one.row is None]


@dataclass
class Step:
    """A step in the making, as it ought to be."""

    budget: int
    most_prefill: int | None
    """Prompt tokens that it may have; None: nobody decodes, so that any number may."""
    chunks: list[tuple[Account, int]] = field(default_factory=list)

    @property
    def num_prefill(self) -> int:
        return sum(count for _, count in self.chunks)

    def give(self, one: Account, count: int) -> None:
        self.chunks.append((one, count))
        self.budget -= count


def common_prefix(some: list[int], others: list[int]) -> int:
    pairs = zip(some, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)))
