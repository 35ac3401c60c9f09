"""Sessions where it is easy to be wrong: odd input, mixed input, rewritten pasts, overlapping lives, dead cores."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.session.helpers import GREEDY, continuation, make_service, read, scene, tokens_of
from tokenmill import SessionService
from tokenmill.core import Fault, FaultKind
from tokenmill.errors import ConfigError, EngineDead, InvalidRequest, Overloaded, RequestFailed, SessionNotFound
from tokenmill.params import SamplingParams
from tokenmill.session.info import SessionLimits
from tokenmill.session.loaded import MOST_RENDERERS
from tokenmill.session.routing import LeastLoaded
from tokenmill.text.chat import ChatTemplate
from tokenmill.text.model_text import ModelText
from tokenmill.text.tokenizer import ByteTokenizer

REWRITES = (  # past answers are shown as a star
    "{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }};{% else %}*;{% endif %}{% endfor %}A:"
)


def with_template(service: SessionService, source: str) -> None:
    loaded, tokenizer = service._model(), ByteTokenizer(258)
    text = ModelText(tokenizer, ChatTemplate(source, tokenizer))
    object.__setattr__(loaded.opened, "text", text)
    loaded.intake.text = text
    loaded._renderers.clear()


# -- what goes in -----------------------------------------------------------------------------------------------------


def test_raw_ids_and_messages_in_any_order_are_all_there() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        assert await service.append_input(name, "hello") == 23
        assert await service.append_input(name, [88, 89, 90]) == 26
        await service.append_input(name, "more")
        total = await service.append_input(name, "still more")
        _, ids, _ = await read(await service.generate_stream(name))
        log = tokens_of(service, name)
        assert bytes(log[:total]) == b"user: hello\nassistant: XYZ\nuser: more\nuser: still more\nassistant: "
        assert ids == continuation(log[:total], GREEDY, seed=1)

    scene(play)


def test_raw_input_is_not_lost_where_the_template_rewrites_the_past() -> None:
    async def play(service: SessionService) -> None:
        with_template(service, REWRITES)
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "q")
        await service.append_input(name, list(b"XYZ"))
        await read(await service.generate_stream(name))
        with pytest.raises(InvalidRequest, match="does not write answers as they are"):
            await service.append_input(name, "next")
        assert b"XYZ" in bytes(t for t in tokens_of(service, name) if t < 256)

    scene(play)


def test_going_back_to_a_turn_that_was_rewritten(caplog: pytest.LogCaptureFixture) -> None:
    async def play(service: SessionService) -> None:
        with_template(service, REWRITES)
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        for i in range(3):
            total = await service.append_input(name, f"q{i}")
            _, ids, _ = await read(await service.generate_stream(name))
            log = tokens_of(service, name)
            assert bytes(log[:total]) == b"".join(b"U:q%d;*;" % j for j in range(i)) + b"U:q%d;A:" % i
            assert ids == continuation(log[:total], GREEDY, seed=1)
        child = await service.fork(name, at_turn=2)
        assert [turn.kind for turn in service.get(child).turns] == ["input", "answer"]
        assert service.get(child).num_tokens > 0
        await service.append_input(child, list(b"ABC"))
        log = tokens_of(service, child)
        assert bytes(log).startswith(b"U:q0;A:")
        assert bytes(log).endswith(b"ABC")
        _, ids, _ = await read(await service.generate_stream(child))
        seed = service._model().master.find(child).options.sampling.seed or 0
        assert ids == continuation(log, GREEDY, seed=seed)
        await service.rewind(name, at_turn=3)
        assert bytes(tokens_of(service, name)) == b"U:q0;*;U:q1;A:"
        total = await service.edit(name, 0, "Q")
        _, ids, _ = await read(await service.generate_stream(name))
        assert bytes(tokens_of(service, name)[:total]) == b"U:Q;A:"

    with caplog.at_level(logging.WARNING):
        scene(play)
    assert [record.name for record in caplog.records if "rewrites" in record.message] == ["tokenmill.text.delta"]


def test_what_a_caller_changes_afterwards_does_not_matter() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        message = {"role": "user", "content": "hi"}
        total = await service.append_input(name, [message])
        message["content"] = "x" * 2000
        await read(await service.generate_stream(name))
        assert bytes(tokens_of(service, name)[:total]) == b"user: hi\nassistant: "

    scene(play)


def test_wrong_arguments_are_told_when_they_are_given() -> None:
    async def play(service: SessionService) -> None:
        odd: Any = ["x"]
        with pytest.raises(SessionNotFound, match="a session's name is a text"):
            await service.append_input(odd, "hi")
        wrong: list[dict[str, Any]] = [
            {"sampling_params": {"temperature": 1}},
            {"sampling_params": SamplingParams(n=3)},
            {"seed": -1},
            {"priority": "x"},
            {"system": 5},
            {"template_options": {"messages": 1}},
            {"template_options": {1: 2}},
            {"template_options": {"add_generation_prompt": False}},
        ]
        for options in wrong:
            with pytest.raises(InvalidRequest):
                await service.create_session(**options)
        name = await service.create_session(system="SYS", sampling_params=GREEDY)
        with pytest.raises(InvalidRequest, match="begins with a message"):
            await service.append_input(name, "AB", raw=True)
        bad: list[Any] = [service.fork(name, at_turn="1"), service.fork(name, n="x"), service.fork(name, n=0),
                          service.edit(name, "0", "x"), service.rewind(name, at_token=1.5)]  # fmt: skip
        for call in bad:
            with pytest.raises(InvalidRequest):
                await call
        assert [info.session_id for info in service.list()] == [name]

    scene(play)
    with pytest.raises(ConfigError, match="num_workers must be at least 1"):
        SessionService("fake", num_workers=0)


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("R6", "G20")
def test_seeds_are_honoured_and_forks_differ() -> None:
    async def play(service: SessionService) -> None:
        params = SamplingParams(seed=7, max_tokens=10)

        async def answer(name: str) -> tuple[int, ...]:
            return tuple((await read(await service.generate_stream(name)))[1])

        answers = set()
        for _ in range(3):
            name = await service.create_session(sampling_params=params)
            await service.append_input(name, "x")
            forks = await service.fork(name, n=3)
            answers.add(await answer(name))
        assert len(answers) == 1
        said = [await answer(fork) for fork in forks]
        assert len({*said, *answers}) == 4
        _, again, _ = await read(await service.regenerate(name))
        child = await service.fork(name)
        _, other, _ = await read(await service.regenerate(child))
        assert tuple(other) not in {tuple(again), *answers}

    scene(play)


@pytest.mark.parametrize("change", [{"temperature": -1}, {"stop_token_ids": (9999,)}, {"colour": 1}])
def test_a_regeneration_that_fails_keeps_the_answer(change: dict[str, Any]) -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "x")
        await read(await service.generate_stream(name))
        log, turns = tokens_of(service, name), service.get(name).turns
        with pytest.raises(InvalidRequest):
            await service.regenerate(name, **change)
        assert tokens_of(service, name) == log
        assert service.get(name).turns == turns
        assert service.get(name).state == "idle"

    scene(play)


@pytest.mark.parametrize("again", [True, False])
def test_an_answer_without_a_word_changes_nothing(again: bool) -> None:
    async def play(service: SessionService) -> None:
        client: Any = service._model().client
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "x")
        await read(await service.generate_stream(name))
        log, turns = tokens_of(service, name), service.get(name).turns
        client.pool.cores[0].core._executor.backend.faults.add(Fault(FaultKind.NAN))
        live = await service.answer(name, given=None if again else "y", again=again)
        _, ids, last = await read(live.read())
        assert (ids, last.finish_reason) == ([], "error")
        assert (tokens_of(service, name), service.get(name).turns) == (log, turns)
        assert (service.get(name).state, service.get(name).pending) == ("idle", ())
        live = await service.answer(name, given=None if again else "y", again=again)
        assert (await read(live.read()))[1] != []

    scene(play)


def test_an_answer_whose_asker_leaves_in_the_very_moment_is_not_left_running() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        session = service._model().master.find(name)
        asking = asyncio.create_task(service.answer(name, 900, given="x", ignore_eos=True))
        while session.live is None:
            await asyncio.sleep(0)
        assert not asking.done()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while session.live is not None:
            await asyncio.sleep(0.001)
        assert session.answer is not None
        assert session.answer.end.finish_reason == "cancelled"

    scene(play)


def test_the_time_of_an_answer_begins_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(service: SessionService) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        first = await service.answer(name, 400, given="x", ignore_eos=True)
        late, later = (asyncio.create_task(service.answer(name, given="y", timeout_s=t)) for t in (20.0, 40.0))
        session = service._model().master.find(name)
        while len(session.waiting or ()) < 2:
            await asyncio.sleep(0)
        monkeypatch.setattr(loop, "time", lambda: real() + 30)
        first.cancel()
        await read(first.read())
        with pytest.raises(RequestFailed, match="while it waited") as caught:
            await late
        assert caught.value.finish_reason == "timeout"
        live = await later
        left = live.generation.choices[0].request.limits.timeout_s
        assert left is not None
        assert 0 < left <= 10
        await read(live.read())
        assert [message["content"] for message in session.log.messages[::2]] == ["x", "y"]

    scene(play)


def test_forks_whose_asker_leaves_in_the_very_moment_are_not_left_behind() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        asking = asyncio.create_task(service.fork(name, n=3))
        while len(service) == 1:
            await asyncio.sleep(0)
        assert not asking.done()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert [info.session_id for info in service.list()] == [name]

    scene(play)


def test_a_fork_that_fails_is_none() -> None:
    """It leaves no session behind, and the next one draws what the first would have drawn."""

    async def play(service: SessionService) -> None:
        said = []
        for fails in (False, True):
            name = await service.create_session(sampling_params=SamplingParams(max_tokens=10), seed=7)
            await service.append_input(name, "x")
            if fails:
                with pytest.raises(InvalidRequest):
                    await service.fork(name, at_turn=9, n=3)
            (child,) = await service.fork(name, n=1)
            said.append((await read(await service.generate_stream(child)))[1])
        assert said[0] == said[1]
        assert len(service) == 4

    scene(play)


def test_going_on_where_a_chunk_ends_repeats_nothing() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=replace(GREEDY, stop=("zz", "qq")), seed=1)
        await service.append_input(name, "x")
        stream = await service.generate_stream(name, 60, ignore_eos=True)
        whole = asyncio.create_task(read(await service.attach(name)))
        async for chunk in stream:
            rest, ids, _ = await read(await service.attach(name, chunk.offset + len(chunk.token_ids)))
            text, all_ids, _ = await whole
            shown = "" if chunk.offset else chunk.text
            assert text.endswith(rest)
            assert all_ids[chunk.offset + len(chunk.token_ids) :] == ids
            if not chunk.offset:
                assert shown + rest == text
            break

    scene(play)


def test_a_loop_that_was_busy_does_not_cost_an_attentive_reader_its_answer() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "x")
        stream = await service.generate_stream(name, 300, ignore_eos=True)
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        time.sleep(0.2)
        assert (await reader)[2].finish_reason == "length"

    scene(play, limits=SessionLimits(stall_timeout_s=0.1))


# -- order, bytes, lives ----------------------------------------------------------------------------------------------


def test_callers_that_have_left_do_not_fill_the_queue() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "a")
        stream = await service.generate_stream(name, 400, ignore_eos=True)
        await anext(stream)
        left = [asyncio.create_task(service.append_input(name, f"m{i}")) for i in range(8)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        stays = asyncio.create_task(service.append_input(name, "real"))
        await service.cancel_generate(name)
        await stays
        await read(await service.generate_stream(name))
        assert service.get(name).turns[2].messages[0]["content"] == "real"

    scene(play)


def test_what_sessions_are_created_with_is_bounded_too() -> None:
    async def play(service: SessionService) -> None:
        for i in range(100):
            name = await service.create_session(template_options={"style": "s" * 3000 + str(i)})
            assert service._upkeep.room.total > 3000
            await service.end_session(name)
        assert len(service._model()._renderers) <= MOST_RENDERERS
        biased = replace(GREEDY, logit_bias=dict.fromkeys(range(200), 1.0))
        await service.create_session(sampling_params=biased)
        with pytest.raises(Overloaded):
            await service.create_session()

    scene(play, limits=SessionLimits(max_log_bytes=9000, stall_timeout_s=None))


def test_bytes_bound_forks_and_system_prompts_too() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, system="s" * 100)
        assert service._upkeep.room.total >= 100
        await service.append_input(name, "x" * 800)
        await read(await service.generate_stream(name, 1))
        before = service._upkeep.room.total
        with pytest.raises(Overloaded):
            await service.fork(name, n=500)
        assert (service._upkeep.room.total, len(service)) == (before, 1), "all or none"
        for info in service.list():
            await service.end_session(info.session_id)
        assert service._upkeep.room.total == 0

    scene(play, limits=SessionLimits(max_log_bytes=9000, stall_timeout_s=None))


def test_a_service_belongs_to_one_loop() -> None:
    service = make_service()

    async def use() -> None:
        name = await service.create_session(sampling_params=GREEDY)
        await service.append_input(name, "x")

    asyncio.run(use())
    with pytest.raises(InvalidRequest, match="belongs to the event loop"):
        asyncio.run(use())


def test_loads_that_overlap_leave_one_engine_and_a_close_none() -> None:
    def engines() -> int:
        return sum(thread.name.startswith("tokenmill-core") for thread in threading.enumerate())

    async def play() -> None:
        before = engines()
        service = SessionService()
        await asyncio.gather(*(service.load_model_with_workers("fake") for _ in range(4)))
        assert engines() == before + 1
        loading = asyncio.create_task(service.load_model_with_workers("fake"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(service.close())
        await asyncio.gather(loading, closing, return_exceptions=True)
        await service.close()
        assert engines() == before
        with pytest.raises(EngineDead):
            await service.load_model_with_workers("fake")
        assert engines() == before

    asyncio.run(asyncio.wait_for(play(), 30))


@pytest.mark.req("R3", "R9")
def test_sessions_of_a_core_that_is_gone_for_good_go_on_elsewhere() -> None:
    async def play(service: SessionService) -> None:
        client: Any = service._model().client
        core = client.pool.cores[0]
        names = [await service.create_session(sampling_params=GREEDY, seed=1) for _ in range(2)]
        assert [service.get(name).core for name in names] == [0, 1]
        for name in names:
            await service.append_input(name, "hello")
            await read(await service.generate_stream(name))
        while core.is_alive:
            core.core._executor.backend.faults.add(Fault(FaultKind.FATAL))
            await service.append_input(names[0], "again")
            await read(await service.generate_stream(names[0], 3))
        total = await service.append_input(names[0], "go on")
        _, ids, last = await read(await service.generate_stream(names[0]))
        assert last.error is None
        assert ids == continuation(tokens_of(service, names[0])[:total], GREEDY, seed=1)
        assert service.get(names[0]).core == 1
        new = await service.create_session(sampling_params=GREEDY)
        assert service.get(new).core == 1

    scene(play, num_workers=2)


def test_the_least_loaded_core_counts_forks_and_forgets_openings() -> None:
    routing = LeastLoaded(2)
    first = routing.choose("sys", [0, 1])
    for _ in range(10):
        routing.stay(first, "sys")
    for _ in range(10):
        routing.leave(first, "sys")
    assert routing._loads == [1, 0]
    assert routing.choose("sys", [0, 1]) == first
    assert routing.choose(None, [0, 1]) == 1 - first
    routing.leave(first, "sys")
    routing.leave(first, "sys")
    assert not routing._knows
    assert routing.choose("x", [1]) == 1


def test_expiry_lives_as_long_as_the_service() -> None:
    async def play(service: SessionService) -> None:
        for _ in range(2):
            await service.create_session()
            while service.list():
                await asyncio.sleep(0.01)

    scene(play, limits=SessionLimits(ttl_s=0.05))
