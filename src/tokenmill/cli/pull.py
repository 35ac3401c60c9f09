"""`tokenmill pull`: fetch a model."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli import options as shared


def pull(
    model: Annotated[str, typer.Argument(help="Model: a short name, or ORGANIZATION/MODEL.")] = shared.DEFAULT,
) -> None:
    """Fetch a model into the cache folder, check it, and say where it is."""
    from tokenmill.backends.library import pull as fetch

    typer.echo(fetch(model))
