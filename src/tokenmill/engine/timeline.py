"""Where a request's time went: phases, one after the other, that sum to its wall time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.engine.events import Event, Phase, RequestEvent, TickEvent
from tokenmill.outputs import CacheVerdict, FinishReason

HAS_ROW = frozenset({Phase.PREFILL, Phase.DECODE})


@dataclass(frozen=True)
class Span:
    phase: Phase
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Timeline:
    """One request's spans, complete once it has ended."""

    request_id: str
    spans: list[Span] = field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0
    """Prompt tokens that it did not have to compute when it first started."""
    num_computed: int = 0
    """Tokens that were computed for it: again after it was preempted, and one too many when it ended, included."""
    num_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    key: str = ""
    owner: str | None = None
    first_token_at: float | None = None
    verdict: CacheVerdict | None = None
    """Why so much of its prompt was computed."""
    num_proposed: int = 0
    """Tokens that speculation proposed for it, once it has ended..."""
    num_agreed: int = 0
    """...and those of them that were drawn as proposed."""
    neighbours_s: dict[Phase, float] = field(default_factory=dict)
    """What of a phase others' prompts took, in steps that they shared."""
    own_prefill_s: float = 0.0
    """What its own prompt took of the steps since it got its row."""
    num_running: int = 0
    """How many ran when it was queued, and..."""
    num_ahead: int = 0
    """...how many waited."""
    _prefill_from: float = 0.0
    """What all prompts had taken when its phase began."""
    _open: tuple[Phase, float] | None = None
    _row_from: int = 0
    """What was computed already when it got its row."""

    def enter(self, event: RequestEvent, prefill_s: float = 0.0) -> None:
        """The next phase. `prefill_s` is what all prompts have taken of the core's time so far."""
        if self._open is not None:
            span = Span(self._open[0], self._open[1], event.at)
            self.spans.append(span)
            if span.phase in HAS_ROW:
                others = min(max(0.0, prefill_s - self._prefill_from - self.own_prefill_s), span.seconds)
                self.neighbours_s[span.phase] = self.neighbours_s.get(span.phase, 0.0) + others
            if self._open[0] in HAS_ROW and event.phase not in HAS_ROW:
                self.num_computed += event.num_computed - self._row_from
        self._open = None if event.phase is Phase.ENDED else (event.phase, event.at)
        self._prefill_from, self.own_prefill_s = prefill_s, 0.0
        self.verdict = event.verdict
        self.num_proposed, self.num_agreed = event.num_proposed, event.num_agreed
        self.num_cached, self.num_tokens, self.num_prompt = event.num_cached, event.num_tokens, event.num_prompt
        self.finish_reason, self.key, self.owner = event.finish_reason, event.key, event.owner
        if event.phase is Phase.PREFILL:
            self._row_from = event.num_computed
        elif event.phase is Phase.PREEMPTED:
            self.num_preemptions += 1
        elif event.phase is Phase.DECODE and self.first_token_at is None:
            self.first_token_at = event.at

    @property
    def begin(self) -> float:
        """When it was queued."""
        return self.spans[0].begin if self.spans else self._open[1] if self._open else 0.0

    @property
    def ttft_s(self) -> float | None:
        """From the queue to the first token; None if there was none."""
        return None if self.first_token_at is None else self.first_token_at - self.begin

    def spans_until(self, now: float) -> list[Span]:
        """Its spans, that of the phase it is in included."""
        return self.spans if self._open is None else [*self.spans, Span(self._open[0], self._open[1], now)]

    def seconds(self, phase: Phase) -> float:
        return sum(span.seconds for span in self.spans if span.phase is phase)

    def parts(self, now: float) -> dict[str, float]:
        """Seconds by what they went to; together all there were until now."""
        others = {phase: self.neighbours_s.get(phase, 0.0) for phase in HAS_ROW}
        seconds = dict.fromkeys(Phase, 0.0)
        for span in self.spans_until(now):
            seconds[span.phase] += span.seconds
        return {
            "queued": seconds[Phase.QUEUED],
            "prefill": seconds[Phase.PREFILL] - others[Phase.PREFILL],
            "decode": seconds[Phase.DECODE] - others[Phase.DECODE],
            "neighbours_prefill": sum(others.values()),
            "preempted": seconds[Phase.PREEMPTED],
        }

    @property
    def wall_s(self) -> float:
        return self.spans[-1].end - self.spans[0].begin if self.spans else 0.0


class Timelines:
    """A subscriber that keeps the timelines of running requests and of the last `keep` ended ones."""

    def __init__(self, keep: int = 1000) -> None:
        self._keep = keep
        self._live: dict[str, Timeline] = {}
        self._ended: OrderedDict[str, Timeline] = OrderedDict()
        self._prefill_s = 0.0
        """What prompts have taken of the core's time."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestEvent):
            self.enter(event)
        elif isinstance(event, TickEvent):
            self.note_tick(event)

    def note_tick(self, event: TickEvent) -> None:
        """Steps without a prompt in them cost nothing here."""
        plan = event.plan
        if not plan.num_prefill:
            return
        self._prefill_s += event.prefill_s
        first = plan.num_decode
        for name, count in zip(event.requests[first:], plan.counts[first:].tolist(), strict=True):
            timeline = self._live.get(name or "")
            if timeline is not None:
                timeline.own_prefill_s += event.prefill_s * count / plan.num_prefill

    def enter(self, event: RequestEvent) -> Timeline:
        """The request's timeline, with the event in it."""
        timeline = self._live.setdefault(event.request_id, Timeline(event.request_id))
        timeline.enter(event, self._prefill_s)
        if event.phase is Phase.ENDED:
            self._ended[event.request_id] = self._live.pop(event.request_id)
            while len(self._ended) > self._keep:
                self._ended.popitem(last=False)
        return timeline

    def get(self, request_id: str) -> Timeline | None:
        return self._live.get(request_id) or self._ended.get(request_id)

    def find(self, is_wanted: Callable[[Timeline], bool]) -> list[Timeline]:
        """Those that are wanted, ended ones first."""
        return [one for some in (self._ended, self._live) for one in some.values() if is_wanted(one)]

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)
