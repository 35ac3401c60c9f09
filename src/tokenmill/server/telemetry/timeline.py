"""Where a request's time went: its parts from headers to last byte, their causes in words, and OpenTelemetry spans.

Spans need the extra `otel`, and only if they are enabled. A thread of their own makes them: a core's thread only leaves
timelines in a queue, and when that is full it drops the span rather than wait.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.engine.timeline import Timeline
from tokenmill.errors import ConfigError
from tokenmill.outputs import ENDED_WELL, FinishReason
from tokenmill.pipeline.prompts import callers_name
from tokenmill.server.telemetry.live import ShowName
from tokenmill.session.explain import SENTENCES, Cause, TurnCost, in_words
from tokenmill.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MIN_SHARE = 0.1
"""What took less of the time is no cause."""


@dataclass(frozen=True)
class Delivery:
    """What the server's outermost layer saw of a call."""

    began: float
    ended: float
    blocked: tuple[tuple[float, float], ...]
    """When it could not send, because its client did not take what there was."""
    differs_in: tuple[int, str] | None
    """The message in which its prompt leaves what was known: its number and its role."""


def parts_of(timeline: Timeline, delivery: Delivery | None, now: float) -> dict[str, float]:
    """Seconds by what they went to. Together they are all the time from the headers to the last byte."""
    parts = {"received": 0.0, **timeline.parts(now), "delivery": 0.0, "client_blocked": 0.0}
    if delivery is not None and timeline.finish_reason is not None:
        end = timeline.begin + timeline.wall_s
        blocked = sum(max(0.0, until - max(begin, end)) for begin, until in delivery.blocked)
        parts["received"] = max(0.0, timeline.begin - delivery.began)
        parts["client_blocked"] = blocked
        parts["delivery"] = max(0.0, delivery.ended - end - blocked)
    return {name: round(seconds, 6) for name, seconds in parts.items()}


def causes_of(timeline: Timeline, parts: dict[str, float], cache: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What took a good part of the time, most first, each with a sentence."""
    if timeline.finish_reason is FinishReason.OVERLOAD:
        why = f"the queue was full: {timeline.num_running} ran and {timeline.num_ahead} waited"
        return [{"cause": "queue_full", "seconds": parts["queued"], "why": why}]
    sentences = {
        "queued": (
            "queue",
            f"all places were taken: {timeline.num_running} ran, {timeline.num_ahead} waited before it",
        ),
        "neighbours_prefill": ("long_neighbour", "prompts of others were computed in the steps it had a part in"),
        "preempted": ("preempted", f"it lost its place to others {timeline.num_preemptions} times"),
        "client_blocked": ("slow_reader", "its answer was complete, but its client did not take it"),
        "prefill": ("prompt", "its prompt was computed" if cache is None else str(cache["why"])),
    }
    total = sum(parts.values())
    found = [
        {"cause": cause, "seconds": parts[name], "why": why}
        for name, (cause, why) in sentences.items()
        if parts[name] > 0 and parts[name] >= MIN_SHARE * total
    ]
    return sorted(found, key=lambda one: -one["seconds"])


# -- prefix misses ----------------------------------------------------------------------------------------------------


def cost_json(cost: TurnCost, names: ShowName) -> dict[str, Any]:
    """What an answer of a session cost before its first token, and why."""
    to = None if cost.lost_to is None else names(*cost.lost_to)
    difference = cost.difference
    return {
        "prompt_tokens": cost.num_prompt,
        "cached_tokens": cost.num_cached,
        "prefilled_tokens": cost.num_prefilled,
        "cause": cost.cause.value,
        "why": in_words(cost, to),
        "difference": None
        if difference is None
        else {
            "token": difference.at,
            "turn": difference.turn,
            "message": difference.message,
            "role": difference.role,
            "before": difference.before,
            "now": difference.now,
        },
        "evicted": None if cost.lost_s is None else {"seconds_before": round(cost.lost_s, 3), "for": to},
    }


def cache_json(timeline: Timeline, delivery: Delivery | None, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The same of a request that is no session's: it has no past, but others had one."""
    verdict = timeline.verdict
    if verdict is None:
        return None
    cached, divergence = verdict.num_cached, verdict.divergence
    prefilled = timeline.num_prompt - cached
    said = f"{cached} of {timeline.num_prompt} tokens were there, {prefilled} were computed"
    about: dict[str, Any] = {
        "prompt_tokens": timeline.num_prompt,
        "cached_tokens": cached,
        "prefilled_tokens": prefilled,
    }
    if divergence is None or divergence.at < cached:
        cause = Cause.NEW if cached or verdict.is_found else Cause.NOT_REUSED
        new = "nothing goes on otherwise from there" if cached else "nothing begins as it does"
        why = new if cause is Cause.NEW else SENTENCES[cause]
        return {**about, "cause": cause.value, "why": f"{said}: {why}", "difference": None, "evicted": None}
    before, now = (_text(tokenizer, ids) for ids in (divergence.held, divergence.asked))
    message, role = (None, None) if delivery is None or delivery.differs_in is None else delivery.differs_in
    where = "" if role is None else f" (message {message}, {role})"
    why = f"from token {divergence.at} on{where} it is {now!r:.60}, where what is known has {before!r:.60}"
    difference = {"token": divergence.at, "turn": None, "message": message, "role": role, "before": before, "now": now}
    return {**about, "cause": Cause.CHANGED.value, "why": f"{said}: {why}", "difference": difference, "evicted": None}


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special=False)


# -- spans ------------------------------------------------------------------------------------------------------------


MAX_WAITING = 10_000
CLOSE_S = 5.0


class Spans:
    """A span per ended request, with a child per phase. `Telemetry(on_end=spans.note)` fills it; `close` flushes."""

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
        raise ConfigError(f"missing package {error.name}: pip install 'tokenmill[otel]'") from None
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
        "tokenmill.proposed_tokens": timeline.num_proposed,
        "tokenmill.accepted_tokens": timeline.num_agreed,
        "tokenmill.preemptions": timeline.num_preemptions,
    }
