"""`tokenmill serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cli import arguments as shared
from tokenmill.errors import ConfigError


def serve(
    model: Annotated[str | None, typer.Argument(help=shared.MODEL_HELP, show_default=shared.DEFAULT)] = None,
    more: Annotated[
        list[str] | None, typer.Option("--model", "-m", metavar="NAME=PATH", help="Additional model (repeatable).")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with [[model]] tables, API keys and server settings; see docs/several-models.md.",
            dir_okay=False,
            show_default="none",
        ),
    ] = None,
    keep_alive: Annotated[
        float | None, typer.Option(help="Unload a model after this many idle seconds.", show_default="never")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to bind to; non-loopback requires --api-key or --keys-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free port.")] = 8000,
    ollama_port: Annotated[
        int | None,
        typer.Option(help="Second port to listen on, for tools that expect Ollama at 11434.", show_default="none"),
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="TOKENMILL_API_KEY", help="Require this API key (repeatable).")
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        typer.Option(envvar="TOKENMILL_ADMIN_KEY", help="API key that may load and unload models (repeatable)."),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="Certificate chain (PEM): serve HTTPS.", show_default="none: HTTP")
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(help="Private key of the certificate (PEM).", show_default="in --ssl-certfile"),
    ] = None,
    ssl_keyfile_password: Annotated[
        str | None,
        typer.Option(
            envvar="TOKENMILL_SSL_KEYFILE_PASSWORD", help="Password of an encrypted private key.", show_default="none"
        ),
    ] = None,
    forwarded_allow_ips: Annotated[
        str | None,
        typer.Option(
            help="Trust X-Forwarded-For and X-Forwarded-Proto headers from these proxies: comma-separated addresses or "
            "networks; '*' for all.",
            show_default="none",
        ),
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(
            envvar="TOKENMILL_KEYS_FILE",
            help="Keys with names, limits and expiry (TOML or JSON), reloaded on SIGHUP; see `tokenmill keys`.",
            dir_okay=False,
            show_default="none",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow binding to a non-loopback address without an API key.")
    ] = False,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="Name of MODEL in requests; '*' accepts any name.",
            show_default="MODEL as given (Qwen/Qwen3-4B); of a path, its last part",
        ),
    ] = None,
    default_model: Annotated[
        bool,
        typer.Option(
            "--default-model/--no-default-model",
            help="Make `model` optional in requests to a server with one model.",
        ),
    ] = True,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Accept this Host header on a server without API keys (repeatable).")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Allow cross-origin requests from this origin (repeatable).")
    ] = None,
    clamp_max_tokens: Annotated[
        bool,
        typer.Option(
            "--clamp-max-tokens",
            help="Reduce max_tokens to the remaining context instead of rejecting the request.",
        ),
    ] = False,
    web: Annotated[bool, typer.Option("--web/--no-web", help="Serve the web UI at /.")] = True,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Maximum number of running requests.", show_default="32; 256 on CUDA")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of a step.", show_default="2048; 8192 on CUDA")
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum prompt tokens of one request in a step while other requests are decoding.",
            show_default="512; 2048 on CUDA",
        ),
    ] = None,
    min_prefill_chunk: Annotated[
        int | None,
        typer.Option(min=1, help="Minimum prompt tokens of a step with prompts.", show_default="8; 256 on CUDA"),
    ] = None,
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Size of the KV cache (tokens), of all workers together.",
            show_default="--max-num-seqs full contexts, within a fraction of free memory",
        ),
    ] = None,
    target_tick_ms: Annotated[
        float | None,
        typer.Option(
            help="Target step latency (ms) while requests are decoding.",
            show_default="100; 500 with llama.cpp",
        ),
    ] = None,
    max_step_ms: Annotated[
        float | None,
        typer.Option(
            help="Target latency (ms) of steps that compute prompts only.", show_default="500; unbounded on CUDA"
        ),
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Maximum number of queued requests; further ones get 429.", show_default="256")
    ] = None,
    max_queue_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum total prompt tokens of queued requests; further requests get 429.",
            show_default="unlimited",
        ),
    ] = None,
    forced_tokens: Annotated[
        bool,
        typer.Option(
            "--forced-tokens/--no-forced-tokens",
            help="Append tokens forced by a grammar without sampling them.",
        ),
    ] = True,
    speculation: Annotated[
        str | None,
        typer.Option(
            help="Default speculative decoding of requests: auto, off, lookup or draft. The output is unchanged.",
            show_default="auto on the CPU kernels or with a draft model, otherwise off",
        ),
    ] = None,
    draft_model: shared.DraftModel = None,
    tokenizer_threads: Annotated[
        int, typer.Option(min=2, help="Tokenizer threads for long prompts; one is reserved for prompts up to 64 KiB.")
    ] = 2,
    queue_timeout: Annotated[float, typer.Option(help="Maximum time in the queue (s), then 503.")] = 60.0,
    request_timeout: Annotated[float, typer.Option(help="Maximum total time of a request (s).")] = 600.0,
    hang_timeout: Annotated[
        float,
        typer.Option(help="Abandon an engine when a step takes longer than this (s); an engine process is replaced."),
    ] = 60.0,
    exit_on_hang: Annotated[
        bool,
        typer.Option(
            "--exit-on-hang",
            help="Exit with code 4 when an engine hangs or fails permanently, for a service manager to restart it.",
        ),
    ] = False,
    session_ttl: Annotated[float, typer.Option(help="End a session after this many idle seconds.")] = 86_400.0,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URL",
            help="Persist sessions in this directory, or in a PostgreSQL database that several servers share "
            "(postgresql://USER@HOST/DATABASE).",
            show_default="in memory only",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Base URL under which other servers of the same database reach this one.",
            show_default="the address that it binds to",
        ),
    ] = None,
    lease: Annotated[
        float, typer.Option(help="Time after which a stopped server loses the sessions that it is answering in (s).")
    ] = 6.0,
    kv_transfer: Annotated[
        bool,
        typer.Option(
            "--kv-transfer/--no-kv-transfer",
            help="Fetch the KV of a session from the server that had it where that is predicted to be faster than "
            "computing it.",
        ),
    ] = True,
    metrics_alias: Annotated[
        str | None,
        typer.Option(
            help="Export what routers read under vLLM's metric names, too: vllm.", show_default="own names only"
        ),
    ] = None,
    drain: Annotated[float, typer.Option(help="Grace period for running requests on shutdown (s).")] = 30.0,
    drain_delay: Annotated[
        float,
        typer.Option(
            help="Time for which requests are still admitted on shutdown while /health/ready is 503, for routers to "
            "notice (s)."
        ),
    ] = 0.0,
    log_level: Annotated[str, typer.Option(help="Log level: debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="Log format: text, or json for one object per line.")] = "text",
    otlp: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Export request spans to this OpenTelemetry collector (OTLP/HTTP).", show_default="none"
        ),
    ] = None,
    backend: shared.Backend = "auto",
    extra: shared.Extra = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    engine: shared.Engine = "auto",
    deterministic: shared.Deterministic = False,
    load_format: shared.LoadFormat = "auto",
    tool_format: Annotated[
        str | None,
        typer.Option(help="Format of tool calls (see docs/tools.md).", show_default="derived from the chat template"),
    ] = None,
    context: shared.Context = None,
    threads: shared.Threads = None,
    workers: shared.Workers = 1,
) -> None:
    """Serve models over HTTP: OpenAI-compatible API, sessions, web UI."""
    try:
        from tokenmill.server.app import serve as run
        from tokenmill.server.config import ServerConfig, as_store, hash_key, read_server_table
        from tokenmill.server.keys import has_keys
        from tokenmill.server.middleware import configure_logs
        from tokenmill.server.models import ANY_NAME, named, read_catalogue, short_name, spec
    except ImportError as error:
        raise ConfigError(f"missing package {error.name}: pip install 'tokenmill[server]'") from None

    configure_logs(log_level, log_format)
    proxies = [part.strip() for part in (forwarded_allow_ips or "").split(",") if part.strip()]
    own: dict[str, Any] = {
        "ssl_certfile": ssl_certfile,
        "ssl_keyfile": ssl_keyfile,
        "ssl_keyfile_password": ssl_keyfile_password,
        "forwarded_allow_ips": tuple(proxies) if forwarded_allow_ips else None,
    }
    of_file = {} if config is None else read_server_table(config)
    settings = ServerConfig(
        host=host,
        port=port,
        ollama_port=ollama_port,
        key_hashes=tuple(hash_key(key) for key in api_key or ()),
        admin_key_hashes=tuple(hash_key(key) for key in admin_key or ()),
        keys_file=keys_file or (config if config is not None and has_keys(config) else None),
        insecure=insecure,
        allowed_hosts=frozenset(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        default_model=default_model,
        clamp_max_tokens=clamp_max_tokens,
        web=web,
        spans_url=otlp,
        session_ttl_s=session_ttl,
        store=as_store(store),
        advertise=advertise,
        lease_s=lease,
        kv_transfer=kv_transfer,
        metrics_alias=metrics_alias,
        max_request_s=request_timeout,
        tokenizer_threads=tokenizer_threads,
        drain_s=drain,
        drain_delay_s=drain_delay,
        exit_on_hang=exit_on_hang,
        **{**of_file, **{name: value for name, value in own.items() if value is not None}},
    )
    options: dict[str, Any] = {
        "backend": backend,
        "extra": shared.read_extra(extra),
        "dtype": dtype,
        "device": device,
        "engine": engine,
        "deterministic": deterministic,
        "load_format": load_format,
        "tool_format": tool_format,
        "max_model_len": context,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "prefill_chunk": prefill_chunk,
        "min_prefill_chunk": min_prefill_chunk,
        "kv_cache_tokens": kv_cache_tokens,
        "target_tick_ms": target_tick_ms,
        "max_step_ms": max_step_ms,
        "max_queue": max_queue,
        "max_queue_tokens": max_queue_tokens,
        "queue_timeout_s": queue_timeout,
        "hang_timeout_s": hang_timeout,
        "forced_tokens": forced_tokens,
        "speculation": speculation,
        "draft_model": draft_model,
        "num_threads": threads,
        "workers": workers,
    }
    specs = [] if config is None else read_catalogue(config, options, keep_alive)
    if model is not None or not (specs or more):
        path = model or shared.DEFAULT
        any_name = served_model_name == ANY_NAME
        name = short_name(path) if any_name or not served_model_name else served_model_name
        aliases = [ANY_NAME] if any_name else []
        specs.insert(0, spec(name, path, options, aliases=aliases, keep_alive_s=keep_alive))
    elif served_model_name is not None:
        raise ConfigError("--served-model-name requires MODEL; --model NAME=PATH sets its own name")
    specs += [spec(*named(one), options, keep_alive_s=keep_alive) for one in more or ()]
    run(specs, settings, lambda name: spec(name, name, options, keep_alive_s=keep_alive))
