"""Reads a server's live view: once, or as a stream that is taken up again whenever it breaks off."""

from __future__ import annotations

import http.client
import json
import threading
from typing import IO, Any
from urllib.parse import urlsplit

from tokenmill.cli.live_state import LiveState
from tokenmill.errors import ConfigError, EngineDead

AGAIN_S = 1.0
"""Between two attempts to reach a server."""
SILENT_S = 60.0
"""A server that sends nothing for so long, not even a comment, is gone."""


class Address:
    """Where a server is, and the key that it wants."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host, self._port = "", None
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"{url!r} is no address of a server; it looks like http://127.0.0.1:8000")
        self._is_secure = parts.scheme == "https"
        self._folder = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.url = f"{parts.scheme}://{parts.netloc}{self._folder}"

    def get(self, path: str) -> http.client.HTTPResponse:
        """An answer that is a success; `EngineDead` where there is none, `ConfigError` where the key is wrong."""
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=SILENT_S)
        try:
            connection.request("GET", self._folder + path, headers=self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EngineDead(f"no server at {self.url}: {error}") from None
        if answer.status == 200:
            return answer
        connection.close()
        if answer.status in (401, 403):
            raise ConfigError(f"{self.url} wants an API key: give --api-key, or set TOKENMILL_API_KEY")
        if answer.status == 404:
            raise ConfigError(f"{self.url} has no {path}: it is no tokenmill server, or an older one")
        raise EngineDead(f"{self.url} answers {answer.status}: not ready")


def read_once(address: Address, state: LiveState) -> None:
    """What the server is doing right now."""
    with address.get("/v1/scheduler") as answer:
        state.take_all(json.load(answer))


class Follower:
    """A thread that keeps a state up to date."""

    def __init__(self, address: Address, state: LiveState) -> None:
        self._address = address
        self._state = state
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenmill-follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for the connection: nobody needs it any more."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                with self._address.get("/v1/scheduler/events") as answer:
                    self._state.begin()
                    self._read(answer)
                problem = self._state.problem or "the server has closed the connection"
            except (EngineDead, ConfigError, OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            except (KeyError, TypeError, ValueError) as error:
                problem = f"the server says what can't be understood: {type(error).__name__} {error}"
            self._state.lose(f"{problem}; trying again")
            self._is_over.wait(AGAIN_S)

    def _read(self, answer: IO[bytes]) -> None:
        kind = ""
        for line in answer:
            if self._is_over.is_set():
                return
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                kind = value
            elif field == "data":
                data: dict[str, Any] = json.loads(value)
                self._state.take(kind, data)
