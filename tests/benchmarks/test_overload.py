"""`python -m benchmarks.overload`: its figures, and a short run over a real server."""

from __future__ import annotations

import json

import pytest

from benchmarks.overload import GOOD, KeyRun, Refusal, jain, main, retry_ratios, slope_per_minute


def test_the_true_value_of_retry_after_is_when_all_who_wait_have_been_admitted() -> None:
    run = KeyRun(admitted=[1.0, 3.0, 4.0, 8.0])
    run.refusals = [Refusal(0.0, 2.0, 1), Refusal(2.0, 4.0, 2), Refusal(2.0, 3.0, 3), Refusal(5.0, 9.0, 2)]
    assert retry_ratios(run) == [2.0, 2.0, 0.5]  # of the last one nothing is known


def test_figures() -> None:
    assert jain([1, 1, 1, 1]) == 1.0
    assert jain([1, 0, 0, 0]) == 0.25
    assert slope_per_minute([(float(i), 100 + i / 60) for i in range(40)]) == pytest.approx(1.0)


def test_it_measures_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fake", "--seconds", "2", "--control-seconds", "0.5", "--rows", "4", "--queue", "4", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert len(told["rows"]) == 7
    assert set(told["statuses"]) == {*GOOD, "hostile"}
    assert told["rows"][0]["is_met"], told  # no good key's request was refused
