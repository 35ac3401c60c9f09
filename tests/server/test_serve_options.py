"""Options of `tokenmill serve`, passed on the command line and in a TOML file to a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.server.queueing import CHAT, assert_overloaded
from tests.server.serving import KEY, Child, child, request
from tests.server.test_hanging_engine import chat
from tests.server.wire import PATIENCE_S, Wire, chat_body, until

OTHER = "sk-other"
QUEUE_TIMEOUT_S = 4


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """One row and a small queue, all of it asked for on the command line."""
    options = ["--max-num-seqs", "1", "--max-queue", "2", "--max-queue-tokens", "400", "--prefill-chunk", "64"]
    options += ["--queue-timeout", str(QUEUE_TIMEOUT_S), "--api-key", KEY, "--api-key", OTHER]
    sizes = ["--extra", "max_context=65536", "--extra", "vocab_size=258", "--kv-cache-tokens", "65536"]
    with child(tmp_path_factory.mktemp("narrow") / "log", "fake", *options, *sizes) as server:
        yield server


@contextmanager
def one_running(port: int) -> Iterator[None]:
    """A stream has the only row."""
    with Wire(port) as stream:
        stream.send(chat(stream=True, max_tokens=60_000))
        stream.first_id()
        yield


def num_queued(port: int) -> int:
    (model,) = request(port, "GET", "/v1/scheduler").json()["models"]
    return sum(len(core["waiting"]) for core in model["cores"])


@pytest.mark.req("G8", "R15")
@pytest.mark.parametrize("limit", ["max_queue", "max_queue_tokens"])
def test_g8_the_queue_is_as_long_as_the_command_line_says(narrow: Child, limit: str) -> None:
    with one_running(narrow.port), ExitStack() as stack:
        length, most = (1, 2) if limit == "max_queue" else (250, 1)
        for i in range(most):
            stack.enter_context(Wire(narrow.port)).send(chat(f"{i}" * length))
        until(lambda: num_queued(narrow.port) == most)
        refused = request(narrow.port, "POST", CHAT, chat_body("x" * length))
        assert_overloaded(refused)
    until(lambda: num_queued(narrow.port) == 0)


@pytest.mark.req("B7")
def test_b7_a_request_that_is_refused_or_waits_too_long_is_told_so(narrow: Child) -> None:
    """The key that fills the queue is told when to retry and how many requests are ahead; another key gets a slot."""
    with one_running(narrow.port), ExitStack() as stack:
        queued = [stack.enter_context(Wire(narrow.port)) for _ in range(2)]
        for i, client in enumerate(queued):
            client.send(chat(f"queued {i}"))
        until(lambda: num_queued(narrow.port) == 2)
        refused = request(narrow.port, "POST", CHAT, chat_body())
        assert_overloaded(refused)
        assert 0 < int(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"]) <= 60_000
        assert int(refused.headers["x-queue-position"]) >= 2
        began = time.monotonic()
        other = request(narrow.port, "POST", CHAT, chat_body(max_tokens=4), key=OTHER)
        assert (other.status, other.error["code"]) == (503, "timeout")
        assert int(other.headers["retry-after"]) >= 1
        assert QUEUE_TIMEOUT_S <= time.monotonic() - began < QUEUE_TIMEOUT_S + PATIENCE_S
        replies = [client.read_reply() for client in queued]
        assert [reply and reply.status for reply in replies] == [503, 429], (
            "the last one gave its place to the other key"
        )
    until(lambda: num_queued(narrow.port) == 0)


@pytest.mark.req("R11", "B9")
def test_workers_and_their_shares_are_asked_for_on_the_command_line(tmp_path: Path) -> None:
    options = ["--workers", "2", "--kv-cache-tokens", "8200", "--max-num-seqs", "10", "--context", "512"]
    toml = tmp_path / "models.toml"
    toml.write_text('[[model]]\nname = "three"\npath = "fake"\nworkers = 3\nkv_cache_tokens = 3000\n')
    with child(tmp_path / "log", "fake", *options, "--config", str(toml)) as server:
        models = request(server.port, "GET", "/v1/scheduler").json()["models"]
    shares = {one["model"]: [(core["cells"]["all"], len(core["slots"])) for core in one["cores"]] for one in models}
    assert shares == {"fake": [(4096, 5)] * 2, "three": [(992, 4)] * 3}
