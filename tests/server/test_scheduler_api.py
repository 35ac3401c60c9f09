"""What the engines are doing, over HTTP: a snapshot, and events that rebuild it at the other end."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.queueing import read
from tests.server.serving import KEY, WAIT_S, Running, running
from tests.server.telling import CHAT, OTHER_KEY, Scrape, following, make_config, make_llm
from tests.server.wire import Wire, chat_body, chat_request, held, until, wait_for_inbox
from tokenmill.backends.fake import FaultKind
from tokenmill.cli.follow import LiveState, frame
from tokenmill.engine.events import CoreSnapshot
from tokenmill.engine.request import Hints
from tokenmill.params import SamplingParams
from tokenmill.server.config import hash_key
from tokenmill.server.telemetry.live import LiveCore, Names, Reader, snapshot_from, snapshot_json

SCHEDULER = "/v1/scheduler"
HASH = re.compile("[0-9a-f]{8}")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(make_llm(max_num_seqs=3, max_queue=8), make_config()) as one:
        yield one


def core_of(server: Running, key: str = KEY) -> dict[str, Any]:
    """The only core of the only model."""
    told = server.get(SCHEDULER, key=key).json()
    assert told["object"] == "scheduler"
    ((model,), cores) = told["models"], told["models"][0]["cores"]
    assert (model["model"], len(cores)) == ("fake", 1)
    return dict(cores[0])


def shown(server: Running, snapshot: CoreSnapshot, key: str = KEY) -> dict[str, Any]:
    """A snapshot of the core as a caller may see it."""
    return snapshot_json(snapshot, server.served.telemetry.names.seen_by(hash_key(key).hex()))


def chat_in_session(server: Running, session: str | None, key: str, prompt: str) -> None:
    """One turn in the engine, as sessions have them."""

    async def turn() -> None:
        hints = Hints(key=hash_key(key).hex(), owner=session)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        async for _ in server.llm.generate(prompt, params, session, hints=hints):
            pass

    asyncio.run(turn())


# -- a snapshot -------------------------------------------------------------------------------------------------------


@pytest.mark.req("R50", "B6")
def test_the_scheduler_tells_what_runs_waits_and_is_parked(server: Running) -> None:
    chat_in_session(server, "sess-mine", KEY, "a session that is mine")
    with held(server, after=1) as hold:
        clients = [Wire(server.port) for _ in range(5)]
        clients[0].send(chat_request("client 0", max_tokens=20))
        hold.wait()
        for number, client in enumerate(clients[1:], 1):
            client.send(chat_request(f"client {number}", max_tokens=20))
            wait_for_inbox(server, number)
        for _ in range(3):
            hold.step()
        told, view = core_of(server), server.served.telemetry.watches["fake"][0].view
        assert {key: told[key] for key in told if key not in ("core", "rates")} == shown(server, view.snapshot())
        agree = server.core.call(lambda core: core.snapshot() == view.snapshot())
        hold.step()
        assert agree.result(WAIT_S), "the view is not what the core says"
        states = [slot["state"] for slot in told["slots"]]
        assert len(states) == 3
        assert "idle" not in states
        assert "generating" in states
        assert len(told["waiting"]) == 2
        assert all(one["request"].startswith("chatcmpl-") for one in (*told["slots"], *told["waiting"]))
        assert "sess-mine" in [one["session"] for one in told["parked"]]
        cells = told["cells"]
        assert cells["used"] + cells["free"] == cells["all"] > cells["used"] > 0
        assert told["rates"]["ticks"] > 0
        hold.release()
        assert all(read(client).status == 200 for client in clients)
        for client in clients:
            client.socket.close()
    server.wait_until_idle()
    assert {slot["state"] for slot in core_of(server)["slots"]} == {"idle"}


@pytest.mark.req("R50", "B6")
def test_21_2_parked_tokens_are_counted_once() -> None:
    """Two sessions and two plain requests that begin alike: in the API, the metrics and `top`."""
    with running(make_llm(), make_config()) as server:
        begins = "the same long beginning " * 40
        for session in ("sess-one", "sess-two"):
            chat_in_session(server, session, KEY, begins + session)
        for text in ("plain", "other"):
            chat_in_session(server, None, KEY, begins + text)
        server.wait_until_idle()
        told, metrics = core_of(server), Scrape(server)
        summed = sum(one["tokens"] for one in told["parked"])
        assert len(told["parked"]) == 4
        assert len(begins) < told["parked_tokens"]["all"] <= told["cells"]["used"] < summed / 3
        assert 0 < told["parked_tokens"]["plain"] < 20, "sessions hold the rest"
        assert metrics.sum("tokenmill_parked_tokens") == told["parked_tokens"]["all"]
        state = LiveState("http://127.0.0.1")
        state.take_all(server.get(SCHEDULER).json())
        text = "\n".join(frame(state, 100, 60, colour=False))
        assert f"{told['parked_tokens']['all']:,} tokens parked" in text
        assert f"{told['parked_tokens']['plain']} tokens  (no session)" in text


@pytest.mark.req("B6")
def test_other_keys_see_hashes(server: Running) -> None:
    chat_in_session(server, "sess-secret", KEY, "a secret session")
    with held(server, after=1) as hold, Wire(server.port) as client:
        client.send(chat_request("mine"))
        hold.wait()
        mine, others = core_of(server, KEY), core_of(server, OTHER_KEY)
        (name,) = [slot["request"] for slot in mine["slots"] if slot["state"] != "idle"]
        (hidden,) = [slot["request"] for slot in others["slots"] if slot["state"] != "idle"]
        assert name.startswith("chatcmpl-")
        assert HASH.fullmatch(hidden)
        sessions = {one["session"] for one in others["parked"]}
        assert "sess-secret" in {one["session"] for one in mine["parked"]}
        assert all(one is None or HASH.fullmatch(one) for one in sessions)
        assert [one["tokens"] for one in mine["parked"]] == [one["tokens"] for one in others["parked"]]
        hold.release()
        assert read(client).status == 200


def test_a_hash_is_of_this_process_alone() -> None:
    one, other = Names(), Names()
    assert one.shown("name", "a", "a") == "name"
    assert one.shown("name", "a", "b") == one.shown("name", "a", "c") != one.shown("name 2", "a", "b")
    assert one.shown("name", "a", "b") != other.shown("name", "a", "b")


# -- events -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("R42", "B6")
@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_events_rebuild_the_state_at_the_other_end(server: Running, key: str) -> None:
    with following(server, key) as events:
        kind, told = events.next()
        assert kind == "snapshot"
        far = LiveCore(told)
        server.inject(FaultKind.FAIL, after=6)
        threads = [
            threading.Thread(target=server.post, args=(CHAT, chat_body(f"number {i} of {key}", max_tokens=12)))
            for i in range(6)
        ]
        for thread in threads:
            thread.start()
        heard = events.until_end_of(len(threads))
        for thread in threads:
            thread.join(WAIT_S)
        server.wait_until_idle()
        truth = snapshot_from(shown(server, server.core.core.snapshot(), key))
        for kind, data in heard:
            assert (data["model"], data["core"]) == ("fake", 0)
            far.take(kind, data)
        while far.view.snapshot() != truth:  # a last step may have been in flight
            far.take(*events.next())
    assert {"tick", "request", "parked", "failed_step"} <= {kind for kind, _ in heard}
    assert sum(len(data["drawn"]) for kind, data in heard if kind == "tick") == 6 * 12
    names = {data["request"] for kind, data in heard if kind == "request"}
    assert all(HASH.fullmatch(name) for name in names) == (key == OTHER_KEY)


@pytest.mark.req("R43", "B6")
def test_one_subscriber_serves_all_readers(server: Running) -> None:
    with following(server) as one, following(server, OTHER_KEY) as two:
        assert one.next()[0] == two.next()[0] == "snapshot"
        assert len(server.core.events._subscribers) == 1
        assert server.chat().status == 200
        first, second = one.until_end_of(1), two.until_end_of(1)
        assert [data for kind, data in first if kind == "tick"] == [data for kind, data in second if kind == "tick"]
    watch = server.served.telemetry.watches["fake"][0]
    until(lambda: not watch._readers)


@pytest.mark.req("R43")
def test_a_reader_that_falls_behind_begins_again() -> None:
    """What waits for it is bounded; after too much it gets fresh snapshots, and nothing of what was before."""
    with running(make_llm(), make_config()) as server:
        telemetry = server.served.telemetry

        async def fall_behind() -> list[Any]:
            with telemetry.following() as reader:
                reader._max_unread = 8
                assert len(await reader.take()) == 1
                params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
                async for _ in server.llm.generate("go on", params):
                    pass
                await asyncio.to_thread(server.wait_until_idle)
                assert reader.is_behind
                assert len(reader._told) <= 8
                assert await reader.take() == []
                telemetry.begin_again(reader)
                return await reader.take()

        (told,) = asyncio.run(fall_behind())
        assert told.what == server.core.core.snapshot()


def test_a_reader_takes_what_there_is() -> None:
    async def run() -> None:
        reader = Reader(asyncio.get_running_loop())
        waiting = asyncio.ensure_future(reader.take())
        await asyncio.sleep(0)
        reader.end("that was all")
        assert await waiting == []
        assert reader.ending == "that was all"

    asyncio.run(run())


@pytest.mark.req("B6")
def test_models_come_and_go_under_a_reader() -> None:
    with running(make_llm(), make_config()) as server, following(server) as events:
        telemetry = server.served.telemetry
        assert events.next()[0] == "snapshot"
        telemetry.attach("second", server.llm)
        kind, data = events.next()
        assert (kind, data["model"]) == ("snapshot", "second")
        telemetry.detach("second")
        assert events.next() == ("gone", {"model": "second", "core": 0, "at": 0.0})


def test_streams_of_events_do_not_keep_a_server_from_stopping() -> None:
    with running(make_llm(), make_config()) as server, following(server) as events:
        assert events.next()[0] == "snapshot"
        assert server.served.gate.num_inside == 0, "nobody waits for it"
        server.loop.call_soon_threadsafe(server.served.drain)
        assert events.next() == ("end", {"reason": "the server is shutting down"})
        with pytest.raises(EOFError):
            events.next()


def test_a_quiet_stream_has_a_pulse() -> None:
    with running(make_llm(), make_config(keep_alive_s=0.05)) as server, following(server) as events:
        assert events.next()[0] == "snapshot"
        assert b": keep-alive\n" in [events._answer.readline() for _ in range(2)]


def test_the_live_view_wants_a_key(server: Running) -> None:
    assert server.get(SCHEDULER, key=None).status == 401
    assert server.get("/v1/scheduler/events", key="wrong").status == 401
