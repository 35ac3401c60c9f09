"""`python -m benchmarks.gpu_serving CHECKPOINT ...`: servers side by side on one GPU, over HTTP, default settings.

For each checkpoint, `tokenmill serve` and, where it is installed, `vllm serve` are started one after the other, and get
the same load from `tokenmill bench serve`: clients that each send one request after the other, 512 random token ids in
and 256 out, greedy, streamed. The best of some rounds counts. The table has tokens per second, percentiles of TTFT and
ITL, and their ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenmill import __version__
from tokenmill.bench import bench_parser
from tokenmill.bench.load_clients import HttpFailure, Stream, Target, completion_body
from tokenmill.bench.report import SPEED, Section
from tokenmill.bench.serve import parse, run_processes

NAME = "model"
START_S, STOP_S = 300.0, 15.0
SEEDS_APART = 100_000
"""Between those of measurements: each client process has a seed of its own."""
OURS, THEIRS = "tokenmill", "vllm"
LOAD = "Streamed completions of {} + {} random ids, greedy; each client sends its next request when it has its answer."
FIGURES = ("output_throughput", "median_ttft_ms", "p95_ttft_ms", "median_itl_ms", "p95_itl_ms")


def command_of(server: str, checkpoint: str, port: int, options: argparse.Namespace) -> list[str]:
    """How a server is started. vLLM is told how much KV it has, so that it does not take the whole GPU."""
    if server == OURS:
        return [
            sys.executable,
            "-m",
            "tokenmill",
            "serve",
            checkpoint,
            "--served-model-name",
            NAME,
            "--port",
            str(port),
        ]
    settings = ["--max-num-seqs", "256", "--max-model-len", "4096", "--dtype", "bfloat16"]
    settings += ["--kv-cache-memory-bytes", str(options.vllm_kv_bytes), *options.vllm_argument]
    module = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", checkpoint]
    return [*module, "--served-model-name", NAME, "--port", str(port), *settings]


@contextmanager
def started(command: Sequence[str], port: int) -> Iterator[Target]:
    """A server that has answered a request."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        target = Target(f"http://127.0.0.1:{port}")
        began = time.monotonic()
        try:
            while not asyncio.run(_answers(target)):
                if process.poll() is not None or time.monotonic() - began > START_S:
                    raise RuntimeError(f"{command[2]} did not start:\n{log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.25)
            print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
            yield target
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):  # what it has started ends with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _answers(target: Target) -> bool:
    body = completion_body(NAME, [1, 2, 3, 4], 1, temperature=0, ignore_eos=True)
    return (await Stream(target, "/v1/completions", body, 60.0).run()).is_ok


def measure(target: Target, num_clients: int, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    num_prompts = max(num_clients, min(options.most_requests, num_clients * options.waves))
    given = [
        "--base-url", target.base_url, "--model", NAME, "--num-prompts", str(num_prompts), "--seed", str(seed),
        "--max-concurrency", str(num_clients), "--processes", str(min(num_clients, options.processes)),
        "--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len),
        "--temperature", "0", "--metric-percentiles", "50,95,99",
    ]  # fmt: skip
    report = run_processes(parse(given))
    if report.errors:
        raise HttpFailure("failures", f"{report.errors} of {num_prompts} requests")
    return report.to_json()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.gpu_serving", __doc__)
    parser.add_argument("checkpoints", nargs="+", help="directories of models")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64, 256], help="concurrent clients")
    parser.add_argument("--waves", type=int, default=8, help="requests of each client")
    parser.add_argument("--most-requests", type=int, default=1024, help="maximum requests of a measurement")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each kind; the best counts")
    parser.add_argument("--processes", type=int, default=8, help="client processes")
    parser.add_argument("--input-len", type=int, default=512, help="prompt tokens of a request")
    parser.add_argument("--output-len", type=int, default=256, help="generated tokens of a request")
    parser.add_argument("--servers", nargs="+", choices=[OURS, THEIRS], help="servers (default: those installed)")
    parser.add_argument("--vllm-kv-bytes", type=int, default=32 << 30, help="KV memory of vLLM (bytes)")
    parser.add_argument("--vllm-argument", nargs="*", default=[], help="further arguments of vLLM")
    parser.add_argument("--report", type=Path, help="write a report for the README to this file (default: none)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per measurement")
    options = parser.parse_args(arguments)
    servers = options.servers or [OURS, *([THEIRS] if importlib.util.find_spec("vllm") is not None else [])]
    sections: list[dict[str, Any]] = []
    for checkpoint in options.checkpoints:
        found: dict[tuple[str, int], dict[str, Any]] = {}
        section = Section(
            "http", f"Over HTTP, {Path(checkpoint).name}", LOAD.format(options.input_len, options.output_len)
        )
        rows = {count: section.row(f"{count} clients", SPEED, "") for count in options.clients}
        for server in servers:
            port = free_port()
            with started(command_of(server, checkpoint, port, options), port) as target:
                measure(target, options.clients[-1], options, seed=0)  # warm-up
                for num_clients in options.clients:
                    first = SEEDS_APART * num_clients  # new prompts for each measurement: none are in KV
                    rounds = [measure(target, num_clients, options, first + number) for number in range(options.rounds)]
                    best = max(rounds, key=lambda one: float(one["output_throughput"]))
                    found[server, num_clients] = best
                    speeds = [float(one["output_throughput"]) for one in rounds]
                    if server == OURS:
                        rows[num_clients].ours, rows[num_clients].again = speeds, [*speeds[1:], speeds[0]]
                    else:
                        rows[num_clients].theirs[server] = speeds
                    if options.json:
                        print(json.dumps({"server": server, "checkpoint": checkpoint, **best}), flush=True)
        print(table(Path(checkpoint).name, servers, options.clients, found), flush=True)
        sections.append(section.to_json())
    if options.report is not None:
        options.report.write_text(
            json.dumps(report(sections, sys.argv[1:] if arguments is None else arguments), indent=1)
        )
    return 0


def report(sections: Sequence[dict[str, Any]], arguments: Sequence[str]) -> dict[str, Any]:
    """As `tokenmill bench report` writes it."""
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "benchmarks.gpu_serving", *arguments]),
        "tokenmill": __version__,
        "model": "random weights in bfloat16",
        "machine": {"cpu": torch.cuda.get_device_name()},
        "peers": {THEIRS: importlib.metadata.version(THEIRS)} if importlib.util.find_spec(THEIRS) else {},
        "sections": list(sections),
    }


def table(name: str, servers: Sequence[str], clients: Sequence[int], found: dict[tuple[str, int], Any]) -> str:
    """One line for each number of clients: figures of each server, and the ratios of the first to the last."""
    lines = [f"{name}: " + ", ".join(FIGURES)]
    for count in clients:
        rows = {server: [float(found[server, count][figure]) for figure in FIGURES] for server in servers}
        said = [f"{server} " + " ".join(f"{value:,.1f}" for value in row) for server, row in rows.items()]
        if len(servers) > 1:
            ratios = zip(rows[servers[0]], rows[servers[-1]], strict=True)
            said.append("ratio " + " ".join(f"{ours / theirs:.2f}" if theirs else "-" for ours, theirs in ratios))
        lines.append(f"{count:>5} clients | " + " | ".join(said))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
