"""The tasks of `bench compare --server`, on a server of the fake model; and how their results are told."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.serving import Child
from tokenmill.bench import compare
from tokenmill.bench.load_clients import HttpFailure, Sample, Target
from tokenmill.bench.servers import (
    FIRST,
    GAP,
    SPEED,
    TASKS,
    ServerRow,
    Subject,
    Work,
    clients,
    gaps_within,
    long_prompt,
    shared_prefix,
    table,
)
from tokenmill.bench.workloads import IdPrompts, Word


def do(server: Child, work: Work) -> dict[str, float]:
    prompts = IdPrompts([Word(chr(i), (i,)) for i in range(97, 123)], seed=0)
    return asyncio.run(asyncio.wait_for(_do(server, work, prompts), 30))


async def _do(server: Child, work: Work, prompts: IdPrompts) -> dict[str, float]:
    return await work(Subject(Target(f"http://127.0.0.1:{server.port}"), "fake", prompts))


@pytest.mark.parametrize(
    ("work", "measures"),
    [
        (clients(3, prompt_tokens=20, new_tokens=8), {SPEED, FIRST}),
        (shared_prefix(3, shared=100, own=8, new_tokens=4), {FIRST}),
        (long_prompt(2, 3000, short_tokens=16), {GAP}),
    ],
)
def test_each_task_can_be_done_and_measured(server: Child, work: Work, measures: set[str]) -> None:
    found = do(server, work)
    assert found.keys() == measures
    assert all(value > 0 for value in found.values())


def test_work_that_is_refused_is_no_result(server: Child) -> None:
    with pytest.raises(HttpFailure, match="HTTP 400"):
        do(server, clients(1, prompt_tokens=100_000))


def test_gaps_count_where_they_overlap_the_span() -> None:
    sample = Sample(0.0, (1.0, 2.0, 4.0, 7.0, 11.0), 11.0)
    assert gaps_within(sample, 2.5, 6.0) == [2.0, 3.0]
    assert gaps_within(sample, 0.0, 20.0) == [1.0, 2.0, 3.0, 4.0]
    assert gaps_within(sample, 11.0, 20.0) == []


def test_a_ratio_is_the_median_of_the_rounds_and_has_a_bar() -> None:
    row = ServerRow(
        "clients-16", SPEED, ours=[100, 300, 200], theirs=[50, 100, 100], again=[110, 300, 180], asked=(">=", 2.5)
    )
    assert row.ratio == 2.0
    assert row.noise == 1.0
    assert (row.bar, row.is_met) == (">= 2.5", False)
    quick = ServerRow("clients-16", FIRST, ours=[40], theirs=[100], again=[44], asked=("<=", 0.4))
    assert (quick.bar, quick.is_met) == ("<= 0.4", True)
    free = ServerRow("clients-4", SPEED, ours=[1], theirs=[2], again=[1])
    assert (free.bar, free.is_met) == ("", None)
    assert table([row, quick, free]).splitlines()[2:] == [
        "| 16 clients | tok/s | 200.0 | 100.0 | 2.00 | 1.00 | >= 2.5 | no |",
        "| 16 clients | p50 TTFT ms | 40.0 | 100.0 | 0.40 | 1.10 | <= 0.4 | yes |",
        "| 4 clients | tok/s | 1.0 | 2.0 | 0.50 | 1.00 |  |  |",
    ]


def test_every_bar_is_of_a_measure_and_every_prompt_fits() -> None:
    for task in TASKS.values():
        assert task.bars.keys() <= {SPEED, FIRST, GAP}
        assert task.slots * task.slot_context <= 1 << 17


def test_compare_hands_over_to_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        compare.main(["--server", "--tasks", "juggling"])
    assert error.value.code == 2
    assert "no task juggling; there are clients-1" in capsys.readouterr().err
