"""Counters and histograms: what a server and its engines have done, and at which rates.

`Tally` is a histogram, `CoreFigures` the totals of one engine core, `Rates` its last seconds, and `Traffic` the HTTP
requests by endpoint and outcome. Core threads fill the figures of their core and the event loop those of requests, so
nothing here takes long: numbers and lists, no locks, no labels. Any thread may read; what it sees may be of two moments
a few microseconds apart.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import floor

from tokenmill.engine.events import (
    Event,
    FailedStepEvent,
    ParkedChange,
    ParkedEvent,
    Phase,
    ProposalEvent,
    RequestEvent,
    StartEvent,
    TickEvent,
    VerifiedEvent,
)
from tokenmill.engine.timeline import Timeline
from tokenmill.outputs import FinishReason

SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
"""Steps, and the time from a token to the next."""
LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
"""What a whole request or one of its phases takes."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Tally:
    """How many values there were up to each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of each bucket by itself; the last one has no bound."""
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """So many values that are the same."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def merge(self, other: Tally) -> None:
        """Add another one's values, as they are now."""
        for place, count in enumerate(other.counts.copy()):
            self.counts[place] += count
        self.total += other.total

    def cumulative(self) -> list[tuple[str, int]]:
        """Prometheus' buckets: each bound, as text, with the number of values up to it."""
        buckets, so_far = [], 0
        for bound, count in zip((*map(_text, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return buckets


def _text(bound: float) -> str:
    return repr(float(bound))


# -- one engine core --------------------------------------------------------------------------------------------------


class CoreFigures:
    """Counters and histograms of one core since the server started, added up from its events."""

    def __init__(self) -> None:
        self.num_prompt = 0
        self.num_cached = 0
        self.num_generated = 0
        self.num_forced = 0
        self.num_computed = 0
        self.num_preempted = 0
        self.num_evicted = 0
        self.num_failed_steps = 0
        self.num_restarts = 0
        self.num_prefill = 0
        """Tokens of prompts that were computed..."""
        self.prefill_s = 0.0
        """...and the time that they took."""
        self.ended = dict.fromkeys(FinishReason, 0)
        self.proposed: Counter[tuple[str, int]] = Counter()
        """By proposer and position, the first being 1: tokens that were proposed and verified..."""
        self.accepted: Counter[tuple[str, int]] = Counter()
        """...and those of them that were drawn as proposed."""
        self.step_s, self.schedule_s, self.inter_token_s = Tally(SHORT_S), Tally(SHORT_S), Tally(SHORT_S)
        self.step_tokens, self.step_sequences = Tally(TOKENS), Tally(SEQUENCES)
        self.mask_s, self.compile_s = Tally(SHORT_S), Tally(SHORT_S)
        self.first_token_s, self.request_s = Tally(LONG_S), Tally(LONG_S)
        self.phase_s: dict[Phase, Tally] = {phase: Tally(LONG_S) for phase in Phase if phase is not Phase.ENDED}
        self.prompt_tokens, self.generated_tokens = Tally(TOKENS), Tally(TOKENS)
        self._token_at: dict[str | None, float] = {}
        """When a request got its latest token, for those that are not among the next ones."""
        self._latest: tuple[str | None, ...] = ()
        """The requests that got a token in the latest step that gave any..."""
        self._latest_at = 0.0
        """...and when that was."""

    # -- steps --------------------------------------------------------------------------------------------------------

    def note_tick(self, event: TickEvent) -> None:
        plan = event.plan
        self.num_computed += plan.num_tokens
        self.num_prefill += plan.num_prefill
        self.prefill_s += event.prefill_s
        self.step_s.add(event.step_s)
        self.schedule_s.add(event.schedule_s)
        if event.mask_s:
            self.mask_s.add(event.mask_s)
        self.step_tokens.add(plan.num_tokens)
        self.step_sequences.add(len(plan.rows))
        if not len(plan.sampled_rows):
            return
        self.num_generated += event.num_generated
        is_all = event.is_whole and len(plan.sampled_rows) == len(event.requests)
        drawn = event.requests if is_all else (share.request_id for share in event.shares if share.is_drawn)
        # The gaps before these tokens. Mostly the same requests had the latest ones, and the gap is one for all.
        names, at = tuple(drawn), event.at
        if names == self._latest:
            self.inter_token_s.add(at - self._latest_at, len(names))
        else:
            self._token_at.update(dict.fromkeys(self._latest, self._latest_at))
            for before, count in Counter(map(self._token_at.get, filter(None, names))).items():
                if before is not None:  # else it is the first one
                    self.inter_token_s.add(at - before, count)
            self._latest = names
        self._latest_at = at

    # -- requests -----------------------------------------------------------------------------------------------------

    def note_request(self, event: RequestEvent, timeline: Timeline) -> None:
        """The timeline has the event in it."""
        if event.phase is Phase.QUEUED:
            self._note_forced(event.num_tokens - event.num_prompt)  # what its output begins with in any case
        elif event.phase is Phase.PREFILL and timeline.num_preemptions == 0:
            self.num_prompt += event.num_prompt
            self.num_cached += event.num_cached
        elif event.phase is Phase.DECODE and timeline.first_token_at == event.at:
            self.first_token_s.add(timeline.ttft_s or 0.0)
        elif event.phase is Phase.PREEMPTED:
            self.num_preempted += 1
        if event.phase is not Phase.ENDED:
            return
        self._token_at.update(dict.fromkeys(self._latest, self._latest_at))
        self._token_at.pop(event.request_id, None)
        self._latest = ()
        if event.finish_reason is not None:
            self.ended[event.finish_reason] += 1
        if event.finish_reason is FinishReason.OVERLOAD:
            return  # it was never let in: it would only make waiting look short
        self.request_s.add(timeline.wall_s)
        self.prompt_tokens.add(event.num_prompt)
        self.generated_tokens.add(event.num_tokens - event.num_prompt)
        for phase in {span.phase for span in timeline.spans}:
            self.phase_s[phase].add(timeline.seconds(phase))

    def note_other(self, event: Event) -> None:
        if isinstance(event, ProposalEvent):
            self._note_forced(sum(event.counts))
        elif isinstance(event, VerifiedEvent):
            for name, num_proposed, num_agreed in zip(
                event.proposers, event.num_proposed, event.num_agreed, strict=True
            ):
                self.proposed.update((name, position + 1) for position in range(num_proposed))
                self.accepted.update((name, position + 1) for position in range(num_agreed))
            self.num_generated += sum(event.num_drawn)
        elif isinstance(event, ParkedEvent):
            self.num_evicted += event.change is ParkedChange.EVICTED
        elif isinstance(event, FailedStepEvent):
            self.num_failed_steps += 1
        elif isinstance(event, StartEvent):
            self.num_restarts += 1

    def _note_forced(self, count: int) -> None:
        self.num_forced += count
        self.num_generated += count

    # -- of several cores ---------------------------------------------------------------------------------------------

    def merge(self, other: CoreFigures) -> None:
        """Add what another core has done."""
        for name, value in vars(self).items():
            if isinstance(value, Tally):
                value.merge(getattr(other, name))
            elif isinstance(value, int):
                setattr(self, name, value + getattr(other, name))
        self.prefill_s += other.prefill_s
        for reason in self.ended:
            self.ended[reason] += other.ended[reason]
        self.proposed.update(other.proposed.copy())
        self.accepted.update(other.accepted.copy())
        for phase, tally in self.phase_s.items():
            tally.merge(other.phase_s[phase])


# -- rates ------------------------------------------------------------------------------------------------------------


WINDOW_S = 10
LEAST_S = 0.5
"""A rate over less than this is noise."""


@dataclass(frozen=True)
class RateView:
    """By the second, but for the hit rate."""

    ticks: float = 0.0
    generated_tokens: float = 0.0
    prefill_tokens: float = 0.0
    hit_rate: float | None = None
    """Cached prompt tokens of those of the requests that started; None if none did."""


@dataclass
class _Second:
    number: int
    num_ticks: int = 0
    num_generated: int = 0
    num_prefill: int = 0
    num_prompt: int = 0
    num_cached: int = 0


class Rates:
    """Sums by second over the last `WINDOW_S`. One thread fills it: a core's, or that of a client that follows it."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S + 1)
        self._began: float | None = None

    def note(
        self,
        at: float,
        *,
        num_ticks: int = 0,
        num_generated: int = 0,
        num_prefill: int = 0,
        num_prompt: int = 0,
        num_cached: int = 0,
    ) -> None:
        """Steps and their tokens; of requests that started, the prompt's tokens and those of them that were cached."""
        number = floor(at)
        if self._began is None:
            self._began = at
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        second = self._seconds[-1]
        second.num_ticks += num_ticks
        second.num_generated += num_generated
        second.num_prefill += num_prefill
        second.num_prompt += num_prompt
        second.num_cached += num_cached

    def now(self, at: float) -> RateView:
        first = floor(at) - WINDOW_S + 1
        seconds = [one for one in list(self._seconds) if first <= one.number <= at]
        if self._began is None or not seconds:
            return RateView()
        span = max(at - max(first, self._began), LEAST_S)
        prompt = sum(one.num_prompt for one in seconds)
        return RateView(
            ticks=sum(one.num_ticks for one in seconds) / span,
            generated_tokens=sum(one.num_generated for one in seconds) / span,
            prefill_tokens=sum(one.num_prefill for one in seconds) / span,
            hit_rate=sum(one.num_cached for one in seconds) / prompt if prompt else None,
        )


# -- HTTP requests ----------------------------------------------------------------------------------------------------


OTHER = "other"
"""The label of all paths that no route has."""
CLIENT_GONE = 499
"""Nobody was there any more to be answered."""


class Outcome(Enum):
    """How a request ended, as far as its client is concerned."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """Its client left, or somebody ended it by its id."""
    FAILED = "failed"
    """It was taken and did not get done."""
    REJECTED = "rejected"
    """It was not taken: wrong, not allowed, too many at once, or the server was not ready."""


class Endpoints(dict[str, str]):
    """The label of each path, so that a label has few values whatever clients send.

    A route is known by its path under /v1 where it has one; ids are `{id}`, and the files of the web page are one.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        every = {re.sub(r"^/web/.*", "/web/{file:path}", path) for path in paths}
        super().__init__()
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        for path in sorted(every):
            own = f"/v1{path}" if f"/v1{path}" in every else path
            label = re.sub(r"\{\w+_id\}", "{id}", own).replace(":path}", "}")
            if "{" in path:
                self._patterns.append((_pattern(path), label))
            else:
                self[path] = label

    @property
    def labels(self) -> set[str]:
        return {*self.values(), *(label for _, label in self._patterns), OTHER}

    def __missing__(self, path: str) -> str:
        """That of the route with an id or a file in its path."""
        return next((label for pattern, label in self._patterns if pattern.fullmatch(path)), OTHER)


def _pattern(path: str) -> re.Pattern[str]:
    """What a route's path matches, as Starlette does it."""
    parts = re.split(r"(\{[^}]+\})", path)
    made = [
        re.escape(part) if not part.startswith("{") else ".*" if part.endswith(":path}") else "[^/]+" for part in parts
    ]
    return re.compile("".join(made), re.DOTALL)


@dataclass
class KeyTotals:
    """What an API key has used since the server started. For the event loop's thread."""

    running: int = 0
    """Requests that are not done."""
    requests: int = 0
    """Requests that were admitted and are done: until then the queue may refuse one, and counters only grow."""
    refused: int = 0
    """Requests that exceeded a limit of the key, or found the queue full."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class BatchFigures:
    """What has become of the lines of batches since the server started. For the event loop's thread."""

    running: int = 0
    """Lines that run."""
    lines: Counter[Outcome] = field(default_factory=Counter)
    """Lines that are done."""
    by_status: Callable[[], Mapping[str, int]] = dict
    """How many batches there are in each status."""


class Traffic:
    """Counts requests where they enter and leave. For the event loop's thread.

    At every moment, for every endpoint: received = finished + cancelled + failed + rejected + running.
    """

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.ended: Counter[tuple[str, Outcome]] = Counter()
        self.seconds: dict[str, Tally] = {}

    def enter(self, endpoint: str) -> None:
        self.received[endpoint] += 1
        self.running[endpoint] += 1

    def leave(self, endpoint: str, status: int, outcome: Outcome | None, seconds: float) -> Outcome:
        """How it ended: what its status says, unless that was sent before, as a stream's is."""
        if outcome is None and status < 400:
            outcome = Outcome.FINISHED
        elif outcome is None and status == CLIENT_GONE:
            outcome = Outcome.CANCELLED
        elif outcome is None:
            outcome = Outcome.REJECTED if status < 500 or status == 503 else Outcome.FAILED
        self.running[endpoint] -= 1
        self.ended[endpoint, outcome] += 1
        if endpoint not in self.seconds:
            self.seconds[endpoint] = Tally(LONG_S)
        self.seconds[endpoint].add(seconds)
        return outcome
