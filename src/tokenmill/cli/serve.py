"""`tokenmill serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as shared
from tokenmill.errors import ConfigError


def serve(
    model: Annotated[str, typer.Argument(help="A name, a Hugging Face directory or a .gguf file.")] = shared.DEFAULT,
    host: Annotated[str, typer.Option(help="Where to listen. Beyond this machine only with --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="TOKENMILL_API_KEY", help="Clients must know one of these.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without a key.")] = False,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at the same time.")] = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    deterministic: shared.Deterministic = False,
    context: shared.Context = None,
    threads: shared.Threads = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it."""
    try:
        from tokenmill.server.config import ServerConfig, hash_key
        from tokenmill.server.run import serve as run
    except ImportError as error:
        raise ConfigError(f"the server needs more packages ({error.name}): pip install 'tokenmill[server]'") from None
    from tokenmill.engine.async_llm import AsyncLLM

    name = served_model_name or (Path(model).name if "/" in model else model)
    keys = tuple(hash_key(key) for key in api_key or ())
    config = ServerConfig(model_name=name, host=host, port=port, key_hashes=keys, insecure=insecure)
    llm = AsyncLLM(
        model,
        dtype=dtype,
        device=device,
        deterministic=deterministic,
        max_model_len=context,
        max_num_seqs=max_num_seqs,
        num_threads=threads,
    )
    run(llm, config)
