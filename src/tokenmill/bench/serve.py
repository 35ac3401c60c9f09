"""`tokenmill bench serve`: load on any OpenAI-compatible server, and what its clients see of it.

Flags and figures have the names and the arithmetic of `vllm bench serve`, so runs of both can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import fmean
from threading import BrokenBarrierError
from typing import Any

import numpy as np

from tokenmill.bench import bench_parser
from tokenmill.bench.load_clients import HttpFailure, Sample, Target, first_model
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


# -- figures of a run ------------------------------------------------------------------------------------------------

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Their short names and what they are."""
GOALS = ("ttft", "tpot", "e2el")
"""What a request as a whole can meet or miss."""


@dataclass(frozen=True)
class Totals:
    """The figures of a whole run; the fields are keys of its result file."""

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    """Requests a second that met all goals; None where there are none."""
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    """In the best second of the run."""
    max_concurrent_requests: int


def totals(samples: Sequence[Sample], duration_s: float, goals: Mapping[str, float]) -> Totals:
    """Goals are milliseconds by the name of their metric; only requests that were answered count as such."""
    done = [one for one in samples if one.is_ok]
    num_input, num_output = sum(one.prompt_tokens for one in done), sum(one.output_tokens for one in done)
    num_good = sum(all(value_ms(one, name) <= goal for name, goal in goals.items()) for one in done)
    return Totals(
        duration=duration_s,
        completed=len(done),
        failed=len(samples) - len(done),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=len(done) / duration_s,
        request_goodput=num_good / duration_s if goals else None,
        output_throughput=num_output / duration_s,
        total_token_throughput=(num_input + num_output) / duration_s,
        max_output_tokens_per_s=max(tokens_by_second(done), default=0.0),
        max_concurrent_requests=most_at_once(done),
    )


def value_ms(sample: Sample, metric: str) -> float:
    """Of one request."""
    return 1000 * {"ttft": sample.ttft_s, "tpot": sample.tpot_s, "e2el": sample.latency_s}[metric]


def values_ms(samples: Sequence[Sample], metric: str) -> list[float]:
    """Of all requests that were answered; a TPOT needs two tokens, and each has as many ITLs as pieces but one."""
    done = [one for one in samples if one.is_ok]
    if metric == "itl":
        return [1000 * gap for one in done for gap in one.gaps_s]
    return [value_ms(one, metric) for one in done if metric != "tpot" or one.output_tokens > 1]


