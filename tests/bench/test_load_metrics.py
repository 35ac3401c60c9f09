"""The figures of a run, by hand: the same arithmetic as `vllm bench serve`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tokenmill.bench.load_clients import Sample
from tokenmill.bench.serve import (
    LoadReport,
    most_at_once,
    running_by_second,
    statistics_of,
    tokens_by_second,
    totals,
    values_ms,
)

QUICK = Sample(10.0, (10.1, 10.2, 10.4), 10.5, prompt_tokens=7, output_tokens=5)
"""TTFT 100 ms, latency 500, TPOT (500 - 100) / 4 = 100; pieces after 100 and 200 ms."""
SLOW = Sample(10.2, (11.2,), 11.2, prompt_tokens=3, output_tokens=1)
"""TTFT and latency 1,000 ms; one token, so no TPOT."""
FAILED = Sample(10.0, (10.1,), 10.1, prompt_tokens=100, output_tokens=100, error="HTTP 503", detail="stopping")


def test_one_request() -> None:
    assert QUICK.ttft_s == pytest.approx(0.1)
    assert QUICK.latency_s == pytest.approx(0.5)
    assert QUICK.tpot_s == pytest.approx(0.1)
    assert QUICK.gaps_s == pytest.approx([0.1, 0.2])
    assert SLOW.tpot_s == 0
    assert replace(SLOW, chunk_times_s=()).ttft_s == pytest.approx(1.0)  # an answer without text


def test_a_whole_run() -> None:
    found = totals([QUICK, SLOW, FAILED], 2.0, {})
    assert (found.completed, found.failed) == (2, 1)
    assert (found.total_input_tokens, found.total_output_tokens) == (10, 6)
    assert found.request_throughput == pytest.approx(1.0)
    assert found.output_throughput == pytest.approx(3.0)
    assert found.total_token_throughput == pytest.approx(8.0)
    assert found.request_goodput is None
    assert found.max_output_tokens_per_s == pytest.approx(5.0)
    assert found.max_concurrent_requests == 2


@pytest.mark.parametrize(
    ("goals", "num_good"),
    [
        ({"ttft": 500}, 1),
        ({"ttft": 1001}, 2),
        ({"tpot": 99}, 1),
        ({"tpot": 101, "e2el": 600}, 1),
        ({"e2el": 100}, 0),
    ],
)
def test_goodput_counts_requests_that_meet_all_goals(goals: dict[str, float], num_good: int) -> None:
    assert totals([QUICK, SLOW, FAILED], 2.0, goals).request_goodput == pytest.approx(num_good / 2)


def test_the_values_of_a_metric_are_those_of_answered_requests() -> None:
    samples = [QUICK, SLOW, FAILED]
    assert values_ms(samples, "ttft") == pytest.approx([100, 1000])
    assert values_ms(samples, "e2el") == pytest.approx([500, 1000])
    assert values_ms(samples, "tpot") == pytest.approx([100])
    assert values_ms(samples, "itl") == pytest.approx([100, 200])


def test_statistics() -> None:
    found = statistics_of([1, 2, 3, 4], [25, 99.9])
    assert found == pytest.approx({"mean": 2.5, "median": 2.5, "std": 1.118034, "p25": 1.75, "p99.9": 3.997})
    assert statistics_of([], [99]) == {"mean": 0, "median": 0, "std": 0, "p99": 0}


def test_tokens_and_running_requests_of_each_second() -> None:
    assert tokens_by_second([QUICK, SLOW]) == pytest.approx([5, 1])  # 5 tokens in 3 pieces
    assert running_by_second([QUICK, SLOW]) == pytest.approx([0.5 + 0.8, 0.2])
    assert tokens_by_second([]) == running_by_second([]) == []


def test_a_request_that_ends_makes_room_for_one_that_begins() -> None:
    one = Sample(0.0, (1.0,), 1.0)
    assert most_at_once([one, replace(one, sent_s=1.0, ended_s=2.0)]) == 1
    assert most_at_once([one, replace(one, sent_s=0.9, ended_s=2.0)]) == 2
    assert most_at_once([]) == 0


def report(*samples: Sample) -> LoadReport:
    setup = {"model_id": "m", "max_concurrency": 4, "request_rate": 2.5}
    return LoadReport(setup, samples, 2.0, {"ttft": 500.0}, ["ttft", "itl"], [50, 99])


def test_the_table_is_as_vllm_prints_it() -> None:
    lines = report(QUICK, SLOW, FAILED).table().splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert [line.split(":")[0] for line in lines[1:14]] == [
        "Successful requests",
        "Failed requests",
        "Maximum request concurrency",
        "Request rate configured (RPS)",
        "Benchmark duration (s)",
        "Total input tokens",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Request goodput (req/s)",
        "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)",
        "Peak concurrent requests",
        "Total token throughput (tok/s)",
    ]
    assert lines[1] == f"{'Successful requests:':<40} {2:<10}"
    assert lines[14] == "---------------Time to First Token----------------"
    assert [line.split(":")[0] for line in lines[15:19]] == [
        "Mean TTFT (ms)",
        "Median TTFT (ms)",
        "P50 TTFT (ms)",
        "P99 TTFT (ms)",
    ]
    assert lines[15].split() == ["Mean", "TTFT", "(ms):", "550.00"]
    assert lines[-2] == "=" * 50
    assert lines[-1] == "1 x HTTP 503: stopping"


def test_the_result_has_vllms_keys() -> None:
    made = json.loads(json.dumps(report(QUICK, SLOW, FAILED).to_json()))
    assert made["model_id"] == "m"
    assert made["completed"] == 2
    assert made["mean_ttft_ms"] == pytest.approx(550)
    assert made["p99_itl_ms"] == pytest.approx(199)
    assert made["error_kinds"] == {"HTTP 503": 1}
    assert {"duration", "request_throughput", "output_throughput", "median_ttft_ms", "std_itl_ms"} <= made.keys()
    assert "ttfts" not in made
    detailed = report(QUICK, FAILED).to_json(detailed=True)
    assert detailed["errors"] == ["", "HTTP 503: stopping"]
    assert detailed["output_lens"] == [5, 0]


def test_the_plot_has_a_row_for_each_second_and_never_too_many() -> None:
    assert [line.split()[:3] for line in report(QUICK, SLOW).plot().splitlines()[1:]] == [
        ["0", "5.0", "1.3"],
        ["1", "1.0", "0.2"],
    ]
    long = Sample(0.0, tuple(float(i) for i in range(300)), 299.0, output_tokens=300)
    rows = report(long).plot().splitlines()[1:]
    assert len(rows) == 20
    assert rows[3].split()[:3] == ["45", "1.0", "1.0"]
    assert report(FAILED).plot() == ""
