"""S09: sessions belong to the key that made them; for others they are not there, and neither is their KV."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.planting import PlantedBug, plant
from tests.server.conversing import OTHER_KEY, SESSIONS, converse
from tests.server.rules import fake_server
from tests.server.serving import KEY, Running, request
from tokenmill.server.config import hash_key
from tokenmill.server.served import Served

VERBS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "", None),
    ("DELETE", "", None),
    ("GET", "/turns", None),
    ("GET", "/stream", None),
    ("POST", "/append", {"input": "hi"}),
    ("POST", "/generate", {"input": "hi"}),
    ("POST", "/generate", {"input": "hi", "stream": False}),
    ("POST", "/regenerate", {}),
    ("POST", "/cancel", None),
    ("POST", "/fork", {}),
    ("POST", "/rewind", {"at_turn": 0}),
    ("POST", "/edit", {"turn": 0, "content": "x"}),
]


def other_keys_see_nothing(server: Running) -> None:
    """S09: for another key a session is not there, whatever it asks, and no word differs from one that never was."""
    talk = converse(server)
    talk.ask("hi")
    before = talk.contents()
    chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    for name in (talk.id, "A" * len(talk.id)):
        for method, verb, body in VERBS:
            reply = request(server.port, method, f"{SESSIONS}/{name}{verb}", body, key=OTHER_KEY)
            assert reply.status == 404, (method, verb, reply.status)
            assert reply.error == {
                "message": "session not found", "type": "invalid_request_error",
                "param": "session_id", "code": "session_not_found",
            }  # fmt: skip
        for stream in (True, False):
            reply = server.post("/v1/chat/completions", {**chat, "session_id": name, "stream": stream}, key=OTHER_KEY)
            assert (reply.status, reply.error["code"]) == (404, "session_not_found")
    assert talk.contents() == before
    mine = converse(server, OTHER_KEY)
    for key, own, foreign in ((KEY, talk.id, mine.id), (OTHER_KEY, mine.id, talk.id)):
        listed = [one["id"] for one in server.get(SESSIONS, key=key).json()["data"]]
        assert own in listed
        assert foreign not in listed


@pytest.mark.req("R36")
def test_s09_another_key_sees_nothing(server: Running) -> None:
    other_keys_see_nothing(server)


def test_s09_ids_cannot_be_guessed(server: Running) -> None:
    talk = converse(server)
    names = [talk.id, *(one.id for one in talk.fork(n=31))]
    assert len(set(names)) == 32
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)?", name)
    drawn = [base64.urlsafe_b64decode(f"{name.rpartition('.')[2]}==") for name in names]  # of a fork, behind its root
    assert all(len(one) * 8 >= 128 for one in drawn)
    bits = [int.from_bytes(one) for one in drawn]
    for place in range(128):  # no bit is the same in all of them
        assert len({(number >> place) & 1 for number in bits}) == 2


def kv_is_not_shared(server: Running) -> None:
    """The same words with another key compute everything anew; with the same key almost nothing."""
    words = "the same words for everybody " * 8
    wanted = converse(server).ask(words)
    again = converse(server).ask(words)
    foreign = converse(server, OTHER_KEY).ask(words)
    assert wanted["text"] == again["text"] == foreign["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
    assert foreign["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.req("R36")
def test_s09_keys_share_no_kv() -> None:
    with fake_server(key_hashes=(hash_key(KEY), hash_key(OTHER_KEY))) as server:
        kv_is_not_shared(server)


def test_s09_a_key_for_models_shares_no_kv_either() -> None:
    with fake_server(admin_key_hashes=(hash_key(OTHER_KEY),)) as server:
        kv_is_not_shared(server)


# -- the suite can fail -----------------------------------------------------------------------------------------------

MINE = "model.sessions.places(caller.key, limit + 1, last, newest_first=newest_first)"
BUGS: list[tuple[PlantedBug, Callable[[Running], None]]] = [
    (PlantedBug("no ownership", Served, "model_of", "key == caller.key", "True"), other_keys_see_nothing),
    (
        PlantedBug("a list of all", Served, "sessions", MINE, MINE.replace("caller.key", "None")),
        other_keys_see_nothing,
    ),
    (PlantedBug("one KV for all", Served, "hints", "self.keys.are_several", "False"), kv_is_not_shared),
]


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_is_caught(
    bug: PlantedBug, check: Callable[[Running], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_server(key_hashes=(hash_key(KEY), hash_key(OTHER_KEY))) as server:
        check(server)
    with fake_server(key_hashes=(hash_key(KEY), hash_key(OTHER_KEY))) as server:
        plant(bug, monkeypatch)
        with pytest.raises(AssertionError):
            check(server)
