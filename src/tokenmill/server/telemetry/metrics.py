"""`Metrics`: the figures in Prometheus' form, in a registry of the server's own. They are put together when asked for.

Labels have few values: the model's name, one of our endpoints, an outcome, a finish reason, the name of an API key as
the operator wrote it. Never an id or a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenmill import __version__
from tokenmill.engine.events import Phase
from tokenmill.server.telemetry.figures import BatchFigures, CoreFigures, KeyTotals, Outcome, Tally, Traffic
from tokenmill.server.telemetry.hub import Telemetry
from tokenmill.server.telemetry.live import CoreWatch

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTERS = {
    "num_prompt": ("prompt_tokens", "Prompt tokens of requests that have started."),
    "num_cached": ("cached_prompt_tokens", "Those of them whose KV was there already."),
    "num_generated": ("generated_tokens", "Tokens of outputs, drawn and forced."),
    "num_forced": ("forced_tokens", "Those of them that a grammar left no choice about."),
    "num_computed": ("computed_tokens", "Tokens that went through the model, prompts and drawn ones."),
    "num_preempted": ("preemptions", "Requests that lost their place to others, and went on later."),
    "num_evicted": ("evictions", "Parked sequences that were given up to make room."),
    "num_failed_steps": ("failed_steps", "Steps that failed and whose requests were run alone."),
    "num_restarts": ("engine_restarts", "Engine cores that died and were built again."),
}
PROPOSALS = {
    "proposed": ("proposed_tokens", "Tokens that speculation proposed and a step verified."),
    "accepted": ("accepted_tokens", "Those of them that were drawn as proposed."),
}
HISTOGRAMS = {
    "first_token_s": ("time_to_first_token_seconds", "From the queue to the first token."),
    "inter_token_s": ("inter_token_seconds", "From a token of a request to its next."),
    "request_s": ("request_seconds", "From the queue to the end."),
    "step_s": ("step_seconds", "What a step took."),
    "schedule_s": ("schedule_seconds", "What planning a step took."),
    "mask_s": ("mask_seconds", "What the masks of a step with constrained draws took."),
    "compile_s": ("grammar_compile_seconds", "What compiling a grammar took."),
    "step_tokens": ("step_tokens", "Tokens in a step."),
    "step_sequences": ("step_sequences", "Requests in a step."),
    "prompt_tokens": ("request_prompt_tokens", "Prompt tokens of a request that has ended."),
    "generated_tokens": ("request_generated_tokens", "Tokens of the output of a request that has ended."),
}
PHASES = {
    Phase.QUEUED: ("request_queue_seconds", "What a request waited before it first started."),
    Phase.PREFILL: ("request_prefill_seconds", "From getting a place to the first token there."),
    Phase.DECODE: ("request_decode_seconds", "From the first token to the end."),
    Phase.PREEMPTED: ("request_preempted_seconds", "What a request waited after it had lost its place."),
}


class Metrics(Collector):
    """A server's metrics. For the event loop's thread."""

    def __init__(
        self,
        telemetry: Telemetry,
        keys: Callable[[], Mapping[str, KeyTotals]] = dict,
        *,
        has_vllm_names: bool = False,
        replica: str | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._keys = keys
        """What each API key has used, by its name."""
        self._has_vllm_names = has_vllm_names
        """Tell what routers look at under vLLM's names, too."""
        self._replica = replica
        """A label of all of them, if this server has a name."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for metric in self._collect():
            if self._replica is not None:
                metric.samples = [
                    one._replace(labels={**one.labels, "replica": self._replica}) for one in metric.samples
                ]
            yield metric

    def _collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("tokenmill_info", "Which version runs.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        lag = HistogramMetricFamily("tokenmill_event_loop_lag_seconds", "How late callbacks of the event loop run.")
        _add(lag, [], self._telemetry.loop_lag_s)
        yield lag
        yield from _traffic(self._telemetry.traffic)
        yield from _by_key(self._keys())
        yield from _batches(self._telemetry.batches)
        yield from _engine(self._telemetry.figures())
        yield from _now(self._telemetry.watches)
        if self._has_vllm_names:
            yield from _as_vllm(self._telemetry.watches)

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before it is asked for."""
        return []


