"""`tokenmill`: one command a file; this one puts them together. Exit: 1 request failed, 2 usage, 3 start failed."""

from __future__ import annotations

import io
import os
import sys

import typer

from tokenmill import __version__
from tokenmill.cli.bench import bench
from tokenmill.cli.chat import chat
from tokenmill.cli.check import check
from tokenmill.cli.cluster import cluster
from tokenmill.cli.fit import fit
from tokenmill.cli.generate import generate
from tokenmill.cli.keys import keys
from tokenmill.cli.models import models, pull
from tokenmill.cli.replay import replay
from tokenmill.cli.serve import serve
from tokenmill.cli.top import top
from tokenmill.errors import EngineDead, ModelLoadError, RequestFailed, TokenmillError

app = typer.Typer(
    name="tokenmill",
    help="A session-first LLM inference engine.",
    no_args_is_help=True,
    rich_markup_mode=None,  # loading rich takes as long as all the rest of a help page
)
app.command()(generate)
app.command()(chat)
app.command()(pull)
app.command()(serve)
app.command()(fit)
app.command()(check)
app.command()(top)
app.command()(replay)
app.add_typer(models, name="models")
app.add_typer(keys, name="keys")
app.add_typer(bench, name="bench")
app.add_typer(cluster, name="cluster")

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
