"""The command line as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill

TOKENMILL = str(Path(sys.executable).with_name("tokenmill"))


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_version_and_help() -> None:
    assert call(TOKENMILL, "--version").stdout == f"tokenmill {tokenmill.__version__}\n"
    assert "bench" in call(TOKENMILL, "--help").stdout
    assert "engine" in call(TOKENMILL, "bench", "--help").stdout


@pytest.mark.parametrize("command", [[TOKENMILL, "bench", "engine"], [sys.executable, "-m", "tokenmill.bench.engine"]])
def test_bench_engine_runs_either_way(command: list[str]) -> None:
    done = call(*command, "--sizes", "1", "8", "--rounds", "1", "--steps", "5", "--depths", "0", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["num_running"] for row in report["rows"]] == [1, 8]
    assert all(row["host_us_per_row"] > 0 for row in report["rows"])
    table = call(*command, "--sizes", "2", "--rounds", "1", "--steps", "3").stdout
    assert "| 2 | 1 |" in table


def test_wrong_usage_is_exit_code_2() -> None:
    assert call(TOKENMILL, "bench", "engine", "--sizes", "0").returncode == 2
    assert call(TOKENMILL, "bench", "engine", "--colour", "red").returncode == 2
    assert call(TOKENMILL, "dance").returncode == 2
