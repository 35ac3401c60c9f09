"""Conversations under load: what each turn sends, and when one ends."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from typing import Any

from tests.bench.scripted import DONE, HEAD, USAGE, answering, chunk, plain
from tokenmill.bench.load_clients import Sample
from tokenmill.bench.workloads import Load, LoadConversation, LoadTurn

ANSWER = HEAD + b"\r\n" + chunk("yes") + chunk(finish_reason="stop") + USAGE + DONE
TALK = LoadConversation((LoadTurn("one", 4), LoadTurn("two", 5)))


def run(answer: bytes, *, uses_sessions: bool, **others: bytes) -> tuple[list[Sample], list[tuple[str, Any]]]:
    """What became of the requests of one conversation, and what the server heard: first lines and bodies."""
    heard: list[bytes] = []

    async def go() -> list[Sample]:
        async with answering(answer, heard, **others) as target:
            load = Load(
                target=target,
                model="m",
                endpoint="/v1/chat/completions",
                is_chat=True,
                timeout_s=30.0,
                sampling={"ignore_eos": True},
                uses_sessions=uses_sessions,
                places=nullcontext(),
            )
            await load.run([TALK], [0.0])
            return load.samples

    samples = asyncio.run(go())
    parts = [one.decode().partition("\r\n\r\n") for one in heard]
    return samples, [(head.partition(" HTTP")[0], json.loads(body or "null")) for head, _, body in parts]


def test_each_turn_sends_the_history() -> None:
    samples, heard = run(ANSWER, uses_sessions=False)
    assert [one.text for one in samples] == ["yes", "yes"]
    (_, first), (_, second) = heard
    assert first["messages"] == [{"role": "user", "content": "one"}]
    assert second["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "two"},
    ]
    assert (first["max_completion_tokens"], second["max_completion_tokens"]) == (4, 5)
    assert first["ignore_eos"] is True
    assert "session_id" not in first


def test_with_a_session_each_turn_sends_what_is_new() -> None:
    samples, heard = run(ANSWER, uses_sessions=True, sessions=plain(201, {"id": "s-1"}))
    assert len(samples) == 2
    assert [line for line, _ in heard] == [
        "POST /v1/sessions",
        "POST /v1/chat/completions",
        "POST /v1/chat/completions",
        "DELETE /v1/sessions/s-1",
    ]
    for (_, body), text in zip(heard[1:3], ("one", "two"), strict=True):
        assert body["messages"] == [{"role": "user", "content": text}]
        assert body["session_id"] == "s-1"


def test_the_first_failure_ends_a_conversation() -> None:
    samples, heard = run(plain(503, {"error": {"message": "stopping"}}), uses_sessions=False)
    assert [(one.error, one.detail) for one in samples] == [("HTTP 503", "stopping")]
    assert len(heard) == 1


def test_a_session_that_cannot_be_opened_is_a_failed_request() -> None:
    samples, _ = run(ANSWER, uses_sessions=True, sessions=plain(404, {"error": {"message": "path not found"}}))
    assert [one.error for one in samples] == ["HTTP 404"]
