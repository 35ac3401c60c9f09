"""Sessions that outlive their service: what was acknowledged is there again, exactly once, and goes on as before."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.session.helpers import GREEDY, continuation, make_service, read, tokens_of
from tests.session.storing import ask, converse, play, stored
from tokenmill import SessionService
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.errors import SessionNotFound
from tokenmill.params import SamplingParams
from tokenmill.session.store import DATABASE, SessionStore


@pytest.mark.fault("P04")
@pytest.mark.req("B3")
def test_a_session_goes_on_in_the_next_service(tmp_path: Path) -> None:
    async def first(service: SessionService) -> tuple[str, list[int], Any]:
        name = await converse(service, "hello", "what is this", system="SYS")
        await service.append_input(name, "pending")
        return name, tokens_of(service, name), service.get(name)

    async def second(service: SessionService) -> tuple[Any, list[int], list[int]]:
        (info,) = service.list()
        log = tokens_of(service, info.session_id)
        _, ids, last = await read(await service.generate_stream(info.session_id))
        assert last.durable is True
        return info, log, [*tokens_of(service, info.session_id)[: -len(ids)], *ids]

    async def third(service: SessionService) -> list[int]:
        (info,) = service.list()
        return tokens_of(service, info.session_id)

    (name, log, before), (after, log_after, whole), last = play(tmp_path, first, second, third)
    assert (after.session_id, log_after) == (name, log)
    assert (after.turns, after.pending, after.state) == (before.turns, before.pending, "appending")
    assert before.durable
    assert after.durable
    assert last == whole
    asked = len(log) + len("\nuser: pending\nassistant: ")
    assert whole[asked:] == continuation(whole[:asked], GREEDY, seed=1)


def test_every_verb_is_durable_when_it_returns(tmp_path: Path) -> None:
    """A copy of the files at that moment is what a crash would leave."""

    async def scene(service: SessionService) -> None:
        async def check(names: list[str]) -> None:
            # What is on the disk now, and nothing that waits in a process.
            copied = tmp_path / f"copy-{len(os.listdir(tmp_path))}"
            copied.mkdir()
            for file in (tmp_path / "store").glob(f"{DATABASE}*"):
                (copied / file.name).write_bytes(file.read_bytes())
            for name in names:
                assert stored(copied, name) == tokens_of(service, name)

        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await check([name])
        await service.append_input(name, list(b"raw"))
        await check([name])
        for i in range(3):
            await service.append_input(name, f"q{i}")
            await read(await service.generate_stream(name))
            await check([name])
        await read(await service.regenerate(name))
        await check([name])
        children = await service.fork(name, n=2)
        await check([name, *children])
        await service.rewind(name, at_token=20)
        await check([name, *children])
        await ask(service, name)
        await check([name, *children])
        await service.edit(children[0], 1, "other")
        await service.end_session(children[1])
        await check([name, children[0]])
        assert stored(tmp_path / "store", children[1]) is None

    play(tmp_path / "store", scene)


def test_a_rewind_to_exactly_the_start_of_a_stored_piece_survives_a_restart(tmp_path: Path) -> None:
    async def first(service: SessionService) -> tuple[list[int], Any]:
        name = await converse(service, "one", "two", "three")
        ends = [turn.end for turn in service._model().queue.find(name).log.turns]
        await service.rewind(name, at_turn=4)
        with sqlite3.connect(tmp_path / DATABASE) as connection:
            begins = [begin for (begin,) in connection.execute("SELECT begin FROM tokens ORDER BY begin")]
        assert begins == [0, ends[1]], "each question and its answer are a piece, and the third is gone"
        assert stored(tmp_path, name) == tokens_of(service, name)
        return tokens_of(service, name), service.get(name).turns

    async def second(service: SessionService) -> tuple[list[int], Any]:
        (info,) = service.list()
        log = tokens_of(service, info.session_id)
        ids = await ask(service, info.session_id, "four")
        whole = tokens_of(service, info.session_id)
        assert ids == continuation(whole[: -len(ids)], GREEDY, seed=1)
        assert stored(tmp_path, info.session_id) == whole
        return log, info.turns

    before, after = play(tmp_path, first, second)
    assert after == before


def test_forks_and_regenerations_after_a_restart_draw_differently(tmp_path: Path) -> None:
    drawn = SamplingParams(max_tokens=12, ignore_eos=True)

    async def first(service: SessionService) -> list[list[int]]:
        name = await service.create_session(sampling_params=drawn, seed=7)
        answer = await ask(service, name, "hello")
        return [answer, *await again(service, name)]

    async def later(service: SessionService) -> list[list[int]]:
        (info,) = service.list()
        return await again(service, info.session_id)

    async def again(service: SessionService, name: str) -> list[list[int]]:
        """A regeneration and two forks of the same question; only the regeneration changes the session itself."""
        said = [(await read(await service.regenerate(name)))[1]]
        for _ in range(2):
            child = await service.fork(name, at_turn=1)
            said.append((await read(await service.generate_stream(child)))[1])
            await service.end_session(child)
        return said

    answers = [tuple(answer) for answers in play(tmp_path, first, later, later) for answer in answers]
    assert len(answers) == 10
    assert len(set(answers)) == 10


def test_what_differs_is_written_and_nothing_else(tmp_path: Path) -> None:
    async def scene(service: SessionService) -> int:
        name = await converse(service, *["a long question " * 20] * 2)
        with sqlite3.connect(tmp_path / DATABASE) as connection:
            connection.execute("CREATE TEMP TABLE before AS SELECT * FROM tokens")
            await ask(service, name, "short")
            kept = "SELECT count(*) FROM tokens JOIN before USING (session, begin, ids)"
            assert connection.execute(kept).fetchone() == connection.execute("SELECT count(*) FROM before").fetchone()
            (added,) = connection.execute("SELECT sum(length(ids)) FROM tokens").fetchone()
            (before,) = connection.execute("SELECT sum(length(ids)) FROM before").fetchone()
        return int(added - before) // 4

    (added,) = play(tmp_path, scene)
    assert added < 50


def test_sessions_that_are_not_meant_to_be_kept_are_not(tmp_path: Path) -> None:
    async def first(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, is_kept=False)
        await ask(service, name)
        child = await service.fork(name)
        assert service.get(child).durable is None

    async def second(service: SessionService) -> None:
        assert service.list() == []

    play(tmp_path, first, second)


def test_sessions_of_another_model_stay_where_they_are(tmp_path: Path) -> None:
    async def first(service: SessionService) -> str:
        return await converse(service, "x")

    async def second(service: SessionService) -> int:
        return len(service.list())

    play(tmp_path, first)
    other = FakeModel(FakeConfig(vocab_size=300, max_context=1024, block_size=4))

    async def run() -> int:
        async with SessionService(other, store=tmp_path) as service:
            await service.create_session()
            return len(service.list())

    assert asyncio.run(run()) == 1
    assert play(tmp_path, second) == [1]


def test_a_service_that_reloads_has_its_sessions_again(tmp_path: Path) -> None:
    async def scene(service: SessionService) -> None:
        name = await converse(service, "x")
        log = tokens_of(service, name)
        await service.reload()
        assert tokens_of(service, name) == log
        await ask(service, name)

    play(tmp_path, scene)


def test_two_services_of_one_model_share_a_store(tmp_path: Path) -> None:
    async def run() -> None:
        store = SessionStore(tmp_path)
        async with make_service(store=store) as one:
            name = await converse(one, "x")
            async with make_service(store=store) as two:
                assert two.list() == []
                other = await converse(two, "y")
        async with make_service(store=store) as three:
            assert {info.session_id for info in three.list()} == {name, other}
        assert store.check_integrity() == "ok"
        store.close()

    asyncio.run(run())


def test_a_disk_that_takes_its_time_holds_up_the_end_of_an_answer_and_nothing_else(tmp_path: Path) -> None:
    async def scene(service: SessionService) -> None:
        names = [await service.create_session(sampling_params=GREEDY, seed=1) for _ in range(3)]
        other = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # nobody else can write now
        lives = [await service.answer(name, given="x", ignore_eos=True) for name in names]
        readers = [live.read() for live in lives]
        for live, reader in zip(lives, readers, strict=True):
            count = 0
            while count < 8:  # all tokens come, one session after the other: loop and engine go on
                chunk = await anext(reader)
                assert chunk.finish_reason is None
                count += len(chunk.token_ids)
            while not live.is_released:
                await asyncio.sleep(0)
            assert not live.is_over
        ends = [asyncio.ensure_future(anext(reader)) for reader in readers]
        await asyncio.sleep(0)
        assert not any(end.done() for end in ends), "not acknowledged before it is durable"
        other.execute("ROLLBACK")
        assert [(await end).durable for end in ends] == [True] * 3
        other.close()

    play(tmp_path, scene)


def test_a_session_whose_maker_leaves_before_it_is_durable_never_was(tmp_path: Path) -> None:
    async def scene(service: SessionService) -> None:
        kept = await service.create_session(sampling_params=GREEDY)
        other = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # nobody else can write now
        making = asyncio.ensure_future(service.create_session())
        forking = asyncio.ensure_future(service.fork(kept, n=2))
        while len(service) < 4:
            await asyncio.sleep(0)
        for task in (making, forking):
            task.cancel()
        await asyncio.gather(making, forking, return_exceptions=True)
        assert [info.session_id for info in service.list()] == [kept]
        other.execute("ROLLBACK")
        other.close()

    async def after(service: SessionService) -> int:
        return len(service)

    assert play(tmp_path, scene, after)[1] == 1


def test_a_session_whose_namespace_can_not_be_written_says_so(tmp_path: Path) -> None:
    async def scene(service: SessionService) -> None:
        name = await service.create_session(namespace=frozenset("a"))
        assert service.get(name).durable is False
        assert "namespace" in (service.get(name).problem or "")
        other = await service.create_session(namespace=("a", ("b", 1)))
        assert service.get(other).durable

    async def again(service: SessionService) -> None:
        (info,) = service.list()
        assert service._model().queue.find(info.session_id).options.namespace == ("a", ("b", 1))
        with pytest.raises(SessionNotFound):
            service.get("never was")

    play(tmp_path, scene, again)


def test_a_new_store_is_its_owners_alone(tmp_path: Path) -> None:
    SessionStore(tmp_path / "store").close()
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0
