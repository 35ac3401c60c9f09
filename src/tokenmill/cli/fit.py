"""`tokenmill fit`: will it fit? Weights, KV and activations of a model, before anything is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli import options as shared

MIB = 1 << 20


def fit(
    model: Annotated[str, typer.Argument(help=shared.MODEL_HELP)] = shared.DEFAULT,
    sessions: Annotated[int, typer.Option(min=1, help="Number of concurrent sessions.")] = 16,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens per session.", show_default="what the model supports")
    ] = None,
    backend: shared.Backend = "auto",
    extra: shared.Extra = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    memory_gb: Annotated[
        float | None, typer.Option(min=0, help="Memory to plan for (GB).", show_default="what is free")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Work out what a model takes in memory, and what is the most that fits. Exits with 1 if it does not."""
    import json
    from dataclasses import asdict

    from tokenmill.entrypoints.fit import plan_fit

    found = plan_fit(
        model,
        sessions,
        context,
        free_bytes=None if memory_gb is None else int(memory_gb * 1e9),
        backend=backend,
        extra=shared.read_extra(extra),
        dtype=dtype,
        device=device,
    )
    if json_output:
        typer.echo(json.dumps({**asdict(found), "total": found.plan.total, "fits": found.fits}, indent=2))
        raise typer.Exit(0 if found.fits else 1)
    plan = found.plan
    typer.echo(f"{model} as {found.form}, {sessions} sessions of {found.context} tokens:")
    for name, size in (
        ("weights", plan.weights),
        (f"KV ({found.kv_bytes_per_token:,} bytes a token)", plan.kv),
        ("activations", plan.activations),
        ("tokenizer, tables, code", plan.other),
        ("in all", plan.total),
        ("free", found.free_bytes),
    ):
        typer.echo(f"  {name:<32} {size / MIB:>10,.0f} MiB")
    typer.echo("it fits" if found.fits else "it does not fit")
    typer.echo(f"  most sessions of {found.context} tokens: {found.most_sessions:,}")
    typer.echo(f"  longest context of {sessions} sessions: {found.longest_context:,}")
    raise typer.Exit(0 if found.fits else 1)
