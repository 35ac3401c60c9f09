"""Operations: models, running requests, what the engines are doing, metrics and health probes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tokenmill import __version__
from tokenmill.engine.events import CoreSnapshot
from tokenmill.errors import InvalidRequest
from tokenmill.pipeline.prompts import callers_name
from tokenmill.server import schemas
from tokenmill.server.api import anthropic
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.errors import ApiError, Dialect
from tokenmill.server.keys import Account
from tokenmill.server.middleware import Caller
from tokenmill.server.models import describe
from tokenmill.server.requests import LoadModel, UnloadModel
from tokenmill.server.served import RESPONSE, Served
from tokenmill.server.sse import EventStream, PieceEvents, event
from tokenmill.server.telemetry.hub import Found, Telemetry
from tokenmill.server.telemetry.live import PACE_S, SLOWEST_S, ShowName, Told, event_json, rates_json, snapshot_json
from tokenmill.server.telemetry.metrics import CONTENT_TYPE, Metrics
from tokenmill.server.telemetry.timeline import cache_json, causes_of, cost_json, parts_of
from tokenmill.session.postgres import KV_PATH, SECRET_HEADER, PostgresStore

HEALTH = frozenset({"/health", "/health/live", "/health/ready"})
ServerName = Annotated[
    str | None, Query(max_length=64, description="Another server of the same database; `GET /v1/servers` lists them.")
]
EVENTS = "/scheduler/events"
"""A stream without an end."""
PART_BYTES = 1 << 20


# -- models -----------------------------------------------------------------------------------------------------------


def model_routes(served: Served) -> APIRouter:
    """List, load and unload the models of a server."""
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["models"])
    models = served.models
    about_one: dict[int | str, dict[str, Any]] = {200: {"model": schemas.Model}}

    @api.get("/models", responses={200: {"model": schemas.ModelList}, **schemas.errors(401, 503)})
    async def list_models(http: Request) -> Response:
        """The models that can be named, loaded or not."""
        data = [describe(entry, served.started) for entry in models.entries]
        if http.state.caller.dialect is Dialect.ANTHROPIC:
            return JSONResponse(anthropic.list_models(data))
        return JSONResponse({"object": "list", "data": data})

    @api.get("/models/cached", responses={200: {"model": schemas.CachedModels}, **schemas.errors(401, 403, 503)})
    async def list_cached(http: Request) -> Response:
        """Downloaded models that `POST /models/load` could add; with an admin key."""
        check_admin(http.state.caller)
        found = [
            {"id": one.name, "object": "cached_model", "bytes": one.num_bytes, "last_used": int(one.last_used)}
            for one in await models.cached()
        ]
        return JSONResponse({"object": "list", "data": found})

    @api.post("/models/load", responses={**about_one, **schemas.errors(400, 401, 403, 404, 503, 507)})
    async def load_model(http: Request, body: LoadModel) -> Response:
        """Load a model of the server, or a downloaded one, if it fits. One that is loaded stays as it is."""
        check_admin(http.state.caller)
        await models.load_cached(body.model)
        await served.models.use(body.model)
        return JSONResponse(describe(models.entry(body.model), served.started))

    @api.post("/models/unload", responses={**about_one, **schemas.errors(400, 401, 403, 404, 409, 503)})
    async def unload_model(http: Request, body: UnloadModel) -> Response:
        """Unload a model: its memory is free. The next request for it loads it again."""
        check_admin(http.state.caller)
        entry = models.entry(body.model)
        await models.unload(entry, force=bool(body.force))
        return JSONResponse(describe(entry, served.started))

    @api.get("/models/{name:path}", responses={**about_one, **schemas.errors(401, 404, 503)})
    async def get_model(http: Request, name: str) -> Response:
        """One of them."""
        if not name:
            return await list_models(http)
        about = describe(models.entry(name), served.started)
        is_anthropic = http.state.caller.dialect is Dialect.ANTHROPIC
        return JSONResponse(anthropic.describe_model(about) if is_anthropic else about)

    return api


def check_admin(caller: Caller) -> None:
    """Raise unless the caller may load and unload models: with an admin key, or where there are no keys at all."""
    if not caller.account.key.is_admin:
        raise ApiError(403, "requires an admin key (--admin-key)", code="admin_key_needed")


# -- requests and engines ---------------------------------------------------------------------------------------------


def engine_routes(served: Served) -> APIRouter:
    """What runs: its state, its timelines, and how to end it."""
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY])
    telemetry, config = served.telemetry, served.config
    about_events: dict[str, Any] = {
        "description": "Server-sent events, without an end: `snapshot`, then `tick` and each change, by core.",
        "content": {"text/event-stream": {}},
    }

    @api.post(
        "/requests/{request_id}/cancel",
        responses={200: {"model": schemas.Cancelled}, **schemas.errors(401, 404, 503)},
        tags=["generation"],
    )
    async def cancel_request(
        http: Request, request_id: Annotated[str, Path(description="The id of its answer, or its x-request-id.")]
    ) -> Response:
        """Cancel a queued or running request; it ends with the error `cancelled` (499)."""
        num_cancelled = served.calls.cancel(request_id, http.state.caller.key)
        if not num_cancelled:
            raise ApiError(404, f"no running request {request_id!r:.140}", code="request_not_found")
        return JSONResponse({"id": request_id, "object": "request.cancelled", "cancelled": num_cancelled})

    @api.get(
        "/requests/{request_id}/timeline",
        responses={200: {"model": schemas.RequestTimeline}, **schemas.errors(400, 401, 404, 503)},
        tags=["telemetry"],
    )
    async def get_timeline(
        http: Request,
        request_id: Annotated[str, Path(description="The id of its answer, or its x-request-id.")],
        server: ServerName = None,
    ) -> Response:
        """Where the time of a request went, for each of its generations. Only for the key that made it."""
        await _refer(served, server)
        found = telemetry.timelines(request_id, http.state.caller.key)
        if not found:
            raise ApiError(404, f"request {request_id!r:.140} not found", code="request_not_found")
        first, now = found[0].timeline.begin, time.monotonic()
        names = telemetry.names.seen_by(http.state.caller.key)
        generations = [_generation(one, first, now, _cache(served, one, names)) for one in found]
        return JSONResponse({"id": request_id, "object": "request.timeline", "generations": generations})

    @api.get("/usage", responses={200: {"model": schemas.UsageList}, **schemas.errors(401, 503)}, tags=["telemetry"])
    async def get_usage(http: Request) -> Response:
        """What the caller's key has used since the server started, and its limits; with an admin key, of all keys."""
        own: Account = http.state.caller.account
        shown = served.keys.accounts if own.key.is_admin else [own]
        data = [await usage_shape(one, served) for one in shown]
        return JSONResponse({"object": "list", "since": served.started, "data": data})

    @api.get(
        "/scheduler", responses={200: {"model": schemas.Scheduler}, **schemas.errors(400, 401, 503)}, tags=["telemetry"]
    )
    async def get_scheduler(http: Request, server: ServerName = None) -> Response:
        """What every engine is doing right now. Names of other keys are shown as hashes."""
        await _refer(served, server)
        return JSONResponse(_scheduler(telemetry, telemetry.names.seen_by(http.state.caller.key)))

    @api.get(
        EVENTS,
        responses={200: about_events, **schemas.errors(400, 401, 503)},
        response_class=Response,
        tags=["telemetry"],
    )
    async def follow_scheduler(
        http: Request,
        pace_s: Annotated[
            float, Query(ge=PACE_S, le=SLOWEST_S, description="Seconds between two deliveries.")
        ] = PACE_S,
        server: ServerName = None,
    ) -> Response:
        """The same as a stream of events: a snapshot of each core, then every step and every change."""
        await _refer(served, server)
        names = telemetry.names.seen_by(http.state.caller.key)
        return EventStream(PieceEvents(_follow(telemetry, names, pace_s)), http.state.caller, config)

    @api.get("/servers", responses={200: {"model": schemas.ServerList}, **schemas.errors(401, 503)}, tags=["telemetry"])
    async def list_servers() -> Response:
        """The servers that share this one's database, this one included; none without such a database."""
        store = served.store
        data = []
        if isinstance(store, PostgresStore):
            names = await asyncio.to_thread(store.servers)
            data = [{"id": name, "object": "server", "is_this": name == store.server_id} for name in names]
        return JSONResponse({"object": "list", "data": data})

    @api.get(KV_PATH.removeprefix("/v1"), include_in_schema=False)
    async def get_kv(http: Request, session: str = "", epoch: int = 0) -> Response:
        """KV of a session for its next owner: a server of the same database that has claimed the session."""
        store = served.store
        if isinstance(store, PostgresStore) and store.is_peer(http.headers.get(SECRET_HEADER, "")):
            for model in served.models.loaded:
                pieces = await model.sessions.hand_over_kv(session, epoch)
                if pieces is not None:
                    length = {"Content-Length": str(sum(map(len, pieces)))}
                    return StreamingResponse(_in_parts(pieces), headers=length, media_type="application/octet-stream")
        raise ApiError(404, "no such KV")

    return api


