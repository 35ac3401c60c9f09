"""Settings of the server: a frozen dataclass that checks itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
TEMPLATE_OPTIONS = frozenset({"enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "date_string"})
"""What well-known chat templates ask for by name, beyond the messages."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server listens to, whom it lets in, and how much one request may ask for."""

    host: str = "127.0.0.1"
    port: int = 8000
    key_hashes: tuple[bytes, ...] = ()
    """SHA-256 of each API key; none: everybody who can reach the server may use it."""
    admin_key_hashes: tuple[bytes, ...] = ()
    """SHA-256 of each key that may load and unload models. Where there are keys, but none of these, nobody may."""
    insecure: bool = False
    """Listen beyond this machine without a key."""
    allowed_hosts: frozenset[str] = frozenset()
    """Names by which clients may call the server, beside those of this machine; of use only where there is no key."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may use the server from a browser."""
    default_model: bool = True
    """A request of OpenAI's API that names no model is for the only one of the server; else it is rejected."""
    web: bool = True
    """Serve the web page, at /."""
    template_options: frozenset[str] = TEMPLATE_OPTIONS
    """Names that `chat_template_kwargs` may have."""

    spans_url: str | None = None
    """Where each request goes as an OpenTelemetry span; None: nowhere."""

    # How a request may come in.
    max_header_bytes: int = 64 * KIB
    max_headers: int = 100
    header_timeout_s: float = 15.0
    body_timeout_s: float = 60.0
    max_body_bytes: int = 8 * MIB
    tokenizer_threads: int = 2
    """Threads that parse, render and tokenize long prompts. One of them is for prompts of up to 64 KiB."""
    max_tokenizing_bytes: int = 64 * MIB
    """Of longer prompts that are tokenized or wait for it; one more is answered with 429."""

    # What it may ask for.
    clamp_max_tokens: bool = False
    """A `max_tokens` that does not fit beside the prompt is cut to what does; else the request is rejected."""
    max_n: int = 8
    max_stops: int = 4
    max_stop_chars: int = 256
    max_completion_logprobs: int = 5
    """In /v1/completions; chats may have 20."""
    max_logit_bias: int = 1024
    max_prompts: int = 64
    """In one call of /v1/completions."""
    max_inputs: int = 2048
    """In one call of /v1/embeddings."""
    max_messages: int = 2048
    max_content_parts: int = 64

    # Sessions.
    session_ttl_s: float | None = 24 * 3600.0
    """One that nobody has used for so long ends."""
    max_session_bytes: int = 1024 * MIB
    """Of all logs of a model's sessions."""
    store: Path | None = None
    """The directory in which sessions outlive the server; None: they do not."""
    max_stored_responses: int = 1024
    """Answers of /v1/responses that can be gone on from."""

    # How long things may take.
    idle_s: float = 75.0
    """A connection may be idle for so long."""
    max_request_s: float = 600.0
    """From arrival to the last token. Clients may ask for less."""
    send_timeout_s: float = 30.0
    """A client that takes nothing for so long is given up."""
    keep_alive_s: float = 15.0
    """A comment is sent when a stream was silent for so long."""
    drain_s: float = 30.0
    """What runs when the server is told to stop may go on for so long."""

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.key_hashes and not self.insecure:
            raise ConfigError(
                f"listening on {self.host} lets others in: give --api-key, or --insecure if that is what you want"
            )
        if hash_key("") in self.every_key_hash:
            raise ConfigError("an API key must not be empty")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"a port is 0 to 65535, not {self.port}")
        if self.tokenizer_threads < 2:
            raise ConfigError(f"tokenizer_threads must be at least 2, not {self.tokenizer_threads}")
        for name in ("header_timeout_s", "body_timeout_s", "max_request_s", "send_timeout_s", "keep_alive_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if self.session_ttl_s is not None and not self.session_ttl_s > 0:
            raise ConfigError(f"session_ttl_s must be positive, not {self.session_ttl_s}")
        if self.drain_s < 0:
            raise ConfigError(f"drain_s must not be negative, but is {self.drain_s}")

    @property
    def every_key_hash(self) -> tuple[bytes, ...]:
        """Of all keys that may come in."""
        return tuple(dict.fromkeys((*self.key_hashes, *self.admin_key_hashes)))


def hash_key(key: str | bytes) -> bytes:
    """What is kept of an API key."""
    raw = key if isinstance(key, bytes) else key.encode("utf-8", errors="surrogateescape")
    return hashlib.sha256(raw).digest()
