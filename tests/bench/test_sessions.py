"""The benchmark of sessions runs, and draws what it found."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tokenmill.bench import sessions


def test_turns_and_restoring_are_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "turns.svg"
    what = ["fake", "--parts", "by-turn", "restore", "--turns", "3", "--tokens", "20", "--pairs", "2"]
    assert sessions.main([*what, "--lengths", "32", "64", "--plot", str(chart), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    turns = report["by_turn"]
    assert turns["history"] == [20, 60, 100]
    assert {len(rounds) for rounds in turns["seconds"].values()} == {2}
    assert [one["num_tokens"] for one in report["restore"]["lengths"]] == [32, 64]
    drawn = ElementTree.fromstring(chart.read_text())
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 3


@pytest.mark.parametrize(
    ("ratios", "pays"), [([2, 0.9, 0.5], 2), ([0.5, 2, 0.4], 3), ([2, 2, 2], None), ([0.1] * 3, 1)]
)
def test_from_which_length_bytes_pay(ratios: list[float], pays: int | None) -> None:
    found = [sessions.Restored(i + 1, 0, 0.0, [ratio], [1.0]) for i, ratio in enumerate(ratios)]
    assert sessions.pays_from(found) == pays
