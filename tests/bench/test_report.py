"""The benchmark report: what is measured becomes JSON, a page that needs no network, and the figures in the README."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tokenmill.bench import report
from tokenmill.bench.report import LATENCY, SPEED, Figure, Rounds


def test_a_run_writes_json_and_a_page_that_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    assert report.main(["fake", "--quick", "--rounds", "2", "--sections", "prefix", "speculation", *files]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert [one["name"] for one in found["sections"]] == ["prefix", "speculation"]
    assert found["command"] == "tokenmill bench report fake --quick --rounds 2 --sections prefix speculation"
    for row in (row for one in found["sections"] for row in one["rows"]):
        assert len(row["ours"]) == len(row["again"]) == len(row["theirs"]["off"]) == 2
        assert row["switch"]
        assert row["limit"] > 0
        assert row["noise"] > 0
    html = (tmp_path / "a.html").read_text()
    assert html.count("<svg") == 2
    assert not re.search(r"<script|<link|@import|src=|url\(", html)
    assert "EngineConfig(prefix_caching=False)" in capsys.readouterr().out
    again = tmp_path / "b.html"
    assert report.main(["--from-json", str(tmp_path / "a.json"), "--html", str(again)]) == 0
    assert again.read_text() == html


def test_a_ratio_above_one_is_always_better() -> None:
    faster = Figure("a", SPEED, "", ours=[200, 300, 100], again=[100, 300, 100], theirs={"off": [100, 100, 100]})
    sooner = Figure("b", LATENCY, "", ours=[50, 60, 40], again=[50, 60, 40], theirs={"off": [100, 120, 120]})
    assert faster.to_json()["ratios"] == {"off": 2}
    assert faster.to_json()["noise"] == 1
    assert sooner.to_json()["ratios"] == {"off": 2}


def test_rounds_end_when_the_next_one_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])

    def taken(budget_s: float) -> int:
        count = 0
        for _ in Rounds(7, budget_s):
            now[0] += 10
            count += 1
        return count

    assert [taken(1), taken(30), taken(35), taken(1000)] == [1, 3, 3, 7]
