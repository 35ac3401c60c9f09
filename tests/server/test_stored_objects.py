"""What OpenAI's clients can come back for: stored responses, background responses, conversations, chat completions."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import openai
import pytest

from tests.planting import PlantedBug, plant
from tests.server.conversing import OTHER_KEY, SAME, SESSIONS, ascii_server, service_of
from tests.server.rules import assert_error
from tests.server.serving import KEY, WAIT_S, Reply, Running, raw_request, request
from tests.server.wire import Wire, held, until
from tokenmill.errors import Overloaded, SessionNotFound
from tokenmill.server.api import responses
from tokenmill.server.api.responses import BackgroundResponse
from tokenmill.server.config import hash_key
from tokenmill.server.streaming import SessionSource

RESPONSES, CONVERSATIONS, CHAT = "/v1/responses", "/v1/conversations", "/v1/chat/completions"
SHORT: dict[str, Any] = {"max_output_tokens": 8, **SAME}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with ascii_server() as one:
        yield one


def respond(server: Running, said: Any = "hi", **changes: Any) -> dict[str, Any]:
    reply = server.post(RESPONSES, {"model": "fake", "input": said, **SHORT, **changes})
    assert reply.status == 200, reply.body
    return dict(reply.json())


def get(server: Running, path: str, key: str = KEY) -> Any:
    reply = server.get(path, key=key)
    assert reply.status == 200, reply.body
    return reply.json()


def delete(server: Running, path: str, key: str = KEY) -> Reply:
    return request(server.port, "DELETE", path, key=key)


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


def cached(response: dict[str, Any]) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


# -- stored responses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_retrieved_as_it_was_answered(server: Running, stream: bool) -> None:
    body = {"model": "fake", "input": "hi", "metadata": {"topic": "x"}, "stream": stream, **SHORT}
    reply = server.post(RESPONSES, body)
    told = reply.events()[-1]["response"] if stream else reply.json()
    assert get(server, f"{RESPONSES}/{told['id']}") == told
    assert (told["store"], told["background"], told["metadata"]) == (True, False, {"topic": "x"})
    assert delete(server, f"{RESPONSES}/{told['id']}").json() == {
        "id": told["id"],
        "object": "response",
        "deleted": True,
    }
    assert server.get(f"{RESPONSES}/{told['id']}").status == 404
    assert server.post(RESPONSES, {**body, "previous_response_id": told["id"]}).status == 400
    unstored = respond(server, store=False)
    assert server.get(f"{RESPONSES}/{unstored['id']}").status == 404


def test_input_items_are_listed_in_pages(server: Running) -> None:
    said: Any = [{"role": "user", "content": f"line {number}"} for number in range(5)]
    said.insert(1, {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"})
    said.insert(2, {"type": "function_call_output", "call_id": "c1", "output": "sunny"})
    path = f"{RESPONSES}/{respond(server, said)['id']}/input_items"
    page = get(server, f"{path}?order=asc")
    kinds = ["message", "function_call", "function_call_output", *["message"] * 4]
    assert [item["type"] for item in page["data"]] == kinds
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "line 0"}]
    names = [item["id"] for item in page["data"]]
    assert len(set(names)) == 7
    assert [item["id"] for item in get(server, path)["data"]] == names[::-1]
    page = get(server, f"{path}?order=asc&limit=2&after={names[1]}")
    assert ([item["id"] for item in page["data"]], page["has_more"], page["last_id"]) == (names[2:4], True, names[3])
    assert_error(server.get(f"{path}?after=nothing"), 404, "after")
    assert_error(server.get(f"{path}?limit=0"), 400, "limit")


def other_keys(server: Running) -> None:
    """To other keys, nothing of it exists."""
    response = respond(server, background=True)
    talk = server.post(CONVERSATIONS, {"items": [{"role": "user", "content": "hi"}]}).json()
    (item,) = get(server, f"{CONVERSATIONS}/{talk['id']}/items")["data"]
    chat = server.chat(store=True).json()
    for path in (f"{RESPONSES}/{response['id']}", f"{CONVERSATIONS}/{talk['id']}", f"{CHAT}/{chat['id']}"):
        assert server.get(path, key=OTHER_KEY).status == 404
        assert delete(server, path, key=OTHER_KEY).status == 404
    for path in ("input_items", "?stream=true"):
        assert server.get(f"{RESPONSES}/{response['id']}/{path}".replace("/?", "?"), key=OTHER_KEY).status == 404
    assert server.post(f"{RESPONSES}/{response['id']}/cancel", {}, key=OTHER_KEY).status == 404
    items = f"{CONVERSATIONS}/{talk['id']}/items"
    assert server.get(items, key=OTHER_KEY).status == 404
    assert server.get(f"{items}/{item['id']}", key=OTHER_KEY).status == 404
    assert server.post(items, {"items": [{"role": "user", "content": "x"}]}, key=OTHER_KEY).status == 404
    assert server.get(f"{CHAT}/{chat['id']}/messages", key=OTHER_KEY).status == 404
    assert server.post(f"{CHAT}/{chat['id']}", {"metadata": {}}, key=OTHER_KEY).status == 404
    assert get(server, CHAT, key=OTHER_KEY)["data"] == []
    asked = {"model": "fake", "input": "hi", "conversation": talk["id"], **SHORT}
    assert server.post(RESPONSES, asked, key=OTHER_KEY).status == 404
    referred = [{"type": "item_reference", "id": f"msg_{response['id'].removeprefix('resp_')}00"}]
    assert server.post(RESPONSES, {**asked, "input": referred, "conversation": None}, key=OTHER_KEY).status == 400


@pytest.mark.req("R36")
def test_other_keys_see_nothing_of_it(server: Running) -> None:
    other_keys(server)


def test_items_of_stored_responses_are_referred_to(server: Running) -> None:
    """As Vercel's client does."""
    first = respond(server)
    (item,) = first["output"]
    said = {"role": "user", "content": "hi"}
    more = {"role": "user", "content": "more"}
    referring = respond(server, [said, {"type": "item_reference", "id": item["id"]}, more])
    plain = respond(server, [said, {"role": "assistant", "content": text_of(first)}, more])
    assert text_of(referring) == text_of(plain)
    assert_error(server.post(RESPONSES, {"input": [{"type": "item_reference", "id": "msg_x"}], **SHORT}), 400, "input")


