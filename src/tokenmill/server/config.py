"""Settings of the server: a frozen dataclass that checks itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tokenmill.errors import ConfigError

MIB = 1 << 20
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server listens to, whom it lets in, and how much one request may ask for."""

    model_name: str
    """The `model` that clients name."""
    host: str = "127.0.0.1"
    port: int = 8000
    key_hashes: tuple[bytes, ...] = ()
    """SHA-256 of each API key; none: everybody who can reach the server may use it."""
    insecure: bool = False
    """Listen beyond this machine without a key."""
    max_body_bytes: int = 8 * MIB
    max_n: int = 8
    max_stops: int = 4
    max_prompts: int = 64
    """In one call of /v1/completions or /v1/embeddings."""
    max_messages: int = 2048
    send_timeout_s: float = 30.0
    """A client that takes nothing for so long is given up."""
    keep_alive_s: float = 15.0
    """A comment is sent when a stream was silent for so long."""

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.key_hashes and not self.insecure:
            raise ConfigError(
                f"listening on {self.host} lets others in: give --api-key, or --insecure if that is what you want"
            )


def hash_key(key: str) -> bytes:
    """What is kept of an API key."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
