"""`previous_response_id`: responses that are stored can be gone on from, each as often as one likes. Row P07."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.planting import PlantedBug, plant
from tests.server.conversing import OTHER_KEY, SAME, SESSIONS, ascii_server, service_of
from tests.server.rules import assert_error, fake_server
from tests.server.serving import KEY, WAIT_S, Reply, Running, raw_request, request
from tests.server.wire import Wire, assert_no_leak, held, until
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel, FaultKind
from tokenmill.server.api import responses
from tokenmill.server.models import ModelSpec
from tokenmill.server.served import ResponseStore, StoredResponse

PATH = "/v1/responses"
GREEDY = {"temperature": 0, "max_output_tokens": 12}
FORGOTTEN = "not found"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with ascii_server() as one:
        yield one


def post(server: Running, said: Any, before: str | None = None, key: str = KEY, **changes: Any) -> Reply:
    body = {"model": "fake", "input": said, "previous_response_id": before, **GREEDY, **changes}
    return server.post(PATH, body, key=key)


def respond(server: Running, said: Any, before: str | None = None, **changes: Any) -> dict[str, Any]:
    reply = post(server, said, before, **changes)
    assert reply.status == 200, reply.body
    return dict(reply.json())


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


def cached(response: dict[str, Any]) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


def told_all(server: Running, *said: tuple[str, str], **changes: Any) -> str:
    """What is answered to a conversation that is sent as a whole, stored nowhere."""
    items = [{"role": role, "content": content} for role, content in said]
    return text_of(respond(server, items, store=False, **changes))


def assert_not_found(reply: Reply) -> None:
    """P07."""
    assert_error(reply, 400, "previous_response_id")
    assert reply.error["code"] == "previous_response_not_found"


# -- going on ---------------------------------------------------------------------------------------------------------


def go_on(server: Running) -> None:
    """Each answer is that to the whole conversation, and only what is new is computed."""
    last, said = None, []
    known = 0
    for turn in range(6):
        question = f"question {turn}"
        response = respond(server, question, last)
        said.append(("user", question))
        assert response["previous_response_id"] == last
        assert text_of(response) == told_all(server, *said)
        if turn:
            assert cached(response) >= known - 1
        said.append(("assistant", text_of(response)))
        last = response["id"]
        known = response["usage"]["total_tokens"]


@pytest.mark.req("R36")
def test_p07_a_response_goes_on_from_another(server: Running) -> None:
    go_on(server)


def branch(server: Running) -> None:
    """Going on twice from the same one gives two conversations, and neither knows of the other."""
    first = respond(server, "first")
    left = respond(server, "left", first["id"])
    right = respond(server, "right", first["id"])
    again = respond(server, "left", first["id"])
    both = [("user", "first"), ("assistant", text_of(first))]
    assert text_of(left) == text_of(again) == told_all(server, *both, ("user", "left"))
    assert text_of(right) == told_all(server, *both, ("user", "right"))
    below = respond(server, "more", left["id"])
    more = [*both, ("user", "left"), ("assistant", text_of(left)), ("user", "more")]
    assert text_of(below) == told_all(server, *more)
    assert text_of(respond(server, "right", first["id"])) == text_of(right)


@pytest.mark.req("R36")
def test_p07_branches_are_independent(server: Running) -> None:
    branch(server)


def test_p07_branches_at_once(server: Running) -> None:
    first = respond(server, "first")
    wanted = [text_of(respond(server, f"branch {i}", first["id"])) for i in range(8)]
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = text_of(respond(server, f"branch {number}", first["id"]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [found[number] for number in range(8)] == wanted


@pytest.mark.req("R36")
def test_p07_the_official_client_in_streams(server: Running) -> None:
    last = None
    texts = []
    for question in ("one", "two", "three"):
        options: dict[str, Any] = {"model": "fake", "input": question, **GREEDY}
        with server.client.responses.stream(**options, previous_response_id=last) as stream:
            events: list[Any] = list(stream)
        final = events[-1].response
        texts.append(final.output_text)
        assert (final.previous_response_id, final.usage is not None) == (last, True)
        last = final.id
    said = [("user", "one"), ("assistant", texts[0]), ("user", "two"), ("assistant", texts[1]), ("user", "three")]
    assert texts[2] == told_all(server, *said)
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.responses.create(model="fake", input="x", previous_response_id="resp_nobody")
    assert caught.value.code == "previous_response_not_found"


def test_p07_a_response_can_be_gone_on_from_as_soon_as_it_is_complete(server: Running) -> None:
    for _ in range(5):
        reply = post(server, "hi", stream=True)
        (last,) = [event for event in reply.events() if event["type"] in ("response.completed", "response.incomplete")]
        assert post(server, "more", last["response"]["id"]).status == 200


def other_instructions(server: Running, stream: bool) -> None:
    """They are a request's own, and what else was said stays: also what the system said."""
    first = respond(server, [{"role": "system", "content": "kept"}, {"role": "user", "content": "one"}])
    said = [("system", "kept"), ("user", "one"), ("assistant", text_of(first))]
    brief = respond(server, "two", first["id"], instructions="be brief")
    assert text_of(brief) == told_all(server, *said, ("user", "two"), instructions="be brief")
    said += [("user", "two"), ("assistant", text_of(brief))]
    same = respond(server, "three", brief["id"], instructions="be brief")
    assert text_of(same) == told_all(server, *said, ("user", "three"), instructions="be brief")
    assert cached(same) >= brief["usage"]["total_tokens"] - 1
    for other in ("be long", None):
        wanted = told_all(server, *said, ("user", "three"), instructions=other)
        if stream:
            events = post(server, "three", brief["id"], instructions=other, stream=True).events()
            assert text_of(events[-1]["response"]) == wanted
        else:
            assert text_of(respond(server, "three", brief["id"], instructions=other)) == wanted