def test_input_tokens_are_counted(server: Running) -> None:
    first = respond(server)
    asked = {"model": "fake", "input": "more", "previous_response_id": first["id"], "instructions": "Be brief."}
    counted = server.post(f"{RESPONSES}/input_tokens", asked).json()
    answered = respond(server, "more", previous_response_id=first["id"], instructions="Be brief.")
    assert counted == {"object": "response.input_tokens", "input_tokens": answered["usage"]["input_tokens"]}


def test_the_oldest_turns_are_dropped_if_that_is_wanted(server: Running) -> None:
    long = [{"role": "user", "content": "x" * 1500} for _ in range(4)]
    assert server.post(RESPONSES, {"input": long, **SHORT}).error["code"] == "context_length_exceeded"
    for store in (True, False):
        answer = respond(server, long, truncation="auto", store=store)
        assert (answer["status"], answer["truncation"]) == ("incomplete", "auto")
        assert 3000 < answer["usage"]["input_tokens"] < 4096, "no more than need be"


# -- background -------------------------------------------------------------------------------------------------------


def poll(server: Running, response_id: str) -> dict[str, Any]:
    """Until it has ended."""
    path = f"{RESPONSES}/{response_id}"
    until(lambda: get(server, path)["status"] not in ("queued", "in_progress"))
    return dict(get(server, path))


