"""`tokenmill bench serve`: load on any OpenAI-compatible server, and what its clients see of it.

Flags and figures have the names that `vllm bench serve` gives them, so runs of both can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

from tokenmill.bench import bench_parser
from tokenmill.bench.load_clients import HttpFailure, Target, first_model
from tokenmill.bench.load_report import GOALS, METRICS, LoadReport
from tokenmill.bench.workloads import (
    IdPrompts,
    Lengths,
    Load,
    LoadConversation,
    Prompts,
    TextPrompts,
    arrivals,
    from_file,
    learn_words,
    multi_turn,
    random_requests,
    shared_prefix,
)

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DATASETS = ("random", "prefix-repetition", "multi-turn", "custom")
ENDLESS = ("random", "multi-turn")
"""Random words have no natural end: their answers go on to the length that was asked for."""


# -- from options to a run --------------------------------------------------------------------------------------------


async def make_workload(options: argparse.Namespace, target: Target, model: str) -> list[LoadConversation]:
    """The conversations that are asked for, and those that warm up after them."""
    count, seed = options.num_prompts + options.num_warmups, options.seed
    if options.dataset_name == "custom":
        return from_file(options.dataset_path, count, options.custom_output_len)
    words = await learn_words(target, model)
    knows_ids = any(word.ids for word in words)
    if not knows_ids:
        print("the server has no /tokenize: lengths are those of words", file=sys.stderr)
    prompts: Prompts
    prompts = TextPrompts(words, seed) if _is_chat(options) or not knows_ids else IdPrompts(words, seed)
    lengths = Lengths(options.random_input_len, options.random_output_len, options.random_range_ratio)
    if options.dataset_name == "prefix-repetition":
        return shared_prefix(
            prompts,
            count,
            options.prefix_repetition_num_prefixes,
            options.prefix_repetition_prefix_len,
            options.prefix_repetition_suffix_len,
            options.prefix_repetition_output_len,
        )
    if options.dataset_name == "multi-turn":
        return multi_turn(prompts, count, options.num_turns, lengths, seed)
    return random_requests(prompts, count, lengths, seed)


async def run(options: argparse.Namespace, before_load: Callable[[], object] | None = None) -> LoadReport:
    """Send the load; `before_load` is called, and waited for, when all is prepared."""
    target = Target(options.base_url or f"http://{options.host}:{options.port}", options.api_key)
    model = options.model or await first_model(target)
    conversations = await make_workload(options, target, model)
    load = Load(
        target=target,
        model=model,
        endpoint=options.endpoint or ENDPOINTS[options.backend],
        is_chat=_is_chat(options),
        timeout_s=options.timeout,
        sampling=_sampling(options),
        uses_sessions=options.sessions,
        places=asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else nullcontext(),
    )
    await load.warm_up(conversations[options.num_prompts :])
    if before_load is not None:
        await asyncio.to_thread(before_load)
    moments = arrivals(options.num_prompts, options.request_rate, options.burstiness, options.seed)
    duration_s = await load.run(conversations[: options.num_prompts], moments)
    setup = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "model_id": model,
        "dataset_name": options.dataset_name,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
        "sessions": options.sessions,
    }
    return LoadReport(setup, load.samples, duration_s, options.goodput, options.metrics, options.percentiles)


def run_processes(options: argparse.Namespace) -> LoadReport:
    """The load, shared by several client processes: one alone cannot read as fast as a GPU generates."""
    count = min(options.processes, options.num_prompts, options.max_concurrency or options.num_prompts)
    if count == 1:
        return asyncio.run(run(options))
    context = multiprocessing.get_context("spawn")
    all_prepared, results = context.Barrier(count), context.SimpleQueue()
    clients = [
        context.Process(target=_run_share, args=(_share(options, i, count), all_prepared, results), daemon=True)
        for i in range(count)
    ]
    for client in clients:
        client.start()
    reports: list[LoadReport] = []
    for _ in clients:
        result = results.get()
        if isinstance(result, Exception):
            raise result
        reports.append(result)
    samples = sorted((sample for one in reports for sample in one.samples), key=lambda sample: sample.sent_s)
    duration_s = max(one.ended_s for one in samples) - min(one.sent_s for one in samples)
    setup = {**reports[0].setup, "num_prompts": options.num_prompts, "max_concurrency": options.max_concurrency}
    return replace(reports[0], setup=setup, samples=samples, duration_s=duration_s)


def _share(options: argparse.Namespace, index: int, count: int) -> argparse.Namespace:
    """The share of the load of client process `index` of `count`."""
    own = argparse.Namespace(**vars(options))
    for name in ("num_prompts", "num_warmups", "max_concurrency"):
        total = getattr(options, name)
        setattr(own, name, None if total is None else total // count + (index < total % count))
    own.request_rate = options.request_rate / count
    own.seed = options.seed + 1000 * index
    return own


Result = LoadReport | Exception


def _run_share(options: argparse.Namespace, all_prepared: Barrier, results: SimpleQueue[Result]) -> None:
    """A client process."""
    try:
        results.put(asyncio.run(run(options, all_prepared.wait)))
    except Exception as error:
        all_prepared.abort()  # the others need not wait for this one
        results.put(error)


def _is_chat(options: argparse.Namespace) -> bool:
    return bool(options.backend == "openai-chat")


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    made: dict[str, Any] = {} if options.temperature is None else {"temperature": options.temperature}
    return {**made, "ignore_eos": True} if options.ignore_eos else made


# -- the command line -------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("tokenmill bench serve", __doc__)
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", help="URL of the server (default: http://HOST:PORT)")
    server.add_argument("--host", default="127.0.0.1", help="host of the server")
    server.add_argument("--port", type=int, default=8000, help="port of the server")
    server.add_argument(
        "--backend", choices=list(ENDPOINTS), help="kind of endpoint (default: openai; openai-chat for multi-turn)"
    )
    server.add_argument("--endpoint", help="path of the endpoint (default: the one of the backend)")
    server.add_argument("--model", help="model name (default: the first of /v1/models)")
    server.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="API key (default: $OPENAI_API_KEY)"
    )
    server.add_argument("--timeout", type=float, default=600.0, help="maximum duration of a request (s)")
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--dataset-name", default="random", type=lambda name: name.replace("_", "-"), choices=DATASETS, help="workload"
    )
    work.add_argument(
        "--dataset-path", type=Path, help='custom: .jsonl file with {"prompt": "..."} on each line (default: none)'
    )
    work.add_argument("--num-prompts", type=int, default=1000, help="number of requests; multi-turn: of conversations")
    work.add_argument("--num-warmups", type=int, default=0, help="number of warm-up requests")
    work.add_argument(
        "--random-input-len", type=int, default=1024, help="random: tokens per prompt; multi-turn: per turn"
    )
    work.add_argument("--random-output-len", type=int, default=128, help="random: generated tokens per request")
    work.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="random: lengths vary by up to this fraction"
    )
    work.add_argument(
        "--prefix-repetition-prefix-len", type=int, default=256, help="prefix-repetition: tokens per prefix"
    )
    work.add_argument(
        "--prefix-repetition-suffix-len", type=int, default=256, help="prefix-repetition: tokens after the prefix"
    )
    work.add_argument(
        "--prefix-repetition-num-prefixes", type=int, default=10, help="prefix-repetition: number of prefixes"
    )
    work.add_argument(
        "--prefix-repetition-output-len", type=int, default=128, help="prefix-repetition: generated tokens per request"
    )
    work.add_argument("--num-turns", type=int, default=4, help="multi-turn: turns per conversation")
    work.add_argument("--sessions", action="store_true", help="multi-turn: send only new messages, with a session_id")
    work.add_argument(
        "--custom-output-len", type=int, default=256, help="custom: generated tokens where a line has no output_tokens"
    )
    work.add_argument("--ignore-eos", action="store_true", help="generate to the full length; always so with random")
    work.add_argument("--temperature", type=float, help="sampling temperature (default: the server's)")
    work.add_argument("--seed", type=int, default=0, help="seed of the workload")
    arrival = parser.add_argument_group("arrivals")
    arrival.add_argument(
        "--request-rate", type=float, default=math.inf, help="requests per second; inf sends all at once"
    )
    arrival.add_argument(
        "--burstiness", type=float, default=1.0, help="burstiness of arrivals: 1 is Poisson, lower is burstier"
    )
    arrival.add_argument(
        "--max-concurrency", type=int, help="maximum number of concurrent requests (default: no limit)"
    )
    arrival.add_argument(
        "--processes", type=int, default=1, help="client processes; one reads roughly 10,000 tokens per second"
    )
    told = parser.add_argument_group("report")
    told.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="service level objectives for goodput, such as ttft:500 tpot:50 e2el:9000",
    )
    told.add_argument("--percentile-metrics", default=",".join(METRICS), help="metrics with percentiles")
    told.add_argument("--metric-percentiles", default="50,90,99", help="percentiles")
    told.add_argument("--save-result", action="store_true", help="write the result to a JSON file")
    told.add_argument("--save-detailed", action="store_true", help="write every request to the result file, too")
    told.add_argument("--result-filename", type=Path, help="name of the result file (default: named after the run)")
    told.add_argument("--json", action="store_true", help="print the result as JSON instead of the table")
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, checked."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.backend = options.backend or ("openai-chat" if options.dataset_name == "multi-turn" else "openai")
    options.ignore_eos = options.ignore_eos or options.dataset_name in ENDLESS
    try:
        options.goodput = _goals(options.goodput)
        options.metrics = _metrics(options.percentile_metrics)
        options.percentiles = [float(one) for one in options.metric_percentiles.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if any(not 0 <= one <= 100 for one in options.percentiles):
        parser.error(f"percentiles are 0 to 100, not {options.metric_percentiles}")
    if options.dataset_name == "multi-turn" and not _is_chat(options):
        parser.error("multi-turn needs --backend openai-chat")
    if options.sessions and options.dataset_name != "multi-turn":
        parser.error("--sessions goes with --dataset-name multi-turn")
    if (options.dataset_name == "custom") != (options.dataset_path is not None):
        parser.error("--dataset-name custom and --dataset-path go together")
    for name, least in (("num_prompts", 1), ("num_warmups", 0), ("max_concurrency", 1), ("processes", 1)):
        if getattr(options, name) is not None and getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if options.request_rate <= 0 or options.burstiness <= 0 or options.timeout <= 0:
        parser.error("--request-rate, --burstiness and --timeout must be positive")
    return options


def _goals(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for one in given:
        name, _, value = one.partition(":")
        if name not in GOALS or not value:
            raise ValueError(f"a goal is NAME:MILLISECONDS, of {', '.join(GOALS)}: not {one!r}")
        found[name] = float(value)
    return found


def _metrics(given: str) -> list[str]:
    if unknown := set(given.split(",")) - set(METRICS):
        raise ValueError(f"no metric {', '.join(sorted(unknown))}; there are {', '.join(METRICS)}")
    return given.split(",")


def result_file(report: LoadReport, given: Path | None) -> Path:
    """Named as vLLM names it, unless it is given."""
    setup = report.setup
    most = "" if setup["max_concurrency"] is None else f"-concurrency{setup['max_concurrency']}"
    model = str(setup["model_id"]).rpartition("/")[2]
    return given or Path(f"{setup['backend']}-{setup['request_rate']}qps{most}-{model}-{setup['date']}.json")


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        report = run_processes(options)
    except (HttpFailure, ValueError, OSError, BrokenBarrierError) as error:
        print(f"bench serve: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report.to_json(detailed=options.save_detailed), indent=2))
    else:
        print(report.table())
        print(report.plot())
    if options.save_result or options.result_filename is not None:
        path = result_file(report, options.result_filename)
        path.write_text(json.dumps(report.to_json(detailed=options.save_detailed)) + "\n")
        print(f"saved to {path}", file=sys.stderr)
    return 0 if report.totals.completed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
