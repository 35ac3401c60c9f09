"""`tokenmill bench NAME`: each benchmark is a module with a parser of its own, so that it runs without this, too."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import typer

BENCHMARKS = {
    "engine": "What a step costs the host, for 1 to 1,024 running requests, on the fake backend.",
    "events": "What it costs the engine that the server listens to it.",
    "agreement": "How far a model's numbers depend on how they are computed, and its perplexity on a text.",
    "compare": "Our engine beside llama.cpp's raw loop and transformers, on the same file, in turn.",
    "llamacpp": "What the engine adds to llama.cpp's own time, and what parked KV costs there.",
    "throughput": "Tokens a second by the number of requests that run together, offline.",
    "memory": "What `tokenmill fit` plans beside what is really used.",
    "http": "What HTTP costs: many clients that stream, beside the same work offline.",
    "flood": "A stream while other clients post prompts that are too long: inter-token latency, event loop lag.",
    "serve": "Load on any OpenAI-compatible server: throughput and latencies, as `vllm bench serve` has them.",
    "sessions": "What a session saves, turn by turn; what a reader that stops costs; when KV bytes beat a replay.",
}
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}

bench = typer.Typer(help="Benchmarks.", no_args_is_help=True)


def _command(name: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        raise typer.Exit(import_module(f"tokenmill.bench.{name}").main(context.args))

    return run


for _name, _help in BENCHMARKS.items():
    bench.command(_name, help=_help, context_settings=PASS_THROUGH, add_help_option=False)(_command(_name))
