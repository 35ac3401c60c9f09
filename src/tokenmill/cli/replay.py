"""`tokenmill replay`: run a conversation again from its file, and find the first token that is another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import arguments as shared


def replay(
    file: Annotated[
        Path, typer.Argument(help="Exported session: a file written by `save`.", exists=True, dir_okay=False)
    ],
    model: shared.Model = shared.DEFAULT,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    threads: shared.Threads = None,
) -> None:
    """Replay an exported session in deterministic mode. Exit code 1 at the first token that differs."""
    from tokenmill.session.records import open_file
    from tokenmill.session.records import replay as run

    how = {} if model == "fake" else {"dtype": dtype, "device": device, "num_threads": threads}
    with shared.open_llm(model, deterministic=True, **how) as llm:
        tokenizer, num_same, num_answers = llm.get_tokenizer(), 0, 0
        for one in run(open_file(file, llm), llm):
            num_answers += 1
            if one.at is None:
                num_same += 1
                continue
            recorded = "" if one.recorded is None else repr(tokenizer.decode([one.recorded], skip_special=False))
            drawn = "the end" if one.drawn is None else repr(tokenizer.decode([one.drawn], skip_special=False))
            typer.echo(
                f"turn {one.turn}: token {one.at} of {one.num_tokens} is {one.drawn} ({drawn}), "
                f"not {one.recorded} ({recorded})"
            )
            raise typer.Exit(1)
        typer.echo(f"{num_same} answers match, token for token")