@pytest.mark.req("R36")
@pytest.mark.parametrize("stream", [True, False])
def test_p07_instructions_are_not_inherited(server: Running, stream: bool) -> None:
    other_instructions(server, stream)


def test_p07_parameters_are_a_requests_own(server: Running) -> None:
    first = respond(server, "hi", temperature=1, seed=3, max_output_tokens=5)
    assert first["usage"]["output_tokens"] <= 5
    drawn = {text_of(respond(server, "more", first["id"], temperature=1)) for _ in range(4)}
    assert len(drawn) == 4, "without a seed each one is drawn anew"
    same = {text_of(respond(server, "more", first["id"], temperature=1, seed=3)) for _ in range(3)}
    assert len(same) == 1
    scored = respond(server, "more", first["id"], top_logprobs=2)
    assert len(scored["output"][0]["content"][0]["logprobs"]) == scored["usage"]["output_tokens"]


def test_p07_another_salt_shares_no_kv(server: Running) -> None:
    first = respond(server, "the same words " * 8, cache_salt="a")
    same = respond(server, "more", first["id"], cache_salt="a")
    other = respond(server, "more", first["id"], cache_salt="b")
    assert cached(same) > 100
    assert cached(other) == 0
    assert text_of(same) == text_of(other)


# -- what is not stored -----------------------------------------------------------------------------------------------


@pytest.mark.req("R36")
def test_p07_what_is_not_stored_cannot_be_gone_on_from(server: Running) -> None:
    count = len(service_of(server))
    first = respond(server, "hi", store=False)
    assert first["store"] is False
    assert_not_found(post(server, "more", first["id"]))
    stored = respond(server, "hi")
    assert (stored["store"], len(service_of(server))) == (True, count + 1)
    last = respond(server, "more", stored["id"], store=False)
    assert_not_found(post(server, "and more", last["id"]))
    until(lambda: len(service_of(server)) == count + 1)
    assert post(server, "and more", stored["id"]).status == 200


@pytest.mark.parametrize("name", ["", "resp_", "resp_" + "0" * 32, "x" * 256, "../models", "\u00e9"])
def test_p07_unknown_ones(server: Running, name: str) -> None:
    before = server.tick()
    assert_not_found(post(server, "hi", name))
    assert_not_found(post(server, "hi", name, stream=True))
    assert_error(post(server, "hi", "x" * 257), 400, "previous_response_id")
    assert server.tick() == before


