"""What tests of sessions over HTTP share: a session and its verbs, and streams that are read event by event."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.server.serving import KEY, WAIT_S, Reply, Running, request, running
from tests.server.wire import LETTERS, until
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.session.service import SessionService
from tokenmill.session.session import Session

OTHER_KEY = "other"
SAME: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS}
"""Parameters of answers that are the same each time, one letter a token."""
SESSIONS = "/v1/sessions"


@dataclass
class Conversation:
    """A session on a server, for one of its clients."""

    server: Running
    id: str
    key: str | None = KEY

    @property
    def path(self) -> str:
        return f"{SESSIONS}/{self.id}"

    def post(self, verb: str, **body: Any) -> Reply:
        return self.server.post(f"{self.path}/{verb}", body, key=self.key)

    def get(self, verb: str = "", **headers: str) -> Reply:
        return self.server.get(self.path + (f"/{verb}" if verb else ""), key=self.key, headers=headers)

    def delete(self) -> Reply:
        return request(self.server.port, "DELETE", self.path, key=self.key)

    def info(self) -> dict[str, Any]:
        reply = self.get()
        assert reply.status == 200, reply.body
        return dict(reply.json())

    def contents(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Everything but when it was last used."""
        info = self.info()
        del info["last_used_at"]
        return info, self.turns()

    def turns(self) -> list[dict[str, Any]]:
        reply = self.get("turns")
        assert reply.status == 200, reply.body
        return list(reply.json()["data"])

    def said(self) -> list[str]:
        """What was said, in order."""
        return [message["content"] for turn in self.turns() for message in turn["messages"]]

    def ask(self, content: str | None = None, **changes: Any) -> dict[str, Any]:
        """An answer to this, or to what waits, whole."""
        given = {} if content is None else {"input": content}
        reply = self.post("generate", **{**given, "stream": False, **changes})
        assert reply.status == 200, reply.body
        return dict(reply.json())

    def chat(self, content: str, **changes: Any) -> Reply:
        """As a chat completion."""
        messages = [{"role": "user", "content": content}]
        body = {"model": "fake", "messages": messages, "session_id": self.id, **changes}
        return self.server.post("/v1/chat/completions", body, key=self.key)

    def fork(self, **where: Any) -> list[Conversation]:
        reply = self.post("fork", **where)
        assert reply.status == 201, reply.body
        return [Conversation(self.server, one["id"], self.key) for one in reply.json()["data"]]

    @property
    def behind(self) -> Session:
        """The session itself."""
        return service_of(self.server)._model().queue.find(self.id)

    @property
    def num_waiting(self) -> int:
        """Operations that wait for it, but for those whose clients have left."""
        return sum(not command.answer.cancelled() for command in self.behind.waiting or ())

    def wait_until_free(self) -> None:
        until(lambda: self.info()["state"] != "generating")


@contextmanager
def ascii_server(**settings: Any) -> Iterator[Running]:
    """Its model knows ASCII alone: whatever it says, a client can say it again in the same tokens."""
    model = FakeModel(FakeConfig(vocab_size=128, max_context=4096, depth=1))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4, max_queue=8), kv_cache_tokens=32_768)
    keys = {"key_hashes": (hash_key(KEY), hash_key(OTHER_KEY)), "keep_alive_s": 60.0}
    with running(llm, ServerConfig(**{**keys, **settings})) as one:
        yield one


def service_of(server: Running) -> SessionService:
    return server.served.models.loaded[0].sessions


def converse(server: Running, key: str | None = KEY, **options: Any) -> Conversation:
    """A new session; its answers are short and the same each time, unless told otherwise."""
    reply = server.post(SESSIONS, {"model": "fake", "max_tokens": 8, **SAME, **options}, key=key)
    assert reply.status == 201, reply.body
    return Conversation(server, reply.json()["id"], key)


# -- streams ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """One event of a session's stream."""

    id: str
    data: dict[str, Any]


def events_in(body: bytes) -> list[Event]:
    """All events of a stream, read strictly: an id and a JSON object each; [DONE] has no id and is the last."""
    *pieces, done, rest = [piece for piece in body.decode().split("\n\n") if not piece.startswith(":")]
    assert (done, rest) == ("data: [DONE]", "")
    return [_event(piece.split("\n")) for piece in pieces]


def _event(lines: list[str]) -> Event:
    """A restart alone has a name."""
    *name, place, line = lines
    assert place.startswith("id: ")
    assert line.startswith("data: ")
    data = json.loads(line.removeprefix("data: "))
    assert name == (["event: restarted"] if data["object"] == "session.restarted" else [])
    return Event(place.removeprefix("id: "), data)


def joined(events: Iterable[Event], begin: int = 0) -> tuple[str, list[int]]:
    """Text and ids of events that follow each other, from a token on: without a gap, without repeats, one end."""
    text, ids, is_over = "", [], False
    for event in events:
        assert event.data["offset"] == begin + len(ids)
        assert not is_over, "an event came after the last one"
        text += event.data["text"]
        ids += event.data["token_ids"]
        is_over = event.data["finish_reason"] is not None
        assert (event.data["usage"] is not None) == is_over
    return text, ids


class Listener:
    """Reads a stream as it comes."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._answer = connection.getresponse()
        self.status = self._answer.status
        self.seen: list[Event] = []

    def next(self) -> Event | None:
        """The next event; None for [DONE]."""
        lines: list[str] = []
        while line := self._answer.readline().decode():
            if line == "\n" and lines:
                if lines == ["data: [DONE]"]:
                    return None
                self.seen.append(_event(lines))
                return self.seen[-1]
            if line != "\n" and not line.startswith(":"):
                lines.append(line.rstrip("\n"))
        raise EOFError("the stream has ended without [DONE]")

    def read_tokens(self, count: int) -> None:
        """Until so many tokens have come."""
        while sum(len(event.data["token_ids"]) for event in self.seen) < count:
            assert self.next() is not None, "the answer has ended"

    def read_rest(self) -> list[Event]:
        """All events to the end, those before included."""
        while self.next() is not None:
            pass
        return self.seen

    def body(self) -> bytes:
        """Of an answer that is no stream."""
        return self._answer.read()

    def leave(self, how: str = "FIN") -> None:
        """With a FIN, as programs do that end; or with a RST, as after a crash."""
        sock = self._connection.sock
        if how == "RST" and sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._answer.close()
        self._connection.close()


@contextmanager
def listening(talk: Conversation, *, last: str | None = None, **body: Any) -> Iterator[Listener]:
    """To an answer: to a new one, or without a body to the one that is there, after the event with this id."""
    connection = http.client.HTTPConnection("127.0.0.1", talk.server.port, timeout=WAIT_S)
    headers = {"Authorization": f"Bearer {talk.key}"} if talk.key else {}
    if body:
        headers["Content-Type"] = "application/json"
        connection.request("POST", f"{talk.path}/generate", json.dumps(body), headers)
    else:
        more = {} if last is None else {"Last-Event-ID": last}
        connection.request("GET", f"{talk.path}/stream", headers={**headers, **more})
    listener = Listener(connection)
    try:
        yield listener
    finally:
        listener.leave()


def resumed(talk: Conversation, last: str | None) -> list[Event]:
    """The rest of an answer, after the event with this id."""
    with listening(talk, last=last) as listener:
        assert listener.status == 200, listener.body()
        return listener.read_rest()
