"""The soak test itself: a short form of it, and that it notices what it is there for."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.server.serving import HI, KEY, Running, running
from tests.soak import CHAT, FAKE, SCHEMA, Counts, Failed, Problem, Usage, answered, growths, plan_faults, soak
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.bench.load_clients import Target
from tokenmill.server.config import ServerConfig, hash_key

KINDS = {"cancel", "chat", "flood", "invalid", "seeded", "session", "slow reader", "structured", "tools", "turn"}
SECONDS = 12.0


@pytest.mark.slow
@pytest.mark.req("R32", "R35", "G18")
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    """With one engine process killed and one restart on the store. `make soak` takes 20 minutes, with a real model."""
    report = soak([FAKE], SECONDS, seed=2)
    assert report.problems == []
    assert report.record.outcomes.keys() == KINDS
    assert {one.what for one in report.disruptions} == {"engine process killed", "restart after SIGTERM"}
    assert sum(found["answered"] for found in report.record.outcomes.values()) > 20
    report.write(tmp_path)
    assert "**0 problems**" in (tmp_path / "soak.md").read_text()
    assert {path.name for path in (tmp_path / "images").iterdir()} == {
        "soak-memory.svg", "soak-descriptors.svg", "soak-requests.svg",
    }  # fmt: skip


def test_the_plan_follows_from_the_seed() -> None:
    plan = plan_faults(1200, 5, hangs=True)
    assert plan == plan_faults(1200, 5, hangs=True) != plan_faults(1200, 6, hangs=True)
    assert [at_s for at_s, _ in plan] == sorted(at_s for at_s, _ in plan)
    assert plan[-1][0] < 0.7 * 1200
    assert Counter(what for _, what in plan) == {"kill": 15, "hang": 4, "SIGTERM": 3, "SIGKILL": 3}


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_answer_is_a_problem_and_an_error_is_a_failure(stream: bool) -> None:
    llm = AsyncLLM(FakeModel(FakeConfig(vocab_size=258, depth=1)), kv_cache_tokens=4096)
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),))) as server:
        body = {"messages": HI, "max_tokens": 64, "temperature": 0, "structured_outputs": {"json": SCHEMA}}
        right = server.post(CHAT, body).json()["choices"][0]["message"]["content"]
        _ask(server, {**body, "stream": stream}, right)
        for wrong in ("", right[:-1], right + "!", "!" + right):
            with pytest.raises(Problem, match="wrong answer"):
                _ask(server, {**body, "stream": stream}, wrong)
        with pytest.raises(Problem, match="status 400"):
            _ask(server, {**body, "stream": stream, "n": -1}, right)
    with pytest.raises(Failed):
        _ask(server, body, right)


def _ask(server: Running, body: dict[str, object], expected: str) -> None:
    asyncio.run(answered(Target(f"http://127.0.0.1:{server.port}", KEY), CHAT, body, expected))


def test_counters_must_add_up() -> None:
    metrics = (
        'tokenmill_http_requests_received_total{endpoint="/a"} 8.0\n'
        'tokenmill_http_requests_received_total{endpoint="/a/{id}"} 1.0\n'
        'tokenmill_http_requests_running{endpoint="/a"} 2.0\n'
        'tokenmill_http_requests_total{endpoint="/a",outcome="finished"} 3.0\n'
        'tokenmill_http_requests_total{endpoint="/a/{id}",outcome="finished"} 1.0\n'
        'tokenmill_http_requests_total{endpoint="/a",outcome="rejected"} 3.0\n'
    )
    counts = Counts()
    for pid in (1, 1, 2):  # the counters of a process are counted once
        counts.update(pid, metrics)
    assert counts.total == {"received_total": 18, "running": 4, "finished": 8, "rejected": 6}
    with pytest.raises(Problem, match="add up"):
        counts.update(2, metrics.replace("8.0", "9.0"))


@pytest.mark.parametrize(
    ("mib_per_s", "fds_per_s", "is_leak"), [(0.0, 0.0, False), (0.05, 0.0, False), (0.5, 0.0, True), (0.0, 0.2, True)]
)
def test_growth_is_found_in_any_process(mib_per_s: float, fds_per_s: float, is_leak: bool) -> None:
    steady = [Usage(float(at), 1, True, 100 + at % 7, 20 + at % 3) for at in range(100)]
    grows = [Usage(float(at), 2, False, 100 + mib_per_s * at, int(13 + fds_per_s * at)) for at in range(100)]
    brief = [Usage(float(at), 3, False, 1000.0 * at, 13) for at in range(30)]
    found = growths([*steady, *grows, *brief], 0.0)
    assert [one.is_leak for one in found] == [False, is_leak]