def other_keys(server: Running) -> None:
    first = respond(server, "hi")
    assert_not_found(post(server, "more", first["id"], key=OTHER_KEY))
    assert_not_found(post(server, "more", first["id"], key=OTHER_KEY, stream=True))
    assert post(server, "more", first["id"]).status == 200


@pytest.mark.req("R36")
def test_p07_another_keys(server: Running) -> None:
    other_keys(server)


def test_p07_another_models() -> None:
    model = FakeModel(FakeConfig(vocab_size=258, max_context=512, depth=1))
    other = ModelSpec(name="second", load=lambda: AsyncLLM(model, kv_cache_tokens=1024))
    with fake_server(others=[other]) as server:
        first = respond(server, "hi")
        said = [("user", "hi"), ("assistant", text_of(first)), ("user", "more")]
        second = respond(server, "more", first["id"], model="second")
        assert text_of(second) == told_all(server, *said, model="second")
        said += [("assistant", text_of(second)), ("user", "again")]
        assert text_of(respond(server, "again", second["id"])) == told_all(server, *said)


def test_p07_one_whose_session_has_ended(server: Running) -> None:
    """It goes on from what was said, which is stored as well."""
    first = respond(server, "hi")
    (session,) = [one["id"] for one in server.get(SESSIONS).json()["data"] if one["num_tokens"]][-1:]
    assert server_delete(server, session) == 204
    said = [("user", "hi"), ("assistant", text_of(first)), ("user", "more")]
    assert text_of(respond(server, "more", first["id"])) == told_all(server, *said)


def server_delete(server: Running, session_id: str) -> int:
    return request(server.port, "DELETE", f"{SESSIONS}/{session_id}").status


@pytest.mark.parametrize("stream", [True, False])
def test_p07_an_answer_that_fails_is_not_stored_and_leaves_its_parent(server: Running, stream: bool) -> None:
    first = respond(server, "hi")
    count, stored = len(service_of(server)), len(server.served.responses)
    server.inject(FaultKind.NAN, after=3)
    failed = post(server, "more", first["id"], stream=stream, max_output_tokens=100)
    if failed.status == 200:
        name = failed.events()[-1]["response"]["id"]
        assert_not_found(post(server, "more", name))
    else:
        assert failed.status == 500
    until(lambda: len(service_of(server)) == count)
    assert len(server.served.responses) == stored
    assert post(server, "more", first["id"]).status == 200


def test_p07_instructions_that_do_not_fit_leave_no_session(server: Running) -> None:
    count = len(service_of(server))
    refused = post(server, "hi", instructions="x" * 5000)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    until(lambda: len(service_of(server)) == count)


def test_p07_what_does_not_fit_is_refused_and_leaves_nothing(server: Running) -> None:
    first = respond(server, "hi")
    count = len(service_of(server))
    for changes in ({"said": "x" * 5000}, {"said": "hi", "max_output_tokens": 4096}):
        refused = post(server, before=first["id"], **changes)
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    until(lambda: len(service_of(server)) == count)


# -- what is left behind ----------------------------------------------------------------------------------------------


def forget(server: Running) -> None:
    """The oldest goes when there is no more room, and its session with it; what is gone on from counts as new."""
    first, second = respond(server, "one"), respond(server, "two")
    third = respond(server, "three", first["id"])  # the first is younger than the second now
    fourth = respond(server, "four", third["id"])
    assert len(server.served.responses) == 3
    assert_not_found(post(server, "more", second["id"]))
    until(lambda: len(service_of(server)) == 3)
    fifth = respond(server, "five", fourth["id"])
    assert_not_found(post(server, "more", first["id"]))
    assert text_of(respond(server, "six", third["id"], store=False))
    assert text_of(respond(server, "six", fifth["id"], store=False)), "its parent's parent is gone, and it is whole"
    until(lambda: len(service_of(server)) == 3)
    assert_no_leak(server)


