"""`Files`: files that clients upload for batches, and those that batches write.

What is known of a file is a document (`session/documents.py`); its content lies in `files/` of the store's directory,
or of a temporary one that ends with the process. Where servers share a database, the content is there, and on each disk
is a copy of what was needed here. Everything here runs on the event loop, the disk's part of it on
threads.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from tokenmill.errors import NotDurable, SessionMoved
from tokenmill.server.errors import ApiError
from tokenmill.session.blobs import Blobs
from tokenmill.session.documents import Document, Documents

T = TypeVar("T")
KIND = "file"
FILE_TTL_S = 30 * 24 * 3600
"""Files of batches expire after this time, as OpenAI's do, unless the upload says otherwise."""
MIN_TTL_S, MAX_TTL_S = 3600, FILE_TTL_S
MAX_NAME_CHARS = 256


@dataclass(frozen=True)
class StoredFile:
    """What is known of a file."""

    id: str
    key: str
    """The id of the API key that it belongs to."""
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int

    def shape(self) -> dict[str, Any]:
        """As OpenAI shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Files:
    """The files of a server."""

    def __init__(
        self,
        documents: Documents,
        directory: Path | None,
        max_bytes: int,
        max_bytes_of: Callable[[str], int | None],
        blobs: Blobs | None = None,
    ) -> None:
        self._documents = documents
        self._blobs = blobs
        """The contents, where other servers share them; on this one's disk are copies."""
        self._given = directory
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._max_bytes = max_bytes
        """Of all files together."""
        self._max_bytes_of = max_bytes_of
        """The limit of a key, if it has one."""
        self._files: dict[str, StoredFile] = {}
        """In the order in which they were created."""
        self.is_used: Callable[[StoredFile], bool] = lambda file: False  # noqa: ARG005
        """Is it still read? Then it does not expire."""
        self._growing: list[tuple[str, Callable[[], int]]] = []
        """Keys and bytes of uploads that are being stored, and of results of batches that run."""

    async def load(self) -> None:
        """Find the files that an earlier process left; contents without a document are of uploads that failed."""
        await self.refresh()
        if self._given is None:
            return
        page = await durable(self._documents.list(KIND, None))
        for document in [] if page is None else page.documents:
            file = StoredFile(**document.body)
            if self.path(file.id).is_file():
                self._files[file.id] = file
        await asyncio.to_thread(self._remove_others, set(self._files))

    async def refresh(self) -> None:
        """Know the files of other servers, too."""
        if self._blobs is not None:
            page = await durable(self._documents.list(KIND, None))
            found = [] if page is None else [StoredFile(**one.body) for one in page.documents]
            self._files = {file.id: file for file in found}

    async def content(self, file_id: str) -> Path:
        """Where the content of a file can be read, if there is any."""
        path = self.path(file_id)
        if self._blobs is not None and not path.exists():
            await durable_call(self._blobs.fetch, file_id, path)
        return path

    def _remove_others(self, known: set[str]) -> None:
        folder = self.directory / "files"
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in known:
                path.unlink()

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def directory(self) -> Path:
        """In which files and results of batches lie; a temporary one is made on first use."""
        if self._given is not None:
            return self._given
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="tokenmill-")
        return Path(self._temporary.name)

    def path(self, file_id: str) -> Path:
        """Where the content of a file lies."""
        return self.directory / "files" / file_id

    # -- those of a key -----------------------------------------------------------------------------------------------

    def find(self, key: str, file_id: str, param: str | None = None) -> StoredFile:
        """One of this key's; those of others are not found."""
        file = self._files.get(file_id)
        if file is None or file.key != key or file.expires_at <= time.time():
            raise ApiError(404, f"no file {file_id!r:.80}", code="file_not_found", param=param)
        return file

    def of(self, key: str, purpose: str | None = None) -> list[StoredFile]:
        """All of this key's, oldest first."""
        now = time.time()
        return [
            file
            for file in self._files.values()
            if file.key == key and file.expires_at > now and purpose in (None, file.purpose)
        ]

    def bytes_of(self, key: str) -> int:
        return sum(file.num_bytes for file in self._files.values() if file.key == key)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self._files.values())

    # -- coming and going ---------------------------------------------------------------------------------------------

    async def add(
        self, key: str, content: IO[bytes], num_bytes: int, filename: str, ttl_s: int = FILE_TTL_S
    ) -> StoredFile:
        """Store an upload; done when it is on the disk."""
        await self.refresh()
        await self.remove_expired()
        self.check_room(key, num_bytes)
        file_id = f"file-{secrets.token_hex(16)}"
        try:
            with self.growing(key, lambda: num_bytes):
                await asyncio.to_thread(_write, self.path(file_id), content)
                if self._blobs is not None:
                    await durable_call(self._blobs.put, file_id, self.path(file_id))
                file = await self._describe(file_id, key, filename, "batch", num_bytes, ttl_s)
        except OSError as error:
            raise not_stored(str(error)) from None
        except BaseException:  # nobody knows of it
            self.path(file_id).unlink(missing_ok=True)
            raise
        self._files[file_id] = file
        return file

    async def adopt(
        self, file_id: str, key: str, written: Path, filename: str, purpose: str, ttl_s: int = FILE_TTL_S
    ) -> StoredFile | None:
        """Make a file of one that lies beside the others; None if it is empty. Can be repeated after a crash.

        The document goes first: one without its content is not listed, but content without a document is removed.
        """
        path = self.path(file_id)
        content = next((one for one in (written, path) if one.exists() and one.stat().st_size), None)
        if content is None:
            written.unlink(missing_ok=True)
            return None
        file = self._files.get(file_id)
        if file is None:
            file = await self._describe(file_id, key, filename, purpose, content.stat().st_size, ttl_s)
        if content is written:
            await asyncio.to_thread(_move, written, path)
        written.unlink(missing_ok=True)
        self._files[file_id] = file
        return file

    async def _describe(
        self, file_id: str, key: str, filename: str, purpose: str, num_bytes: int, ttl_s: int
    ) -> StoredFile:
        """Store what is known of a file."""
        now = int(time.time())
        name = re.sub(r"[^\x20-\x7e]|[\\/\"]", "_", filename)[-MAX_NAME_CHARS:] or "file"
        file = StoredFile(file_id, key, name, purpose, num_bytes, now, now + ttl_s)
        await durable(self._documents.put(Document(KIND, file_id, key, asdict(file))))
        return file

    async def delete(self, file: StoredFile) -> None:
        """Remove a file; the document goes first, so that none is left without its content."""
        self._files.pop(file.id, None)
        await durable(self._documents.delete(KIND, file.id, file.key))
        if self._blobs is not None:
            await durable(self._blobs.delete(file.id))
        await asyncio.to_thread(self.path(file.id).unlink, missing_ok=True)

    async def remove_expired(self) -> None:
        now = time.time()
        for file in [one for one in self._files.values() if one.expires_at <= now and not self.is_used(one)]:
            await self.delete(file)

    @contextmanager
    def growing(self, key: str, num_bytes: Callable[[], int]) -> Iterator[None]:
        """Count what is going to be a file for its key already."""
        one = (key, num_bytes)
        self._growing.append(one)
        try:
            yield
        finally:
            self._growing.remove(one)

    def check_room(self, key: str, num_bytes: int = 0) -> None:
        """May a key have so many bytes more?"""
        limit, own = (
            self._max_bytes_of(key),
            self.bytes_of(key) + sum(size() for whose, size in self._growing if whose == key),
        )
        if limit is not None and own + num_bytes > limit:
            what = f"the files of this API key have {own} bytes, its limit is {limit}; delete some"
            raise ApiError(413, what, code="file_quota_exceeded")
        if self.num_bytes + sum(size() for _, size in self._growing) + num_bytes > self._max_bytes:
            what = f"all files together may have {self._max_bytes} bytes; delete some"
            raise ApiError(507, what, "server_error", "file_storage_full")


async def durable(future: Future[T]) -> T:
    """What the store's thread says, or an error that tells that nothing was stored."""
    try:
        return await asyncio.wrap_future(future)
    except SessionMoved:
        raise
    except NotDurable as error:
        raise not_stored(str(error)) from None


async def durable_call(call: Callable[..., T], *arguments: Any) -> T:
    """The same for a call that waits for the store."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except NotDurable as error:
        raise not_stored(str(error)) from None


def not_stored(why: str) -> ApiError:
    return ApiError(507, "the file could not be stored", "server_error", "not_stored", cause=why)


def _write(path: Path, content: IO[bytes]) -> None:
    """Copy a file to its place; it is there as a whole, or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("xb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _move(path: Path, to: Path) -> None:
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.replace(to)
    sync_folder(to.parent)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The names in a directory are durable, too. Windows has no way to say so."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
