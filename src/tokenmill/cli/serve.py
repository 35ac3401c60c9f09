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
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name by which clients may call this machine, where there is no key.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Let web pages of this origin use the server. None may by default.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at the same time.")] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; one more is answered with 429.")] = 256,
    queue_timeout: Annotated[
        float, typer.Option(help="Seconds; a request that has not started by then is answered with 503.")
    ] = 60.0,
    request_timeout: Annotated[float, typer.Option(help="Seconds that a request may take in all.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds that what runs may go on when the server is stopped.")] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    deterministic: shared.Deterministic = False,
    context: shared.Context = None,
    threads: shared.Threads = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it."""
    try:
        from tokenmill.server.config import ServerConfig, hash_key
        from tokenmill.server.logs import configure_logs
        from tokenmill.server.run import serve as run
    except ImportError as error:
        raise ConfigError(f"the server needs more packages ({error.name}): pip install 'tokenmill[server]'") from None
    from tokenmill.config import EngineConfig
    from tokenmill.engine.async_llm import AsyncLLM

    configure_logs(log_level)
    config = ServerConfig(
        model_name=served_model_name or (Path(model).name if "/" in model else model),
        host=host,
        port=port,
        key_hashes=tuple(hash_key(key) for key in api_key or ()),
        insecure=insecure,
        allowed_hosts=frozenset(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        max_request_s=request_timeout,
        drain_s=drain,
    )
    engine = EngineConfig(max_queue=max_queue, queue_timeout_s=queue_timeout)

    def load() -> AsyncLLM:
        return AsyncLLM(
            model,
            config=engine,
            dtype=dtype,
            device=device,
            deterministic=deterministic,
            max_model_len=context,
            max_num_seqs=max_num_seqs,
            num_threads=threads,
        )

    run(load, config)
