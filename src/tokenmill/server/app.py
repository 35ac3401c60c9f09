"""The server: the application, and its lifecycle from listening to shutdown.

The port is bound first, so that a conflict is reported at once. While models load, requests are answered with
503. On SIGTERM or Ctrl-C new requests are rejected and running ones get a grace period; those left after it end with
an error of their own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from tokenmill import __version__
from tokenmill.errors import ConfigError, EngineDead, ModelLoadError
from tokenmill.server import web
from tokenmill.server.api import (
    anthropic,
    batches,
    chat_completions,
    completions,
    conversations,
    embeddings,
    llama_server,
    ollama,
    operations,
    responses,
    sessions,
)
from tokenmill.server.bodies import HANDLERS
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError, Dialect
from tokenmill.server.middleware import FORM_TYPE, Middleware, Paths
from tokenmill.server.models import ModelSpec
from tokenmill.server.protocol import GuardedProtocol, raise_file_limit
from tokenmill.server.served import Served
from tokenmill.server.telemetry.figures import Endpoints
from tokenmill.session.postgres import KV_PATH, PostgresStore
from tokenmill.session.records import MEDIA_TYPE

DESCRIPTION = "Many conversations at once: OpenAI's API, sessions, and extensions that other servers have as well."
V1, OLLAMA = "/v1", "/api"
METERED = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
        "/infill",
        *("/v1/sessions/{id}/generate", "/v1/sessions/{id}/regenerate"),
        *("/v1/messages", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    }
)
"""Generating endpoints, by label: limits on requests and tokens apply to these."""
BACKLOG = 2048
SWITCH_S = 0.001
"""Interpreter switch interval (default: 5 ms): each engine step needs the lock often."""
EXIT_HUNG = 4
"""Exit code with `exit_on_hang`: a service manager that restarts on failure starts a new server."""
LAST_WORDS_S = 2.0
"""Time for the terminal events of interrupted requests."""
LOOK_S = 0.2
"""Polling interval for hung engine threads."""
MIN_LOOK_S = 0.05
"""Polling interval for idle models."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def create_app(served: Served) -> FastAPI:
    """The routes behind the middleware. Requests are admitted once `served.open` is called."""
    app = FastAPI(
        title="tokenmill",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    messages = anthropic.message_routes(served)
    versioned = [
        operations.model_routes(served),
        chat_completions.chat_routes(served),
        completions.completion_routes(served),
        responses.response_routes(served),
        conversations.conversation_routes(served),
        embeddings.embedding_routes(served),
        batches.batch_routes(served),
        messages,
        sessions.session_routes(served),
        operations.engine_routes(served),
    ]
    of_ollama = ollama.ollama_routes(served)
    at_root = [embeddings.token_routes(served), llama_server.llama_routes(served)]
    at_root += [operations.probe_routes(served), ollama.probe_route()]
    at_root += [web.page_routes()] if served.config.web else []
    for router in versioned:
        app.include_router(router, prefix=V1)
        app.include_router(router, include_in_schema=False)  # for clients whose base URL has no /v1
    for router in at_root:
        app.include_router(router)
    app.include_router(of_ollama, prefix=OLLAMA)
    ollama_paths = list(_paths([of_ollama], (OLLAMA,)))
    paths = Paths(
        Endpoints([*_paths(versioned, (V1, "")), *_paths(at_root, ("",)), *ollama_paths, str(app.openapi_url)]),
        public=operations.HEALTH | {KV_PATH} | (web.assets().keys() if served.config.web else set()),
        endless=frozenset({V1 + operations.EVENTS, operations.EVENTS}),
        dialects={
            **dict.fromkeys(_paths([messages], (V1, "")), Dialect.ANTHROPIC),
            **dict.fromkeys(ollama_paths, Dialect.OLLAMA),
        },
        ollama_prefix=f"{OLLAMA}/",
        uploads={
            **dict.fromkeys((V1 + sessions.RESTORE, sessions.RESTORE), MEDIA_TYPE),
            **dict.fromkeys((V1 + batches.FILES, batches.FILES), FORM_TYPE),
        },
        metered=METERED,
    )
    app.add_middleware(
        Middleware,
        config=served.config,
        gate=served.gate,
        paths=paths,
        telemetry=served.telemetry,
        keys=served.keys,
    )
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return app


def _paths(routers: Sequence[APIRouter], prefixes: Sequence[str]) -> Iterator[str]:
    for prefix in prefixes:
        yield from (prefix + route.path for one in routers for route in one.routes if isinstance(route, APIRoute))


def serve(specs: Sequence[ModelSpec], config: ServerConfig, spec_of: Callable[[str], ModelSpec] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C; a second signal ends what still runs, a third one does not wait for that.

    `spec_of` makes other downloaded models available to `POST /v1/models/load`.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenization has threads of its own
    sys.setswitchinterval(SWITCH_S)
    raise_file_limit()
    check_certificate(config)
    server = Server(Served(config, specs, spec_of))
    server.served.models.after_change = server.settle
    listeners = [listen(config.host, config.port)]
    if config.ollama_port is not None:
        listeners.append(listen(config.host, config.ollama_port))
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        try:
            is_loaded = runner.run(server.load_and_serve(*listeners))
        finally:
            for listener in listeners:
                listener.close()
        # A thread that loads a model, or whose step does not return, cannot be stopped.
        if not is_loaded or server.has_hung or server.served.models.is_stuck:
            sys.stderr.flush()
            os._exit(EXIT_HUNG if server.has_hung else 0)


class Server(uvicorn.Server):
    """Uvicorn with our own drain."""

    def __init__(self, served: Served) -> None:
        config = served.config
        self.app = create_app(served)
        settings = uvicorn.Config(
            self.app,
            http=GuardedProtocol.with_limits(config),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # our own log has request ids
            timeout_keep_alive=round(config.idle_s),
            timeout_graceful_shutdown=max(1, round(LAST_WORDS_S)),
            server_header=False,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            ssl_keyfile_password=config.ssl_keyfile_password,
            proxy_headers=bool(config.forwarded_allow_ips),
            forwarded_allow_ips=list(config.forwarded_allow_ips),
        )
        super().__init__(settings)
        self.served = served
        self.has_hung = False
        """Whether it shut down because an engine was lost."""
        self.opened = asyncio.Event()
        """Set once requests are admitted."""
        self._draining: asyncio.Task[None] | None = None
        self._is_hurried = False

    def settle(self) -> None:
        """Do in advance, while models are loaded, what would stall all threads in the middle of a stream."""
        self.app.openapi()  # builds the routes, which the first request would do otherwise
        # Models and modules are hundreds of thousands of objects, which every full collection would visit: 0.3 s.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    @property
    def is_ready(self) -> bool:
        return self.started and self.served.is_ready

    async def load_and_serve(self, *listeners: socket.socket) -> bool:
        """Load the models of the start, and serve; False if it was stopped before that was done."""
        scheme = "http" if self.served.config.ssl_certfile is None else "https"
        where, *others = (_address(scheme, listener) for listener in listeners)
        models, store = self.served.models, self.served.store
        if isinstance(store, PostgresStore):
            store.announce(self.served.config.advertise or where)
        names = ", ".join(entry.spec.name for entry in models.entries)
        first = ", ".join(entry.spec.name for entry in models.entries if entry.spec.at_start) or "nothing yet"
        say(f"loading {first}; {where} answers 503 until then")
        began = time.monotonic()
        loading = asyncio.ensure_future(self._load_first())
        serving = asyncio.ensure_future(self.serve(sockets=list(listeners)))
        both: set[asyncio.Future[Any]] = {loading, serving}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            serving.result()
            return False
        watching = asyncio.gather(self._unload_idle(), self._exit_on_hang(), self.served.telemetry.watch_loop())
        try:
            loading.result()  # a model that fails to load ends the server
            await self.served.batches.start(partial(batches.answer, self.served))
            self.served.open()
            self.opened.set()
            say(f"{names} on {where}/v1 ({time.monotonic() - began:.1f} s)")
            for other in others:
                say(f"for Ollama's clients: {other}")
            await serving
        finally:
            self.should_exit = True
            watching.cancel()
            await asyncio.gather(serving, watching, return_exceptions=True)
            await self.served.close()
        return True

    async def _load_first(self) -> None:
        """Sequentially: each model has to fit beside those before it."""
        for entry in self.served.models.entries:
            if entry.spec.at_start:
                try:
                    await self.served.models.load(entry)
                except ApiError as error:
                    raise ModelLoadError(error.message) from None

    async def _unload_idle(self) -> None:
        """Unload idle models periodically."""
        limits = [entry.spec.keep_alive_s for entry in self.served.models.entries]
        given = [limit for limit in limits if limit is not None]
        while given:
            await asyncio.sleep(max(MIN_LOOK_S, min(given) / 4))
            for name in await self.served.models.unload_idle():
                say(f"{name} was not used for a while and is unloaded; the next request loads it")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's own would raise the signal again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handlers = dict.fromkeys(SIGNALS, self.stop)
        if self.served.config.keys_file is not None:
            handlers |= {getattr(signal, name): self.reload_keys for name in ("SIGHUP",) if hasattr(signal, name)}
        if sys.platform == "win32":  # event loops on Windows take no handlers
            for number, handler in handlers.items():
                signal.signal(number, lambda *_, handler=handler: loop.call_soon_threadsafe(handler))
            yield
            return
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def reload_keys(self) -> None:
        """Reload the keys file; if it is invalid, keep the previous keys."""
        try:
            self.served.keys.reload()
        except ConfigError as error:
            say(f"the keys are unchanged: {error}")
        else:
            say(f"read {len(self.served.keys.accounts)} keys")

    async def _exit_on_hang(self) -> None:
        """Shut down once an engine is lost, if configured."""
        if self.served.config.exit_on_hang:
            while not self.served.is_lost:
                await asyncio.sleep(LOOK_S)
            self.has_hung = True
            say("an engine hangs or has failed and cannot be replaced; exiting (--exit-on-hang)")
            self.stop()

    def stop(self) -> None:
        """Drain and end; a second call ends what still runs, a third one does not wait for that."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        elif not self._is_hurried:
            self._is_hurried = True
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        """Wait for running requests; then end the rest with an error."""
        self.served.is_leaving = True
        try:
            delay_ends = time.monotonic() + self.served.config.drain_delay_s
            while time.monotonic() < delay_ends and not self._is_hurried:
                await asyncio.sleep(0.02)
            self.served.drain()
            await self.served.batches.stop()
            inside = self.served.gate
            if inside.num_inside:
                say(f"stopping; {inside.num_inside} requests may go on for {self.served.config.drain_s:g} s")
            await self._until_empty(self.served.config.drain_s, lambda: self._is_hurried)
            await self.served.models.close()
            await self._until_empty(LAST_WORDS_S, lambda: False)
        finally:  # whatever fails on the way, it stops
            self.should_exit = True

    async def _until_empty(self, most_s: float, is_enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + most_s
        while self.served.gate.num_inside and time.monotonic() < deadline and not is_enough():
            await asyncio.sleep(0.02)


def say(what: str) -> None:
    print(f"tokenmill: {what}", file=sys.stderr, flush=True)


def check_certificate(config: ServerConfig) -> None:
    """`ConfigError` if the server's certificate and private key are unusable."""
    if config.ssl_certfile is None:
        return
    key_file = config.ssl_keyfile or config.ssl_certfile
    for option, path in (("--ssl-certfile", config.ssl_certfile), ("--ssl-keyfile", key_file)):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from None
    if b"ENCRYPTED" in content and config.ssl_keyfile_password is None:  # OpenSSL would prompt on the terminal
        raise ConfigError(f"the private key in {key_file} is encrypted: use --ssl-keyfile-password")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, config.ssl_keyfile_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the private key in {key_file} is not that of {config.ssl_certfile}") from None
        reason = (error.reason or "not PEM").lower().replace("_", " ")
        raise ConfigError(
            f"cannot use the certificate in {config.ssl_certfile} with the private key in {key_file}: {reason}"
        ) from None


def _address(scheme: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to this address; `EngineDead` if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # connections made during the start wait in the backlog
    except OSError as error:
        listener.close()
        raise EngineDead(f"cannot bind to {host}:{port}: {error.strerror}") from None
    return listener
