"""The session API on the fake model: turns, verbs, order, errors."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.session.helpers import GREEDY, continuation, read, scene, tokens_of
from tokenmill import SessionService
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.errors import (
    ConfigError,
    ContextOverflow,
    InvalidRequest,
    SessionBusy,
    SessionEnded,
    SessionNotFound,
)
from tokenmill.params import SamplingParams


@pytest.mark.req("R1", "R2", "R4", "B1")
@pytest.mark.parametrize("depth", [0, 1])
def test_turn_by_turn_only_what_is_new_is_computed(depth: int) -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        for turn in range(20):
            before = len(tokens_of(service, name))
            total = await service.append_input(name, f"question {turn}")
            _, ids, last = await read(await service.generate_stream(name))
            assert last.usage is not None
            assert last.usage.prompt_tokens == total
            if turn:
                assert last.usage.cached_tokens >= before - 1
            log = tokens_of(service, name)
            assert log[total:] == ids == continuation(log[:total], GREEDY, seed=1)
        info = service.get(name)
        assert [turn.kind for turn in info.turns] == ["input", "answer"] * 20
        assert sum(turn.num_tokens or 0 for turn in info.turns) == info.num_tokens == len(log)

    scene(play, depth=depth)


@pytest.mark.req("R5", "G15")
@pytest.mark.parametrize("ending", ["length", "stop token", "stop string", "cancel"])
@pytest.mark.parametrize("depth", [0, 1])
def test_however_a_turn_ends_the_next_one_is_that_of_a_fresh_prefill(depth: int, ending: str) -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        total = await service.append_input(name, "hello")
        free = continuation([*b"user: hello\nassistant: "], replace(GREEDY, max_tokens=40), seed=1)
        changes: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
        if ending == "length":
            changes["max_tokens"] = 5
        elif ending == "stop token":
            changes["stop_token_ids"] = (free[6],)
        elif ending == "stop string":
            printable = [i for i in range(3, 20) if 32 <= free[i] < 127 and free[i] not in free[:i]]
            changes["stop"] = (chr(free[printable[0]]),)
        else:
            changes["max_tokens"] = 450
        stream = await service.generate_stream(name, **changes)
        if ending == "cancel":
            await anext(stream)
            assert await service.cancel_generate(name)
        _, ids, last = await read(stream)
        assert last.finish_reason == {"length": "length", "cancel": "cancelled"}.get(ending, "stop")
        log = tokens_of(service, name)
        assert log[total:][: len(ids)] == ids or ending == "cancel"
        before = len(log)
        again = await service.append_input(name, "and then?")
        _, more, last = await read(await service.generate_stream(name))
        log = tokens_of(service, name)
        assert more == continuation(log[:again], GREEDY, seed=1)
        assert last.usage is not None
        assert last.usage.cached_tokens >= before - 1

    scene(play, depth=depth)


@pytest.mark.req("B2", "G6")
def test_fork_rewind_edit_regenerate() -> None:
    async def play(service: SessionService) -> None:
        params = SamplingParams(max_tokens=6)
        name = await service.create_session(sampling_params=params, seed=5)
        for question in ("one", "two", "three"):
            await service.append_input(name, question)
            await read(await service.generate_stream(name))
        log = tokens_of(service, name)
        stats = service._model().client.stats
        ticks = stats()[0].tick  # type: ignore[union-attr]
        children = await service.fork(name, n=3)
        earlier = await service.fork(name, at_turn=2)
        middle = await service.fork(name, at_token=len(log) - 3)
        assert stats()[0].tick == ticks  # type: ignore[union-attr]
        (grandchild,) = await service.fork(children[0], n=1)
        assert {one.partition(".")[0] for one in (*children, earlier, middle, grandchild)} == {name}, "of one root"
        assert all(tokens_of(service, child) == log for child in children)
        assert len(service.get(earlier).turns) == 2
        assert tokens_of(service, middle) == log[:-3]
        said: set[tuple[int, ...]] = set()
        for child in (*children, earlier, middle):
            before = len(tokens_of(service, child))
            total = await service.append_input(child, "four")
            _, ids, last = await read(await service.generate_stream(child))
            seed = service._model().queue.find(child).options.sampling.seed or 0
            assert ids == continuation(tokens_of(service, child)[:total], params, seed=seed)
            said.add(tuple(ids))
            assert last.usage is not None
            assert last.usage.cached_tokens >= before - 1
        assert len(said) == 5
        first = log[len(log) - 6 :]
        _, second, last = await read(await service.regenerate(name))
        assert second != first
        assert last.usage is not None
        assert last.usage.cached_tokens == last.usage.prompt_tokens - 1
        _, third, _ = await read(await service.regenerate(name))
        assert third not in (first, second)
        await service.rewind(name, at_turn=4)
        assert len(service.get(name).turns) == 4
        total = await service.edit(name, 2, "TWO")
        assert bytes(tokens_of(service, name)).startswith(b"user: one\nassistant: ")
        _, ids, last = await read(await service.generate_stream(name))
        edited = tokens_of(service, name)
        assert ids == continuation(edited[:total], params, seed=5)
        assert service.get(name).turns[2].messages[-1]["content"] == "TWO"
        assert last.usage is not None
        assert last.usage.cached_tokens >= service._model().queue.find(name).log.begin_of(2) - 1

    scene(play)


@pytest.mark.req("B2")
def test_a_cut_at_a_token_that_ends_a_turn_keeps_that_turn_whole() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "one")
        free = continuation([*b"user: one\nassistant: "], GREEDY, seed=1)
        await read(await service.generate_stream(name, stop_token_ids=(free[3],)))
        await service.append_input(name, "two")
        await read(await service.generate_stream(name))
        turns = service._model().queue.find(name).log.turns
        assert turns[1].ended_with is not None
        for count in range(len(turns) + 1):
            end = turns[count - 1].end if count else 0
            by_turn = await service.fork(name, at_turn=count)
            by_token = await service.fork(name, at_token=end)
            cuts = [service._model().queue.find(one) for one in (by_turn, by_token)]
            assert cuts[0].log.turns == cuts[1].log.turns == turns[:count]
            assert cuts[0].log.tokens == cuts[1].log.tokens
            assert cuts[0].state == cuts[1].state
        await service.rewind(name, at_token=turns[1].end)
        assert service._model().queue.find(name).log.turns == turns[:2]
        with pytest.raises(InvalidRequest, match="append some input first"):  # the answer is complete
            await service.generate_stream(name)

    scene(play)


@pytest.mark.req("R3", "R9", "R10")
def test_sessions_are_routed_for_life_and_not_limited_by_workers() -> None:
    async def play(service: SessionService) -> None:
        names = [await service.create_session(sampling_params=GREEDY, seed=1) for _ in range(40)]
        cores = [service.get(name).core for name in names]
        assert cores == [i % 2 for i in range(40)]
        for turn in range(2):
            for i, name in enumerate(names):
                await service.append_input(name, f"{turn} of {i}")
            await asyncio.gather(*[read(await service.generate_stream(name)) for name in names])
        assert [service.get(name).core for name in names] == cores
        for name in names:
            log = tokens_of(service, name)
            total = len(log) - (service.get(name).turns[-1].num_tokens or 0)
            assert log[total:] == continuation(log[:total], GREEDY, seed=1)
        stats = service._model().client.stats()
        assert all(one is not None and one.tick > 5 for one in stats)

    scene(play, num_workers=2, max_seqs=6, config=EngineConfig(max_num_seqs=4))


@pytest.mark.req("R10")
def test_operations_queue_in_order_up_to_a_limit() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "a")
        stream = await service.generate_stream(name, max_new_tokens=400, ignore_eos=True)
        await anext(stream)
        queued = [asyncio.create_task(service.append_input(name, f"m{i}")) for i in range(8)]
        await asyncio.sleep(0)
        with pytest.raises(SessionBusy, match="8 operations are queued"):
            await service.append_input(name, "one too many")
        await service.cancel_generate(name)
        counts = await asyncio.gather(*queued)
        assert counts == sorted(counts)
        await read(await service.generate_stream(name))
        content = [message["content"] for message in service.get(name).turns[2].messages]
        assert content == [f"m{i}" for i in range(8)]

    scene(play)


@pytest.mark.req("R7", "G2", "G3")
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_cancel_in_every_phase_keeps_the_session_and_its_kv(phase: str) -> None:
    async def play(service: SessionService) -> None:
        client: Any = service._model().client
        backend = client.pool.cores[0].core._executor.backend
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "x" * 100)
        await read(await service.generate_stream(name))
        known = len(tokens_of(service, name))
        await service.append_input(name, "y" * 100)
        stall = Fault(FaultKind.STALL)
        if phase != "decode":
            backend.faults.add(stall)
        if phase == "queued":
            other = await service.create_session(sampling_params=GREEDY, seed=1)
            await service.append_input(other, "hold the only row")
            holder = asyncio.create_task(read(await service.generate_stream(other)))
            await asyncio.to_thread(stall.stalled.wait, 30)
        stream = await service.generate_stream(name, max_new_tokens=300, ignore_eos=True)
        if phase == "decode":
            await anext(stream)
        elif phase == "prefill":
            await asyncio.to_thread(stall.stalled.wait, 30)
        cancelled = asyncio.create_task(service.cancel_generate(name))
        await asyncio.sleep(0)
        stall.release.set()
        assert await cancelled
        _, _, last = await read(stream)
        assert last.finish_reason == "cancelled"
        if phase == "queued":
            await holder
        assert not await service.cancel_generate(name)
        total = await service.append_input(name, "go on")
        _, ids, last = await read(await service.generate_stream(name))
        assert ids == continuation(tokens_of(service, name)[:total], GREEDY, seed=1)
        assert last.usage is not None
        assert last.usage.cached_tokens >= known - 1

    scene(play, config=EngineConfig(max_num_seqs=1))


@pytest.mark.req("R49")
def test_errors_are_typed_and_change_nothing() -> None:
    async def play(service: SessionService) -> None:
        with pytest.raises(SessionNotFound, match="no session 'nobody'"):
            await service.append_input("nobody", "hi")
        with pytest.raises(SessionNotFound):
            service.get("nobody")
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        with pytest.raises(InvalidRequest, match="append some input first"):
            await service.generate_stream(name)
        with pytest.raises(InvalidRequest, match="nothing to regenerate"):
            await service.regenerate(name)
        bad: list[Any] = [[], [1, -1], [{"role": "user"}], "\ud800", [99999], 7, None]
        for given in bad:
            with pytest.raises(InvalidRequest):
                await service.append_input(name, given)
        with pytest.raises(InvalidRequest, match="empty"):
            await service.append_input(name, "", raw=True)
        assert tokens_of(service, name) == []
        await service.append_input(name, "hello")
        await read(await service.generate_stream(name))
        log = tokens_of(service, name)
        with pytest.raises(ContextOverflow, match="maximum context length"):
            await service.append_input(name, "x" * 1100)
        for wrong in ({"at_turn": 3}, {"at_token": len(log) + 1}, {"at_turn": -1}):
            with pytest.raises(InvalidRequest, match="cannot keep"):
                await service.fork(name, **wrong)
            with pytest.raises(InvalidRequest, match="cannot keep"):
                await service.rewind(name, **wrong)
        with pytest.raises(InvalidRequest, match="exactly one of"):
            await service.rewind(name)
        with pytest.raises(InvalidRequest, match="not an input turn of this session"):
            await service.edit(name, 1, "x")
        with pytest.raises(ContextOverflow):
            await service.edit(name, 0, "x" * 1100)
        with pytest.raises(InvalidRequest, match="unknown sampling parameter colour"):
            await service.generate_stream(name, colour=1)
        with pytest.raises(InvalidRequest, match="temperature"):
            await service.generate_stream(name, temperature=-1)
        with pytest.raises(ConfigError, match="overflow 'burst'"):
            await service.create_session(overflow="burst")  # type: ignore[arg-type]
        assert tokens_of(service, name) == log
        assert service.get(name).state == "idle"
        await service.end_session(name)
        for call in (service.append_input(name, "x"), service.generate_stream(name), service.end_session(name)):
            with pytest.raises(SessionEnded):
                await call

    scene(play)


def test_ending_while_an_answer_runs_and_others_wait() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "a")
        stream = await service.generate_stream(name, max_new_tokens=400, ignore_eos=True)
        await anext(stream)
        waiting = asyncio.create_task(service.append_input(name, "later"))
        await asyncio.sleep(0)
        await service.end_session(name)
        with pytest.raises(SessionEnded):
            await waiting
        assert (await read(stream))[2].finish_reason == "cancelled"
        while (stats := await asyncio.to_thread(service._model().client.stats))[0].num_parked:  # type: ignore[union-attr]
            pass
        assert stats[0] is not None
        assert service.list() == []

    scene(play)


def test_the_oldest_turns_go_where_that_is_wanted() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(
            sampling_params=GREEDY, seed=1, overflow="drop_oldest_turns", system="be brief"
        )
        for turn in range(12):
            await service.append_input(name, f"{turn} " + "x" * 80)
            _, ids, _ = await read(await service.generate_stream(name))
            log = tokens_of(service, name)
            assert len(log) <= 1024
            assert bytes(log).startswith(b"system: be brief\n")
            assert ids == continuation(log[: len(log) - len(ids)], GREEDY, seed=1)
        with pytest.raises(ContextOverflow, match="but 1136 are needed"):
            await service.append_input(name, "x" * 1100)

    scene(play)


def test_raw_input_and_ids() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "waits")
        assert [message["content"] for message in service.get(name).pending] == ["waits"]
        await service.rewind(name, at_turn=0)
        assert service.get(name).pending == ()
        assert await service.append_input(name, "abc", raw=True) == 3
        assert await service.append_input(name, [100, 101]) == 5
        _, ids, _ = await read(await service.generate_stream(name))
        assert tokens_of(service, name) == [*b"abcde", *ids]
        assert [turn.kind for turn in service.get(name).turns] == ["input", "answer"]

    scene(play)


def test_an_answer_goes_on_from_the_beginning_that_is_given() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        begun = {"role": "assistant", "content": "Well, "}
        messages = [{"role": "user", "content": "hi"}, begun]
        total = await service.append_input(name, messages, continue_final_message=True)
        log = tokens_of(service, name)
        assert bytes(log) == b"user: hi\nassistant: Well, "
        assert total == len(log)
        _, ids, _ = await read(await service.generate_stream(name))
        assert ids == continuation(log, GREEDY, seed=1)
        question, answer = service.get(name).turns
        assert question.messages == (messages[0],)
        assert str(answer.messages[0]["content"]).startswith("Well, ")

    scene(play)
