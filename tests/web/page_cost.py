"""What an open engine page costs: the server, in CPU seconds for each token, and the machine, in shares of a core.

    python -m tests.web.page_cost --pairs 7

The same load runs without the page, with it, and without it again: the first and the last tell what chance alone does.
Prints each round, and medians; a bar holds inside it, or inside the spread of chance if that is wider. The browser is
started as a user starts it: whoever drives one pays for being told of every packet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.serving import child, request
from tests.web.browsing import chromium

MODEL = "smollm2-135m"
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
SETTLE_S = 3.0
MOST_SERVER, MOST_PAGE = 1.03, 0.2
"""Of what it costs without the page; of a core."""


@dataclass(frozen=True)
class Process:
    """What /proc says of one."""

    pid: int
    parent: int
    cpu_s: float
    command: str

    @classmethod
    def read(cls, pid: int) -> Process:
        folder = Path("/proc") / str(pid)
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return cls(pid, int(fields[1]), ticks / TICKS_A_SECOND, (folder / "cmdline").read_bytes().decode())


def all_processes() -> Iterator[Process]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                yield Process.read(int(folder.name))
            except OSError:  # it has ended meanwhile
                continue


def chromium_cpu() -> dict[str, float]:
    """CPU seconds of this script's browser: of its renderers, and of all its processes."""
    found = {one.pid: one for one in all_processes()}

    def is_ours(process: Process) -> bool:
        return process.pid == os.getpid() or (process.parent in found and is_ours(found[process.parent]))

    ours = [one for one in found.values() if "--user-data-dir=" in one.command and is_ours(one)]
    renderers = [one for one in ours if "--type=renderer" in one.command]
    return {"renderer": sum(one.cpu_s for one in renderers), "all": sum(one.cpu_s for one in ours)}


def run_load(port: int, num_streams: int, num_tokens: int) -> None:
    """So many answers at once, of so many tokens each."""

    def stream(number: int) -> None:
        messages = [{"role": "user", "content": f"Tell story number {number}, a long one."}]
        fixed: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": num_tokens}
        reply = request(port, "POST", "/v1/chat/completions", {"model": MODEL, "messages": messages, **fixed})
        assert reply.status == 200, reply.body

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True)
class Cost:
    """Of one run."""

    server_s: float
    """CPU time of a token."""
    renderer: float
    chromium: float
    """Shares of a core."""
    tokens_per_s: float


def measure(pid: int, port: int, num_streams: int, num_tokens: int) -> Cost:
    before, page_before, began = Process.read(pid).cpu_s, chromium_cpu(), time.monotonic()
    run_load(port, num_streams, num_tokens)
    wall_s, tokens = time.monotonic() - began, num_streams * num_tokens
    page = {name: seconds - page_before[name] for name, seconds in chromium_cpu().items()}
    server_s = (Process.read(pid).cpu_s - before) / tokens
    return Cost(server_s, page["renderer"] / wall_s, page["all"] / wall_s, tokens / wall_s)


@contextmanager
def page_open(port: int) -> Iterator[None]:
    """A browser of its own that shows the page."""
    path = chromium()
    assert path is not None, "there is no Chromium here"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = ["--headless=new", "--no-sandbox", "--window-size=1280,900", f"--user-data-dir={folder}"]
        command = [path, *flags, f"http://127.0.0.1:{port}/engine"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not is_followed(port):
                assert process.poll() is None, "the browser has ended"
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait()


def is_followed(port: int) -> bool:
    """Does somebody read the engine's events?"""
    metrics = request(port, "GET", "/metrics").body.decode()
    return 'tokenmill_http_requests_running{endpoint="/v1/scheduler/events"} 1' in metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    options = parser.parse_args()
    load = options.streams, options.tokens
    rounds: list[tuple[Cost, Cost, Cost]] = []
    with tempfile.TemporaryDirectory() as folder, child(Path(folder) / "log", MODEL) as server:
        pid, port = server.process.pid, server.port
        run_load(port, *load)  # prompts are cached from here on, with the page and without
        for _ in range(options.pairs):
            time.sleep(SETTLE_S)
            closed = measure(pid, port, *load)
            with page_open(port):
                time.sleep(SETTLE_S)  # a page is opened once, and then left open
                opened = measure(pid, port, *load)
            time.sleep(SETTLE_S)
            again = measure(pid, port, *load)
            rounds.append((opened, closed, again))
            print(json.dumps(_said(*rounds[-1])), flush=True)
    ratio = statistics.median(2 * one.server_s / (other.server_s + again.server_s) for one, other, again in rounds)
    chance = sorted(again.server_s / other.server_s for _, other, again in rounds)
    share = statistics.median(one.chromium for one, _, _ in rounds)
    most = max(MOST_SERVER, chance[-1])
    print(
        f"server {1e6 * statistics.median(one.server_s for one, _, _ in rounds):,.0f} us a token with the page, "
        f"{1e6 * statistics.median(one.server_s for _, one, _ in rounds):,.0f} without: "
        f"{ratio:.3f} times (at most {MOST_SERVER}; by chance {statistics.median(chance):.3f}, "
        f"{chance[0]:.3f} to {chance[-1]:.3f})\n"
        f"page {statistics.median(one.renderer for one, _, _ in rounds):.3f} of a core in its renderer, "
        f"{share:.3f} in all of Chromium (at most {MOST_PAGE})"
    )
    raise SystemExit(0 if ratio <= most and share <= MOST_PAGE else 1)


def _said(opened: Cost, closed: Cost, again: Cost) -> dict[str, float]:
    return {
        "with_us": round(1e6 * opened.server_s, 1),
        "without_us": round(1e6 * closed.server_s, 1),
        "again_us": round(1e6 * again.server_s, 1),
        "renderer": round(opened.renderer, 4),
        "chromium": round(opened.chromium, 4),
        "with_tok_s": round(opened.tokens_per_s, 1),
        "without_tok_s": round(closed.tokens_per_s, 1),
    }


if __name__ == "__main__":
    main()
