"""`CoreFigures`: what one engine core has done since the server started, added up from its events.

The core's thread fills it, so nothing here may take long: numbers and lists, no locks, no labels. Others read it at any
time; what they see may be of two moments that are a few microseconds apart.
"""

from __future__ import annotations

from collections import Counter

from tokenmill.engine.events import (
    Event,
    FailedStepEvent,
    ParkedChange,
    ParkedEvent,
    Phase,
    RequestEvent,
    StartEvent,
    TickEvent,
)
from tokenmill.engine.timeline import Timeline
from tokenmill.outputs import FinishReason
from tokenmill.server.telemetry.tally import LONG_S, SEQUENCES, SHORT_S, TOKENS, Tally


class CoreFigures:
    """Counters and histograms of one core."""

    def __init__(self) -> None:
        self.num_prompt = 0
        self.num_cached = 0
        self.num_generated = 0
        self.num_computed = 0
        self.num_preempted = 0
        self.num_evicted = 0
        self.num_failed_steps = 0
        self.num_restarts = 0
        self.ended = dict.fromkeys(FinishReason, 0)
        self.step_s, self.schedule_s, self.inter_token_s = Tally(SHORT_S), Tally(SHORT_S), Tally(SHORT_S)
        self.step_tokens, self.step_sequences = Tally(TOKENS), Tally(SEQUENCES)
        self.first_token_s, self.request_s = Tally(LONG_S), Tally(LONG_S)
        self.phase_s: dict[Phase, Tally] = {phase: Tally(LONG_S) for phase in Phase if phase is not Phase.ENDED}
        self.prompt_tokens, self.generated_tokens = Tally(TOKENS), Tally(TOKENS)
        self._token_at: dict[str, float] = {}
        """When a request got its latest token, for those that are not among the next ones."""
        self._latest: tuple[str | None, ...] = ()
        """The requests that got a token in the latest step that gave any..."""
        self._latest_at = 0.0
        """...and when that was."""

    # -- steps --------------------------------------------------------------------------------------------------------

    def note_tick(self, event: TickEvent) -> None:
        plan = event.plan
        self.num_computed += plan.num_tokens
        self.step_s.add(event.step_s)
        self.schedule_s.add(event.schedule_s)
        self.step_tokens.add(plan.num_tokens)
        self.step_sequences.add(len(plan.rows))
        if len(plan.sampled_rows):
            self.num_generated += event.num_generated
            self._note_tokens(_drawn(event), event.at)

    def _note_tokens(self, names: tuple[str | None, ...], at: float) -> None:
        """The gaps before these tokens. Mostly the same requests had the latest ones, and the gap is one for all."""
        if names == self._latest:
            self.inter_token_s.add(at - self._latest_at, len(names))
        else:
            self._remember_latest()
            for before, count in Counter(map(self._token_at.get, filter(None, names))).items():
                if before is not None:  # else it is the first one
                    self.inter_token_s.add(at - before, count)
            self._latest = names
        self._latest_at = at

    def _remember_latest(self) -> None:
        self._token_at.update((name, self._latest_at) for name in self._latest if name is not None)
        self._latest = ()

    # -- requests -----------------------------------------------------------------------------------------------------

    def note_request(self, event: RequestEvent, timeline: Timeline) -> None:
        """The timeline has the event in it."""
        if event.phase is Phase.PREFILL and timeline.num_preemptions == 0:
            self.num_prompt += event.num_prompt
            self.num_cached += event.num_cached
        elif event.phase is Phase.DECODE and timeline.first_token_at == event.at:
            self.first_token_s.add(timeline.ttft_s or 0.0)
        elif event.phase is Phase.PREEMPTED:
            self.num_preempted += 1
        elif event.phase is Phase.ENDED:
            self._note_end(event, timeline)

    def _note_end(self, event: RequestEvent, timeline: Timeline) -> None:
        self._remember_latest()
        self._token_at.pop(event.request_id, None)
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
        if isinstance(event, ParkedEvent):
            self.num_evicted += event.change is ParkedChange.EVICTED
        elif isinstance(event, FailedStepEvent):
            self.num_failed_steps += 1
        elif isinstance(event, StartEvent):
            self.num_restarts += 1

    # -- of several cores ---------------------------------------------------------------------------------------------

    def merge(self, other: CoreFigures) -> None:
        """Add what another core has done."""
        for name, value in vars(self).items():
            if isinstance(value, Tally):
                value.merge(getattr(other, name))
            elif isinstance(value, int):
                setattr(self, name, value + getattr(other, name))
        for reason in self.ended:
            self.ended[reason] += other.ended[reason]
        for phase, tally in self.phase_s.items():
            tally.merge(other.phase_s[phase])


def _drawn(event: TickEvent) -> tuple[str | None, ...]:
    """The requests that got a token in a step."""
    if event.is_whole and len(event.plan.sampled_rows) == len(event.requests):
        return event.requests
    return tuple(share.request_id for share in event.shares if share.is_drawn)
