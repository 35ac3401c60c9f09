"""Several models in one server: which answers, and who may load and unload them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.conversing import SESSIONS, converse
from tests.server.loading import Store, admin, chat, no_keys, status_of, two_models
from tests.server.refusals import BODIES
from tests.server.rules import assert_error
from tests.server.serving import HI, Running
from tokenmill.errors import ConfigError
from tokenmill.server.config import ServerConfig, hash_key

ADMIN = "sk-admin"


@pytest.fixture(scope="module")
def pair() -> Iterator[Running]:
    """Two models that are there from the start."""
    with two_models(spec={"at_start": True}) as one:
        yield one


# -- which one answers ------------------------------------------------------------------------------------------------


@pytest.mark.req("R40")
def test_each_name_is_answered_by_its_model(pair: Running) -> None:
    def said(path: str, model: str, **body: Any) -> Any:
        reply = pair.post(path, {**BODIES[path], **body, "model": model})
        assert reply.status == 200, reply.body
        return without_names(reply.json())

    for path in BODIES:
        more: dict[str, Any] = {"temperature": 0} if "embed" not in path and "token" not in path else {}
        first, second = (said(path, name, **more) for name in ("fake", "second"))
        assert said(path, "two", **more) == said(path, "org/second", **more) == second
        if path != "/detokenize":
            assert first != second, path
    texts = {name: converse(pair, model=name).ask("hi")["text"] for name in ("fake", "second", "two")}
    assert texts["fake"] != texts["second"] == texts["two"]


def without_names(answer: Any) -> Any:
    """What two answers of the same model have in common."""
    if isinstance(answer, dict):
        own = {"id", "created", "created_at", "completed_at", "model", "item_id", "usage"}
        return {name: without_names(value) for name, value in answer.items() if name not in own}
    return [without_names(one) for one in answer] if isinstance(answer, list) else answer


@pytest.mark.req("R40")
def test_the_list_of_models(pair: Running) -> None:
    first, second = pair.get("/v1/models").json()["data"]
    assert (first["id"], first["status"], first["max_model_len"], first["aliases"]) == ("fake", "loaded", 4096, [])
    assert (second["id"], second["status"], second["max_model_len"]) == ("second", "loaded", 512)
    assert second["aliases"] == ["org/second", "two"]
    for name in ("second", "two", "org/second", "org%2Fsecond"):
        assert status_of(pair, name)["id"] == "second"
    assert [model.id for model in pair.client.models.list()] == ["fake", "second"]
    assert pair.client.models.retrieve("org/second").id == "second"


@pytest.mark.req("R40")
def test_a_model_that_is_not_known_is_404_everywhere(pair: Running) -> None:
    paths: dict[str, dict[str, Any]] = {**BODIES, SESSIONS: {}, "/v1/models/load": {}, "/v1/models/unload": {}}
    with two_models(**no_keys()) as server:
        for path, body in paths.items():
            for name in ("nobody", "", "fake ", "Fake", "org", "second/../fake"):
                reply = server.post(path, {**body, "model": name}, key=None)
                assert_error(reply, 404, "model")
                assert reply.error["code"] == "model_not_found"
        assert_error(server.get("/v1/models/nobody", key=None), 404, "model")
        assert status_of(server)["status"] == "unloaded"
    with pytest.raises(openai.NotFoundError):
        pair.client.chat.completions.create(model="nobody", messages=HI)


def test_sessions_are_with_their_model(pair: Running) -> None:
    talk = converse(pair, model="two")
    assert talk.info()["model"] == "second"
    talk.ask("hi")
    other = converse(pair)
    other.ask("hi")
    assert talk.said() != other.said()
    assert talk.fork()[0].info()["model"] == "second"
    assert {one["model"] for one in pair.get(SESSIONS).json()["data"]} == {"fake", "second"}
    assert chat(pair, "two", session_id=talk.id).status == 200
    assert_error(chat(pair, "fake", session_id=talk.id), 400, "model")


# -- who may ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("R40")
def test_only_a_key_for_it_may_load_and_unload() -> None:
    store = Store()
    with two_models(store, admin_key_hashes=(hash_key(ADMIN),)) as server:
        for what in ("load", "unload"):
            refused = admin(server, what)
            assert_error(refused, 403)
            assert refused.error["code"] == "admin_key_needed"
            assert admin(server, what, "nobody").status == 403, "nothing is told before"
            assert admin(server, what, key="sk-wrong").status == 401
            assert admin(server, what, key=None).status == 401
        assert store.happened == []
        assert chat(server, "second").status == 200, "who may use it may have it loaded"
        assert admin(server, "unload", key=ADMIN).status == 200
        assert admin(server, "load", key=ADMIN).status == 200
        assert server.get("/v1/models", key=ADMIN).status == 200
        assert store.happened == ["load", "close", "load"]


def test_where_there_are_keys_and_none_for_it_nobody_may() -> None:
    with two_models() as server:
        for what in ("load", "unload"):
            assert_error(admin(server, what), 403)


def test_where_there_is_only_a_key_for_it_nobody_else_may_come_in() -> None:
    with two_models(key_hashes=(), admin_key_hashes=(hash_key(ADMIN),)) as server:
        assert admin(server, "load", key=None).status == 401
        assert server.get("/v1/models", key=None).status == 401
        assert admin(server, "load", key=ADMIN).status == 200


@pytest.mark.parametrize("name", ["key_hashes", "admin_key_hashes"])
def test_no_key_is_empty(name: str) -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        ServerConfig(**{name: (hash_key(""),)})  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [{}, {"model": 5}, {"model": None}, {"model": "second", "force": "yes"}])
def test_what_is_wrong_is_refused(body: dict[str, Any]) -> None:
    with two_models(**no_keys()) as server:
        assert server.post("/v1/models/unload", body).status == 400
        if "force" not in body:
            assert server.post("/v1/models/load", body).status == 400