def test_a_background_response_is_polled_for(server: Running) -> None:
    whole = respond(server, "in the background")
    with held(server, after=3):
        begun = respond(server, "in the background", background=True)
        assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
        until(lambda: get(server, f"{RESPONSES}/{begun['id']}")["status"] == "in_progress")
        assert_error(
            server.post(RESPONSES, {"input": "x", "previous_response_id": begun["id"], **SHORT}),
            400,
            "previous_response_id",
        )
    ended = poll(server, begun["id"])
    assert (ended["status"], text_of(ended), ended["usage"]) == ("incomplete", text_of(whole), ended["usage"])
    assert text_of(respond(server, "more", previous_response_id=begun["id"])) == text_of(
        respond(server, "more", previous_response_id=whole["id"])
    )
    assert server.post(f"{RESPONSES}/{begun['id']}/cancel", {}).json()["status"] == "incomplete", "it has ended"
    assert_error(server.post(f"{RESPONSES}/{whole['id']}/cancel", {}), 400, "response_id")
    assert_error(server.post(RESPONSES, {"input": "x", "background": True, "store": False}), 400, "background")


def resume(server: Running) -> None:
    """A client that was cut off goes on after any event that it has seen."""
    body = {"model": "fake", "input": "stream", "background": True, "stream": True, **SHORT, "max_output_tokens": 12}
    with held(server, after=4) as hold, Wire(server.port) as client:
        client.send(raw_request(RESPONSES, body))
        name = client.first_id()
        hold.wait()
        client.leave("RST")
    ended = poll(server, name)
    events = server.get(f"{RESPONSES}/{name}?stream=true").events()
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert (kinds[-1], events[-1]["response"]) == ("response.incomplete", ended)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == text_of(ended)
    for last in (0, 5, len(events) - 2, len(events) - 1):
        rest = server.get(f"{RESPONSES}/{name}?stream=true&starting_after={last}").events()
        assert rest == events[last + 1 :]
    with server.client.responses.stream(response_id=name, starting_after=5) as stream:
        seen = list(stream)
    assert [event.sequence_number for event in seen] == list(range(6, len(events)))


@pytest.mark.req("R36")
def test_a_background_stream_is_resumed(server: Running) -> None:
    resume(server)


def test_a_background_stream_is_read_while_it_runs(server: Running) -> None:
    with held(server, after=4):
        begun = respond(server, "slow", background=True)
        found: list[Reply] = []
        path = f"{RESPONSES}/{begun['id']}?stream=true&starting_after=2"
        reading = threading.Thread(target=lambda: found.append(server.get(path)))
        reading.start()
        until(lambda: get(server, f"{RESPONSES}/{begun['id']}")["status"] == "in_progress")
    reading.join(WAIT_S)
    assert found[0].events()[0]["sequence_number"] == 3
    assert found[0].events()[-1]["type"] == "response.incomplete"


def cancel(server: Running) -> None:
    count = len(service_of(server))
    with held(server, after=4) as hold:
        begun = respond(server, "long", background=True, max_output_tokens=2000)
        hold.wait()
        cancelling: list[Reply] = []
        thread = threading.Thread(
            target=lambda: cancelling.append(server.post(f"{RESPONSES}/{begun['id']}/cancel", {}))
        )
        thread.start()
        hold.release()
        thread.join(WAIT_S)
    assert cancelling[0].json()["status"] == "cancelled"
    assert get(server, f"{RESPONSES}/{begun['id']}")["status"] == "cancelled"
    stored = server.do(server.served.document("response", begun["id"], hash_key(KEY).hex()))
    assert stored is not None
    assert stored.body["response"]["status"] == "cancelled"
    assert server.get(f"{RESPONSES}/{begun['id']}?stream=true").events()[-1]["response"]["status"] == "cancelled"
    asked = {"input": "more", "previous_response_id": begun["id"], **SHORT}
    assert_error(server.post(RESPONSES, asked), 400, "previous_response_id")
    server.wait_until_idle()
    until(lambda: len(service_of(server)) == count)


def test_a_background_response_is_cancelled(server: Running) -> None:
    cancel(server)


def test_a_background_response_that_does_not_fit_has_failed(server: Running) -> None:
    ended = poll(server, respond(server, "x" * 5000, background=True)["id"])
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")
    assert "maximum context length" in ended["error"]["message"]


# -- conversations ----------------------------------------------------------------------------------------------------