def statistics_of(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation, and percentiles as `p99`; all 0 where there is nothing."""
    data = np.asarray(values or [0.0], dtype=float)
    found = {"mean": data.mean(), "median": np.median(data), "std": data.std()}
    found |= {f"p{one:g}": np.percentile(data, one) for one in percentiles}
    return {name: float(value) for name, value in found.items()}


def tokens_by_second(samples: Sequence[Sample]) -> list[float]:
    """Tokens in each second from the first request on. A piece counts as many as its request has a piece on average."""
    if not samples:
        return []
    began = min(one.sent_s for one in samples)
    seconds = [0.0] * (int(max(one.ended_s for one in samples) - began) + 1)
    for one in samples:
        for moment in one.chunk_times_s:
            seconds[int(moment - began)] += one.output_tokens / len(one.chunk_times_s)
    return seconds


def running_by_second(samples: Sequence[Sample]) -> list[float]:
    """Requests that were under way in each second, on average."""
    if not samples:
        return []
    began = min(one.sent_s for one in samples)
    seconds = [0.0] * (int(max(one.ended_s for one in samples) - began) + 1)
    for one in samples:
        first, last = one.sent_s - began, one.ended_s - began
        for second in range(int(first), int(last) + 1):
            seconds[second] += min(last, second + 1) - max(first, second)
    return seconds


def most_at_once(samples: Sequence[Sample]) -> int:
    """Requests that were under way at the same moment; one that ends makes room for one that begins then."""
    moments = sorted([(one.ended_s, -1) for one in samples] + [(one.sent_s, 1) for one in samples])
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


WIDTH = 50
LABEL = 40
PLOT_ROWS = 20
PLOT_WIDTH = 40


@dataclass(frozen=True)
class LoadReport:
    """A run: what was sent how, and what came of it."""

    setup: Mapping[str, Any]
    """Keys of the result file that say what was asked for."""
    samples: Sequence[Sample]
    duration_s: float
    goals: Mapping[str, float]
    metrics: Sequence[str]
    percentiles: Sequence[float]

    @property
    def totals(self) -> Totals:
        return totals(self.samples, self.duration_s, self.goals)

    @property
    def errors(self) -> dict[str, int]:
        """Failures by their kind, most frequent first."""
        return dict(Counter(one.error for one in self.samples if one.error).most_common())

    def statistics(self, metric: str) -> dict[str, float]:
        return statistics_of(values_ms(self.samples, metric), self.percentiles)

    def to_json(self, *, detailed: bool = False) -> dict[str, Any]:
        """The result file."""
        made: dict[str, Any] = {**self.setup, **asdict(self.totals)}
        for metric in self.metrics:
            made |= {f"{name}_{metric}_ms": value for name, value in self.statistics(metric).items()}
        made["error_kinds"] = self.errors
        return {**made, **self._details()} if detailed else made

    def _details(self) -> dict[str, Any]:
        """Lists with one entry for each request."""
        samples = self.samples
        return {
            "input_lens": [one.prompt_tokens for one in samples],
            "output_lens": [one.output_tokens if one.is_ok else 0 for one in samples],
            "ttfts": [one.ttft_s if one.is_ok else 0.0 for one in samples],
            "itls": [one.gaps_s for one in samples],
            "latencies": [one.latency_s if one.is_ok else 0.0 for one in samples],
            "start_times": [one.sent_s for one in samples],
            "queue_times": [one.queued_s for one in samples],
            "generated_texts": [one.text for one in samples],
            "errors": [one.error and f"{one.error}: {one.detail}" for one in samples],
        }

    # -- as text ------------------------------------------------------------------------------------------------------

    def table(self) -> str:
        found = self.totals
        lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
        lines += [_line("Successful requests:", found.completed), _line("Failed requests:", found.failed)]
        if self.setup.get("max_concurrency") is not None:
            lines.append(_line("Maximum request concurrency:", self.setup["max_concurrency"]))
        if self.setup.get("request_rate", "inf") != "inf":
            lines.append(_line("Request rate configured (RPS):", self.setup["request_rate"]))
        lines += [
            _line("Benchmark duration (s):", found.duration),
            _line("Total input tokens:", found.total_input_tokens),
            _line("Total generated tokens:", found.total_output_tokens),
            _line("Request throughput (req/s):", found.request_throughput),
        ]
        if found.request_goodput is not None:
            lines.append(_line("Request goodput (req/s):", found.request_goodput))
        lines += [
            _line("Output token throughput (tok/s):", found.output_throughput),
            _line("Peak output token throughput (tok/s):", found.max_output_tokens_per_s),
            _line("Peak concurrent requests:", found.max_concurrent_requests),
            _line("Total token throughput (tok/s):", found.total_token_throughput),
        ]
        for metric in self.metrics:
            lines += self._distribution(metric)
        return "\n".join([*lines, "=" * WIDTH, *self._failures()])

    def _distribution(self, metric: str) -> list[str]:
        short, long = METRICS[metric]
        found = self.statistics(metric)
        del found["std"]
        return [f"{long:-^{WIDTH}}"] + [
            _line(f"{name.capitalize()} {short} (ms):", value) for name, value in found.items()
        ]

    def _failures(self) -> list[str]:
        """Each kind with how often it came, and what was said the first time."""
        lines = []
        for kind, count in self.errors.items():
            detail = next(one.detail for one in self.samples if one.error == kind)
            lines.append(f"{count} x {kind}: {detail}" if detail else f"{count} x {kind}")
        return lines

    def plot(self) -> str:
        """Tokens a second over time, and how many requests ran."""
        done = [one for one in self.samples if one.is_ok]
        speeds, running = tokens_by_second(done), running_by_second(done)
        if not speeds:
            return ""
        span = -(-len(speeds) // PLOT_ROWS)
        rows = [
            (begin, fmean(speeds[begin : begin + span]), fmean(running[begin : begin + span]))
            for begin in range(0, len(speeds), span)
        ]
        most = max(speed for _, speed, _ in rows) or 1.0
        lines = [f"{'second':>8}  {'tok/s':>8}  {'running':>8}"]
        for begin, speed, count in rows:
            bar = "#" * round(PLOT_WIDTH * speed / most)
            lines.append(f"{begin:>8}  {speed:>8.1f}  {count:>8.1f}  {bar}".rstrip())
        return "\n".join(lines)


def _line(label: str, value: float) -> str:
    return f"{label:<{LABEL}} {value:<10}" if isinstance(value, int) else f"{label:<{LABEL}} {value:<10.2f}"


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
