"""`Telemetry`: what one server knows of itself. Models are attached once they are loaded, and detached when they go."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from tokenmill.engine.events import CoreSnapshot
from tokenmill.engine.timeline import Timeline
from tokenmill.entrypoints.async_llm import AsyncLLM
from tokenmill.errors import EngineDead
from tokenmill.pipeline.prompts import callers_name
from tokenmill.server.telemetry.figures import SHORT_S, BatchFigures, CoreFigures, Tally, Traffic
from tokenmill.server.telemetry.live import PACE_S, CoreWatch, EndListener, Names, Reader, Told
from tokenmill.server.telemetry.timeline import Delivery

log = logging.getLogger(__name__)

MAX_NAMES = 4096
"""Names of callers' own that are remembered."""
MAX_CALLS_OF_A_NAME = 8
PROBE_S = 0.02
MAX_MISSED = 10_000


@dataclass(frozen=True)
class Found:
    """A generation of a call, and where it ran."""

    model: str
    core: int
    timeline: Timeline
    delivery: Delivery | None = None
    """What became of its call, once that is over."""


class Telemetry:
    """For the event loop's thread, but for `attach` and `detach`, which any thread may call."""

    def __init__(self, on_end: EndListener | None = None) -> None:
        self.traffic = Traffic()
        self.batches = BatchFigures()
        self.names = Names()
        self.loop_lag_s = Tally(SHORT_S)
        """How long callbacks have waited for the event loop."""
        self._on_end = on_end
        self._watches: dict[str, list[CoreWatch]] = {}
        self._figures: dict[str, list[CoreFigures]] = {}
        """By model and core. They outlive the model: what was counted is not forgotten."""
        self._endings: dict[str, list[Callable[[], None]]] = {}
        self._readers: set[Reader] = set()
        self._calls: OrderedDict[tuple[str, str], deque[str]] = OrderedDict()
        """(key, x-request-id) -> the names of what it ran."""
        self._deliveries: OrderedDict[str, Delivery] = OrderedDict()
        """By the name of what it ran."""
        self._stopping: str | None = None
        self._lock = threading.RLock()
        """Around what models and readers there are."""

    async def watch_loop(self) -> None:
        """Measure from now on how late a callback of the event loop is that is due every `PROBE_S`."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PROBE_S
            await asyncio.sleep(PROBE_S)
            lag_s = max(0.0, loop.time() - due)
            # A long wait hides the callbacks that would have been due meanwhile: they count, too.
            for missed in range(1 + min(int(lag_s / PROBE_S), MAX_MISSED)):
                self.loop_lag_s.add(lag_s - missed * PROBE_S)

    # -- models -------------------------------------------------------------------------------------------------------

    def attach(self, model: str, llm: AsyncLLM) -> None:
        """Follow a model's engine from now on. Waits for the step that each of its cores is in."""
        with self._lock:
            self.detach(model)
            figures = self._figures.setdefault(model, [])
            figures += [CoreFigures() for _ in range(llm.num_cores - len(figures))]
            self._watches[model], self._endings[model] = [], []
            llm.on_compiled(figures[0].compile_s.add)
            for core in range(llm.num_cores):
                try:
                    self._endings[model].append(llm.subscribe(core, partial(self._watch, model, core)))
                except (EngineDead, TimeoutError) as error:
                    log.warning("no metrics and no live view of core %d of %s: %r", core, model, error)

    def _watch(self, model: str, core: int, snapshot: CoreSnapshot) -> CoreWatch:
        """On the core's thread, while `attach` waits."""
        watch = CoreWatch(model, core, self._figures[model][core], self._on_end, snapshot)
        self._watches[model].append(watch)
        for reader in self._readers:
            watch.join(reader)
        return watch

    def detach(self, model: str) -> None:
        """The model goes: nothing of it runs any more."""
        with self._lock:
            for end in self._endings.pop(model, []):
                end()
            for watch in self._watches.pop(model, []):
                for reader in self._readers:
                    watch.leave(reader)
                    reader.put(Told(model, watch.core, 0.0, None))

    @property
    def watches(self) -> dict[str, list[CoreWatch]]:
        """Of the models that are there."""
        with self._lock:
            return {model: list(watches) for model, watches in self._watches.items()}

    def figures(self) -> dict[str, CoreFigures]:
        """What each model has done, those that have gone included."""
        with self._lock:
            cores = {model: list(figures) for model, figures in self._figures.items()}
        sums = {}
        for model, figures in cores.items():
            sums[model] = CoreFigures()
            for one in figures:
                sums[model].merge(one)
        return sums

    @property
    def num_waiting(self) -> int:
        """Requests in the queues of all engines."""
        return sum(watch.view.num_waiting for watches in self._watches.values() for watch in watches)

    # -- calls --------------------------------------------------------------------------------------------------------

    def note_call(self, key: str, request_id: str, call_id: str) -> None:
        """A request of this key is about to run something in an engine, under `call_id`."""
        calls = self._calls.setdefault((key, request_id), deque(maxlen=MAX_CALLS_OF_A_NAME))
        calls.append(call_id)
        self._calls.move_to_end((key, request_id))
        while len(self._calls) > MAX_NAMES:
            self._calls.popitem(last=False)

    def note_done(self, call_id: str, delivery: Delivery) -> None:
        """A request that ran `call_id` is over; the first of them counts, later ones only resumed its stream."""
        if call_id in self._deliveries:
            return
        self._deliveries[call_id] = delivery
        while len(self._deliveries) > MAX_NAMES:
            self._deliveries.popitem(last=False)

    def timelines(self, name: str, key: str) -> list[Found]:
        """The generations of a call, by its answer's id or its x-request-id, if they were this key's; oldest first.

        Of a session, by its id: those of all its turns.
        """
        calls = {name, *self._calls.get((key, name), ())}

        def is_wanted(timeline: Timeline) -> bool:
            own = timeline.request_id
            names = {own, _call_of(timeline), timeline.owner}
            return timeline.key == key and not names.isdisjoint(calls)

        found = [
            Found(model, watch.core, timeline, self._deliveries.get(_call_of(timeline)))
            for model, watches in self.watches.items()
            for watch in watches
            for timeline in watch.timelines(is_wanted)
        ]
        return sorted(found, key=lambda one: (one.timeline.begin, one.timeline.request_id))

    # -- whoever follows ----------------------------------------------------------------------------------------------

    @contextmanager
    def following(self, pace_s: float = PACE_S) -> Iterator[Reader]:
        """A reader of all models' events, each core's after a snapshot of it; it looks once in `pace_s`."""
        reader = Reader(asyncio.get_running_loop(), pace_s)
        if self._stopping is not None:
            reader.end(self._stopping)
        try:
            with self._lock:
                self._readers.add(reader)
                self._join_all(reader)
            yield reader
        finally:
            with self._lock:
                self._readers.discard(reader)
                self._leave_all(reader)

    def begin_again(self, reader: Reader) -> None:
        """Fresh snapshots for a reader that has fallen behind."""
        with self._lock:
            self._leave_all(reader)
            reader.clear()
            self._join_all(reader)

    def _join_all(self, reader: Reader) -> None:
        for watches in self._watches.values():
            for watch in watches:
                watch.join(reader)

    def _leave_all(self, reader: Reader) -> None:
        for watches in self._watches.values():
            for watch in watches:
                watch.leave(reader)

    def end_streams(self, why: str = "the server is shutting down") -> None:
        """Nobody is to be held up by those who only watch."""
        self._stopping = why
        for reader in self._readers:
            reader.end(why)


def _call_of(timeline: Timeline) -> str:
    """The name of the call that a generation is of."""
    return callers_name(timeline.request_id).partition("/")[0]
