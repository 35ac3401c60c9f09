"""Session files: one conversation, to be taken elsewhere. docs/durability.md has the format.

    magic, version, length of the header, number of tokens, length of the KV | header: JSON | ids | KV | SHA-256

A file says which model it is of, and is for no other one. Its KV is optional, and used only by a model that computes in
the same form; the ids are enough to compute it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill import __version__
from tokenmill.contract import IntArray
from tokenmill.errors import SessionFileError
from tokenmill.session.fingerprint import Fingerprint
from tokenmill.session.record import SessionRecord, head_json, read_record, turn_json

MAGIC = b"tokenmill-session\x00"
VERSION = 1
LENGTHS = struct.Struct("<IQQQ")
"""After the magic: version, bytes of the header, number of ids, bytes of KV."""
DIGEST_BYTES = 32
MEDIA_TYPE = "application/vnd.tokenmill.session"
PRIVATE = {"key": "", "namespace": None, "priority": 0, "created_at": None, "used_at": None, "last_answer": None}
"""What is nobody's business elsewhere, and what a session has instead that comes from a file."""


@dataclass(frozen=True)
class SessionFile:
    """What a file holds."""

    record: SessionRecord
    fingerprint: Fingerprint
    num_kv_tokens: int
    kv: bytes
    """Of the first `num_kv_tokens` ids; empty: none."""


def pack(record: SessionRecord, fingerprint: Fingerprint, num_kv_tokens: int = 0, kv: bytes = b"") -> bytes:
    """A session as a file's bytes."""
    head = {name: value for name, value in head_json(record).items() if name not in PRIVATE}
    header: dict[str, Any] = {
        "made_by": f"tokenmill {__version__}",
        "model": asdict(fingerprint),
        "session": head,
        "turns": [turn_json(turn) for turn in record.turns],
        "num_kv_tokens": num_kv_tokens,
    }
    written = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    ids = record.tokens.array.astype("<i4").tobytes()
    lengths = LENGTHS.pack(VERSION, len(written), len(record.tokens), len(kv))
    body = b"".join((MAGIC, lengths, written, ids, kv))
    return body + hashlib.sha256(body).digest()


def unpack(data: bytes, session_id: str, vocab_size: int) -> SessionFile:
    """Read a file's bytes; `SessionFileError` says why they are none."""
    header, tokens, kv = _parts(data)
    try:
        model, count = header["model"], header["num_kv_tokens"]
        fingerprint = Fingerprint(*(str(model[name]) for name in ("weights", "text", "form")))
        head = {**header["session"], **PRIVATE}
        turns = header["turns"]
    except (KeyError, TypeError) as error:
        raise SessionFileError(f"its header is not complete: {error}") from None
    if not isinstance(count, int) or not 0 <= count <= len(tokens) or bool(count) != bool(kv):
        raise SessionFileError("its KV is not of its ids")
    return SessionFile(read_record(session_id, head, turns, tokens, vocab_size), fingerprint, count, kv)


def read_fingerprint(data: bytes) -> Fingerprint:
    """Which model a file is of, for whoever has several; the file is checked."""
    header, _, _ = _parts(data)
    try:
        return Fingerprint(*(str(header["model"][name]) for name in ("weights", "text", "form")))
    except (KeyError, TypeError) as error:
        raise SessionFileError(f"its header is not complete: {error}") from None


def read_whole(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SessionFileError(f"{path} can't be read: {error.strerror or error}") from None


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file that is whole or not there, and on the disk."""
    # A name of its own: somebody else may be writing the same file.
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with unfinished.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        _sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise SessionFileError(f"{path} can't be written: {error.strerror or error}") from None
    return path


def _sync_directory(directory: Path) -> None:
    """A file's name is on the disk when its directory is; some file systems can't be asked for that."""
    with suppress(OSError):
        held = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(held)
        finally:
            os.close(held)


def _parts(data: bytes) -> tuple[Any, IntArray, bytes]:
    start = len(MAGIC) + LENGTHS.size
    if not data.startswith(MAGIC):
        raise SessionFileError("it is no session file" if data else "it is empty")
    if len(data) < start:
        raise SessionFileError(f"it is cut short: {len(data)} bytes are less than the beginning of one")
    version, header_bytes, num_tokens, kv_bytes = LENGTHS.unpack_from(data, len(MAGIC))
    if version > VERSION:
        raise SessionFileError(f"it is of version {version}, of a later tokenmill; this one reads up to {VERSION}")
    expected = start + header_bytes + 4 * num_tokens + kv_bytes + DIGEST_BYTES
    if len(data) != expected:
        what = "cut short" if len(data) < expected else "too long"
        raise SessionFileError(f"it is {what}: {len(data)} bytes, not {expected}")
    if hashlib.sha256(memoryview(data)[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:
        raise SessionFileError("it is damaged: its checksum does not fit")
    ids_at = start + header_bytes
    kv_at = ids_at + 4 * num_tokens
    try:
        header = json.loads(data[start:ids_at])
    except (ValueError, RecursionError):
        raise SessionFileError("its header is no JSON") from None
    tokens = np.frombuffer(data, dtype="<i4", count=num_tokens, offset=ids_at).astype(np.int32)
    return header, tokens, data[kv_at:-DIGEST_BYTES]
