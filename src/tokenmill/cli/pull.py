"""`tokenmill pull`: fetch a model."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli import arguments as shared


def pull(
    model: Annotated[
        str, typer.Argument(help=r"Model: a short name, or ORGANIZATION/MODEL\[@REVISION]\[:QUANTIZATION].")
    ] = shared.DEFAULT,
) -> None:
    """Download a model to the cache directory, verify it, and print its path."""
    from tokenmill.backends.loading import pull_model

    typer.echo(pull_model(model))
