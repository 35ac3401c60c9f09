"""Which models a server has: a TOML file, and what the command line says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.serving import HI, child, request
from tokenmill.cli.main import main
from tokenmill.server.models import read_catalogue

CHAT = "/v1/chat/completions"
GOOD = """
[[model]]
name = "small"
path = "fake"
aliases = ["default", "tiny"]
keep_alive_s = 600
max_num_seqs = 3

[[model]]
path = "fake"
at_start = false
max_model_len = 512
"""


def test_a_file_of_models(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(GOOD)
    small, other = read_catalogue(path, {"max_num_seqs": 7, "max_model_len": 1024}, keep_alive_s=5.0)
    assert (small.name, small.aliases, small.keep_alive_s, small.at_start) == ("small", {"default", "tiny"}, 600, True)
    assert (other.name, other.aliases, other.keep_alive_s, other.at_start) == ("fake", frozenset(), 5.0, False)
    for spec, seqs, length in ((small, 3, 1024), (other, 7, 512)):
        llm = spec.load()
        assert (llm.opened.config.max_num_seqs, llm.max_model_len) == (seqs, length)
        llm.client.close()


@pytest.mark.req("R40")
def test_a_server_with_a_file_and_more_models(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(GOOD)
    with child(tmp_path / "log", "--config", str(path), "--model", "a=fake", "--model", "b=fake") as served:
        assert "loading small, a, b; " in served.said()
        data = request(served.port, "GET", "/v1/models", key=None).json()["data"]
        assert [(one["id"], one["status"]) for one in data] == [
            ("small", "loaded"), ("fake", "unloaded"), ("a", "loaded"), ("b", "loaded"),
        ]  # fmt: skip
        for name in ("small", "tiny", "fake", "a", "b"):
            body = {"model": name, "messages": HI, "max_tokens": 3}
            assert request(served.port, "POST", CHAT, body, key=None).status == 200
        refused = request(served.port, "POST", CHAT, {"model": "c", "messages": HI}, key=None)
        assert refused.status == 404
        assert request(served.port, "POST", "/v1/models/unload", {"model": "a"}, key=None).status == 200
        assert served.stop() == 0
        assert "Traceback" not in served.said()


BAD = {
    "no file": (None, "cannot be read"),
    "no TOML": ("[[model", "is not valid TOML"),
    "no UTF-8": (b"\xff\xfe", "is not valid TOML"),
    "nothing": ("", "has no [[model]] table"),
    "an empty list": ("model = []", "has no [[model]] table"),
    "a table": ('[model]\npath = "fake"', "has no [[model]] table"),
    "a list of texts": ('model = ["fake"]', "has no [[model]] table"),
    "something else": (
        '[colours]\nred = 1\n[[model]]\npath = "fake"',
        "unknown colours; supported: [[model]], [[key]], [limits] and [server]",
    ),
    "a setting of the command line": (
        '[server]\nport = 1\n[[model]]\npath = "fake"',
        "unknown setting port; supported: ",
    ),
    "no path": ('[[model]]\nname = "a"', "model 'a': path is missing"),
    "an unknown setting": ('[[model]]\npath = "fake"\ncolour = 1', "unknown setting colour; known: aliases,"),
    "the engine's own": ('[[model]]\npath = "fake"\nconfig = 1', "unknown setting config"),
    "a name that is none": ('[[model]]\npath = "fake"\nname = 5', "invalid name 5"),
    "a path that is none": ("[[model]]\npath = true", "invalid path True"),
    "aliases that are none": ('[[model]]\npath = "fake"\naliases = "a"', "invalid aliases 'a'"),
    "an alias that is none": ('[[model]]\npath = "fake"\naliases = [1]', "aliases must be strings"),
    "a time that is none": ('[[model]]\npath = "fake"\nkeep_alive_s = "1"', "invalid keep_alive_s '1'"),
    "no time": ('[[model]]\npath = "fake"\nkeep_alive_s = 0', "keep_alive_s must be positive"),
    "not a time": ('[[model]]\npath = "fake"\nkeep_alive_s = nan', "keep_alive_s must be positive"),
    "a flag that is none": ('[[model]]\npath = "fake"\nat_start = 1', "invalid at_start 1"),
    "a number that is none": ('[[model]]\npath = "fake"\nmax_num_seqs = "many"', "invalid max_num_seqs 'many'"),
    "a number that is a flag": ('[[model]]\npath = "fake"\nmax_num_seqs = true', "invalid max_num_seqs True"),
    "a form that is none": ('[[model]]\npath = "fake"\ndtype = 8', "invalid dtype 8"),
    "a device that is not there": (
        '[[model]]\npath = "fake"\ndevice = "tpu"',
        "does not support backend, dtype or device",
    ),
    "the same name twice": ('[[model]]\npath = "fake"\n[[model]]\npath = "fake"', "duplicate model name 'fake'"),
    "a name as alias": ('[[model]]\npath = "fake"\naliases = ["fake"]', "duplicate model name 'fake'"),
}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`tokenmill serve` in this process, of which nothing comes: it ends with 2, and with one line that is returned."""
    monkeypatch.setattr("tokenmill.server.middleware.configure_logs", lambda *_: None)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tokenmill", "serve", "--port", "0", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        said = [line for line in capsys.readouterr().err.splitlines() if " answers 503 until then" not in line]
        assert len(said) == 1, said
        return said[0]

    return run


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_wrong_is_told_in_one_line(tmp_path: Path, command: Callable[..., str], kind: str) -> None:
    content, words = BAD[kind]
    path = tmp_path / "models.toml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = command("--config", str(path))
    assert said.startswith("tokenmill: ")
    assert words in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "=fake"], "--model must be NAME=PATH, not '=fake'"),
        (["--model", "a="], "--model must be NAME=PATH, not 'a='"),
        (["--model", "a=fake", "--model", "a=fake"], "duplicate model name 'a'"),
        (["fake", "--model", "fake"], "duplicate model name 'fake'"),
        (["--model", "a=fake", "--served-model-name", "b"], "--served-model-name requires MODEL"),
        (["fake", "--keep-alive", "0"], "keep_alive_s must be positive"),
        (["fake", "--session-ttl", "0"], "session_ttl_s must be positive"),
        (["fake", "--admin-key", ""], "an API key must not be empty"),
    ],
)
def test_options_that_are_wrong_are_told_in_one_line(
    command: Callable[..., str], arguments: list[str], words: str
) -> None:
    assert words in command(*arguments)
