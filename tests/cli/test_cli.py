"""The command line as a user runs it."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import tokenmill
from tests.server.serving import child, request
from tokenmill.cli.bench import BENCHMARKS, IN_THE_REPOSITORY
from tokenmill.cli.main import app

TOKENMILL = str(Path(sys.executable).with_name("tokenmill"))
ROOT = Path(__file__).parent.parent.parent


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_version_and_help() -> None:
    assert call(TOKENMILL, "--version").stdout == f"tokenmill {tokenmill.__version__}\n"
    assert "bench" in call(TOKENMILL, "--help").stdout
    assert "throughput" in call(TOKENMILL, "bench", "--help").stdout


def test_the_engine_benchmark_runs_from_the_repository() -> None:
    command = [sys.executable, "-m", "benchmarks.engine"]
    done = call(*command, "--sizes", "1", "8", "--rounds", "1", "--steps", "5", "--depths", "0", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["num_running"] for row in report["rows"]] == [1, 8]
    assert all(row["host_us_per_row"] > 0 for row in report["rows"])
    table = call(*command, "--sizes", "2", "--rounds", "1", "--steps", "3").stdout
    assert "| 2 | 1 |" in table


@pytest.mark.parametrize("name", IN_THE_REPOSITORY)
def test_a_benchmark_of_the_repository_says_where_it_is(name: str) -> None:
    done = call(TOKENMILL, "bench", name, "--sizes", "1")
    assert done.returncode == 2
    assert f"python -m benchmarks.{name}" in done.stderr
    assert (ROOT / "benchmarks" / f"{name}.py").exists()


# -- help -------------------------------------------------------------------------------------------------------------

COMMANDS = ["generate", "chat", "pull", "serve", "fit", "top", "replay"]


def compact(text: str) -> str:
    """Without white space: where lines of a help page are broken does not matter."""
    return "".join(text.split())


def parameters(command: str) -> Iterator[Any]:
    group: Any = typer.main.get_command(app)
    yield from group.commands[command].params


@pytest.mark.parametrize("command", COMMANDS)
def test_21_8_help_shows_every_word_and_every_default(command: str) -> None:
    shown = compact(CliRunner().invoke(app, [command, "--help"]).stdout)
    for parameter in parameters(command):
        line = compact(parameter.help or "")
        assert line, parameter.name
        assert line in shown, f"{parameter.name}: markup has taken something out of {line!r}"
        if parameter.required or getattr(parameter, "is_flag", False) or parameter.name == "help":
            continue
        if parameter.multiple:
            assert "(repeatable)" in line, parameter.name
        else:
            assert parameter.default is not None or isinstance(parameter.show_default, str), parameter.name
            assert re.match(r"\[[^]]*default:", shown.partition(line)[2]), parameter.name


def test_21_8_help_names_the_tables_of_a_config_file() -> None:
    assert compact("TOML file with [[model]] tables") in compact(CliRunner().invoke(app, ["serve", "--help"]).stdout)


@pytest.mark.parametrize(
    "name",
    [
        *(f"tokenmill.bench.{name}" for name in (*BENCHMARKS, "servers")),
        *(f"benchmarks.{n}" for n in IN_THE_REPOSITORY),
    ],
)
def test_21_8_help_of_a_benchmark_shows_every_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[argparse.ArgumentParser] = []

    def parse_args(parser: argparse.ArgumentParser, *_: Any) -> None:
        found.append(parser)
        raise SystemExit

    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(SystemExit):
        import_module(name).main([])
    (parser,) = found
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or action.nargs == 0:
            continue
        assert action.help, action.dest
        shown = parser._get_formatter()._expand_help(action)
        assert action.required or "(default: " in shown, f"{action.dest}: {shown}"
        assert "(default: None)" not in shown, action.dest
        assert "sk-secret" not in shown


def test_21_8_serve_sets_the_size_of_the_kv_cache(tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake", "--kv-cache-tokens", "4096", "--context", "512") as served:
        (model,) = request(served.port, "GET", "/v1/scheduler").json()["models"]
        assert model["cores"][0]["cells"]["all"] == 4096
    done = call(TOKENMILL, "serve", "fake", "--kv-cache-tokens", "0")
    assert done.returncode == 2
    assert "--kv-cache-tokens" in done.stderr


def test_wrong_usage_is_exit_code_2() -> None:
    assert call(TOKENMILL, "bench", "engine", "--sizes", "0").returncode == 2
    assert call(TOKENMILL, "bench", "engine", "--colour", "red").returncode == 2
    assert call(TOKENMILL, "dance").returncode == 2
