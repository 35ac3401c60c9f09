"""From the samples of a run to its figures, by the names and the arithmetic of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
