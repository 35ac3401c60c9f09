"""Servers that answer byte for byte what a test wants, and what there is to answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tokenmill.bench.load_clients import Target

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunk(content: str | None = None, finish_reason: str | None = None, **more: Any) -> bytes:
    delta = {} if content is None else {"content": content}
    return event({"choices": [{"index": 0, "delta": {**delta, **more}, "finish_reason": finish_reason}]})


def event(data: Any) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


USAGE = event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 4}})
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def answering(
    answer: bytes, heard: list[bytes] | None = None, *, hangs: bool = False, **others: bytes
) -> AsyncIterator[Target]:
    """A server that has this answer for everybody, and then closes the connection, or says no more.

    Paths that end with the name of one of the others get that one.
    """
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if heard is not None:
            heard.append(head + await reader.readexactly(length))
        path = head.split(b" ")[1].decode()
        writer.write(next((one for name, one in others.items() if path.endswith(name)), answer))
        if hangs:
            await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/", "sk-load")
    finally:
        over.set()
        server.close()


def plain(status: int, body: Any) -> bytes:
    content = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content)
