"""`/metrics`, `/v1/scheduler`, its events, and `/v1/requests/{id}/timeline`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response

from tokenmill.engine.stats import CoreSnapshot
from tokenmill.errors import SessionNotFound
from tokenmill.pipeline.prompts import callers_name
from tokenmill.server import schemas as shared
from tokenmill.server.context import caller_of
from tokenmill.server.errors import ApiError
from tokenmill.server.sse import EventStream, event
from tokenmill.server.telemetry import schemas
from tokenmill.server.telemetry.hub import Found, Telemetry
from tokenmill.server.telemetry.live import PACE_S, SLOWEST_S, ShowName, Told, event_json, rates_json, snapshot_json
from tokenmill.server.telemetry.metrics import CONTENT_TYPE, Metrics
from tokenmill.server.telemetry.timeline import cache_json, causes_of, cost_json, parts_of

if TYPE_CHECKING:
    from tokenmill.server.served import Served


def telemetry_routes(served: Served, route_class: type[APIRoute] = APIRoute) -> APIRouter:
    """What a server tells about itself."""
    api = APIRouter(route_class=route_class, tags=["telemetry"])
    telemetry, config = served.telemetry, served.config
    metrics = Metrics(telemetry)
    about_metrics: dict[str, Any] = {"description": "Prometheus' text format.", "content": {"text/plain": {}}}
    about_events: dict[str, Any] = {
        "description": "Server-sent events, without an end: `snapshot`, then `tick` and each change, by core.",
        "content": {"text/event-stream": {}},
    }

    @api.get("/metrics", responses={200: about_metrics, **shared.errors(401, 503)}, response_class=Response)
    async def get_metrics() -> Response:
        """Counters, gauges and histograms of the server and its engines."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @api.get("/scheduler", include_in_schema=False)
    @api.get("/v1/scheduler", responses={200: {"model": schemas.Scheduler}, **shared.errors(401, 503)})
    async def get_scheduler(http: Request) -> Response:
        """What every engine is doing right now. Names of other keys are shown as hashes."""
        return JSONResponse(_scheduler(telemetry, telemetry.names.seen_by(caller_of(http.scope).key)))

    @api.get("/scheduler/events", include_in_schema=False)
    @api.get(
        "/v1/scheduler/events",
        responses={200: about_events, **shared.errors(400, 401, 503)},
        response_class=Response,
    )
    async def follow_scheduler(
        http: Request,
        pace_s: Annotated[
            float, Query(ge=PACE_S, le=SLOWEST_S, description="Seconds between two deliveries.")
        ] = PACE_S,
    ) -> Response:
        """The same as a stream of events: a snapshot of each core, then every step and every change."""
        names = telemetry.names.seen_by(caller_of(http.scope).key)
        timeouts = {"keep_alive_s": config.keep_alive_s, "send_timeout_s": config.send_timeout_s}
        return EventStream(_follow(telemetry, names, pace_s), _nothing, **timeouts)

    @api.get("/requests/{request_id}/timeline", include_in_schema=False)
    @api.get(
        "/v1/requests/{request_id}/timeline",
        responses={200: {"model": schemas.RequestTimeline}, **shared.errors(401, 404, 503)},
    )
    async def get_timeline(
        http: Request, request_id: Annotated[str, Path(description="The id of its answer, or its x-request-id.")]
    ) -> Response:
        """Where the time of a request went, for each of its generations. Only for the key that made it."""
        found = telemetry.timelines(request_id, caller_of(http.scope).key)
        if not found:
            raise ApiError(404, f"no request {request_id!r:.140} is known", code="request_not_found")
        first, now = found[0].timeline.begin, time.monotonic()
        names = telemetry.names.seen_by(caller_of(http.scope).key)
        generations = [_generation(one, first, now, _cache(served, one, names)) for one in found]
        return JSONResponse({"id": request_id, "object": "request.timeline", "generations": generations})

    return api


async def _nothing() -> None:
    """What is to be done at a stream's end is done by it."""


def _scheduler(telemetry: Telemetry, names: ShowName) -> dict[str, Any]:
    models = []
    for model, watches in telemetry.watches.items():
        cores = []
        for watch in watches:
            snapshot, rates = watch.snapshot()
            cores.append({"core": watch.core, **snapshot_json(snapshot, names), "rates": rates_json(rates)})
        models.append({"model": model, "cores": cores})
    return {"object": "scheduler", "models": models}


def _cache(served: Served, found: Found, names: ShowName) -> dict[str, Any] | None:
    """Why so much of its prompt was computed; None if nothing was, or its model is gone."""
    timeline = found.timeline
    model = next((one for one in served.models.loaded if one.name == found.model), None)
    if model is None:
        return None
    if timeline.owner is not None:
        with suppress(SessionNotFound):
            name = callers_name(timeline.request_id)
            costs = [one for one in model.sessions.explain(timeline.owner) if one.request_id == name]
            if costs:
                return cost_json(costs[-1], names)
    return cache_json(timeline, found.delivery, model.llm.get_tokenizer())


def _generation(found: Found, first: float, now: float, cache: dict[str, Any] | None) -> dict[str, Any]:
    """Phases begin so many seconds after the call's first one."""
    timeline = found.timeline
    spans = timeline.spans_until(now)
    parts = parts_of(timeline, found.delivery, now)
    return {
        "id": timeline.request_id,
        "model": found.model,
        "core": found.core,
        "phases": [
            {"phase": span.phase.value, "begin": round(span.begin - first, 6), "seconds": round(span.seconds, 6)}
            for span in spans
        ],
        "seconds": round(spans[-1].end - spans[0].begin, 6),
        "parts": parts,
        "causes": causes_of(timeline, parts, cache),
        "cache": cache,
        "ttft_s": None if timeline.ttft_s is None else round(timeline.ttft_s, 6),
        "prompt_tokens": timeline.num_prompt,
        "cached_tokens": timeline.num_cached,
        "computed_tokens": timeline.num_computed,
        "completion_tokens": timeline.num_tokens - timeline.num_prompt,
        "preemptions": timeline.num_preemptions,
        "finish_reason": None if timeline.finish_reason is None else timeline.finish_reason.value,
    }


# -- the live view ----------------------------------------------------------------------------------------------------


async def _follow(telemetry: Telemetry, names: ShowName, pace_s: float) -> AsyncGenerator[bytes]:
    """Events as they come, many in one piece if they come quickly. A reader that falls behind begins again."""
    with telemetry.following(pace_s) as reader:
        while True:
            pieces = [_told(told, names) for told in await reader.take()]
            if reader.is_behind:
                telemetry.begin_again(reader)
            if pieces:
                yield b"".join(pieces)
            if reader.ending is not None:
                yield event({"reason": reader.ending}, "end")
                return


def _told(told: Told, names: ShowName) -> bytes:
    where = {"model": told.model, "core": told.core, "at": round(told.at, 6)}
    what = told.what
    if what is None:
        return event(where, "gone")
    if isinstance(what, dict):
        return event({**where, **what}, "tick")
    if isinstance(what, CoreSnapshot):
        return event({**where, **snapshot_json(what, names)}, "snapshot")
    kind, data = event_json(what, names)
    return event({**where, **data}, kind)
