"""Running a conversation again from its file: the same tokens, or the first that is another."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.session.helpers import make_service, read
from tests.session.killing import small_checkpoint, torch_model
from tokenmill import LLM, SessionService
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.errors import SessionFileError
from tokenmill.params import SamplingParams, StructuredOutputs
from tokenmill.session.records import DIGEST_BYTES, Replayed, open_file, replay, unpack

pytestmark = pytest.mark.slow

TOKENMILL = str(Path(sys.executable).with_name("tokenmill"))


async def talk(service: SessionService) -> str:
    """Sampled, with neighbours, a regeneration, parameters of an answer's own, a cancel and an eviction."""
    name = await service.create_session(sampling_params=SamplingParams(temperature=0.9, max_tokens=12), seed=7)
    others = [await service.create_session(seed=i) for i in range(3)]
    noise = [asyncio.ensure_future(noisy(service, other)) for other in others]
    for said, changes in (
        ("one", {}),
        ("two", {"temperature": 0.2, "top_k": 5, "logit_bias": {65: 2.0}}),
        ("x" * 90, {}),
    ):
        await service.append_input(name, said)
        await read(await service.generate_stream(name, **changes))
        await read(await service.regenerate(name, **changes))
    live = await service.answer(name, 400, given="long", ignore_eos=True)
    reading = live.read()
    await anext(reading)
    await service.cancel_generate(name)
    await read(await service.generate_stream(name, 6))  # goes on with what was cut short
    await asyncio.gather(*noise)
    return name


async def noisy(service: SessionService, name: str) -> None:
    for i in range(4):
        await service.append_input(name, f"noise {i} " * 4)
        await read(await service.generate_stream(name, 20))


def save(path: Path, **options: Any) -> Path:
    async def run() -> None:
        async with make_service(**options) as service:
            await service.save(await talk(service), path)

    asyncio.run(run())
    return path


def fake() -> LLM:
    return LLM(FakeModel(FakeConfig(vocab_size=258, max_context=1024, block_size=4)), kv_cache_tokens=2048)


@pytest.mark.req("B5", "R29")
def test_constrained_answers_go_on_after_a_cut_and_are_drawn_again(tmp_path: Path) -> None:
    """Cut short by its length, by a cancel and by a rewind into its middle, a fork of it, and a restart in between."""
    schema = {"type": "object", "properties": {name: {"type": "integer", "maximum": 9999, "minimum": 1000}
                                               for name in ("first", "second", "third")},
              "required": ["first", "second", "third"], "additionalProperties": False}  # fmt: skip
    outputs, path = StructuredOutputs(json=schema), tmp_path / "constrained.session"

    async def run() -> None:
        async with make_service(store=tmp_path / "store") as service:
            name = await service.create_session(sampling_params=SamplingParams(temperature=0.9), seed=7)
            await service.append_input(name, "one")
            begun, _, _ = await read(await service.generate_stream(name, 20, structured_outputs=outputs))
            assert len(begun) == 20
            fork = await service.fork(name)
        async with make_service(store=tmp_path / "store") as service:
            for one in (fork, name):
                text, ids, last = await read(await service.generate_stream(one, 100, structured_outputs=outputs))
                assert list(json.loads(begun + text)) == ["first", "second", "third"]
            assert last.usage is not None
            await service.rewind(name, at_token=last.usage.prompt_tokens + len(ids) - 12)
            rest, _, _ = await read(await service.generate_stream(name, 100, structured_outputs=outputs))
            assert list(json.loads((begun + text)[:-11] + rest)) == ["first", "second", "third"]
            await service.save(name, path)

    asyncio.run(run())
    with fake() as llm:
        found = list(replay(open_file(path, llm), llm))
    assert [one.at for one in found] == [None]


@pytest.mark.req("B5")
def test_every_answer_is_drawn_again_token_for_token(tmp_path: Path) -> None:
    path = save(tmp_path / "one.session", cells=700)
    with fake() as llm:
        found = list(replay(open_file(path, llm), llm))
    assert [one.turn for one in found] == [1, 3, 5, 7]
    assert [one.at for one in found] == [None] * 4


@pytest.mark.req("B5")
def test_a_real_decoder_draws_the_same_again(tmp_path: Path) -> None:
    """With neighbours and after evictions, then alone: torch in deterministic mode."""
    checkpoint = small_checkpoint(tmp_path / "model")

    async def run() -> None:
        async with SessionService(torch_model(checkpoint), kv_cache_tokens=800) as service:
            await service.save(await talk(service), tmp_path / "one.session")

    asyncio.run(run())
    with LLM(torch_model(checkpoint), kv_cache_tokens=1024) as llm:
        found = list(replay(open_file(tmp_path / "one.session", llm), llm))
    assert [one.at for one in found] == [None] * 4


@pytest.mark.req("B5")
def test_the_first_token_that_differs_is_told(tmp_path: Path) -> None:
    path = save(tmp_path / "one.session")
    data = path.read_bytes()
    ids = unpack(data, "x", 258).record.tokens.array
    where = data.rindex(ids.tobytes())
    with fake() as llm:
        first = next(replay(open_file(path, llm), llm))
        begin = unpack(data, "x", 258).record.turns[0].end
        assert begin is not None
        at = begin + first.num_tokens - 2
        other = (int(ids[at]) + 1) % 256
        body = data[: where + 4 * at] + other.to_bytes(4, "little") + data[where + 4 * at + 4 : -DIGEST_BYTES]
        path.write_bytes(body + hashlib.sha256(body).digest())
        changed = next(replay(open_file(path, llm), llm))
    assert changed == Replayed(1, first.num_tokens, first.num_tokens - 2, other, ids[at])
    with LLM("fake") as llm, pytest.raises(SessionFileError, match="another model"):
        open_file(path, llm)


@pytest.mark.req("B5")
def test_the_command_says_whether_it_is_the_same(tmp_path: Path) -> None:
    async def run() -> None:
        async with SessionService("fake") as service:
            name = await service.create_session(seed=3)
            for said in ("one", "two"):
                await service.append_input(name, said)
                await read(await service.generate_stream(name, 10))
            await service.save(name, tmp_path / "one.session")

    asyncio.run(run())
    command = [TOKENMILL, "replay", str(tmp_path / "one.session"), "--model", "fake"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2 answers match, token for token\n"), done.stderr
    (tmp_path / "one.session").write_bytes(b"x")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "not a session file" in done.stderr) == (2, True)
