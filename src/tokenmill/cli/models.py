"""`tokenmill pull` and `tokenmill models`: download models; list, show and remove those that were downloaded."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import arguments as shared

if TYPE_CHECKING:
    from tokenmill.backends.huggingface import CachedModel

models = typer.Typer(help="Downloaded models: list, show, remove.", invoke_without_command=True, rich_markup_mode=None)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def pull(
    model: Annotated[
        str, typer.Argument(help="Model: a short name, or ORGANIZATION/MODEL[@REVISION][:QUANTIZATION].")
    ] = shared.DEFAULT,
) -> None:
    """Download a model to the cache directory, verify it, and print its path."""
    from tokenmill.backends.loading import pull_model

    typer.echo(pull_model(model))


@models.callback()
def default(context: typer.Context) -> None:
    """Downloaded models: list (the default), show, remove."""
    if context.invoked_subcommand is None:
        list_models()


@models.command("list")
def list_models(json_output: Json = False) -> None:
    """List downloaded models with their size on disk and last use."""
    from tokenmill.backends.huggingface import in_words
    from tokenmill.backends.library import cached_models

    found = cached_models()
    if json_output:
        typer.echo(json.dumps([_about(model) for model in found], indent=2))
        return
    width = max((len(model.name) for model in found), default=0)
    typer.echo(f"{'NAME':<{width}}  {'SIZE':>10}  LAST USED")
    for model in found:
        note = "" if model.path is not None else "  (incomplete; tokenmill pull resumes it)"
        typer.echo(f"{model.name:<{width}}  {in_words(model.num_bytes):>10}  {_when(model)}{note}")


@models.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name of a model, as listed.")],
    json_output: Json = False,
) -> None:
    """Show the path and the files of a downloaded model."""
    from tokenmill.backends.huggingface import in_words
    from tokenmill.backends.library import cached_model

    model = cached_model(name)
    if json_output:
        typer.echo(json.dumps(_about(model), indent=2))
        return
    typer.echo(f"{model.name}: {in_words(model.num_bytes)}, last used {_when(model)}")
    typer.echo(f"path: {model.path or '(incomplete; tokenmill pull resumes it)'}")
    for file in model.files:
        typer.echo(f"  {in_words(file.stat().st_size):>10}  {file.name}")


@models.command("remove")
def remove(
    names: Annotated[list[str], typer.Argument(help="Names of models, as listed; a repository removes all its files.")],
) -> None:
    """Remove downloaded models."""
    from tokenmill.backends.huggingface import in_words
    from tokenmill.backends.library import remove_model

    for name in names:
        typer.echo(f"removed {name}: {in_words(remove_model(name))} freed")


def _about(model: CachedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": None if model.path is None else str(model.path),
        "bytes": model.num_bytes,
        "last_used": model.last_used,
        "files": {file.name: file.stat().st_size for file in model.files},
    }


def _when(model: CachedModel) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(model.last_used))
