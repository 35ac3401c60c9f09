"""Sessions in a store and as files, over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conversing import SESSIONS, Conversation, converse
from tests.server.serving import KEY, WAIT_S, Reply, Running, child, request, running
from tests.server.telling import OTHER_KEY, make_config, make_llm
from tests.session.test_files import header, resealed
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.server.errors import ApiError
from tokenmill.server.models import Models, ModelSpec
from tokenmill.server.streaming import OpenCalls
from tokenmill.server.telemetry.hub import Telemetry
from tokenmill.session.manager import SessionLimits
from tokenmill.session.records import MEDIA_TYPE
from tokenmill.session.store import DATABASE, SessionStore


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(make_llm(), make_config()) as one:
        yield one


def restore(server: Running, data: bytes, key: str = KEY, kind: str = MEDIA_TYPE) -> Reply:
    return request(server.port, "POST", f"{SESSIONS}/restore", data, key, {"Content-Type": kind})


@pytest.mark.req("B3", "R36")
def test_a_saved_session_is_restored_for_whoever_brings_it(server: Running) -> None:
    talk = converse(server, system="be brief")
    talk.ask("one")
    talk.post("append", input="waits")
    saved = talk.post("save", kv=True)
    assert (saved.status, saved.headers["content-type"]) == (200, MEDIA_TYPE)
    made = restore(server, saved.body, OTHER_KEY)
    assert made.status == 201
    assert made.json()["durable"] is None
    copy = Conversation(server, made.json()["id"], OTHER_KEY)
    assert copy.turns() == talk.turns()
    assert copy.info()["pending"] == [{"role": "user", "content": "waits"}]
    answer = copy.ask()
    assert answer["token_ids"] == talk.ask()["token_ids"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "KV from outside is not taken"
    assert Conversation(server, copy.id, KEY).get().status == 404
    assert Conversation(server, talk.id, OTHER_KEY).post("save").status == 404


@pytest.mark.req("B3")
def test_files_that_are_none_are_refused_and_the_service_goes_on(server: Running) -> None:
    talk = converse(server)
    talk.ask("one")
    data = talk.post("save").body
    for wrong, reason in (
        (data[:100], "truncated"),
        (data[:-40] + b"x" + data[-39:], "corrupt"),
        (b"{}", "not a session file"),
        (data[:18] + b"\x07" + data[19:], "version 7 is newer"),
        (
            resealed(data, session={**header(data)["session"], "template_options": {"x": 1}}),
            "options x are not accepted",
        ),
    ):
        refused = restore(server, wrong)
        assert refused.status == 400
        assert refused.error["code"] == "bad_session_file"
        assert reason in refused.error["message"]
    assert restore(server, data, kind="text/plain").status == 415
    assert restore(server, b"").status == 400
    assert restore(server, data).status == 201
    assert talk.ask("two")["finish_reason"] == "length"
    foreign = AsyncLLM(FakeModel(FakeConfig(vocab_size=300)), kv_cache_tokens=1024)
    with running(foreign, make_config()) as other:
        refused = restore(other, data)
        assert (refused.status, "another model" in refused.error["message"]) == (400, True)


@pytest.mark.req("B3")
def test_a_server_with_a_store_has_its_sessions_again(tmp_path: Path) -> None:
    config = make_config(store=tmp_path)
    with running(make_llm(), config) as server:
        talk, other = converse(server, system="be brief"), converse(server, OTHER_KEY)
        assert talk.ask("one")["durable"] is True
        before = talk.ask("two")
        contents = talk.contents()
        assert (contents[0]["durable"], contents[0]["problem"]) == (True, None)
        server.post("/v1/responses", {"model": "fake", "input": "hi", "max_output_tokens": 4})
    with running(make_llm(), config) as server:
        assert [one["id"] for one in server.get(SESSIONS).json()["data"]] == [talk.id]
        assert [one["id"] for one in server.get(SESSIONS, key=OTHER_KEY).json()["data"]] == [other.id]
        again = Conversation(server, talk.id)
        assert again.contents() == contents
        again.post("rewind", at_turn=2)
        assert again.ask("two")["token_ids"] == before["token_ids"]
        assert again.delete().status == 204
    with running(make_llm(), config) as server:
        assert server.get(SESSIONS).json()["data"] == []


def test_sessions_of_a_store_expire_though_nobody_uses_one(tmp_path: Path) -> None:
    with running(make_llm(), make_config(store=tmp_path)) as server:
        converse(server)
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("UPDATE sessions SET used_at = ?", (time.time() + 1,))  # it was used just now
    with running(make_llm(), make_config(store=tmp_path, session_ttl_s=0.5)) as server:
        ends_at = time.monotonic() + WAIT_S
        while server.get(SESSIONS).json()["data"]:
            assert time.monotonic() < ends_at


def test_a_model_whose_sessions_can_not_be_read_is_closed_again(tmp_path: Path) -> None:
    store, llm = SessionStore(tmp_path), make_llm()
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("DROP TABLE sessions")

    async def run() -> None:
        spec = ModelSpec(name="fake", load=lambda: llm)
        models = Models([spec], OpenCalls(), Telemetry(None), SessionLimits(), store)
        with pytest.raises(ApiError) as failed:
            await models.use("fake")
        assert failed.value.code == "model_load_failed"
        assert not llm.is_ready
        await models.close()

    asyncio.run(run())
    store.close()


@pytest.mark.req("B3")
def test_a_server_that_was_killed_has_what_it_said(tmp_path: Path) -> None:
    """`tokenmill serve --store`, kill -9 in the middle of an answer, and again."""
    asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": False}

    def post(port: int, verb: str, body: dict[str, object]) -> Reply:
        reply = request(port, "POST", f"{SESSIONS}{verb}", body, key=None)
        assert reply.status in (200, 201), reply.body
        return reply

    with child(tmp_path / "first.log", "fake", "--store", str(tmp_path / "store")) as first:
        name = post(first.port, "", {"system": "be brief"}).json()["id"]
        answer = post(first.port, f"/{name}/generate", {**asked, "input": "one"}).json()
        assert answer["durable"] is True
        turns = request(first.port, "GET", f"{SESSIONS}/{name}/turns", key=None).json()
        connection = http.client.HTTPConnection("127.0.0.1", first.port, timeout=30)
        body = json.dumps({**asked, "input": "never answered", "max_tokens": 100_000, "stream": True})
        connection.request("POST", f"{SESSIONS}/{name}/generate", body, {"Content-Type": "application/json"})
        assert connection.getresponse().readline(), "it is on its way"
        first.process.kill()
        first.process.wait()
        connection.close()
    with child(tmp_path / "second.log", "fake", "--store", str(tmp_path / "store")) as second:
        (info,) = request(second.port, "GET", SESSIONS, key=None).json()["data"]
        assert (info["id"], info["state"], info["durable"]) == (name, "idle", True)
        assert request(second.port, "GET", f"{SESSIONS}/{name}/turns", key=None).json() == turns
        again = post(second.port, f"/{name}/regenerate", {**asked, "stream": False}).json()
        assert again["token_ids"] == answer["token_ids"], "greedy: the same again"
