"""`tokenmill`: one command a file; this one puts them together. Exit codes: 2 usage, 3 load or start failure."""

from __future__ import annotations

import typer

from tokenmill import __version__

app = typer.Typer(name="tokenmill", help="A session-first LLM inference engine.", no_args_is_help=True)
bench = typer.Typer(help="Benchmarks.", no_args_is_help=True)
app.add_typer(bench, name="bench")

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The benchmark has its own parser, so that it runs without this command line, too."""


def _version(show: bool) -> None:
    if show:
        typer.echo(f"tokenmill {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """A session-first LLM inference engine."""


@bench.command("engine", context_settings=PASS_THROUGH, add_help_option=False)
def bench_engine(context: typer.Context) -> None:
    """What a step costs the host, for 1 to 1,024 running requests, on the fake backend."""
    from tokenmill.bench.engine import main

    raise typer.Exit(main(context.args))


@bench.command("agreement", context_settings=PASS_THROUGH, add_help_option=False)
def bench_agreement(context: typer.Context) -> None:
    """How far a model's numbers depend on how they are computed, and its perplexity on a text."""
    from tokenmill.bench.agreement import main

    raise typer.Exit(main(context.args))
