"""Several models in one server: which answers, when they are loaded and unloaded, and who may say so."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.planting import PlantedBug, plant
from tests.server.conversing import SAME, SESSIONS, converse, listening
from tests.server.refusals import BODIES, check_words
from tests.server.rules import assert_error, fake_server
from tests.server.serving import HI, KEY, WAIT_S, Reply, Running, child, request
from tests.server.test_lifecycle import assert_ends, change_program
from tests.server.wire import held, until
from tokenmill import AsyncLLM
from tokenmill.config import EngineConfig
from tokenmill.core import FakeConfig, FakeModel
from tokenmill.core.memory import MemoryPlan
from tokenmill.engine.fit import Fit
from tokenmill.errors import ConfigError, ModelLoadError, ModelNotFound
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.server.models import Models, ModelSpec

ADMIN = "sk-admin"
MIB = 1 << 20
CHAT = "/v1/chat/completions"


@dataclass
class Store:
    """A model that can be loaded, and what has become of it."""

    may_load: threading.Event = field(default_factory=threading.Event)
    may_close: threading.Event = field(default_factory=threading.Event)
    happened: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    """Of the next attempts to load it."""

    def __post_init__(self) -> None:
        self.may_load.set()
        self.may_close.set()

    def load(self) -> AsyncLLM:
        """A model that says other things than the first one does."""
        self.happened.append("load")
        assert self.may_load.wait(WAIT_S)
        if self.failures:
            raise self.failures.pop(0)
        model = FakeModel(FakeConfig(vocab_size=258, max_context=512, depth=1))
        model.replace_weight("salt", None)
        llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4), kv_cache_tokens=4096)
        close = llm.close

        async def closed() -> None:
            await asyncio.to_thread(self.may_close.wait, WAIT_S)
            await close()
            self.happened.append("close")

        llm.close = closed  # type: ignore[method-assign]
        return llm

    def spec(self, **options: Any) -> ModelSpec:
        usual: dict[str, Any] = {"name": "second", "aliases": frozenset({"two", "org/second"}), "at_start": False}
        return ModelSpec(load=self.load, **{**usual, **options})


@contextmanager
def two_models(store: Store | None = None, *, spec: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    store = store or Store()
    with fake_server(others=[store.spec(**(spec or {}))], **settings) as server:
        yield server
        store.may_load.set()
        store.may_close.set()


@pytest.fixture(scope="module")
def pair() -> Iterator[Running]:
    """Two models that are there from the start."""
    with two_models(spec={"at_start": True}) as one:
        yield one


def chat(server: Running, model: str, **changes: Any) -> Reply:
    return server.post(CHAT, {"model": model, "messages": HI, "max_tokens": 12, **SAME, **changes})


def status_of(server: Running, name: str = "second") -> dict[str, Any]:
    reply = server.get(f"/v1/models/{name}")
    assert reply.status == 200, reply.body
    return dict(reply.json())


def admin(server: Running, what: str, model: str = "second", key: str | None = KEY, **more: Any) -> Reply:
    return server.post(f"/v1/models/{what}", {"model": model, **more}, key=key)


def no_keys() -> dict[str, Any]:
    """Where there are none, everybody on this machine may load and unload."""
    return {"key_hashes": ()}


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


# -- loading ----------------------------------------------------------------------------------------------------------


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
        assert admin(server, "load").status == 200
        assert store.happened == ["load"]
        wanted = chat(server, "second").json()["choices"]
        unloaded = admin(server, "unload")
        assert (unloaded.status, unloaded.json()["status"]) == (200, "unloaded")
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
        assert told == [f"second can't be loaded: {failure}"] * 2
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
        from tokenmill.engine import async_llm
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


# -- unloading --------------------------------------------------------------------------------------------------------


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
        gone = server.post("/v1/responses", after)
        assert (gone.status, gone.error["code"]) == (404, "previous_response_not_found")
        assert chat(server, "second").status == 200
        for verb in ("turns", "stream"):
            assert_error(talk.get(verb), 404, "session_id")
        assert_error(chat(server, "second", session_id=talk.id), 404, "session_id")


def behind(server: Running, name: str) -> Running:
    """The server, with the engine of another of its models to look at."""
    (model,) = [one for one in server.served.models.loaded if one.name == name]
    return replace(server, llm=model.llm)


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


def test_keep_alive_of_the_command_line(tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake", "--keep-alive", "0.2") as served:
        until(lambda: "fake was not used for a while and is unloaded; the next request loads it" in served.said())
        body = {"model": "fake", "messages": HI, "max_tokens": 3}
        assert request(served.port, "GET", "/health", key=None).status == 200
        assert request(served.port, "POST", CHAT, body, key=None).status == 200
        assert served.stop() == 0
        assert "Traceback" not in served.said()


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


# -- the suite can fail -----------------------------------------------------------------------------------------------


def test_loading_it_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(PlantedBug("each loads its own", Models, "load", "if place.loading is None:", "if True:"), monkeypatch)
    store = Store()
    with two_models(store) as server, pytest.raises(AssertionError):
        load_once(server, store)


def test_unloading_what_is_used_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        PlantedBug("nobody counts", Models, "users", "self._calls.of(model.llm) + len(model.sessions)", "0"),
        monkeypatch,
    )
    with pytest.raises(AssertionError):
        test_a_model_in_use_is_not_unloaded_unless_forced()