def new_talk(server: Running, **body: Any) -> str:
    reply = server.post(CONVERSATIONS, body)
    assert reply.status == 200, reply.body
    assert reply.json()["object"] == "conversation"
    return str(reply.json()["id"])


def go_on(server: Running) -> None:
    """Each response is that to all items, and only what is new is computed."""
    talk = new_talk(server, items=[{"role": "user", "content": "My name is Ada."}])
    said: list[Any] = [{"role": "user", "content": "My name is Ada."}]
    known, sessions = 0, set()
    for turn in range(4):
        stream = bool(turn % 2)
        body = {"model": "fake", "input": f"question {turn}", "conversation": {"id": talk}, "stream": stream, **SHORT}
        reply = server.post(RESPONSES, body)
        assert reply.status == 200, reply.body
        response = reply.events()[-1]["response"] if stream else reply.json()
        said.append({"role": "user", "content": f"question {turn}"})
        assert text_of(response) == text_of(respond(server, said, store=False))
        assert response["conversation"] == {"id": talk}
        if turn:
            assert cached(response) >= known - 1
        known = response["usage"]["total_tokens"]
        said.append({"role": "assistant", "content": text_of(response)})
        mine = [one for one in get(server, SESSIONS)["data"] if one["metadata"] == {"conversation": talk}]
        sessions |= {one["id"] for one in mine}
    items = get(server, f"{CONVERSATIONS}/{talk}/items?order=asc")["data"]
    assert [item["content"][0]["text"] for item in items] == [one["content"] for one in said]
    assert len(sessions) == 1, "it is one session"
    assert delete(server, f"{CONVERSATIONS}/{talk}").json()["object"] == "conversation.deleted"
    assert server.get(f"{SESSIONS}/{sessions.pop()}").status == 404


@pytest.mark.req("R36")
def test_a_conversation_continued_reuses_its_kv(server: Running) -> None:
    go_on(server)


def change_items(server: Running) -> None:
    """What was added or deleted besides is there, or is not, in the next answer."""
    talk = new_talk(server)
    first = respond(server, "one", conversation=talk)
    added = server.post(f"{CONVERSATIONS}/{talk}/items", {"items": [{"role": "user", "content": "two"}]}).json()
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": text_of(first)}]
    more = [{"role": "user", "content": "two"}, {"role": "user", "content": "three"}]
    second = respond(server, "three", conversation=talk)
    assert text_of(second) == text_of(respond(server, [*said, *more], store=False))
    gone = added["data"][0]["id"]
    assert get(server, f"{CONVERSATIONS}/{talk}/items/{gone}")["content"][0]["text"] == "two"
    assert delete(server, f"{CONVERSATIONS}/{talk}/items/{gone}").json()["id"] == talk
    assert server.get(f"{CONVERSATIONS}/{talk}/items/{gone}").status == 404
    answered = [{"role": "user", "content": "three"}, {"role": "assistant", "content": text_of(second)}]
    last = respond(server, "four", conversation=talk)
    assert text_of(last) == text_of(
        respond(server, [*said, *answered, {"role": "user", "content": "four"}], store=False)
    )


def test_items_are_added_and_deleted(server: Running) -> None:
    change_items(server)


def test_conversations_have_metadata(server: Running) -> None:
    talk = new_talk(server, metadata={"topic": "a"})
    assert get(server, f"{CONVERSATIONS}/{talk}")["metadata"] == {"topic": "a"}
    assert server.post(f"{CONVERSATIONS}/{talk}", {"metadata": {"topic": "b"}}).json()["metadata"] == {"topic": "b"}
    assert get(server, f"{CONVERSATIONS}/{talk}")["metadata"] == {"topic": "b"}
    assert_error(server.post(CONVERSATIONS, {"items": [{"type": "web_search_call"}]}), 400, "items")
    assert_error(server.post(CONVERSATIONS, {"items": [{"role": "user", "content": "x"}] * 21}), 400, "items")
    asked = {"input": "x", "conversation": talk, "previous_response_id": "resp_x"}
    assert_error(server.post(RESPONSES, asked), 400, "previous_response_id")
    assert server.post(RESPONSES, {"input": "x", "conversation": "conv_nothing", **SHORT}).status == 404


