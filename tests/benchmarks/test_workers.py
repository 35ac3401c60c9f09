"""`python -m benchmarks.workers` runs, and measures what it says."""

from __future__ import annotations

import json

import pytest

from benchmarks import workers


def test_it_compares_one_worker_with_several(capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "fake",
        "--backends",
        "fake",
        "--streams",
        "4",
        "--new-tokens",
        "4",
        "--rounds",
        "2",
        "--prompt-tokens",
        "8",
    ]
    assert workers.main([*small, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert [len(row[name]) for name in ("one", "several", "again")] == [2, 2, 2]
    assert row["ratio"] > 0
    assert row["noise"] > 0
    assert workers.main(small) == 0
    assert "| fake | 4 streams, 8 + 4 tokens |" in capsys.readouterr().out