@pytest.mark.req("R36")
def test_p07_the_oldest_are_forgotten_and_their_sessions_end() -> None:
    with ascii_server(max_stored_responses=3) as server:
        forget(server)


def leave_early(server: Running) -> None:
    """Clients that leave, wherever their request is: in the session's making, in the queue, in the middle."""
    first = respond(server, "hi")
    count = len(service_of(server))
    for stream in (True, False):
        body = {"model": "fake", "input": "more", "previous_response_id": first["id"], "stream": stream}
        with held(server, after=4) as hold, Wire(server.port) as client:
            client.send(raw_request(PATH, {**body, "max_output_tokens": 2000, "temperature": 0}))
            hold.wait()
            client.leave("RST")
        until(lambda: len(service_of(server)) == count)
        for _ in range(20):  # some of them before anything was begun
            with Wire(server.port) as client:
                client.send(raw_request(PATH, body))
                client.leave("RST")
        server.wait_until_idle()
    assert post(server, "more", first["id"], store=False).status == 200


@pytest.mark.req("R36")
def test_p07_clients_that_leave_leave_no_sessions() -> None:
    with ascii_server(max_stored_responses=1) as server:
        leave_early(server)
        respond(server, "last")
        until(lambda: len(service_of(server)) == 1)
        assert_no_leak(server)


def cancel_before_it_begins(server: Running) -> None:
    """A call that is cancelled by its name while its session is about to be made."""
    first = respond(server, "hi")
    count = len(service_of(server))
    replies: list[Reply] = []
    (session,) = server.get(SESSIONS).json()["data"]
    path = f"{SESSIONS}/{session['id']}/generate"
    with held(server, after=3) as hold:  # what is gone on from is busy, so that its fork has to wait
        busy = threading.Thread(
            target=lambda: server.post(path, {"input": "busy", "stream": False, "max_tokens": 9, **SAME})
        )
        busy.start()
        hold.wait()
        named = {"headers": {"X-Request-Id": "early"}}
        body = {"model": "fake", "input": "more", "previous_response_id": first["id"], **GREEDY}
        asking = threading.Thread(target=lambda: replies.append(server.post(PATH, body, **named)))
        asking.start()
        behind = service_of(server)._model().queue.find(session["id"])
        until(lambda: behind.waiting)
        assert server.post("/v1/requests/early/cancel", {}).status == 200
        asking.join(WAIT_S)
    busy.join(WAIT_S)
    assert (replies[0].status, replies[0].error["code"]) == (499, "cancelled")
    server.wait_until_idle()
    assert len(service_of(server)) == count


def test_p07_a_cancel_before_it_begins_leaves_no_session() -> None:
    with ascii_server() as server:
        cancel_before_it_begins(server)


# -- the suite can fail -----------------------------------------------------------------------------------------------

BUGS: list[tuple[PlantedBug, Callable[[Running], None]]] = [
    (PlantedBug("any key will do", ResponseStore, "find", "stored.key == key", "True"), other_keys),
    (PlantedBug("branches are one", responses, "_answer",
                "return str(await model.sessions.fork(known))", "return known"), branch),
    (PlantedBug("instructions stay", StoredResponse, "conversation", "said[1:]", "said"),
     lambda server: other_instructions(server, stream=False)),
    (PlantedBug("sessions stay", ResponseStore, "_evict", "self.forget(self._remove(oldest))",
                "self._remove(oldest)"), forget),
    (PlantedBug("the newest is forgotten", ResponseStore, "_evict", "self._stored.items()",
                "reversed(self._stored.items())"), forget),
    (PlantedBug("what is cut off stays", responses, "_answer", "store.forget(made)", "pass"),
     leave_early),
]  # fmt: skip


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_is_caught(
    bug: PlantedBug, check: Callable[[Running], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ascii_server(max_stored_responses=3) as server:
        monkeypatch.setattr("tests.server.wire.PATIENCE_S", 0.5)
        plant(bug, monkeypatch)
        with pytest.raises(AssertionError):
            check(server)
