"""`tokenmill pull`: fetch a model."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli import arguments as shared


def pull(
    model: Annotated[str, typer.Argument(help="Model: a short name, or ORGANIZATION/MODEL.")] = shared.DEFAULT,
) -> None:
    """Download a model to the cache directory, verify it, and print its path."""
    from tokenmill.backends.library import pull as fetch

    typer.echo(fetch(model))
