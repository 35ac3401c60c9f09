"""`tokenmill fit`: will it fit? Weights, KV and activations of a model, before anything is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli import arguments as shared

MIB = 1 << 20


def fit(
    model: Annotated[str, typer.Argument(help=shared.MODEL_HELP)] = shared.DEFAULT,
    sessions: Annotated[int, typer.Option(min=1, help="Number of concurrent sessions.")] = 16,
    context: Annotated[
        int | None, typer.Option(min=2, help="Context length: tokens per session.", show_default="the model's maximum")
    ] = None,
    backend: shared.Backend = "auto",
    extra: shared.Extra = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    workers: shared.Workers = 1,
    draft_model: shared.DraftModel = None,
    memory_gb: Annotated[
        float | None, typer.Option(min=0, help="Available memory (GB).", show_default="free memory")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the memory that a model needs, and the maximum that fits. Exit code 1 if it does not fit."""
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
        workers=workers,
        draft_model=draft_model,
    )
    if json_output:
        typer.echo(json.dumps({**asdict(found), "total": found.plan.total, "fits": found.fits}, indent=2))
        raise typer.Exit(0 if found.fits else 1)
    plan = found.plan
    on = f" on {workers} workers" if workers > 1 else ""
    on += f" with draft model {draft_model}" if draft_model else ""
    typer.echo(f"{model} as {found.form}, {sessions} sessions of {found.context} tokens{on}:")
    for name, size in (
        ("weights", plan.weights),
        (f"KV ({found.kv_bytes_per_token:,} bytes per token)", plan.kv),
        ("activations", plan.activations),
        ("tokenizer, tables, code", plan.other),
        ("total", plan.total),
        ("free", found.free_bytes),
    ):
        typer.echo(f"  {name:<32} {size / MIB:>10,.0f} MiB")
    typer.echo("fits" if found.fits else "does not fit")
    typer.echo(f"  maximum sessions of {found.context} tokens: {found.most_sessions:,}")
    typer.echo(f"  maximum context of {sessions} sessions: {found.longest_context:,}")
    raise typer.Exit(0 if found.fits else 1)
