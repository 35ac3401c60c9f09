"""`tokenmill cluster`: what it refuses, in one line each. No cluster runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_RAY = "import sys; sys.modules['ray'] = None; from tokenmill.cli.main import main; main()"


def refused(*arguments: str, code: str = "from tokenmill.cli.main import main; main()") -> str:
    """The line on standard error."""
    command = [sys.executable, "-c", code, "cluster", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert done.stdout == ""
    return line


def test_without_the_extra() -> None:
    assert refused("status", code=WITHOUT_RAY) == "tokenmill: missing package ray: pip install 'tokenmill[ray]'"


def test_without_a_node(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    for command in (["status"], ["drain", "abc"]):
        assert "use `tokenmill cluster up`" in refused(*command, "--dir", str(tmp_path))
    assert "is running" in refused("down", "--dir", str(tmp_path))


def test_a_node_that_has_ended_but_was_not_reaped(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b""  # it has ended, and is a zombie until it is waited for
        (tmp_path / "node.json").write_text(json.dumps({"pid": process.pid, "address": "127.0.0.1:1"}))
        assert "is running" in refused("down", "--dir", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("applications: [{args: {model: fake, store: /tmp/x}}]", "store must be a postgresql:// URL"),
        ("applications: [{args: {store: 'postgresql://x'}}]", "one of model and models is required"),
        ("applications: [{args: {models: [{name: a}], store: 'postgresql://x'}}]", "path is missing"),
        ("applications: [{args: {modle: fake}}]", "unknown modle"),
        ("applications: [{args: {model: fake, store: 'postgresql://x', engine: {max_seqs: 1}}}]", "unknown max_seqs"),
        ("applications: [{args: {model: fake, store: 'postgresql://x', server: {port: 1}}}]", "unknown setting port"),
        (
            "applications: [{args: {model: fake, store: 'postgresql://x', server: {drain_s: soon}}}]",
            "drain_s must be",
        ),
        ("applications: [{args: {model: fake, store: 'postgresql://x', server: {idle_s: 0}}}]", "idle_s must be"),
        ("applications: [{route_prefix: /llm, args: {model: fake}}]", "route_prefix must be /"),
        (
            "http_options: {host: 0.0.0.0}\napplications: [{args: {model: fake, store: 'postgresql://x'}}]",
            "binding to 0.0.0.0 requires API keys",
        ),
        ("applications: 3", "no list of applications"),
        ("a: b: c", "not valid YAML"),
    ],
)
def test_a_file_that_cannot_work(tmp_path: Path, text: str, problem: str) -> None:
    pytest.importorskip("ray")
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert problem in refused("deploy", str(file), "--dir", str(tmp_path))
