"""`python -m tests.clients [NAME ...]`: real clients against `tokenmill serve`, and a table of how they did.

Each client has an environment of its own under `.clients`, made once (environments.py), and a script that its own
interpreter runs (check_*.py). With --fake the server has the fake model: quick, for work on the scripts.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.clients.environments import CLIENTS, ROOT, InstallFailed, environment, launch

API_KEY = "sk-clients"
DEFAULT_MODEL = "smollm2-135m"
START_S, STOP_S, SCRIPT_S = 120.0, 60.0, 600.0
POLL_S = 0.1
SETTINGS_OF_CLIENTS = ("OPENAI_", "ANTHROPIC_", "OLLAMA_", "LITELLM_", "LLM_")
"""Environment variables that clients must not see."""
READY = re.compile(r"^tokenmill: .* on (http://\S+/v1)\b", re.MULTILINE)
SETTINGS = ("--port", "0", "--api-key", API_KEY, "--max-num-seqs", "4", "--threads", "1")
"""Four at a time: a check holds all places, lets go, and sees that they are free. One thread: short answers gain little
from two, and lose much where others are at work."""


@dataclass(frozen=True)
class Row:
    """How one client did."""

    name: str
    num_passed: int
    num_checks: int
    seconds: float
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.num_passed == self.num_checks > 0


@contextmanager
def serving(model: str, folder: Path) -> Iterator[str]:
    """A server of `model`, from its ready line until it has ended; gives its base URL."""
    log = folder / "server.log"
    command = [str(Path(sys.executable).with_name("tokenmill")), "serve", model, *SETTINGS]
    with log.open("wb") as output:  # a pipe that nobody reads would fill up and stop the server
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
    try:
        yield _base_url(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"the server did not end within {STOP_S:g} s of SIGTERM", file=sys.stderr)


def _base_url(process: subprocess.Popen[bytes], log: Path) -> str:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        if found := READY.search(log.read_text(errors="replace")):
            return found.group(1)
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
        break
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def run_script(name: str, python: Path, base_url: str, model: str, folder: Path) -> Row:
    """Run the script of one client; what it prints is shown, and its `ok` and `FAILED` lines are counted."""
    command = [*launch(name, python), base_url, API_KEY, model]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(SETTINGS_OF_CLIENTS)}
    settings = {"NO_PROXY": "127.0.0.1", "HF_HOME": str(folder / "huggingface"), "PYTHONPATH": ""}
    begin = time.monotonic()
    error, output = "", folder / f"{name}.log"
    with output.open("wb") as to:
        try:
            done = subprocess.run(
                command, env={**kept, **settings}, cwd=ROOT, stdout=to, stderr=subprocess.STDOUT, timeout=SCRIPT_S
            )
            error = "" if done.returncode in (0, 1) else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            error = f"not done after {SCRIPT_S:g} s"
    lines = output.read_text(errors="replace").splitlines()
    passed = [line for line in lines if line.startswith("ok ")]
    failed = [line for line in lines if line.startswith("FAILED ")]
    for line in passed + failed:
        print(f"  {line}")
    row = Row(name, len(passed), len(passed) + len(failed), time.monotonic() - begin, error)
    if not row.ok and not failed:  # it broke before or between its checks: its last words
        print("\n".join(lines[-20:]))
    return row


def run(names: Sequence[str], model: str) -> list[Row]:
    """Every client in turn, against servers that are started when the first client needs them."""
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clients-")))

        @cache
        def server(checkpoint: bool) -> tuple[str, str]:
            """The base URL, and what the script is told about the model."""
            place = folder / ("tiny" if checkpoint else "model")
            place.mkdir()
            if not checkpoint:
                return stack.enter_context(serving(model, place)), model
            from tests.clients.checkpoint import make_checkpoint  # torch: only if it is needed

            make_checkpoint(place)
            return stack.enter_context(serving(str(place), place)), str(place)

        for name in names:
            try:
                python = environment(name)
            except InstallFailed as error:
                rows.append(Row(name, 0, 0, 0.0, f"not installed: {error}"))
                continue
            print(f"{name} {CLIENTS[name].version}", flush=True)
            rows.append(run_script(name, python, *server(CLIENTS[name].checkpoint), folder))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'client':<15}{'version':<12}{'checks':>8}{'seconds':>9}"]
    for row in rows:
        checks = f"{row.num_passed}/{row.num_checks}"
        verdict = "" if row.ok else f"  FAILED {row.error}".rstrip()
        lines.append(f"{row.name:<15}{CLIENTS[row.name].version:<12}{checks:>8}{row.seconds:>9.1f}{verdict}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; all if none is named")
    parser.add_argument("--fake", action="store_true", help="serve the fake model")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CLIENTS):
        parser.error(f"no client {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped then, too
    rows = run(options.names or list(CLIENTS), "fake" if options.fake else DEFAULT_MODEL)
    print(f"\n{table(rows)}")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
