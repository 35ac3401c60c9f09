"""KV bytes in a store: a cache that comes back with its session, and never stands in for anything else."""

from __future__ import annotations

import asyncio
from array import array
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.session.helpers import GREEDY, continuation, read, tokens_of
from tests.session.storing import Held, converse, play
from tokenmill import SessionService
from tokenmill.errors import SessionEnded
from tokenmill.params import SamplingParams
from tokenmill.session import persistence
from tokenmill.session.persistence import FETCH_AGAIN, Persistence
from tokenmill.session.records import DIGEST_BYTES, KV_HEADER, KVFiles, packed_kv, unpacked_kv
from tokenmill.session.session import KVSource, SavedKV
from tokenmill.session.store import SessionStore


def test_kv_comes_back_with_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "MIN_KV_TOKENS", 64)

    async def first(service: SessionService) -> tuple[str, int]:
        name = await converse(service, "some words " * 12)
        return name, len(tokens_of(service, name))

    async def second(service: SessionService) -> int:
        (info,) = service.list()
        await service.append_input(info.session_id, "more")
        _, ids, last = await read(await service.generate_stream(info.session_id))
        log = tokens_of(service, info.session_id)
        assert ids == continuation(log[: -len(ids)], GREEDY, seed=1)
        assert last.usage is not None
        return last.usage.cached_tokens

    (_, length), cached, again = play(tmp_path, first, second, second)
    assert cached in (length - 1, length)
    assert again > cached
    for damage in (b"", b"x" * 200):
        (kv,) = (tmp_path / "kv").glob("*.kv")
        kv.write_bytes(kv.read_bytes()[:100] + damage)
        assert play(tmp_path, second) == [0], "it was replayed"


def test_kv_of_just_enough_tokens_comes_back(tmp_path: Path) -> None:
    """64 tokens: fewer are replayed."""

    async def first(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, [1] * 60)
        await read(await service.generate_stream(name, max_new_tokens=5, ignore_eos=True))

    async def second(service: SessionService) -> int:
        (info,) = service.list()
        assert info.num_tokens == 65
        await service.append_input(info.session_id, [2])
        _, _, last = await read(await service.generate_stream(info.session_id))
        assert last.usage is not None
        return last.usage.cached_tokens

    assert play(tmp_path, first, second)[1] == 64


def test_kv_is_written_when_nothing_else_is_to_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "MIN_KV_TOKENS", 16)
    monkeypatch.setattr(persistence, "QUIET_S", 0.0)

    async def scene(service: SessionService) -> None:
        store = service.store
        assert store is not None
        written = asyncio.Event()
        loop, write = asyncio.get_running_loop(), store.kv.write

        def noting(*given: Any) -> bool:
            loop.call_soon_threadsafe(written.set)
            return write(*given)

        monkeypatch.setattr(store.kv, "write", noting)
        busy = await service.create_session(sampling_params=GREEDY)
        live = await service.answer(busy, 900, given="x", ignore_eos=True)
        await converse(service, "some words")
        assert not written.is_set(), "the engine is busy"
        live.cancel()
        await written.wait()

    play(tmp_path, scene)


def test_kv_files_are_evicted_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "MIN_KV_TOKENS", 16)
    store = SessionStore(tmp_path, max_kv_bytes=5000)

    async def scene(service: SessionService) -> None:
        for _ in range(12):
            await converse(service, "some words " * 8)

    play(store, scene)
    assert 0 < store.kv.num_bytes <= 5000
    store.close()


def test_kv_files_are_evicted_by_last_use_and_reading_is_use(tmp_path: Path) -> None:
    ids, form, another = array("i", [1, 2, 3]), "f" * 32, "g" * 32
    files = KVFiles(tmp_path, max_bytes=3 * (KV_HEADER.size + 10))

    def held() -> set[str]:
        return {name for name in ("read", "looked at", "younger", "oldest", "new", "newer") if files.num_tokens(name)}

    for age, name in ((30, "read"), (20, "looked at"), (10, "younger")):
        assert files.write(name, form, ids, bytes(10), used_at=1e9 - age)
    assert files.read("read", form, ids) is not None
    assert files.read("looked at", another, ids) is None, "it was of no use"
    assert files.write("new", form, ids, bytes(10), used_at=1e9)
    assert held() == {"read", "younger", "new"}
    assert not files.write("oldest", form, ids, bytes(10), used_at=1e9 - 40), "all others were used since"
    assert held() == {"read", "younger", "new"}
    assert files.write("newer", form, ids, bytes(10), used_at=1e9 + 10)
    assert held() == {"read", "new", "newer"}


def test_a_closing_service_keeps_the_kv_of_the_sessions_used_last(tmp_path: Path) -> None:
    """It writes the latest first, for it may run out of time; earlier ones do not evict them."""

    async def scene(service: SessionService) -> list[str]:
        return [await converse(service, "some words " * 12) for _ in range(4)]

    store = SessionStore(tmp_path, max_kv_bytes=3000)
    (used,) = play(store, scene)
    kept = [name for name in used if store.kv.num_tokens(name)]
    assert 0 < len(kept) < 4
    assert kept == used[-len(kept) :]
    store.close()


def test_kv_of_replaced_weights_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "MIN_KV_TOKENS", 16)

    async def first(service: SessionService) -> None:
        await converse(service, "some words")
        service._model().opened.model.replace_weight("salt", 1)

    async def second(service: SessionService) -> int:
        (info,) = service.list()
        _, _, last = await read(await service.generate_stream(info.session_id, ignore_eos=True))
        assert last.usage is not None
        return last.usage.cached_tokens

    async def third(service: SessionService) -> None:
        await converse(service, "some words")

    async def fourth(service: SessionService) -> int:
        service._model().opened.model.replace_weight("salt", 1)
        return await second(service)

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    monkeypatch.setattr("tests.session.storing.GREEDY", params)
    assert play(tmp_path / "a", first, second) == [None, 0]
    assert play(tmp_path / "b", third, fourth) == [None, 0]


