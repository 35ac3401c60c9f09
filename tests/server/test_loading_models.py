"""When a model is loaded: once, if it can be, and if there is room for it."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.planting import PlantedBug, plant
from tests.server.conversing import SESSIONS, converse
from tests.server.loading import CHAT, Store, admin, chat, no_keys, status_of, two_models
from tests.server.refusals import check_words
from tests.server.rules import fake_server
from tests.server.serving import HI, WAIT_S, Reply, Running, child, request
from tests.server.test_lifecycle import assert_ends, change_program
from tests.server.wire import until
from tokenmill.contract.backend import MemoryPlan
from tokenmill.entrypoints.fit import Fit
from tokenmill.errors import ConfigError, ModelLoadError, ModelNotFound
from tokenmill.server.models import Models

MIB = 1 << 20


def load_once(server: Running, store: Store) -> None:
    """Many want it at once: it is loaded once, and all are answered."""
    store.may_load.clear()
    replies: list[Reply] = []
    asks: list[Callable[[], Reply]] = [
        lambda: chat(server, "second"),
        lambda: chat(server, "two", stream=True),
        lambda: server.post(SESSIONS, {"model": "second"}),
        lambda: server.post("/tokenize", {"model": "two", "prompt": "hi"}),
    ]
    threads = [threading.Thread(target=lambda ask=ask: replies.append(ask())) for ask in asks * 2]
    for thread in threads:
        thread.start()
    until(lambda: server.served.gate.num_inside == len(threads))
    assert status_of(server)["status"] == "loading"
    assert status_of(server)["max_model_len"] is None
    assert chat(server, "fake").status == 200, "the others go on meanwhile"
    store.may_load.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert {reply.status for reply in replies} <= {200, 201}
    assert len(replies) == 8
    assert store.happened == ["load"]
    assert status_of(server)["status"] == "loaded"


@pytest.mark.req("R40")
def test_a_model_is_loaded_when_it_is_first_asked_for_and_once() -> None:
    store = Store()
    with two_models(store) as server:
        assert status_of(server)["status"] == "unloaded"
        assert server.get("/health").status == 200
        load_once(server, store)


@pytest.mark.req("R40")
def test_load_and_unload() -> None:
    store = Store()
    with two_models(store, **no_keys()) as server:
        loaded = admin(server, "load", "two")
        assert (loaded.status, loaded.json()["id"], loaded.json()["status"]) == (200, "second", "loaded")
        assert loaded.json()["default_sampling_params"]["temperature"] == 1.0
        assert admin(server, "load").status == 200
        assert store.happened == ["load"]
        wanted = chat(server, "second").json()["choices"]
        unloaded = admin(server, "unload")
        assert (unloaded.status, unloaded.json()["status"]) == (200, "unloaded")
        assert unloaded.json()["default_sampling_params"] is None
        assert admin(server, "unload").status == 200, "it is, already"
        assert chat(server, "second").json()["choices"] == wanted
        assert store.happened == ["load", "close", "load"]


@pytest.mark.parametrize(
    "failure",
    [
        ModelLoadError("/secret/models/second/config.json is damaged"),
        ModelNotFound("no model at /secret/models/second"),
        ConfigError("900 MiB are needed, see /secret/models/second"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_model_that_cannot_be_loaded_is_503_and_the_log_says_why(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(failures=[failure, failure])
    with two_models(store, **no_keys()) as server:
        for reply in (chat(server, "second", stream=True), admin(server, "load")):
            assert reply.status == 503
            assert (reply.error["type"], reply.error["code"]) == ("server_error", "model_load_failed")
            assert "secret" not in reply.body.decode()
            check_words(reply.error["message"])
            assert status_of(server)["status"] == "unloaded"
        told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert told == [f"second failed to load: {failure}"] * 2
        assert chat(server, "fake").status == 200
        assert chat(server, "second").status == 200, "the next one tries again"


def test_something_unexpected_in_loading_is_500_without_a_word_about_it() -> None:
    store = Store(failures=[RuntimeError("at /secret/models/second")])
    with two_models(store) as server:
        reply = chat(server, "second")
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
        assert "secret" not in reply.body.decode()
        assert chat(server, "second").status == 200


def test_whoever_waits_for_a_model_when_the_server_stops_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
        import threading
        from tokenmill.entrypoints import async_llm
        async_llm.AsyncLLM = lambda *_, **__: threading.Event().wait()
    """
    change_program(tmp_path / "program", program, monkeypatch)
    path = tmp_path / "models.toml"
    path.write_text('[[model]]\npath = "fake"\nat_start = false\n')
    with child(tmp_path / "log", "--config", str(path), "--drain", "0") as served:
        replies: list[Reply] = []
        body = {"model": "fake", "messages": HI}
        asking = threading.Thread(target=lambda: replies.append(request(served.port, "POST", CHAT, body, key=None)))
        asking.start()
        models = "/v1/models/fake"
        until(lambda: request(served.port, "GET", models, key=None).json()["status"] == "loading")
        served.process.send_signal(signal.SIGTERM)
        assert_ends(served)
        asking.join(WAIT_S)
    assert (replies[0].status, replies[0].error["code"]) == (503, "stopping")
    assert int(replies[0].headers["retry-after"]) >= 1


# -- memory -----------------------------------------------------------------------------------------------------------


def fit_of(needed_mib: int, free_mib: int) -> Fit:
    plan = MemoryPlan(needed_mib * MIB // 2, needed_mib * MIB // 4, needed_mib * MIB // 4)
    return Fit("int8", 512, plan, 1024, free_mib * MIB, most_sessions=0, longest_context=0)


@pytest.mark.req("R40")
def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    store = Store()
    with two_models(store, spec={"fit": lambda: fit_of(4000, 1500)}, **no_keys()) as server:
        for reply in (admin(server, "load"), chat(server, "second"), server.post(SESSIONS, {"model": "second"})):
            assert reply.status == 507
            assert (reply.error["type"], reply.error["code"]) == ("server_error", "out_of_memory")
            assert re.search(
                r"second needs 4,\d\d\d MiB \(weights 2,000, KV of one session 1,000, .*\)", reply.error["message"]
            )
            assert "only 1,500 MiB are free" in reply.error["message"]
        assert store.happened == []
        assert chat(server, "fake").status == 200


@pytest.mark.req("R40")
def test_models_that_nobody_uses_make_room_and_others_do_not() -> None:
    first, second = Store(), Store()

    def fit() -> Fit:
        """The other one has to go first."""
        return fit_of(1000, 1500 if first.happened.count("load") == first.happened.count("close") else 500)

    specs = [
        first.spec(name="first", aliases=frozenset(), keep_alive_s=600.0),
        second.spec(name="second", fit=fit, keep_alive_s=600.0),
    ]
    with fake_server(others=specs, **no_keys()) as server:
        talk = converse(server, model="first")
        assert admin(server, "load").status == 507, "it has a session"
        assert talk.delete().status == 204
        assert admin(server, "load").status == 200
        assert (status_of(server, "first")["status"], first.happened) == ("unloaded", ["load", "close"])
        assert status_of(server, "fake")["status"] == "loaded", "it is to stay"


# -- the suite can fail -----------------------------------------------------------------------------------------------


EACH_LOADS_ITS_OWN = PlantedBug("each loads its own", Models, "load", "entry.loading is None", "True")


def test_loading_it_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(EACH_LOADS_ITS_OWN, monkeypatch)
    store = Store()
    with two_models(store) as server, pytest.raises(AssertionError):
        load_once(server, store)
