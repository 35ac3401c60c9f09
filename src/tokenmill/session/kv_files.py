"""`KVFiles`: KV bytes of sessions on disk, one file a session. A cache: whatever is wrong with one, it is not there.

A file is for one beginning of a log, told by a digest of its ids, under one form of the model. The files together take
at most `max_bytes`; those that nobody used for longest go first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tokenmill.contract import IntArray

log = logging.getLogger(__name__)

MAX_KV_BYTES = 4 << 30
MAGIC = b"TMKVF001"
HEADER = struct.Struct("<8s32s32sq")
"""Before the bytes that `KVMemory.export` gave: magic, the model's form, digest of the ids, number of ids."""
SUFFIX, UNFINISHED = ".kv", ".part"


@dataclass(frozen=True)
class SavedKV:
    """KV of the first `num_tokens` ids of a log."""

    num_tokens: int
    state: bytes


class KVFiles:
    """Any thread may call it, but for reading and writing: they take as long as the disk does."""

    def __init__(self, directory: Path, max_bytes: int = MAX_KV_BYTES) -> None:
        self._directory = directory
        self.max_bytes = max_bytes
        self._lock = threading.Lock()

    def write(self, session_id: str, form: str, tokens: IntArray, state: bytes, used_at: float) -> bool:
        """Keep the KV of these ids in place of any before, as last used at this Unix time.

        KV used less recently is evicted for it, nothing else. False: it could not be kept.
        """
        size = HEADER.size + len(state)
        if size > self.max_bytes:
            return False
        header = HEADER.pack(MAGIC, form.encode(), _digest(tokens), len(tokens))
        path = self._path(session_id)
        unfinished = path.with_suffix(UNFINISHED)
        try:
            with self._lock:
                self._directory.mkdir(parents=True, exist_ok=True)
                if not self._make_room(size, path, used_at):
                    return False
                with unfinished.open("wb") as file:
                    file.write(header)
                    file.write(state)
                os.utime(unfinished, (used_at, used_at))
                os.replace(unfinished, path)
        except OSError as error:
            log.info("KV of session %s is not kept: %s", session_id, error)
            with suppress(OSError):
                unfinished.unlink()
            return False
        return True

    def read(self, session_id: str, form: str, tokens: IntArray) -> SavedKV | None:
        """KV of a beginning of this log, if there is any that fits."""
        path = self._path(session_id)
        try:
            with path.open("rb") as file:
                magic, theirs, digest, count = HEADER.unpack(file.read(HEADER.size))
                fits = magic == MAGIC and theirs == form.encode() and 0 < count <= len(tokens)
                if not fits or digest != _digest(tokens[:count]):
                    return None
                state = file.read()
            now = time.time()
            os.utime(path, (now, now))
        except (OSError, struct.error):
            return None
        return SavedKV(count, state)

    def num_tokens(self, session_id: str) -> int:
        """How many ids there is KV of; 0: none."""
        try:
            with self._path(session_id).open("rb") as file:
                magic, _, _, count = HEADER.unpack(file.read(HEADER.size))
        except (OSError, struct.error):
            return 0
        return int(count) if magic == MAGIC else 0

    def remove(self, session_id: str) -> None:
        with suppress(OSError):
            self._path(session_id).unlink()

    def keep_only(self, session_ids: Iterable[str]) -> None:
        """Remove what is of no session among these, and what a process that was killed has not finished."""
        kept = {self._path(one) for one in session_ids}
        with suppress(OSError):
            for path in [*self._directory.glob(f"*{SUFFIX}"), *self._directory.glob(f"*{UNFINISHED}")]:
                if path not in kept:
                    path.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size in self._files())

    def _make_room(self, size: int, path: Path, used_at: float) -> bool:
        """Evict files, least recently used first, until one of this size fits; none if they are not enough."""
        files = sorted(one for one in self._files() if one[1] != path)
        excess = size + sum(one[2] for one in files) - self.max_bytes
        older = [one for one in files if one[0] <= used_at]
        if excess > sum(one[2] for one in older):
            return False
        for _, oldest, their_size in older:
            if excess <= 0:
                break
            oldest.unlink(missing_ok=True)
            excess -= their_size
        return True

    def _files(self) -> list[tuple[float, Path, int]]:
        """(last use, path, size) of each."""
        found = []
        with suppress(OSError):
            for path in self._directory.glob(f"*{SUFFIX}"):
                with suppress(OSError):
                    about = path.stat()
                    found.append((about.st_mtime, path, about.st_size))
        return found

    def _path(self, session_id: str) -> Path:
        """By a digest: a name need not be a file's."""
        return self._directory / (hashlib.sha256(session_id.encode()).hexdigest()[:32] + SUFFIX)


def _digest(tokens: IntArray) -> bytes:
    return hashlib.sha256(tokens.tobytes()).digest()
