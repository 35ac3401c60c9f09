"""Where a request's time went: phases, one after the other, that sum to its wall time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tokenmill.engine.events import Event, Phase, RequestEvent
from tokenmill.outputs import FinishReason


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
    num_cached: int = 0
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    _open: tuple[Phase, float] | None = None

    def enter(self, event: RequestEvent) -> None:
        if self._open is not None:
            self.spans.append(Span(self._open[0], self._open[1], event.at))
        self._open = None if event.phase is Phase.ENDED else (event.phase, event.at)
        self.num_cached, self.num_tokens = event.num_cached, event.num_tokens
        self.finish_reason = event.finish_reason

    def seconds(self, phase: Phase) -> float:
        return sum(span.seconds for span in self.spans if span.phase is phase)

    @property
    def wall_s(self) -> float:
        return self.spans[-1].end - self.spans[0].begin if self.spans else 0.0


class Timelines:
    """A subscriber that keeps the timelines of running requests and of the last `keep` ended ones."""

    def __init__(self, keep: int = 1000) -> None:
        self._keep = keep
        self._live: dict[str, Timeline] = {}
        self._ended: OrderedDict[str, Timeline] = OrderedDict()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RequestEvent):
            return
        timeline = self._live.setdefault(event.request_id, Timeline(event.request_id))
        timeline.enter(event)
        if event.phase is Phase.ENDED:
            self._ended[event.request_id] = self._live.pop(event.request_id)
            while len(self._ended) > self._keep:
                self._ended.popitem(last=False)

    def get(self, request_id: str) -> Timeline | None:
        return self._live.get(request_id) or self._ended.get(request_id)

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)