def test_kv_of_a_session_that_ends_while_it_is_written_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "MIN_KV_TOKENS", 16)
    monkeypatch.setattr(persistence, "QUIET_S", 0.0)

    async def scene(service: SessionService) -> None:
        store = service.store
        assert store is not None
        writing = Held(store.kv.write)
        monkeypatch.setattr(store.kv, "write", writing)
        name = await converse(service, "some words")
        await writing.called.wait()
        await service.end_session(name)
        writing.let_go()

    play(tmp_path, scene)
    assert list((tmp_path / "kv").iterdir()) == []


def test_nobody_waits_while_a_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "MIN_KV_TOKENS", 16)

    async def first(service: SessionService) -> None:
        await converse(service, "some words")

    async def second(service: SessionService) -> None:
        store, (info,) = service.store, service.list()
        assert store is not None
        removing = Held(store.kv.remove)
        monkeypatch.setattr(store.kv, "remove", removing)
        ending = asyncio.ensure_future(service.end_session(info.session_id))
        await removing.called.wait()
        assert service.list() == [], "the event loop goes on"
        removing.let_go()
        await ending

    play(tmp_path, first, second)
    assert list((tmp_path / "kv").iterdir()) == []


def test_what_a_killed_process_has_left_of_kv_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "MIN_KV_TOKENS", 16)

    async def scene(service: SessionService) -> None:
        await converse(service, "some words")

    play(tmp_path, scene)
    (kept,) = (tmp_path / "kv").iterdir()
    for name in ("0" * 32 + ".kv", "1" * 32 + ".part"):  # of a session that has ended, and of a write that has not
        (tmp_path / "kv" / name).write_bytes(b"x" * 100)
    SessionStore(tmp_path).close()
    assert list((tmp_path / "kv").iterdir()) == [kept]


def test_kv_that_is_read_for_a_session_that_ends_meanwhile_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "MIN_KV_TOKENS", 16)

    async def first(service: SessionService) -> None:
        await converse(service, "some words")

    async def second(service: SessionService) -> None:
        store, (info,) = service.store, service.list()
        assert store is not None
        read_file, reading = store.kv.read, Held(lambda saved: saved)
        monkeypatch.setattr(store.kv, "read", lambda *given: reading(read_file(*given)))
        answering = asyncio.ensure_future(service.answer(info.session_id, given="more"))
        await reading.called.wait()
        await service.end_session(info.session_id)
        reading.let_go()
        with pytest.raises(SessionEnded):
            await answering
        held = await asyncio.wrap_future(service._model().client.export_kv(info.core, info.session_id))
        assert held is None

    play(tmp_path, first, second)


# -- KV of other servers -----------------------------------------------------------------------------------------------


def test_kv_from_another_server_fits_or_is_none() -> None:
    ids, form = np.arange(100, dtype=np.int32), "f" * 32
    data = b"".join(packed_kv(form, ids[:70], b"the state"))
    assert unpacked_kv(data, form, ids) == SavedKV(70, b"the state")
    assert unpacked_kv(data, "g" * 32, ids) is None, "another form"
    assert unpacked_kv(data, form, ids[:69]) is None, "of a longer log"
    assert unpacked_kv(data, form, ids[::-1].copy()) is None, "of another log"
    for place in (0, KV_HEADER.size - 1, KV_HEADER.size, len(data) - DIGEST_BYTES, len(data) - 1):
        assert unpacked_kv(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], form, ids) is None
    for length in (0, 10, DIGEST_BYTES, len(data) - 1):
        assert unpacked_kv(data[:length], form, ids) is None


def test_kv_is_fetched_from_another_server_where_that_is_predicted_to_be_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are unknown at first. A fetch that does not pay off is tried again now and then, since networks change."""
    clock, fetched, replay_s = [0.0], list[int](), list[float | None]()
    monkeypatch.setattr(persistence.time, "monotonic", lambda: clock[0])

    async def scene(service: SessionService) -> None:
        name = await converse(service, "some words " * 20)
        loaded = service._model()
        session, kept = loaded.queue.find(name), loaded.persistence
        assert isinstance(kept, Persistence)

        async def bring(seconds: float) -> bool:
            def read(_: str, tokens: Any) -> SavedKV | None:
                fetched.append(len(tokens))
                clock[0] += seconds
                return SavedKV(len(tokens), b"not its KV")

            before, session.kv_source = len(fetched), KVSource(read, is_remote=True)
            await kept.warm(session)
            return len(fetched) > before

        def predicted(_: int, num_tokens: int) -> Future[float | None]:
            done: Future[float | None] = Future()
            done.set_result(None if replay_s[0] is None else num_tokens * replay_s[0])
            return done

        monkeypatch.setattr(loaded.client, "replay_s", predicted)
        replay_s.append(None)
        assert [await bring(1.0) for _ in range(5)] == [True] * 5, "it is not known what a replay takes"
        each = 1.0 / fetched[0]
        replay_s[0] = 1.1 * each
        assert await bring(1.0)
        replay_s[0] = 0.9 * each
        assert sum([await bring(1.0) for _ in range(2 * FETCH_AGAIN)]) == 2
        session.kv_source = KVSource(lambda *_: fetched.append(0), is_remote=False)
        await kept.warm(session)
        assert fetched[-1] == 0, "disks are not asked about"

    play(tmp_path, scene)
