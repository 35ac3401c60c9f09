"""`python -m benchmarks.batches`: its figures, and a short run over a real server."""

from __future__ import annotations

import json

import pytest

from benchmarks.batches import Phase, main, report


def test_what_streams_leave_is_what_the_batch_does_alone_less_theirs() -> None:
    alone = Phase("alone", seconds=10, line_tokens=10_000)
    control = Phase("control", seconds=10, streamed=5_000, gaps_s=[0.010] * 200)
    both = Phase("both", seconds=10, streamed=5_000, gaps_s=[0.014] * 200, line_tokens=3_000)
    found = report([alone, control, both, control])
    assert (found.left, found.batch) == (500, 300)
    assert found.itl_ratio == pytest.approx(1.4)
    assert found.a_a == 1.0
    assert found.is_met


def test_it_measures_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--seconds", "0.5", "--most-seconds", "3", "--settle-seconds", "0.1", "--lines", "3000", "--json"]
    main(["fake", *short])
    told = json.loads(capsys.readouterr().out)
    alone, control, both, _ = told["phases"]
    assert min(alone["lines"], both["lines"]) > 0
    assert min(control["streamed"], both["streamed"]) > 0
