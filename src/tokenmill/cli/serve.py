"""`tokenmill serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cli import options as shared
from tokenmill.errors import ConfigError


def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="A name, a Hugging Face directory or a .gguf file.", show_default=shared.DEFAULT),
    ] = None,
    more: Annotated[
        list[str] | None, typer.Option("--model", "-m", metavar="NAME=PATH", help="One more model. May be repeated.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with [[model]] tables; see docs/server.md.", dir_okay=False)
    ] = None,
    keep_alive: Annotated[
        float | None, typer.Option(help="Seconds; models that are not used for so long are unloaded.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. Beyond this machine only with --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="TOKENMILL_API_KEY", help="Clients must know one of these.")
    ] = None,
    admin_key: Annotated[
        list[str] | None, typer.Option(envvar="TOKENMILL_ADMIN_KEY", help="A key that may load and unload models.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without a key.")] = False,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="Model name in requests for MODEL; '*' accepts any name. Default: its file or directory name."
        ),
    ] = None,
    default_model: Annotated[
        bool,
        typer.Option(
            "--default-model/--no-default-model",
            help="Accept requests that name no model if the server has only one.",
        ),
    ] = True,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name by which clients may call this machine, where there is no key.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Let web pages of this origin use the server. None may by default.")
    ] = None,
    clamp_max_tokens: Annotated[
        bool,
        typer.Option(
            "--clamp-max-tokens",
            help="Cut max_tokens to what fits into the context beside the prompt, instead of rejecting the request.",
        ),
    ] = False,
    web: Annotated[bool, typer.Option("--web/--no-web", help="Serve the web page at /.")] = True,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at the same time.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in one step.")] = None,
    target_tick_ms: Annotated[
        float | None, typer.Option(help="How long a step may take while somebody is being answered.")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Requests that may wait; one more is answered with 429.")
    ] = None,
    queue_timeout: Annotated[
        float, typer.Option(help="Seconds; a request that has not started by then is answered with 503.")
    ] = 60.0,
    request_timeout: Annotated[float, typer.Option(help="Seconds that a request may take in all.")] = 600.0,
    session_ttl: Annotated[
        float, typer.Option(help="Seconds; a session that nobody uses for so long ends.")
    ] = 86_400.0,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep sessions there: they outlive the server.", file_okay=False)
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds that what runs may go on when the server is stopped.")] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="text, or json: one object a line.")] = "text",
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Send each request as an OpenTelemetry span there (OTLP, HTTP).")
    ] = None,
    backend: shared.Backend = "auto",
    extra: shared.Extra = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    deterministic: shared.Deterministic = False,
    context: shared.Context = None,
    threads: shared.Threads = None,
) -> None:
    """Serve models over HTTP: OpenAI's API, sessions, and a web page."""
    try:
        from tokenmill.server.catalogue import named, read_catalogue, short_name, spec
        from tokenmill.server.config import ServerConfig, hash_key
        from tokenmill.server.logs import configure_logs
        from tokenmill.server.models import ANY_NAME
        from tokenmill.server.run import serve as run
    except ImportError as error:
        raise ConfigError(f"the server needs more packages ({error.name}): pip install 'tokenmill[server]'") from None

    configure_logs(log_level, log_format)
    settings = ServerConfig(
        host=host,
        port=port,
        key_hashes=tuple(hash_key(key) for key in api_key or ()),
        admin_key_hashes=tuple(hash_key(key) for key in admin_key or ()),
        insecure=insecure,
        allowed_hosts=frozenset(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        default_model=default_model,
        clamp_max_tokens=clamp_max_tokens,
        web=web,
        spans_url=otlp,
        session_ttl_s=session_ttl,
        store=store,
        max_request_s=request_timeout,
        drain_s=drain,
    )
    options: dict[str, Any] = {
        "backend": backend,
        "extra": shared.read_extra(extra),
        "dtype": dtype,
        "device": device,
        "deterministic": deterministic,
        "max_model_len": context,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "target_tick_ms": target_tick_ms,
        "max_queue": max_queue,
        "queue_timeout_s": queue_timeout,
        "num_threads": threads,
    }
    specs = [] if config is None else read_catalogue(config, options, keep_alive)
    if model is not None or not (specs or more):
        path = model or shared.DEFAULT
        any_name = served_model_name == ANY_NAME
        name = short_name(path) if any_name or not served_model_name else served_model_name
        aliases = [ANY_NAME] if any_name else []
        specs.insert(0, spec(name, path, options, aliases=aliases, keep_alive_s=keep_alive))
    elif served_model_name is not None:
        raise ConfigError("--served-model-name is for MODEL; --model NAME=PATH has its name")
    specs += [spec(*named(one), options, keep_alive_s=keep_alive) for one in more or ()]
    run(specs, settings)