async def _in_parts(pieces: Iterable[bytes]) -> AsyncGenerator[memoryview]:
    """Some at a time, so that the event loop does other work in between."""
    for piece in pieces:
        for at in range(0, len(piece), PART_BYTES):
            yield memoryview(piece)[at : at + PART_BYTES]


async def _refer(served: Served, server: str | None) -> None:
    """Have the request forwarded to the server that it names."""
    if server is None:
        return
    if not isinstance(served.store, PostgresStore):
        raise InvalidRequest("this server shares no database with others", param="server")
    await asyncio.to_thread(served.store.refer_to, server)


async def usage_shape(account: Account, served: Served) -> dict[str, Any]:
    """What one key has used."""
    key, used = account.key, [model.sessions.usage_of(account.key.id) for model in served.models.loaded]
    num_responses, _ = await asyncio.wrap_future(served.documents.usage(key.id, RESPONSE))
    _, stored_bytes = await asyncio.wrap_future(served.documents.usage(key.id))
    return {
        "object": "usage",
        "key": key.name,
        "admin": key.is_admin,
        "expires_at": None if key.expires_at is None else int(key.expires_at),
        **asdict(account.totals),
        "sessions": sum(count for count, _ in used),
        "session_bytes": sum(num_bytes for _, num_bytes in used),
        "stored_responses": num_responses,
        "stored_bytes": stored_bytes,
        "file_bytes": served.files.bytes_of(key.id),
        "limits": {name: value for name, value in asdict(key.limits).items() if value is not None},
        "remaining": account.remaining(),
    }


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
        "proposed_tokens": timeline.num_proposed,
        "accepted_tokens": timeline.num_agreed,
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


