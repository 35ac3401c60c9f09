"""When a model is unloaded: as told, unless it is in use, or when nobody has used it for a while."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.planting import PlantedBug, plant
from tests.server.conversing import converse, listening
from tests.server.loading import CHAT, Store, admin, behind, chat, no_keys, status_of, two_models
from tests.server.rules import assert_error
from tests.server.serving import HI, WAIT_S, Reply, Running, child, request
from tests.server.wire import held, until
from tokenmill.server.models import Models


@pytest.mark.req("R40")
def test_a_model_in_use_is_not_unloaded_unless_forced() -> None:
    with two_models(**no_keys()) as server:
        talk = converse(server, model="second", max_tokens=400)
        refused = admin(server, "unload")
        assert_error(refused, 409, "model")
        assert refused.error["code"] == "model_in_use"
        assert "1 requests and sessions" in refused.error["message"]
        response = server.post("/v1/responses", {"model": "second", "input": "hi", "max_output_tokens": 3}).json()
        assert "2 requests and sessions" in admin(server, "unload").error["message"]
        replies: list[Reply] = []
        with held(behind(server, "second"), after=4) as hold, listening(talk, input="hi") as listener:
            hold.wait()
            asking = threading.Thread(target=lambda: replies.append(chat(server, "second", max_tokens=400)))
            asking.start()
            until(lambda: len(server.served.calls) == 1)
            assert "3 requests and sessions" in admin(server, "unload").error["message"]
            unloading = threading.Thread(target=lambda: replies.append(admin(server, "unload", force=True)))
            unloading.start()
            until(lambda: status_of(server)["status"] == "unloaded")
            assert_error(talk.get(), 404, "session_id")
            hold.release()
            events = listener.read_rest()
            asking.join(WAIT_S)
            unloading.join(WAIT_S)
        assert events[-1].data["error"]["code"] == "shutdown"
        statuses = {reply.status: reply for reply in replies}
        assert set(statuses) == {200, 503}
        assert statuses[503].error["code"] in ("shutdown", "engine_dead")
        after = {"model": "second", "input": "more", "previous_response_id": response["id"]}
        assert server.post("/v1/responses", after).status == 200  # from its stored messages: its session is gone
        assert chat(server, "second").status == 200
        for verb in ("turns", "stream"):
            assert_error(talk.get(verb), 404, "session_id")
        assert_error(chat(server, "second", session_id=talk.id), 404, "session_id")


def unload_and_load(server: Running, store: Store) -> None:
    """Whoever wants a model that is going waits until it has gone."""
    assert admin(server, "load").status == 200
    store.may_close.clear()
    replies: list[Reply] = []
    unloading = threading.Thread(target=lambda: replies.append(admin(server, "unload")))
    unloading.start()
    until(lambda: status_of(server)["status"] == "unloaded")
    asking = threading.Thread(target=lambda: replies.append(chat(server, "second")))
    asking.start()
    until(lambda: status_of(server)["status"] == "loading")
    store.may_close.set()
    unloading.join(WAIT_S)
    asking.join(WAIT_S)
    assert [reply.status for reply in replies] == [200, 200]
    assert store.happened == ["load", "close", "load"]
    assert server.get("/metrics").body.decode().count('model="second"') > 0


def test_a_model_is_loaded_again_when_it_has_gone() -> None:
    store = Store()
    with two_models(store, **no_keys()) as server:
        unload_and_load(server, store)


@pytest.mark.req("R40")
def test_a_model_that_nobody_uses_goes_when_its_time_is_over() -> None:
    store = Store()
    with two_models(store, spec={"keep_alive_s": 600.0}) as server:
        models = server.served.models
        assert server.do(models.unload_idle()) == []
        talk = converse(server, model="second")
        (model,) = [one for one in models.loaded if one.name == "second"]
        model.last_used -= 601.0
        assert server.do(models.unload_idle()) == [], "it has a session"
        assert talk.delete().status == 204
        assert server.do(models.unload_idle()) == [], "its time begins when the last one has gone"
        model.last_used -= 601.0
        with held(behind(server, "second"), after=2) as hold:
            asking = threading.Thread(target=lambda: chat(server, "second"))
            asking.start()
            hold.wait()
            model.last_used -= 601.0
            assert server.do(models.unload_idle()) == [], "it has a request"
        asking.join(WAIT_S)
        model.last_used -= 601.0
        assert server.do(models.unload_idle()) == ["second"]
        assert (status_of(server)["status"], status_of(server, "fake")["status"]) == ("unloaded", "loaded")
        assert chat(server, "second").status == 200
        assert store.happened == ["load", "close", "load"]


def test_a_model_is_not_unloaded_before_the_request_it_was_loaded_for() -> None:
    store = Store()
    with two_models(store, spec={"keep_alive_s": 0.0}) as server:
        models = server.served.models
        store.may_load.clear()
        replies: list[Reply] = []
        asking = threading.Thread(target=lambda: replies.append(chat(server, "second")))
        asking.start()
        until(lambda: store.happened == ["load"])
        unloading = threading.Thread(target=lambda: server.do(models.unload_idle()))
        unloading.start()
        until(lambda: bool(models._memory._waiters))  # it looks as soon as the model is loaded
        store.may_load.set()
        asking.join(WAIT_S)
        unloading.join(WAIT_S)
        assert [reply.status for reply in replies] == [200]


def test_keep_alive_of_the_command_line(tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake", "--keep-alive", "0.2") as served:
        until(lambda: "fake was not used for a while and is unloaded; the next request loads it" in served.said())
        body = {"model": "fake", "messages": HI, "max_tokens": 3}
        assert request(served.port, "GET", "/health", key=None).status == 200
        assert request(served.port, "POST", CHAT, body, key=None).status == 200
        assert served.stop() == 0
        assert "Traceback" not in served.said()


# -- the suite can fail -----------------------------------------------------------------------------------------------


NOBODY_COUNTS = PlantedBug("nobody counts", Models, "users", "self._calls.of(model.llm) + len(model.sessions)", "0")


def test_unloading_what_is_used_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(NOBODY_COUNTS, monkeypatch)
    with pytest.raises(AssertionError):
        test_a_model_in_use_is_not_unloaded_unless_forced()
