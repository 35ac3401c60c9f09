"""Sessions over HTTP on the default model: real words, only what is new is computed, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conversing import Conversation, events_in, joined, listening, resumed
from tests.server.serving import KEY, Running, running
from tokenmill import AsyncLLM
from tokenmill.server.config import ServerConfig, hash_key

NAME = "smollm2-135m"
JAPAN, ITALY, SPAIN = "What is the capital of Japan?", "And of Italy?", "And of Spain?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(default_model: Path, backend: dict[str, Any]) -> Iterator[Running]:
    llm = AsyncLLM(str(default_model), max_model_len=1024, kv_cache_tokens=4096, **backend)
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),)), NAME) as one:
        yield one


def converse(server: Running, **options: Any) -> Conversation:
    reply = server.post("/v1/sessions", {"model": NAME, **GREEDY, **options})
    assert reply.status == 201, reply.body
    return Conversation(server, reply.json()["id"])


@pytest.mark.req("R36", "B1", "B2")
def test_a_conversation_its_fork_and_its_edit(server: Running) -> None:
    talk = converse(server, system="Answer in one sentence.")
    first = talk.ask(JAPAN)
    assert "Tokyo" in first["text"]
    known = first["usage"]["total_tokens"]
    (fork,) = talk.fork()
    second = talk.ask(ITALY)
    assert "Rome" in second["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= known - 1
    chat = server.client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": ITALY}], extra_body={"session_id": fork.id}
    )
    assert chat.choices[0].message.content == second["text"]
    assert fork.said() == talk.said()
    assert talk.post("edit", turn=2, content=SPAIN).json()["num_turns"] == 2
    assert "Madrid" in talk.ask()["text"]
    assert "Rome" in fork.said()[-1]


@pytest.mark.req("R36")
def test_responses_that_go_on(server: Running) -> None:
    options: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 24}
    first = server.client.responses.create(input=JAPAN, **options)
    italy = server.client.responses.create(input=ITALY, previous_response_id=first.id, **options)
    spain = server.client.responses.create(input=SPAIN, previous_response_id=first.id, **options)
    assert ("Tokyo" in first.output_text, "Rome" in italy.output_text, "Madrid" in spain.output_text) == (True,) * 3
    assert italy.usage is not None
    assert first.usage is not None
    assert italy.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


@pytest.mark.req("R36", "R43")
@pytest.mark.parametrize("stop", [None, "kyo"])
def test_a_stream_that_was_cut_loses_nothing(server: Running, stop: str | None) -> None:
    """A stop string may begin inside a token: what is said of that one is the answer's, but the token is not."""
    options: dict[str, Any] = {} if stop is None else {"stop": stop}
    answer = converse(server).ask(JAPAN, **options)
    whole = (answer["text"], answer["token_ids"])
    assert answer["text"].endswith(" Tokyo." if stop is None else " To")
    talk = converse(server)
    events = events_in(talk.post("generate", input=JAPAN, **options).body)
    assert joined(events) == whole
    for count in range(1, len(events) + 1):
        seen = [*events[:count], *resumed(talk, events[count - 1].id)]
        assert joined(seen) == whole
    for count in (1, 2, 4):
        cut = converse(server)
        with listening(cut, input=JAPAN, **options) as listener:
            listener.read_tokens(count)
            listener.leave("RST")
        assert joined([*listener.seen, *resumed(cut, listener.seen[-1].id)]) == whole
