"""A replica: tokenmill's server inside a Serve deployment.

Requests reach it through Serve's proxies, and directly on a port of its own: the other replicas forward requests there
whose session it is answering in. Both lead to the same application. It runs on Serve's event loop for user code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingPolicy, BackpressureConfig, RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from tokenmill.cluster.hooks import AffinityRouter, PrefillQueuePolicy
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError, EngineDead
from tokenmill.server.app import LAST_WORDS_S, SWITCH_S, Server, listen
from tokenmill.server.config import LOOPBACK, ServerConfig, hash_key, settings_of
from tokenmill.server.middleware import configure_logs
from tokenmill.server.models import OPTIONS, ModelSpec, from_table
from tokenmill.server.protocol import Connection, raise_file_limit
from tokenmill.server.served import Served
from tokenmill.server.telemetry.metrics import kv_usage, prefill_queue_s

log = logging.getLogger(__name__)

DEPLOYMENT = "replica"
WHERE = "args"
"""Where settings are, in errors."""
MOST_ROWS = 256
"""Default of `max_num_seqs` on a GPU, where it is largest."""
SPARE_REQUESTS = 128
"""Requests of a replica beside those that its engine has room for: reads, streams that are followed."""
MAX_QUEUED = 1024
"""Requests that a proxy keeps while all replicas are full."""
DRAIN_DELAY_S = 2.0
"""For proxies to hear that a replica is going."""
STREAM_SPARE_S = 60.0
"""Grace period of a stream beyond the longest request."""
LOOK_S = 0.2
LOOPBACK_HOST = "127.0.0.1"
SETTINGS = frozenset({"model", "models", "engine", "server", "store", "log_level"})
OWN = frozenset({"host", "port", "ollama_port", "key_hashes", "admin_key_hashes", "store", "advertise", "replica"})
"""Settings of a server that are not the user's to choose here."""


# -- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaSettings:
    """What the `args` of the configuration file say, checked."""

    tables: tuple[Mapping[str, Any], ...]
    """A model each, as in a TOML file of models."""
    options: Mapping[str, Any]
    """Of every engine."""
    server: Mapping[str, Any]
    store: str
    log_level: str = "info"

    @classmethod
    def read(cls, args: Mapping[str, Any]) -> ReplicaSettings:
        """`ConfigError` says what is wrong."""
        if unknown := set(args) - SETTINGS:
            raise ConfigError(
                f"{WHERE}: unknown {', '.join(sorted(unknown))}; supported: {', '.join(sorted(SETTINGS))}"
            )
        if ("model" in args) == ("models" in args):
            raise ConfigError(f"{WHERE}: one of model and models is required")
        tables = [{"path": args["model"]}] if "model" in args else args["models"]
        if not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
            raise ConfigError(f"{WHERE}: models must be a list of tables with name and path")
        store = args.get("store")
        if not isinstance(store, str) or not store.startswith(("postgresql://", "postgres://")):
            raise ConfigError(f"{WHERE}: store must be a postgresql:// URL, which the replicas share")
        options, server = args.get("engine", {}), args.get("server", {})
        known = {field.name for field in fields(ServerConfig)} - OWN
        server = settings_of(server, known, f"{WHERE}: server")
        settings = cls(tuple(tables), options, server, store, args.get("log_level", "info"))
        if unknown := set(options) - set(OPTIONS):
            supported = ", ".join(sorted(OPTIONS))
            raise ConfigError(f"{WHERE}: engine: unknown {', '.join(sorted(unknown))}; supported: {supported}")
        settings.specs()
        settings.config(LOOPBACK_HOST)
        return settings

    def specs(self) -> list[ModelSpec]:
        return [from_table(table, WHERE, self.options) for table in self.tables]

    def config(self, node: str, replica: str | None = None) -> ServerConfig:
        """On a node of this address. Without keys, replicas are reached from the same machine only."""
        keys: dict[str, Any] = {
            name: tuple(map(hash_key, os.environ.get(variable, "").split()))
            for name, variable in (("key_hashes", "TOKENMILL_API_KEY"), ("admin_key_hashes", "TOKENMILL_ADMIN_KEY"))
        }
        given = {"drain_delay_s": DRAIN_DELAY_S, **self.server}
        is_open = not keys["key_hashes"] and not given.keys() & {"keys_file", "insecure"}
        host = LOOPBACK_HOST if is_open else node
        return ServerConfig(host=host, port=0, store=self.store, replica=replica, **keys, **given)

    @property
    def is_protected(self) -> bool:
        """May it be reached from other machines?"""
        config = self.config(LOOPBACK_HOST)
        return bool(config.key_hashes) or config.keys_file is not None or config.insecure

    @property
    def max_ongoing_requests(self) -> int:
        """More than the engines take: they refuse what is too much for them, and know when there will be room."""
        total = 0
        for table in self.tables:
            given = {**self.options, **table}
            total += given.get("max_num_seqs", MOST_ROWS) + given.get("max_queue", EngineConfig.max_queue)
        return total + SPARE_REQUESTS

    @property
    def stop_s(self) -> float:
        """From the moment when a replica is told to stop to when all of its requests are over."""
        config = self.config(LOOPBACK_HOST)
        return config.drain_delay_s + config.drain_s + LAST_WORDS_S

    @property
    def resources(self) -> dict[str, float]:
        """Of a replica: a GPU where the engine is said to run on one, else the CPUs of its threads."""
        if self.options.get("device") == "cuda" or any(table.get("device") == "cuda" for table in self.tables):
            return {"num_cpus": 1, "num_gpus": 1}
        return {"num_cpus": float(self.options.get("num_threads") or 1)}


