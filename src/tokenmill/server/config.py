"""Settings of the server: a frozen dataclass that checks itself, and the [server] table of a TOML file."""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from tokenmill.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
TEMPLATE_OPTIONS = frozenset({"enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "date_string"})
"""Variables of well-known chat templates, besides the messages."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Address, authentication and limits of the server."""

    host: str = "127.0.0.1"
    """Address to bind to; a non-loopback one requires an API key."""
    port: int = 8000
    """Port to listen on; 0 for any free port."""
    ollama_port: int | None = None
    """Second port to listen on, for tools that expect Ollama at 11434; None to disable."""
    key_hashes: tuple[bytes, ...] = ()
    """SHA-256 of each API key; empty for no authentication."""
    admin_key_hashes: tuple[bytes, ...] = ()
    """SHA-256 of each key that may load and unload models. With API keys but no admin keys, loading is disabled."""
    keys_file: Path | None = None
    """Keys with names, limits and expiry (`keys.py`), besides those above; read again on SIGHUP."""
    insecure: bool = False
    """Allow binding to a non-loopback address without an API key."""
    allowed_hosts: frozenset[str] = frozenset()
    """Accepted `Host` headers besides those of this machine; applies to servers without API keys."""
    cors_origins: tuple[str, ...] = ()
    """Origins that may send cross-origin requests."""
    default_model: bool = True
    """Make `model` optional in requests to a server with one model."""
    web: bool = True
    """Serve the web UI at /."""
    ssl_certfile: Path | None = None
    """Certificate chain (PEM): serve HTTPS."""
    ssl_keyfile: Path | None = None
    """Private key of the certificate (PEM); None if it is in the same file."""
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    """Password of an encrypted private key."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Trust `X-Forwarded-For` and `X-Forwarded-Proto` headers from these proxies (addresses or networks)."""
    template_options: frozenset[str] = TEMPLATE_OPTIONS
    """Allow-list of `chat_template_kwargs`."""

    metrics_alias: str | None = None
    """`vllm`: export what routers read under vLLM's metric names, too."""
    spans_url: str | None = None
    """OTLP endpoint for request spans; None to disable."""

    # Receiving requests.
    max_header_bytes: int = 64 * KIB
    """Maximum size of request line and headers, then 431."""
    max_headers: int = 100
    """Maximum number of headers, then 431."""
    header_timeout_s: float = 15.0
    """Maximum time to receive the headers (s), then 408."""
    body_timeout_s: float = 60.0
    """Maximum time to receive the body (s), then 408."""
    max_body_bytes: int = 8 * MIB
    """Maximum size of a body, then 413."""
    tokenizer_threads: int = 2
    """Threads that parse, render and tokenize long prompts; one is reserved for prompts up to 64 KiB."""
    max_tokenizing_bytes: int = 64 * MIB
    """Maximum bytes of longer prompts being tokenized or queued for it, then 429."""

    # Limits of a request.
    clamp_max_tokens: bool = False
    """Reduce `max_tokens` to the remaining context instead of rejecting the request."""
    max_n: int = 8
    """Maximum `n`: answers per prompt."""
    max_stops: int = 4
    """Maximum number of stop strings."""
    max_stop_chars: int = 256
    """Maximum length of a stop string."""
    max_completion_logprobs: int = 5
    """Maximum `logprobs` of /v1/completions; chat completions allow 20."""
    max_logit_bias: int = 1024
    """Maximum number of tokens in `logit_bias`."""
    max_prompts: int = 64
    """Maximum number of prompts per request to /v1/completions."""
    max_inputs: int = 2048
    """Maximum number of inputs per request to /v1/embeddings."""
    max_messages: int = 2048
    """Maximum number of messages per request."""
    max_content_parts: int = 64
    """Maximum number of content parts per message."""

    # Sessions.
    session_ttl_s: float | None = 24 * 3600.0
    """End a session after this many idle seconds."""
    max_session_bytes: int = 1024 * MIB
    """Total log size of the sessions of a model."""
    store: Path | str | None = None
    """Directory, or URL of a PostgreSQL database, in which sessions and stored objects are persisted; None: in none."""
    advertise: str | None = None
    """Base URL under which other servers of the same database reach this one; None: the address that it binds to."""
    replica: str | None = None
    """Unique name of this server among those of the same database, on its metrics and responses; None: a random one."""
    lease_s: float = 6.0
    """Time after which a server that has stopped loses the sessions that it is answering in."""
    kv_transfer: bool = True
    """Fetch the KV of a session from the server that had it where that is predicted to be faster than computing it."""
    max_stored_responses: int = 1024
    """Maximum number of stored responses, and of stored chat completions; the oldest are evicted."""
    max_stored_bytes: int = 1024 * MIB
    """Total size of stored responses, chat completions and conversations."""

    # Files and batches.
    max_file_bytes: int = 100 * MIB
    """Maximum size of an uploaded file, then 413."""
    max_files_bytes: int = 4096 * MIB
    """Total size of all files."""

    # Timeouts.
    idle_s: float = 75.0
    """Idle timeout of a connection."""
    max_request_s: float = 600.0
    """From arrival to the last token. Clients may request less."""
    send_timeout_s: float = 30.0
    """A client that reads nothing for this long is disconnected."""
    keep_alive_s: float = 15.0
    """Interval of keep-alive comments on a silent stream."""
    drain_s: float = 30.0
    """Grace period for running requests on shutdown."""
    drain_delay_s: float = 0.0
    """On shutdown, admit requests for this long after /health/ready has turned 503, for routers to notice."""
    exit_on_hang: bool = False
    """Shut down with exit code 4 when an engine hangs or fails and cannot be replaced."""

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.key_hashes and self.keys_file is None and not self.insecure:
            raise ConfigError(f"binding to {self.host} requires --api-key or --keys-file (or --insecure)")
        if hash_key("") in self.every_key_hash:
            raise ConfigError("an API key must not be empty")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password):
            raise ConfigError("a private key requires its certificate: --ssl-certfile")
        for proxy in self.forwarded_allow_ips:
            try:
                ip_network("0.0.0.0/0" if proxy == "*" else proxy)
            except ValueError as error:
                raise ConfigError(f"forwarded_allow_ips: {error}; use addresses, networks or '*'") from None
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        if self.ollama_port is not None and not 0 <= self.ollama_port < 1 << 16:
            raise ConfigError(f"ollama_port must be from 0 to 65535, not {self.ollama_port}")
        if self.tokenizer_threads < 2:
            raise ConfigError(f"tokenizer_threads must be at least 2, not {self.tokenizer_threads}")
        for name in ("header_timeout_s", "body_timeout_s", "max_request_s", "send_timeout_s", "keep_alive_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if self.session_ttl_s is not None and not self.session_ttl_s > 0:
            raise ConfigError(f"session_ttl_s must be positive, not {self.session_ttl_s}")
        if self.metrics_alias not in (None, "vllm"):
            raise ConfigError(f"metrics_alias {self.metrics_alias!r} is not supported; supported: 'vllm'")
        if not 0.5 <= self.lease_s <= 600:
            raise ConfigError(f"lease_s must be from 0.5 to 600, not {self.lease_s}")
        if self.advertise is not None and not _is_base_url(self.advertise):
            raise ConfigError(f"advertise must be a URL, http://HOST:PORT, not {self.advertise!r}")
        for name in ("drain_s", "drain_delay_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be non-negative, not {getattr(self, name)}")

    @property
    def every_key_hash(self) -> tuple[bytes, ...]:
        """Of all keys that may come in."""
        return tuple(dict.fromkeys((*self.key_hashes, *self.admin_key_hashes)))


def _is_base_url(given: str) -> bool:
    try:
        parts = urlsplit(given)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        return False


def as_store(given: str | None) -> Path | str | None:
    """A store as it was named: the URL of a database, or a directory."""
    if given is None or given.startswith(("postgresql://", "postgres://")):
        return given
    if Path(given).exists() and not Path(given).is_dir():
        raise ConfigError(f"--store {given} is a file; name a directory or a postgresql:// URL")
    return Path(given)


TABLE = frozenset(
    {
        "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "forwarded_allow_ips", "template_options",
        "max_header_bytes", "max_headers", "max_body_bytes", "max_tokenizing_bytes",
        "max_n", "max_stops", "max_stop_chars", "max_completion_logprobs", "max_logit_bias",
        "max_prompts", "max_inputs", "max_messages", "max_content_parts",
        "max_session_bytes", "max_stored_responses", "max_stored_bytes", "max_file_bytes", "max_files_bytes",
        "header_timeout_s", "body_timeout_s", "idle_s", "send_timeout_s", "keep_alive_s",
    }
)  # fmt: skip
"""Settings that a [server] table may have. Those that the command line has, too, have no default there."""
MAY_BE_ZERO = frozenset({"drain_s", "drain_delay_s"})


def read_server_table(path: Path) -> dict[str, Any]:
    """The [server] table of a TOML file, as keywords of `ServerConfig`; `ConfigError` says what is wrong with it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("server", {})
    except (OSError, ValueError):  # reported when the models are read
        return {}
    return settings_of(table, TABLE, f"{path}, [server]")


def settings_of(table: Any, known: Collection[str], where: str) -> dict[str, Any]:
    """Keywords of `ServerConfig` from a table of a file; `ConfigError` says what is wrong with it."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table")
    if unknown := table.keys() - known:
        supported = ", ".join(sorted(known))
        raise ConfigError(f"{where}: unknown setting {', '.join(sorted(unknown))}; supported: {supported}")
    kinds = get_type_hints(ServerConfig)
    return {name: _setting(name, value, kinds[name], where) for name, value in table.items()}


def _setting(name: str, given: Any, hint: Any, where: str) -> Any:
    """A value of the type that a field has; where it has several, of the first one of these."""
    plain = {get_origin(one) or one for one in (get_args(hint) if isinstance(hint, UnionType) else (hint,))}
    if given is None and NoneType in plain:
        return None
    kind = next(one for one in (bool, int, float, tuple, frozenset, Path, str) if one in plain)
    if kind in (int, float):
        sign, least = ("non-negative", 0) if name in MAY_BE_ZERO else ("positive", math.ulp(0.0))
        wanted = f"a {sign} integer" if kind is int else f"a {sign} number of seconds"
        is_number = isinstance(given, int if kind is int else int | float) and not isinstance(given, bool)
        is_valid = is_number and given >= least
    elif kind in (tuple, frozenset):
        wanted = "a list of strings"
        is_valid = isinstance(given, list) and all(isinstance(one, str) for one in given)
    else:
        wanted = "true or false" if kind is bool else "a string"
        is_valid = isinstance(given, bool if kind is bool else str)
    if not is_valid:
        raise ConfigError(f"{where}: {name} must be {wanted}, not {given!r}")
    return kind(given)


def hash_key(key: str | bytes) -> bytes:
    """What is kept of an API key."""
    raw = key if isinstance(key, bytes) else key.encode("utf-8", errors="surrogateescape")
    return hashlib.sha256(raw).digest()
