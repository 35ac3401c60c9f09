"""What runs inside Ray Serve: a middleware and a router in its proxies, the autoscaling policy in its controller.

The middleware derives a request's routing key from its path or body and hands it to the router in the header that Serve
routes by. On the way back, it replaces the plain-text errors that Serve answers by itself with ours.
"""

from __future__ import annotations

import json
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.cluster.placement import (
    LOAD_FACTOR,
    Affinity,
    HashRing,
    ReplicaLoad,
    RoutingKey,
    ScalingTargets,
    has_opening,
    key_of_body,
    key_of_path,
    rank,
    root_of,
)
from tokenmill.server.errors import RETRY_SOON, ApiError, unavailable
from tokenmill.server.middleware import KEY_HEADERS, REPLICA_HEADER, SESSION_HEADER

PEEK_BYTES = 1 << 20
"""Longer bodies are routed without affinity."""
LOST = unavailable(
    "the replica that had the request has failed; the request may have been carried out", "replica_lost", {}
)
FULL = ApiError(429, "all replicas are full", "rate_limit_error", "rate_limit_exceeded", headers=RETRY_SOON)
NOT_READY = unavailable("no replica is ready", "not_ready")
SERVES_OWN = {408: unavailable("timed out in the proxy", "timeout"), 429: FULL, 500: LOST, 503: NOT_READY}
"""For errors that Serve itself answers with."""


# -- the proxy's middleware -------------------------------------------------------------------------------------------


def middlewares() -> list[Middleware]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(KeyedRequests)]


class KeyedRequests:
    """Gives each request its routing key, and Serve's own errors the shape of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"])
        caller = next((given[name] for name in (b"authorization", *KEY_HEADERS) if name in given), b"")
        api_key = caller.decode("latin-1")
        key = key_of_path(scope["path"])
        if key is None and (named := given.get(SESSION_HEADER)):
            key = RoutingKey(Affinity.SESSION, root_of(named.decode("latin-1")))
        if key is None and has_opening(scope["method"], scope["path"]):
            body, receive = await _peek(receive)
            key = key_of_body(body, api_key)
        headers = [one for one in scope["headers"] if one[0] != SESSION_HEADER]
        if key is not None:
            headers.append((SESSION_HEADER, key.header().encode()))
        answer = _Answer(send)
        await self._app({**scope, "headers": headers}, receive, answer.send)
        await answer.finish()


async def _peek(receive: Receive) -> tuple[bytes, Receive]:
    """The body, unless it is long, and a `receive` that tells all of it again."""
    told: list[Message] = []
    size, is_whole = 0, False
    while not is_whole and size <= PEEK_BYTES:
        message = await receive()
        told.append(message)
        size += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
    body = b"".join(message.get("body", b"") for message in told) if size <= PEEK_BYTES else b""
    told.reverse()

    async def again() -> Message:
        return told.pop() if told else await receive()

    return body, again


class _Answer:
    """A response on its way to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False
        self._own: ApiError | None = None
        """What is sent in place of Serve's own error."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            names = [name.lower() for name, _ in message["headers"]]
            if REPLICA_HEADER in names:  # it is the app's; the proxy has added its id of the request once more
                last = len(names) - 1 - names[::-1].index(b"x-request-id")
                message["headers"] = [
                    one for i, one in enumerate(message["headers"]) if names[i] != b"x-request-id" or i == last
                ]
            elif (own := SERVES_OWN.get(message["status"])) is not None:
                await self._refuse(own)
        if self._own is None:
            await self._send(message)

    async def finish(self) -> None:
        """If Serve has said nothing, the replica was lost."""
        if not self._has_begun:
            await self._refuse(LOST)

    async def _refuse(self, error: ApiError) -> None:
        self._own = error
        body = json.dumps(error.body()).encode()
        told = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        headers = [(name.lower().encode(), value.encode()) for name, value in told.items()]
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


# -- the proxy's router -----------------------------------------------------------------------------------------------


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Any to mypy: ray is an extra
    """Sessions to the owner of their root, prompts to where their prefix is, within a bound; see `placement.rank`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ring = HashRing()
        self._factor = LOAD_FACTOR

    def initialize_state(self, load_factor: float = LOAD_FACTOR) -> None:
        self._factor = load_factor

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._ring.update(one.replica_id.unique_id for one in replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """A replica that is not ready keeps its place on the ring, and is tried when no other one is."""
        named = {one.replica_id.unique_id: one for one in candidate_replicas}
        ready = {name: one for name, one in named.items() if one.routing_stats.get("is_ready", True)} or named
        loads = {name: self._replica_queue_len_cache.get(one.replica_id) or 0 for name, one in ready.items()}
        key = None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            key = RoutingKey.read(pending_request.metadata.session_id)
        return [[named[name] for name in names] for names in rank(key, self._ring, loads, factor=self._factor)]


# -- the controller's policy ------------------------------------------------------------------------------------------


class PrefillQueuePolicy:
    """As many replicas as bring the mean prefill queue and KV use below their targets.

    Serve applies the deployment's limits and delays to what it says.
    """

    def __init__(self, **targets: float) -> None:
        self._targets = ScalingTargets(**targets)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        told = context.aggregated_metrics or {}
        queues, usages = told.get("prefill_queue_s", {}), told.get("kv_usage", {})
        loads = [ReplicaLoad(queues.get(one, 0.0), usages.get(one, 0.0)) for one in context.running_replicas]
        if not loads:
            return context.target_num_replicas, {}
        wanted = self._targets.replicas(loads)
        if context.total_queued_requests:  # at the proxies: all replicas are full
            wanted = max(wanted, len(loads) + 1)
        return wanted, {}
