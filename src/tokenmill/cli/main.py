"""`tokenmill`: one command a file; this one puts them together. Exit: 1 request failed, 2 usage, 3 start failed."""

from __future__ import annotations

import io
import os
import sys

import typer

from tokenmill import __version__
from tokenmill.cli.chat import chat
from tokenmill.cli.fit import fit
from tokenmill.cli.generate import generate
from tokenmill.cli.pull import pull
from tokenmill.cli.serve import serve
from tokenmill.errors import EngineDead, ModelLoadError, RequestFailed, TokenmillError

app = typer.Typer(name="tokenmill", help="A session-first LLM inference engine.", no_args_is_help=True)
app.command()(generate)
app.command()(chat)
app.command()(pull)
app.command()(serve)
app.command()(fit)
bench = typer.Typer(help="Benchmarks.", no_args_is_help=True)
app.add_typer(bench, name="bench")

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The benchmarks have their own parsers, so that they run without this command line, too."""

REQUEST_FAILED, USAGE, START_FAILED, INTERRUPTED = 1, 2, 3, 130


def main() -> None:
    """The command. What tokenmill raises on purpose is one line on standard error, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that a terminal can't show is no reason to stop
    try:
        app()
    except TokenmillError as error:
        print(f"tokenmill: {error}", file=sys.stderr)
        sys.exit(exit_code(error))
    except BrokenPipeError:  # whoever read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(REQUEST_FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def exit_code(error: TokenmillError) -> int:
    if isinstance(error, (ModelLoadError, EngineDead)):
        return START_FAILED
    return REQUEST_FAILED if isinstance(error, RequestFailed) else USAGE


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
    from tokenmill.bench.engine import main as run

    raise typer.Exit(run(context.args))


@bench.command("agreement", context_settings=PASS_THROUGH, add_help_option=False)
def bench_agreement(context: typer.Context) -> None:
    """How far a model's numbers depend on how they are computed, and its perplexity on a text."""
    from tokenmill.bench.agreement import main as run

    raise typer.Exit(run(context.args))


@bench.command("compare", context_settings=PASS_THROUGH, add_help_option=False)
def bench_compare(context: typer.Context) -> None:
    """Our engine beside llama.cpp's raw loop and transformers, on the same file, in turn."""
    from tokenmill.bench.compare import main as run

    raise typer.Exit(run(context.args))


@bench.command("throughput", context_settings=PASS_THROUGH, add_help_option=False)
def bench_throughput(context: typer.Context) -> None:
    """Tokens a second by the number of requests that run together, offline."""
    from tokenmill.bench.throughput import main as run

    raise typer.Exit(run(context.args))


@bench.command("memory", context_settings=PASS_THROUGH, add_help_option=False)
def bench_memory(context: typer.Context) -> None:
    """What `tokenmill fit` plans beside what is really used."""
    from tokenmill.bench.memory import main as run

    raise typer.Exit(run(context.args))


@bench.command("http", context_settings=PASS_THROUGH, add_help_option=False)
def bench_http(context: typer.Context) -> None:
    """What HTTP costs: many clients that stream, beside the same work offline."""
    from tokenmill.bench.http import main as run

    raise typer.Exit(run(context.args))


@bench.command("sessions", context_settings=PASS_THROUGH, add_help_option=False)
def bench_sessions(context: typer.Context) -> None:
    """What a session saves at its last turn, and what a reader that stops costs the others."""
    from tokenmill.bench.sessions import main as run

    raise typer.Exit(run(context.args))
