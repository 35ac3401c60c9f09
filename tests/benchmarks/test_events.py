"""`python -m benchmarks.events` runs, and measures what it says."""

from __future__ import annotations

import json

import pytest

from benchmarks import events


def test_it_measures_the_hardest_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert events.main(["none", "--rows", "1", "4", "--fake-pairs", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["num_rows"], one["what"]) for one in told] == [
        (rows, what) for rows in (1, 4) for what in ("the server listens", "and somebody follows")
    ]
    assert all(one["without_us"] > 0 for one in told)


def test_it_runs_beside_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert events.main(["fake", "--sequences", "2", "--pairs", "1", "--rows", "2", "--fake-pairs", "1"]) == 0
    said = capsys.readouterr().out
    assert "| fake | 2 |" in said
    assert "of a step of fake" in said