# -- probes -----------------------------------------------------------------------------------------------------------


def probe_routes(served: Served) -> APIRouter:
    """Health probes and metrics, at the root only."""
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts))
    keys = served.keys
    metrics = Metrics(
        served.telemetry,
        lambda: {one.key.name: one.totals for one in keys.accounts},
        has_vllm_names=served.config.metrics_alias == "vllm",
        replica=served.config.replica,
    )
    health: dict[int | str, dict[str, Any]] = {200: {"model": schemas.Health}, 503: {"model": schemas.Health}}
    about_metrics: dict[str, Any] = {"description": "Prometheus' text format.", "content": {"text/plain": {}}}

    @api.head("/health", include_in_schema=False)
    @api.head("/health/ready", include_in_schema=False)
    @api.get("/health", responses=health, tags=["health"])
    @api.get("/health/ready", responses=health, tags=["health"])
    async def get_ready() -> Response:
        """Does it take requests, and do the engine's steps end?"""
        if served.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, 503, headers={"Retry-After": "5"})

    @api.head("/health/live", include_in_schema=False)
    @api.get("/health/live", responses=health, tags=["health"])
    async def get_live() -> Response:
        """Does it run? 503 if an engine hangs or was given up, which only a restart of the server ends."""
        if served.is_lost:
            return JSONResponse({"status": "engine lost"}, 503)
        return JSONResponse({"status": "live"})

    @api.get(
        "/metrics",
        responses={200: about_metrics, **schemas.errors(400, 401, 503)},
        response_class=Response,
        tags=["telemetry"],
        dependencies=[KEY],
    )
    async def get_metrics(server: ServerName = None) -> Response:
        """Counters, gauges and histograms of the server and its engines."""
        await _refer(served, server)
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    about_loads: dict[int | str, dict[str, Any]] = {200: {"model": schemas.Loads}, **schemas.errors(401, 503)}

    @api.get("/v1/loads", responses=about_loads, tags=["telemetry"], dependencies=[KEY])
    @api.get("/loads", include_in_schema=False, dependencies=[KEY])
    async def get_loads() -> Response:
        """How busy each engine core is, as SGLang tells routers."""
        cores = [watch.view for watches in served.telemetry.watches.values() for watch in watches]
        loads = [
            {
                "dp_rank": rank,
                "num_running_reqs": core.num_running,
                "num_waiting_reqs": core.num_waiting,
                "num_used_tokens": core.num_cells - core.free_cells,
                "max_total_num_tokens": core.num_cells,
            }
            for rank, core in enumerate(cores)
        ]
        return JSONResponse(
            {"timestamp": time.time(), "version": __version__, "dp_rank_count": len(loads), "loads": loads}
        )

    @api.get("/server_info", include_in_schema=False, dependencies=[KEY])
    @api.get("/get_server_info", include_in_schema=False, dependencies=[KEY])
    async def get_server_info() -> Response:
        """What routers ask a server when they find it."""
        models = served.models.entries
        first = None if not models else models[0]
        length = None if first is None or first.model is None else first.model.llm.max_model_len
        name = None if first is None else first.spec.name
        about = {"version": __version__, "model_path": name, "served_model_name": name, "max_model_len": length}
        return JSONResponse({**about, "models": [entry.spec.name for entry in models]})

    return api
