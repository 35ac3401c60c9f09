"""OpenTelemetry: a span for each request of the engine that has ended, with a child for each of its phases.

Needs the extra `otel`, and only if it is asked for. Spans are made on a thread of their own: an engine's thread only
leaves timelines in a queue, and if that is full the span is lost, not the engine's time.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from tokenmill.engine.timeline import Timeline
from tokenmill.errors import ConfigError
from tokenmill.outputs import ENDED_WELL
from tokenmill.pipeline.prompts import callers_name

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MAX_WAITING = 10_000
CLOSE_S = 5.0


class Spans:
    """Makes spans of timelines. `Telemetry(on_end=spans.note)` fills it; `close` sends what is left."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tokenmill")
        self._ended: queue.Queue[tuple[str, Timeline] | None] = queue.Queue(MAX_WAITING)
        self.num_lost = 0
        self._thread = threading.Thread(target=self._run, name="tokenmill-spans", daemon=True)
        self._thread.start()

    def note(self, model: str, timeline: Timeline) -> None:
        """On a core's thread."""
        try:
            self._ended.put_nowait((model, timeline))
        except queue.Full:
            self.num_lost += 1

    def close(self) -> None:
        """Make spans of what has ended, and send them."""
        self._ended.put(None)
        self._thread.join(CLOSE_S)
        self._provider.shutdown()

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            self._make(*ended)

    def _make(self, model: str, timeline: Timeline) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        reason, offset_s = timeline.finish_reason, time.time() - time.monotonic()

        def wall_ns(at: float) -> int:
            """A moment of the engine's clock as time of day."""
            return int(1e9 * (offset_s + at))

        root = self._tracer.start_span(
            "tokenmill.request", start_time=wall_ns(timeline.begin), attributes=_attributes(model, timeline)
        )
        inside = set_span_in_context(root)
        for span in timeline.spans:
            name = f"tokenmill.{span.phase.value}"
            child = self._tracer.start_span(name, context=inside, start_time=wall_ns(span.begin))
            child.end(wall_ns(span.end))
        if reason not in ENDED_WELL:
            root.set_status(Status(StatusCode.ERROR, None if reason is None else reason.value))
        root.end(wall_ns(timeline.begin + timeline.wall_s))


def open_spans(endpoint: str) -> Spans:
    """Spans that go to an OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"spans need more packages ({error.name}): pip install 'tokenmill[otel]'") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "tokenmill"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Spans(provider)


def _attributes(model: str, timeline: Timeline) -> dict[str, Any]:
    """Under the names of OpenTelemetry's conventions for generative AI, where there are any. No keys, no texts."""
    return {
        "gen_ai.response.id": callers_name(timeline.request_id).partition("/")[0],
        "gen_ai.request.model": model,
        "gen_ai.response.finish_reasons": [timeline.finish_reason.value] if timeline.finish_reason else [],
        "gen_ai.usage.input_tokens": timeline.num_prompt,
        "gen_ai.usage.output_tokens": timeline.num_tokens - timeline.num_prompt,
        "tokenmill.request": timeline.request_id,
        "tokenmill.cached_tokens": timeline.num_cached,
        "tokenmill.computed_tokens": timeline.num_computed,
        "tokenmill.preemptions": timeline.num_preemptions,
    }
