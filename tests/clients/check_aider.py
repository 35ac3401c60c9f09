"""`aider`: its command line against the server, without a terminal; the model need not be able to edit anything."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.checking import Target, run_checks

TIMEOUT_S = 240


def aider(target: Target, folder: Path, *arguments: str) -> str:
    """What it says to one message."""
    settings = {"OPENAI_API_BASE": target.base_url, "OPENAI_API_KEY": target.api_key, "HOME": str(folder)}
    quiet = ["--yes-always", "--no-git", "--no-auto-commits", "--no-check-update", "--no-analytics", "--no-pretty"]
    quiet += ["--no-show-model-warnings", "--no-show-release-notes", "--map-tokens", "0", "--no-detect-urls"]
    (folder / "settings.yml").write_text(
        f"- name: openai/{target.model}\n  edit_format: ask\n  extra_params:\n    max_tokens: 24\n"
    )
    command = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{target.model}", *quiet]
    command += ["--model-settings-file", str(folder / "settings.yml"), *arguments]
    environment = {**os.environ, **settings, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-300:]
    return done.stdout


def ask(target: Target, *arguments: str) -> str:
    with tempfile.TemporaryDirectory(prefix="aider-") as name:
        said = aider(target, Path(name), "--chat-mode", "ask", "--message", "Say hello.", *arguments)
    assert "litellm." not in said, said[-500:]
    return said


def assert_answered(said: str) -> None:
    """It counts the tokens of an answer; of one that was cut by its length it says so."""
    assert "Tokens:" in said or "has hit a token limit" in said, said[-500:]


def check_a_streamed_message(target: Target) -> None:
    assert_answered(ask(target, "--stream"))


def check_a_message(target: Target) -> None:
    assert_answered(ask(target, "--no-stream"))


if __name__ == "__main__":
    run_checks(globals())
