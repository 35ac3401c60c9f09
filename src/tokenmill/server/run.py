"""Runs the application with uvicorn: start, ready line, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.errors import EngineDead
from tokenmill.server.app import create_app
from tokenmill.server.config import ServerConfig

BACKLOG = 2048


def serve(llm: AsyncLLM, config: ServerConfig, *, drain_s: float = 30.0) -> None:
    """Serve until SIGTERM or Ctrl-C. What runs then may end by itself for `drain_s`; after that it is cut off."""
    listener = _listen(config)
    host, port = listener.getsockname()[:2]
    print(f"tokenmill: {config.model_name} on http://{host}:{port}/v1", file=sys.stderr, flush=True)
    settings = uvicorn.Config(
        create_app(llm, config),
        http="h11",  # it counts the bytes of headers; httptools does not
        log_level="warning",
        timeout_graceful_shutdown=max(1, round(drain_s)),
        server_header=False,
    )
    asyncio.run(_run(_Server(settings), listener, llm))


class _Server(uvicorn.Server):
    """Ends well when it is told to: uvicorn would raise the signal once more when all is done."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


async def _run(server: Any, listener: socket.socket, llm: AsyncLLM) -> None:
    try:
        await server.serve(sockets=[listener])
    finally:
        await llm.close()


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)  # who comes while the server starts waits
    except OSError as error:
        listener.close()
        raise EngineDead(f"can't listen on {config.host}:{config.port}: {error.strerror}") from None
    return listener
