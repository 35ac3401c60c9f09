"""`tokenmill bench NAME`: the benchmarks for users; each is a module of `tokenmill.bench` with a parser of its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import typer

BENCHMARKS = {
    "serve": "Load test for any OpenAI-compatible server; metrics as in `vllm bench serve`.",
    "throughput": "Offline throughput by number of concurrent requests (tok/s).",
    "sessions": "TTFT per turn with and without sessions; cost of a stalled reader; KV restore against replay.",
    "report": "All benchmarks of this machine, next to peers and with each optimization off: JSON and an HTML page.",
    "compare": "Throughput next to llama.cpp and transformers on the same model file, interleaved.",
}
IN_THE_REPOSITORY = ("agreement", "engine", "events", "flood", "http", "llamacpp", "memory")
"""Benchmarks of the project itself, which the wheel does not have."""
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}

bench = typer.Typer(help="Benchmarks.", no_args_is_help=True, rich_markup_mode=None)


def _command(name: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        raise typer.Exit(import_module(f"tokenmill.bench.{name}").main(context.args))

    return run


def _moved(name: str) -> Callable[[], None]:
    def refuse() -> None:
        typer.echo(f"tokenmill: `bench {name}` is now `python -m benchmarks.{name}`, run in the repository", err=True)
        raise typer.Exit(2)

    return refuse


for _name, _help in BENCHMARKS.items():
    bench.command(_name, help=_help, context_settings=PASS_THROUGH, add_help_option=False)(_command(_name))
for _name in IN_THE_REPOSITORY:
    bench.command(_name, hidden=True, context_settings=PASS_THROUGH, add_help_option=False)(_moved(_name))