# -- the deployment ---------------------------------------------------------------------------------------------------


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of a Serve configuration file (`import_path: tokenmill.cluster.replica:build`)."""
    settings = ReplicaSettings.read(args)
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=1,
        ray_actor_options=settings.resources,
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=MAX_QUEUED,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        request_router_config=RequestRouterConfig(
            request_router_class=import_path(AffinityRouter), request_routing_stats_period_s=1.0
        ),
        logging_config=LoggingConfig(enable_access_log=False),
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.stop_s + 10.0,
        max_constructor_retry_count=3,
    )
    return deployment(serve.ingress(None)(Replica)).bind(dict(args))


def import_path(what: type) -> str:
    return f"{what.__module__}:{what.__name__}"


def policy() -> AutoscalingPolicy:
    """For an `autoscaling_config` that names none."""
    return AutoscalingPolicy(policy_function=import_path(PrefillQueuePolicy))


class Replica:
    """A server, from loading its models to the end of its last request."""

    _watching: asyncio.Future[None] | None = None
    """None until it is ready."""

    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # our own threads tokenize
        sys.setswitchinterval(SWITCH_S)
        raise_file_limit()
        settings = ReplicaSettings.read(args)
        configure_logs(settings.log_level)
        self._name = serve.get_replica_context().replica_id.unique_id
        config = settings.config(ray._private.worker.global_worker.node_ip_address, self._name)
        host = await asyncio.to_thread(lambda: _get_global_client().http_config.host)
        if host not in LOOPBACK and not settings.is_protected:  # keys are in each node's own environment
            raise ConfigError(f"the proxies bind to {host}, which requires API keys; this replica has none")
        listener = listen(config.host, 0)
        self._server = Server(Served(config, settings.specs()))
        self._server.served.models.after_change = self._server.settle
        self._serving = asyncio.ensure_future(self._server.load_and_serve(listener))
        opened = asyncio.ensure_future(self._server.opened.wait())
        either: set[asyncio.Future[Any]] = {self._serving, opened}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if self._serving.done():
            self._serving.result()
            raise EngineDead("the server ended while it loaded")
        self._connected = Connected(self._server.app, config.max_request_s + STREAM_SPARE_S)
        self._watching = asyncio.ensure_future(self._watch_for_stop())

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._connected

    async def check_health(self) -> None:
        """Serve replaces a replica that fails three times."""
        served = self._server.served
        if self._serving.done() or served.is_lost:
            raise EngineDead("an engine is lost")
        if not served.is_ready and not served.is_leaving:
            raise EngineDead("the engines make no progress")

    async def record_routing_stats(self) -> dict[str, Any]:
        return {"is_ready": self._server.is_ready}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        models = list(self._server.served.telemetry.watches.values())
        return {
            "prefill_queue_s": max(map(prefill_queue_s, models), default=0.0),
            "kv_usage": max(map(kv_usage, models), default=0.0),
        }

    async def _watch_for_stop(self) -> None:
        """Drain as soon as Serve begins to stop this replica.

        Serve has no hook for that moment: it only waits until all requests are over, and kills the replica after a
        while. Streams without an end would hold it up, and long answers would break off without a word.
        """
        stopping = _Stopping()
        while not stopping.is_set():
            await asyncio.sleep(LOOK_S)
        self._server.stop()
        await asyncio.wait([self._serving])
        self._connected.abort()

    async def __del__(self) -> None:
        """Serve calls it once no request is left."""
        if self._watching is None:
            return
        self._watching.cancel()
        if not self._server.served.is_leaving:
            self._server.stop()
        await self._serving


class _Stopping:
    """Has Serve begun to stop this process's replica? Reads what ray 2.60 keeps of it."""

    def __init__(self) -> None:
        worker = ray._private.worker.global_worker
        actor = worker.actors.get(worker.actor_id)
        self._replica = getattr(actor, "_replica_impl", None)
        if not hasattr(self._replica, "_shutting_down"):
            log.warning("this version of Ray does not tell when a replica is stopped: streams will end without notice")

    def is_set(self) -> bool:
        return bool(getattr(self._replica, "_shutting_down", False))


class Connected:
    """The application behind Serve's proxies, which have the connection to the client.

    Serve cancels a request whose client has gone. Its proxy buffers without backpressure, so each request is aborted
    after `max_stream_s`: answers are over by then, and clients of endless streams reconnect.
    """

    def __init__(self, app: ASGIApp, max_stream_s: float) -> None:
        self._app = app
        self._max_stream_s = max_stream_s
        self._open: set[asyncio.Task[Any]] = set()

    def abort(self) -> None:
        """End what is still open: streams that are passed on from other servers."""
        for task in self._open:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.current_task()

        flow = FlowControl(asyncio.Transport())

        def abort() -> None:
            if task is not None:
                task.cancel()

        connection = Connection(abort=abort, lost=lost, write=send, flow=flow)
        scope["state"] = {**scope.get("state", {}), "connection": connection}
        if task is not None:
            self._open.add(task)
        ending = asyncio.get_running_loop().call_later(self._max_stream_s, abort)
        try:
            await self._app(scope, receive, send)
        finally:
            ending.cancel()
            if task is not None:
                self._open.discard(task)