def lock(server: Running) -> None:
    """One response at a time; one that fails, or whose client leaves, leaves the conversation as it was."""
    talk, said = new_talk(server), []
    for question in ("one", "two"):
        answer = respond(server, question, conversation=talk)
        said += [{"role": "user", "content": question}, {"role": "assistant", "content": text_of(answer)}]
    path, asked = f"{CONVERSATIONS}/{talk}/items", {"input": "three", "conversation": talk, **SHORT}
    with held(server, after=3) as hold, Wire(server.port) as client:
        client.send(raw_request(RESPONSES, {**asked, "max_output_tokens": 2000}))
        hold.wait()
        assert server.post(path, {"items": [{"role": "user", "content": "x"}]}).status == 409
        refused = server.post(RESPONSES, asked)
        assert (refused.status, refused.error["code"]) == (409, "conversation_locked")
        assert server.post(RESPONSES, asked, key=OTHER_KEY).status == 404, "it is not there, locked or not"
        client.leave("RST")
    server.wait_until_idle()
    assert len(get(server, path)["data"]) == 4, "what was cut off was not added"
    assert server.post(RESPONSES, {**asked, "temperature": -1}).status == 400, "nor is it locked by what was refused"
    assert server.post(RESPONSES, {**asked, "input": "x" * 5000}).status == 400
    last = respond(server, "three", conversation=talk)
    assert text_of(last) == text_of(respond(server, [*said, {"role": "user", "content": "three"}], store=False))


def test_a_conversation_takes_one_response_at_a_time(server: Running) -> None:
    lock(server)


def cut_off(server: Running) -> None:
    """A first response whose client leaves leaves no session."""
    talk = new_talk(server)
    with held(server, after=3) as hold, Wire(server.port) as client:
        client.send(raw_request(RESPONSES, {"input": "x", "conversation": talk, **SHORT, "max_output_tokens": 2000}))
        hold.wait()
        client.leave("RST")
    server.wait_until_idle()
    until(lambda: {"conversation": talk} not in [one["metadata"] for one in get(server, SESSIONS)["data"]])


def test_a_response_that_is_cut_off_leaves_no_session(server: Running) -> None:
    cut_off(server)


def test_a_conversation_goes_on_in_the_background_and_with_other_instructions(server: Running) -> None:
    talk = new_talk(server)
    first = poll(server, respond(server, "one", conversation=talk, background=True)["id"])
    second = respond(server, "two", conversation=talk, instructions="Be brief.")
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": text_of(first)}]
    asked = [*said, {"role": "user", "content": "two"}]
    assert text_of(second) == text_of(respond(server, asked, instructions="Be brief.", store=False))
    assert len([one for one in get(server, SESSIONS)["data"] if one["metadata"] == {"conversation": talk}]) == 1
    after = respond(server, "three", previous_response_id=second["id"])
    asked += [{"role": "assistant", "content": text_of(second)}, {"role": "user", "content": "three"}]
    assert text_of(after) == text_of(respond(server, asked, store=False)), "it can be gone on from elsewhere"


