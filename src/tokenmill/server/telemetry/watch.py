"""`CoreWatch`: the one subscriber that a server has on an engine core.

It keeps a view of the core, adds up figures, notes timelines, and passes events on to whoever follows the engine. The
core's thread calls it; the event loop looks at it between two events, under a lock that is held for microseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from tokenmill.engine.events import Event, Phase, RequestEvent, TickEvent
from tokenmill.engine.stats import CoreSnapshot
from tokenmill.engine.timeline import Timeline, Timelines
from tokenmill.engine.view import CoreView
from tokenmill.server.telemetry.figures import CoreFigures
from tokenmill.server.telemetry.live import Reader, Told
from tokenmill.server.telemetry.rates import Rates, RateView
from tokenmill.server.telemetry.shapes import tick_json

EndListener = Callable[[str, Timeline], None]
"""Hears of each request that has ended: its model, and where its time went. On a core's thread."""


class CoreWatch:
    """What a server knows of one core."""

    def __init__(
        self, model: str, core: int, figures: CoreFigures, on_end: EndListener | None, snapshot: CoreSnapshot
    ) -> None:
        self.model = model
        self.core = core
        self.view = CoreView(snapshot)
        self._figures = figures
        self._on_end = on_end
        self._rates = Rates()
        self._timelines = Timelines()
        self._readers: list[Reader] = []
        self._lock = threading.Lock()

    # -- on the core's thread -----------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, TickEvent):
                self._figures.note_tick(event)
                self._timelines.note_tick(event)
                self._rates.note_tick(event.at, event.num_generated, event.plan.num_prefill)
            elif isinstance(event, RequestEvent):
                self._note_request(event)
            else:
                self._figures.note_other(event)
            self.view(event)
            if self._readers:
                # A step's arrays are not kept for readers: what it tells is a fraction of what it computed.
                what = tick_json(event) if isinstance(event, TickEvent) else event
                told = Told(self.model, self.core, event.at, what)
                for reader in self._readers:
                    reader.put(told)

    def _note_request(self, event: RequestEvent) -> None:
        timeline = self._timelines.enter(event)
        if event.phase is Phase.QUEUED:
            timeline.num_running, timeline.num_ahead = self.view.num_running, self.view.num_waiting
        self._figures.note_request(event, timeline)
        if event.phase is Phase.PREFILL and timeline.num_preemptions == 0:
            self._rates.note_start(event.at, event.num_prompt, event.num_cached)
        elif event.phase is Phase.ENDED and self._on_end is not None:
            self._on_end(self.model, timeline)

    # -- on the event loop --------------------------------------------------------------------------------------------

    def join(self, reader: Reader) -> None:
        """Let a reader have a snapshot, and every event after it."""
        with self._lock:
            reader.put(Told(self.model, self.core, time.monotonic(), self.view.snapshot()))
            self._readers.append(reader)

    def leave(self, reader: Reader) -> None:
        with self._lock:
            if reader in self._readers:
                self._readers.remove(reader)

    def snapshot(self) -> tuple[CoreSnapshot, RateView]:
        """What the core is doing, and what it did in the last seconds."""
        with self._lock:
            return self.view.snapshot(), self._rates.now(time.monotonic())

    def timelines(self, is_wanted: Callable[[Timeline], bool]) -> list[Timeline]:
        """As they are now."""
        with self._lock:
            return [
                replace(one, spans=[*one.spans], neighbours_s={**one.neighbours_s})
                for one in self._timelines.find(is_wanted)
            ]