def _traffic(traffic: Traffic) -> Iterator[Metric]:
    received = CounterMetricFamily(
        "tokenmill_http_requests_received", "HTTP requests that came in.", labels=["endpoint"]
    )
    running = GaugeMetricFamily("tokenmill_http_requests_running", "Those that are not done.", labels=["endpoint"])
    ended = CounterMetricFamily(
        "tokenmill_http_requests", "HTTP requests that are done, by how they ended.", labels=["endpoint", "outcome"]
    )
    seconds = HistogramMetricFamily(
        "tokenmill_http_request_seconds", "From a request's headers to the end of its answer.", labels=["endpoint"]
    )
    for endpoint in sorted(traffic.received):
        received.add_metric([endpoint], traffic.received[endpoint])
        running.add_metric([endpoint], traffic.running[endpoint])
        for outcome in Outcome:
            ended.add_metric([endpoint, outcome.value], traffic.ended[endpoint, outcome])
        if endpoint in traffic.seconds:
            _add(seconds, [endpoint], traffic.seconds[endpoint])
    yield from (received, running, ended, seconds)


def _by_key(keys: Mapping[str, KeyTotals]) -> Iterator[Metric]:
    running = GaugeMetricFamily("tokenmill_key_requests_running", "Requests of an API key.", labels=["key"])
    requests = CounterMetricFamily(
        "tokenmill_key_requests", "Requests of an API key that generate, by whether they were admitted.",
        labels=["key", "admitted"],
    )  # fmt: skip
    tokens = CounterMetricFamily("tokenmill_key_tokens", "Tokens of an API key, by kind.", labels=["key", "kind"])
    for name, totals in keys.items():
        running.add_metric([name], totals.running)
        requests.add_metric([name, "yes"], totals.requests)
        requests.add_metric([name, "no"], totals.refused)
        for kind in ("prompt", "cached", "completion"):
            tokens.add_metric([name, kind], getattr(totals, f"{kind}_tokens"))
    yield from (running, requests, tokens)


def _batches(figures: BatchFigures) -> Iterator[Metric]:
    batches = GaugeMetricFamily("tokenmill_batches", "Batches, by their status.", labels=["status"])
    for status, count in figures.by_status().items():
        batches.add_metric([status], count)
    yield batches
    yield GaugeMetricFamily("tokenmill_batch_lines_running", "Lines of batches that run.", figures.running)
    lines = CounterMetricFamily("tokenmill_batch_lines", "Lines of batches that are done.", labels=["outcome"])
    for outcome in (Outcome.FINISHED, Outcome.FAILED):
        lines.add_metric([outcome.value], figures.lines[outcome])
    yield lines


def _engine(models: dict[str, CoreFigures]) -> Iterator[Metric]:
    """What the engines have done."""
    for attribute, (name, what) in COUNTERS.items():
        counter = CounterMetricFamily(f"tokenmill_{name}", what, labels=["model"])
        for model, figures in models.items():
            counter.add_metric([model], getattr(figures, attribute))
        yield counter
    for attribute, (name, what) in PROPOSALS.items():
        counter = CounterMetricFamily(f"tokenmill_{name}", what, labels=["model", "proposer", "position"])
        for model, figures in models.items():
            for (proposer, position), count in sorted(getattr(figures, attribute).items()):
                counter.add_metric([model, proposer, str(position)], count)
        yield counter
    ended = CounterMetricFamily(
        "tokenmill_requests", "Requests of the engine that have ended.", labels=["model", "finish_reason"]
    )
    for model, figures in models.items():
        for reason, count in figures.ended.items():
            ended.add_metric([model, reason.value], count)
    yield ended
    for attribute, (name, what) in HISTOGRAMS.items():
        yield _histogram(name, what, {model: getattr(figures, attribute) for model, figures in models.items()})
    for phase, (name, what) in PHASES.items():
        yield _histogram(name, what, {model: figures.phase_s[phase] for model, figures in models.items()})


