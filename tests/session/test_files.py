"""Session files: what they carry, and what is refused with its reason."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.session.helpers import GREEDY, continuation, make_service, read, scene, tokens_of
from tests.session.storing import Held
from tokenmill import AsyncLLM, SessionService
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.errors import EngineDead, Overloaded, SessionFileError
from tokenmill.session import manager
from tokenmill.session.manager import SessionLimits, SessionQuota
from tokenmill.session.records import DIGEST_BYTES, LENGTHS, MAGIC, pack, unpack, write_whole


async def conversation(service: SessionService, said: str = "some words") -> str:
    name = await service.create_session(system="SYS", sampling_params=GREEDY, seed=1)
    await service.append_input(name, said)
    await read(await service.generate_stream(name))
    await service.append_input(name, "pending")
    return name


def header(data: bytes) -> dict[str, Any]:
    start = len(MAGIC) + LENGTHS.size
    _, header_bytes, _, _ = LENGTHS.unpack_from(data, len(MAGIC))
    return dict(json.loads(data[start : start + header_bytes]))


def resealed(data: bytes, **changes: Any) -> bytes:
    """With a changed header, and a checksum that fits."""
    start = len(MAGIC) + LENGTHS.size
    version, header_bytes, num_tokens, kv_bytes = LENGTHS.unpack_from(data, len(MAGIC))
    written = json.dumps({**header(data), **changes}).encode()
    lengths = LENGTHS.pack(version, len(written), num_tokens, kv_bytes)
    body = MAGIC + lengths + written + data[start + header_bytes : -DIGEST_BYTES]
    return body + hashlib.sha256(body).digest()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.req("B3")
@pytest.mark.parametrize("kv", [False, True])
def test_a_file_is_the_session(tmp_path: Path, kv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "MIN_KV_TOKENS", 8)

    async def play(service: SessionService) -> None:
        name = await conversation(service)
        path = await service.save(name, tmp_path / "one.session", kv=kv)
        async with make_service() as other:
            copy = await other.restore(path, key="mine")
            before, after = service.get(name), other.get(copy)
            assert tokens_of(other, copy) == tokens_of(service, name)
            assert (after.turns, after.pending, after.state) == (before.turns, before.pending, before.state)
            assert (after.key, after.session_id != name) == ("mine", True)
            _, ids, last = await read(await other.generate_stream(copy))
            _, same, _ = await read(await service.generate_stream(name))
            assert ids == same == continuation(tokens_of(other, copy)[: -len(ids)], GREEDY, seed=1)
            assert last.usage is not None
            assert (last.usage.cached_tokens > 0) == kv

    scene(play)


def test_the_format_is_as_documented(tmp_path: Path) -> None:
    """Read with nothing but what docs/durability.md says."""

    async def play(service: SessionService) -> None:
        name = await conversation(service)
        data = await service.export(name)
        assert data[:18] == b"tokenmill-session\x00"
        version, num_header, num_ids, num_kv = (
            int.from_bytes(data[a:b], "little") for a, b in ((18, 22), (22, 30), (30, 38), (38, 46))
        )
        assert (version, num_kv) == (1, 0)
        about = json.loads(data[46 : 46 + num_header])
        ids = memoryview(data)[46 + num_header : 46 + num_header + 4 * num_ids].cast("i").tolist()
        assert ids == tokens_of(service, name)
        assert data[-32:] == hashlib.sha256(data[:-32]).digest()
        assert set(about) == {"made_by", "model", "session", "turns", "num_kv_tokens"}
        assert set(about["model"]) == {"weights", "text", "form"}
        assert [turn["kind"] for turn in about["turns"]] == ["input", "answer"]
        assert about["session"]["inbox"] == [{"role": "user", "content": "pending"}]
        assert not {"key", "namespace"} & set(about["session"])

    scene(play)


@pytest.mark.req("B3")
def test_what_is_no_file_of_this_model_is_refused_with_the_reason() -> None:
    async def play(service: SessionService) -> None:
        name = await conversation(service)
        data = await service.export(name)
        about = header(data)["session"]
        version_2 = data[: len(MAGIC)] + LENGTHS.pack(2, 0, 0, 0) + data[len(MAGIC) + LENGTHS.size :]
        bad = {
            "the file is empty": b"",
            "not a session file": b"PK\x03\x04" + data,
            "truncated: 20 bytes": data[:20],
            "truncated": data[:-1],
            "too long": data + b"x",
            "version 2 is newer than the supported version": version_2,
            "checksum mismatch": data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
            "incomplete header": resealed(data, model={}),
            "do not match": resealed(data, turns=[]),
            "not 'x'": resealed(data, turns=[{"kind": "x"}]),
            "the KV does not match the token ids": resealed(data, num_kv_tokens=10**9),
            "'sampling' is missing": resealed(data, session={"system": None}),
            "surrogates not allowed": resealed(data, session={**about, "system": "\ud800"}),
            "maximum recursion": resealed(data, session={**about, "template_options": {"a": nested(600)}}),
        }
        for reason, wrong in bad.items():
            with pytest.raises(SessionFileError, match=reason):
                await service.restore(wrong)
        with pytest.raises(SessionFileError, match="cannot be read: No such file"):
            await service.restore("/nowhere/at/all")
        assert len(service) == 1, "and nothing is left of it"
        await read(await service.generate_stream(name))
        foreign = FakeModel(FakeConfig(vocab_size=300, max_context=1024))
        async with SessionService(foreign) as other:
            with pytest.raises(SessionFileError, match="it is of another model"):
                await other.restore(data)
        async with make_service() as other:
            object.__setattr__(other._model().opened.text.template, "source", "{{ messages }}")
            with pytest.raises(SessionFileError, match="another tokenizer or chat template"):
                await other.restore(data)
        async with make_service(max_model_len=20) as other:
            with pytest.raises(SessionFileError, match="the context is 20"):
                await other.restore(data)

    scene(play)


def test_texts_that_no_session_could_have_taken_in_are_refused() -> None:
    """They would be rendered on the event loop, where they hold up everybody."""

    async def play(service: SessionService) -> None:
        data = await service.export(await conversation(service))
        empty = await service.export(await service.create_session())
        about, long = header(data), {"role": "user", "content": "x" * 5000}
        asked, *rest = about["turns"]
        for wrong in (
            resealed(data, session={**about["session"], "inbox": [long]}),
            resealed(data, turns=[{**asked, "messages": [long]}, *rest]),
            resealed(empty, session={**header(empty)["session"], "system": "x" * 5000}),
        ):
            with pytest.raises(SessionFileError, match=r"the session has 50\d\d tokens; the context is 1024"):
                await service.restore(wrong)
        await service.restore(resealed(data, turns=[{**asked, "messages": [{**long, "content": "x" * 1500}]}, *rest]))

    scene(play)


@pytest.mark.req("B3")
def test_kv_that_does_not_fit_is_dropped_and_the_log_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "MIN_KV_TOKENS", 8)

    async def play(service: SessionService) -> None:
        name = await conversation(service)
        data = await service.export(name, kv=True)
        file = unpack(data, "x", 258)
        assert file.kv
        other_form = type(file.fingerprint)(file.fingerprint.weights, file.fingerprint.text, "0" * 32)
        for wrong in (
            pack(file.record, other_form, file.num_kv_tokens, file.kv),
            pack(file.record, file.fingerprint, file.num_kv_tokens, file.kv[:-1] + b"x"),
            pack(file.record, file.fingerprint, file.num_kv_tokens - 1, file.kv),
        ):
            async with make_service() as other:
                copy = await other.restore(wrong)
                _, ids, last = await read(await other.generate_stream(copy))
                assert last.usage is not None
                assert last.usage.cached_tokens == 0
                assert ids == continuation(tokens_of(other, copy)[: -len(ids)], GREEDY, seed=1)
        async with make_service(cells=96) as small:  # no room for all of it
            copy = await small.restore(data, key="k")
            await read(await small.generate_stream(copy))

    scene(play)


def test_a_file_that_is_written_twice_at_once_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sync, others = tmp_path / "one.session", os.fsync, [b"another one's"]

    def overtaken(file: int) -> None:
        if others:
            write_whole(path, others.pop())
            assert path.read_bytes() == b"another one's"
        sync(file)

    monkeypatch.setattr(os, "fsync", overtaken)
    write_whole(path, b"this one's")
    assert path.read_bytes() == b"this one's"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_read_while_the_model_goes_makes_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        llm = AsyncLLM(FakeModel(FakeConfig(vocab_size=258, max_context=1024)), kv_cache_tokens=1024)
        service = SessionService(llm)
        loaded, data = service._model(), await service.export(await conversation(service))
        reading = Held(loaded.read_file)
        monkeypatch.setattr(loaded, "read_file", reading)
        restoring = asyncio.ensure_future(service.restore(data))
        await reading.called.wait()
        await service.close()  # the engine goes on, for others
        reading.let_go()
        with pytest.raises(EngineDead):
            await restoring
        assert len(loaded.queue.sessions) == 0
        await llm.close()

    asyncio.run(run())


def test_whoever_leaves_while_a_file_is_restored_leaves_no_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "MIN_KV_TOKENS", 8)

    async def play(service: SessionService) -> None:
        loaded, data = service._model(), await service.export(await conversation(service), kv=True)
        took, real = asyncio.get_running_loop().create_future(), manager.import_kv

        async def taking(*given: Any) -> bool:
            took.set_result((given[2], await real(*given)))
            await asyncio.Event().wait()
            return True

        monkeypatch.setattr(manager, "import_kv", taking)
        restoring = asyncio.ensure_future(service.restore(data))
        session, is_taken = await took
        assert is_taken
        restoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restoring
        assert await asyncio.wrap_future(loaded.client.export_kv(session.core, session.session_id)) is None

    scene(play)


@pytest.mark.req("G8")
def test_files_restored_at_the_same_time_do_not_exceed_a_quota() -> None:
    limits = SessionLimits(quota=lambda _: SessionQuota(max_sessions=2))

    async def play(service: SessionService) -> None:
        data = await service.export(await conversation(service))
        restoring = [service.restore(data, template_options=()) for _ in range(4)]
        outcomes = await asyncio.gather(*restoring, return_exceptions=True)
        assert [type(one) for one in outcomes if not isinstance(one, str)] == [Overloaded] * 3
        assert service.usage_of("")[0] == 2

    scene(play, limits=limits)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_change_of_a_byte_gets_through(data: Any) -> None:
    file = _example()
    at = data.draw(st.integers(0, len(file) - 1))
    bit = data.draw(st.integers(0, 7))
    changed = file[:at] + bytes([file[at] ^ 1 << bit]) + file[at + 1 :]
    with pytest.raises(SessionFileError):
        unpack(changed, "x", 258)


_made: list[bytes] = []


def _example() -> bytes:
    if not _made:

        async def play(service: SessionService) -> None:
            _made.append(await service.export(await conversation(service), kv=True))

        scene(play)
    return _made[0]
