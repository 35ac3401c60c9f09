"""Figures of a run under load, by the names and the arithmetic of `vllm bench serve`: table, result file, plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from tokenmill.bench.load_clients import Sample

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
