"""Requests that are passed on to the server of their session, and what happens when it hangs up."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.errors import SessionElsewhere
from tokenmill.server.errors import ApiError
from tokenmill.server.forwarding import follow

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nhere"
PATIENCE_S = 0.01


def request(method: str) -> Any:
    """As much of one as is passed on, of a client that stays."""

    async def body() -> bytes:
        return b"{}"

    async def wait() -> None:
        await asyncio.Event().wait()

    caller = SimpleNamespace(request_id="r", disconnected=wait)
    scope = {"query_string": b"", "raw_path": b"/v1/sessions/s/generate", "headers": []}
    return SimpleNamespace(method=method, scope=scope, headers={}, body=body, state=SimpleNamespace(caller=caller))


class Owner:
    """The server of the session. It reads what it is sent, and then answers or hangs up."""

    def __init__(self, answer: bytes, *, is_alive: bool = True) -> None:
        self.num_requests = self.num_looks = 0
        self.is_done = asyncio.Event()
        self._answer, self._is_alive = answer, is_alive

    def is_there(self) -> bool:
        self.num_looks += 1
        return self._is_alive

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        self.num_requests += 1
        if not self._is_alive:
            await reader.read()  # silent, until it is given up
        while self._answer == ANSWER and self._is_alive and self.num_looks < 2:  # until it was taken for slow, twice
            await asyncio.sleep(0)
        writer.write(self._answer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        self.is_done.set()


async def passed_on(method: str, owner: Owner, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The body of the answer, "handled here", or the code of the error."""

    async def while_connected(_: Any, work: Any) -> Any:
        return await work

    async def handle(_: Any) -> Any:
        return SimpleNamespace(body_iterator=None)

    monkeypatch.setattr("tokenmill.server.forwarding.while_connected", while_connected)
    server = await asyncio.start_server(owner, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        elsewhere = SessionElsewhere("elsewhere", f"http://127.0.0.1:{port}", owner.is_there, PATIENCE_S)
        try:
            response = await follow(request(method), handle, elsewhere)
        except ApiError as error:
            return error.code
        finally:
            await owner.is_done.wait()
        if response.body_iterator is None:
            return "handled here"
        return b"".join([piece async for piece in response.body_iterator])


@pytest.mark.req("B3")
@pytest.mark.parametrize(("method", "wanted"), [("GET", "handled here"), ("POST", "session_server_lost")])
def test_only_a_read_is_repeated_when_the_server_of_the_session_hangs_up(
    method: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have stored the turn before it died: asked again, the turn would be there twice."""

    async def run() -> None:
        owner = Owner(b"")
        assert await passed_on(method, owner, monkeypatch) == wanted
        assert owner.num_requests == 1

    asyncio.run(run())


@pytest.mark.req("B3")
def test_a_write_is_not_repeated_when_the_lease_of_a_silent_server_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        assert await passed_on("POST", Owner(ANSWER, is_alive=False), monkeypatch) == "session_server_lost"

    asyncio.run(run())


@pytest.mark.req("B3")
def test_a_slow_server_is_waited_for_while_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        owner = Owner(ANSWER)
        assert await passed_on("POST", owner, monkeypatch) == b"here"
        assert owner.num_requests == 1

    asyncio.run(run())


@pytest.mark.req("B3")
def test_a_request_that_was_refused_is_handled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        owner = Owner(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        assert await passed_on("POST", owner, monkeypatch) == "handled here"

    asyncio.run(run())
