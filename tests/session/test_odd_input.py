"""What goes into a session where it is easy to be wrong: odd input, mixed input, rewritten pasts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.session.helpers import GREEDY, REWRITES, continuation, read, scene, tokens_of, with_template
from tokenmill import SessionService
from tokenmill.errors import ConfigError, InvalidRequest, SessionNotFound
from tokenmill.params import SamplingParams


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
        with pytest.raises(InvalidRequest, match="does not render answers verbatim"):
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
        seed = service._model().queue.find(child).options.sampling.seed or 0
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
        with pytest.raises(SessionNotFound, match="a session id must be a string"):
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
        with pytest.raises(InvalidRequest, match="must be a message"):
            await service.append_input(name, "AB", raw=True)
        bad: list[Any] = [service.fork(name, at_turn="1"), service.fork(name, n="x"), service.fork(name, n=0),
                          service.edit(name, "0", "x"), service.rewind(name, at_token=1.5)]  # fmt: skip
        for call in bad:
            with pytest.raises(InvalidRequest):
                await call
        assert [info.session_id for info in service.list()] == [name]

    scene(play)
    with pytest.raises(ConfigError, match="workers must be at least 1"):
        SessionService("fake", num_workers=0)