def leave_at_the_end(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that can't be added to its conversation leaves it as it was, and so does one that nobody waits for."""
    talk = new_talk(server)
    first = respond(server, "one", conversation=talk)
    asked = {"input": "two", "conversation": talk, **SHORT}
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": text_of(first)}]

    async def refuse(*_: Any) -> None:
        assert delete(server, f"{CONVERSATIONS}/{talk}").status == 409
        raise Overloaded("full")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(responses, "save_talk", lambda *given: asyncio.to_thread(asyncio.run, refuse(*given)))
            refused = server.post(RESPONSES, asked)
        assert (refused.status, refused.error["code"]) == (507, "not_stored"), "it is not tried again"
    assert len(get(server, f"{CONVERSATIONS}/{talk}/items")["data"]) == 2
    last = respond(server, "three", conversation=talk)
    assert text_of(last) == text_of(respond(server, [*said, {"role": "user", "content": "three"}], store=False))


def test_a_session_is_not_ahead_of_its_conversation(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_at_the_end(server, monkeypatch)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_outlives_a_session_that_is_ended_before_it_is_read(
    server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session of a conversation can be deleted like any other, also while a slow client reads its answer."""
    close = SessionSource.close

    async def ended_first(self: SessionSource) -> None:
        with suppress(SessionNotFound):
            await service_of(server).end_session(str(self._session_id))
        await close(self)

    talk = new_talk(server)
    for where in ({"conversation": talk}, {}):
        asked = {"input": "one", "stream": stream, **where, **SHORT}
        with monkeypatch.context() as patch:
            patch.setattr(SessionSource, "close", ended_first)
            reply = server.post(RESPONSES, asked)
        response = reply.events()[-1]["response"] if stream else reply.json()
        assert (reply.status, response["status"]) == (200, "incomplete"), "as it is without"
        assert get(server, f"{RESPONSES}/{response['id']}") == response
        said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": text_of(response)}]
        asked = [*said, {"role": "user", "content": "two"}]
        expected = text_of(respond(server, asked, store=False))
        assert text_of(respond(server, "two", previous_response_id=response["id"])) == expected
        assert text_of(respond(server, "two", **where) if where else respond(server, asked)) == expected


def test_ids_of_items_are_unique(server: Running) -> None:
    item = {"role": "user", "content": "one", "id": "msg_1"}
    for path, body in ((CONVERSATIONS, {"items": [item, item]}), (RESPONSES, {"input": [item, item], **SHORT})):
        assert_error(server.post(path, body), 400, "input" if path == RESPONSES else "items")
    talk = new_talk(server, items=[item])
    respond(server, [item], conversation=talk)
    names = [one["id"] for one in get(server, f"{CONVERSATIONS}/{talk}/items?order=asc")["data"]]
    assert (names[0], len(set(names))) == ("msg_1", 3)


def test_a_conversation_goes_on_after_a_call_that_was_cut_off(server: Running) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"city": "Par'}
    assert_error(server.post(CONVERSATIONS, {"items": [call]}), 400, "items")
    talk = new_talk(server, items=[{"role": "user", "content": "x"}, {**call, "status": "incomplete"}])
    assert text_of(respond(server, "go on", conversation=talk))


@pytest.mark.parametrize("wrong", [{"type": []}, {"role": "user", "content": [{"type": {}, "text": "x"}]}])
def test_types_that_are_no_strings_are_refused(server: Running, wrong: dict[str, Any]) -> None:
    assert_error(server.post(CONVERSATIONS, {"items": [wrong]}), 400, "items")
    assert_error(server.post(RESPONSES, {"input": [wrong], **SHORT}), 400, "input")


# -- chat completions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_are_stored_if_that_is_wanted(server: Running, stream: bool) -> None:
    asked: dict[str, Any] = {"store": True, "metadata": {"topic": f"t{stream}"}, **SAME}
    whole = server.chat(**SAME).json()
    assert server.get(f"{CHAT}/{whole['id']}").status == 404, "only if it is asked for"
    reply = server.chat(**asked, stream=stream)
    name = reply.events()[0]["id"] if stream else reply.json()["id"]
    stored = get(server, f"{CHAT}/{name}")
    assert (stored["choices"], stored["usage"]) == (whole["choices"], stored["usage"])
    assert (stored["object"], stored["metadata"]) == ("chat.completion", {"topic": f"t{stream}"})
    messages = get(server, f"{CHAT}/{name}/messages")
    assert [(one["role"], one["content"]) for one in messages["data"]] == [("user", "hi")]
    found = get(server, f"{CHAT}?metadata[topic]=t{stream}")["data"]
    assert [one["id"] for one in found] == [name]
    assert get(server, f"{CHAT}?model=other")["data"] == []
    assert server.post(f"{CHAT}/{name}", {"metadata": {"topic": "new"}}).json()["metadata"] == {"topic": "new"}
    assert get(server, f"{CHAT}?metadata[topic]=new&model=fake")["data"][0]["id"] == name
    assert delete(server, f"{CHAT}/{name}").json()["object"] == "chat.completion.deleted"
    assert server.get(f"{CHAT}/{name}").status == 404


@pytest.mark.parametrize("name", ['a"b', "a\\b", "é", "a.b", "$", "it's"])
def test_completions_are_found_by_metadata_of_any_name(server: Running, name: str) -> None:
    kept = [server.chat(store=True, metadata={name: value}).json()["id"] for value in ("x", "y")]
    found = get(server, f"{CHAT}?{urlencode({f'metadata[{name}]': 'x'})}")["data"]
    assert [one["id"] for one in found] == kept[:1]
    assert get(server, f"{CHAT}?{urlencode({f'metadata[{name}' + chr(0) + ']': 'x'})}")["data"] == []


def test_metadata_is_checked_before_anything_is_generated(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "store": True, "stream": True}
    for metadata in ({"a": "x" * 513}, {str(number): "" for number in range(17)}, {"a": 1}):
        assert_error(server.post(CHAT, {**body, "metadata": metadata}), 400, "metadata")
        assert_error(server.post(RESPONSES, {"input": "hi", "stream": True, "metadata": metadata}), 400, "metadata")
    filters = "&".join(f"metadata[{number}]=x" for number in range(17))
    assert_error(server.get(f"{CHAT}?{filters}"), 400, "metadata")
    assert get(server, f"{CHAT}?model=fake&{filters.partition('&')[2]}")["data"] == []


# -- bounds and restarts ----------------------------------------------------------------------------------------------


def test_what_is_stored_is_bounded() -> None:
    with ascii_server(max_stored_responses=2, max_stored_bytes=20_000) as server:
        names = [respond(server, f"{number}")["id"] for number in range(3)]
        assert [server.get(f"{RESPONSES}/{name}").status for name in names] == [404, 200, 200]
        refused = server.post(CONVERSATIONS, {"items": [{"role": "user", "content": "x" * 30_000}]})
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        talk = new_talk(server, items=[{"role": "user", "content": "x" * 19_000}])
        assert get(server, f"{CONVERSATIONS}/{talk}")["id"] == talk
        assert server.get(f"{RESPONSES}/{names[-1]}").status == 404, "it has made room"
        large = respond(server, "y" * 3000)
        assert server.get(f"{RESPONSES}/{large['id']}").status == 404, "the answer stands, though it is not kept"


def outlive(folder: Path) -> None:
    """Everything that is stored is there after a restart, and goes on as before."""
    with ascii_server(store=folder) as server:
        first = respond(server, "one")
        talk = new_talk(server, metadata={"topic": "x"})
        second = respond(server, "a long question " * 8, conversation=talk)
        chat = server.chat(store=True).json()
        with held(server, after=3) as hold:
            begun = respond(server, "never", background=True, max_output_tokens=2000)
            hold.wait()
            killed = folder.with_name("killed")
            shutil.copytree(folder, killed)  # what a power cut would leave
            hold.release()
            assert delete(server, f"{RESPONSES}/{begun['id']}").status == 200, "it ends"
    with ascii_server(store=killed) as server:
        assert get(server, f"{RESPONSES}/{first['id']}") == first
        assert get(server, f"{CHAT}/{chat['id']}")["choices"] == chat["choices"]
        lost = get(server, f"{RESPONSES}/{begun['id']}")
        assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
        events = server.get(f"{RESPONSES}/{begun['id']}?stream=true").events()
        assert [event["type"] for event in events] == ["response.created", "response.failed"]
        more = respond(server, "two", previous_response_id=first["id"])
        said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": text_of(first)}]
        assert text_of(more) == text_of(respond(server, [*said, {"role": "user", "content": "two"}], store=False))
        assert get(server, f"{CONVERSATIONS}/{talk}")["metadata"] == {"topic": "x"}
        sessions = [one for one in get(server, SESSIONS)["data"] if one["metadata"] == {"conversation": talk}]
        third = respond(server, "and?", conversation=talk)
        assert len(sessions) == 1
        after = [one for one in get(server, SESSIONS)["data"] if one["metadata"] == {"conversation": talk}]
        assert [one["id"] for one in after] == [one["id"] for one in sessions], "its session goes on"
        assert third["usage"]["input_tokens"] > second["usage"]["total_tokens"]
        assert len(get(server, f"{CONVERSATIONS}/{talk}/items")["data"]) == 4


@pytest.mark.req("R36", "B3")
def test_what_is_stored_outlives_the_server(tmp_path: Path) -> None:
    outlive(tmp_path / "store")


def test_the_answer_stands_where_the_disk_does_not_take_it(tmp_path: Path) -> None:
    with ascii_server(store=tmp_path) as server:
        assert server.served.store is not None
        server.served.store._post(lambda connection: connection.execute("PRAGMA query_only=True")).result(WAIT_S)
        first = respond(server, "one")
        assert server.get(f"{RESPONSES}/{first['id']}").status == 404
        assert text_of(respond(server, "more", previous_response_id=first["id"])), "from memory"
        refused = server.post(CONVERSATIONS, {})
        assert (refused.status, refused.error["code"]) == (507, "not_durable")


# -- the official client ----------------------------------------------------------------------------------------------


def test_the_client_s_verbs(server: Running) -> None:
    client: openai.OpenAI = server.client
    extra: Any = {"extra_body": SAME}
    talk = client.conversations.create(items=[{"role": "user", "content": "hi"}], metadata={"a": "b"})
    answer = client.responses.create(
        model="fake", input="x", conversation=talk.id, max_output_tokens=8, store=True, **extra
    )
    items = list(client.conversations.items.list(talk.id, order="asc", limit=1))
    assert [item.type for item in items] == ["message"] * 3
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    assert [item.type for item in client.responses.input_items.list(answer.id)] == ["message"]
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    client.conversations.update(talk.id, metadata={"a": "c"})
    client.conversations.delete(talk.id)
    kept = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], store=True, max_tokens=4
    )
    assert kept.id in [one.id for one in client.chat.completions.list(metadata={}, limit=1)]
    client.chat.completions.update(kept.id, metadata={"x": "y"})
    assert next(iter(client.chat.completions.list(metadata={"x": "y"}))).id == kept.id
    assert [one.content for one in client.chat.completions.messages.list(kept.id)] == ["hi"]
    assert client.chat.completions.delete(kept.id).deleted


# -- the suite can fail -----------------------------------------------------------------------------------------------

BUGS: list[tuple[PlantedBug, Callable[[Running], None]]] = [
    (PlantedBug("the lock stays", responses, "_lock", "busy.discard(name)", "None"), lock),
    (PlantedBug("no lock", responses, "_lock", "busy.add(name)", "None"), lock),
    (PlantedBug("half an answer stays", responses, "_answer_in_conversation",
                "started.served.responses.forget(stored)", "None"), cut_off),
    (PlantedBug("added items are forgotten", responses, "start_response",
                "[*as_messages(more, past.most_parts, known_calls=None), *messages] if more else messages", "messages"),
     change_items),
    (PlantedBug("a new session each time", responses, "_known_session",
                "session_of(past.talk, model, started.made(model))", "None"), go_on),
    (PlantedBug("an event twice", BackgroundResponse, "events", "events[first:]", "events[max(0, first - 1):]"),
     resume),
    (PlantedBug("its end is not stored", BackgroundResponse, "_run",
                "await self.started.store(writer.state, replaces=True)", "None"), cancel),
    (PlantedBug("everybody's items", responses, "_referred", "await served.document(RESPONSE, response, key)",
                "await served.document(RESPONSE, response, served.keys.accounts[0].key.id)"), other_keys),
]  # fmt: skip


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_is_caught(
    bug: PlantedBug, check: Callable[[Running], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ascii_server() as server:
        monkeypatch.setattr("tests.server.wire.PATIENCE_S", 0.5)
        plant(bug, monkeypatch)
        with pytest.raises(AssertionError):
            check(server)