def _now(models: dict[str, list[CoreWatch]]) -> Iterator[Metric]:
    """What the engines are doing."""
    views = {model: [watch.view for watch in watches] for model, watches in models.items()}
    for name, what, attribute in (
        ("requests_running", "Requests that have a place.", "num_running"),
        ("requests_waiting", "Requests that wait for one.", "num_waiting"),
        ("kv_cells_free", "Cells of KV memory in free blocks.", "free_cells"),
        ("kv_cells", "Cells of KV memory; each holds one token.", "num_cells"),
        ("parked_tokens", "Tokens of parked KV; shared ones count once.", "num_parked_tokens"),
        ("parked_sequences", "Sequences of parked KV.", "num_parked"),
    ):
        gauge = GaugeMetricFamily(f"tokenmill_{name}", what, labels=["model"])
        for model, cores in views.items():
            gauge.add_metric([model], sum(getattr(core, attribute) for core in cores))
        yield gauge
    used = GaugeMetricFamily("tokenmill_kv_cells_used", "Cells of KV memory that are not free.", labels=["model"])
    for model, cores in views.items():
        used.add_metric([model], sum(core.num_cells - core.free_cells for core in cores))
    yield used
    usage = GaugeMetricFamily(
        "tokenmill_kv_cache_usage", "Fraction of KV memory that running requests take, 0 to 1.", labels=["model"]
    )
    for model, watches in models.items():
        usage.add_metric([model], kv_usage(watches))
    yield usage
    queue = GaugeMetricFamily(
        "tokenmill_prefill_queue_seconds", "How long queued prompt tokens will take to compute.", labels=["model"]
    )
    for model, watches in models.items():
        queue.add_metric([model], prefill_queue_s(watches))
    yield queue


def prefill_queue_s(watches: Sequence[CoreWatch]) -> float:
    """How long the queued prompt tokens of a model will take. Its cores work at the same time."""
    return sum(watch.prefill_queue_s() for watch in watches) / max(1, len(watches))


def kv_usage(watches: Sequence[CoreWatch]) -> float:
    """The fraction of KV memory that running requests take. Parked KV counts as free: it is evicted when needed."""
    views = [watch.view for watch in watches]
    used = sum(max(0, view.num_cells - view.free_cells - view.num_parked_tokens) for view in views)
    return used / max(1, sum(view.num_cells for view in views))


def _as_vllm(models: dict[str, list[CoreWatch]]) -> Iterator[Metric]:
    """What the schedulers of inference gateways read, under the names that they know."""
    for name, what, value in (
        (
            "num_requests_running",
            "Requests that have a place.",
            lambda cores: sum(one.view.num_running for one in cores),
        ),
        (
            "num_requests_waiting",
            "Requests that wait for one.",
            lambda cores: sum(one.view.num_waiting for one in cores),
        ),
        ("kv_cache_usage_perc", "Fraction of KV memory in use, 0 to 1.", kv_usage),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", what, labels=["model_name"])
        for model, cores in models.items():
            gauge.add_metric([model], value(cores))
        yield gauge
    config = GaugeMetricFamily(
        "vllm:cache_config_info", "Size of KV memory.", labels=["model_name", "block_size", "num_gpu_blocks"]
    )
    for model, cores in models.items():
        config.add_metric([model, "1", str(sum(one.view.num_cells for one in cores))], 1)
    yield config


def _histogram(name: str, what: str, tallies: dict[str, Tally]) -> HistogramMetricFamily:
    histogram = HistogramMetricFamily(f"tokenmill_{name}", what, labels=["model"])
    for model, tally in tallies.items():
        _add(histogram, [model], tally)
    return histogram


def _add(histogram: HistogramMetricFamily, labels: Sequence[str], tally: Tally) -> None:
    histogram.add_metric(labels, buckets=tally.cumulative(), sum_value=tally.total)
