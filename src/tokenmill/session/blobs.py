"""`Blobs`: files in a database that several servers share, and who of them works on a batch.

A blob is bytes under a name, in pieces. A job is claimed by one server, as a session is: every claim raises its epoch,
and what is written for it names the epoch, so that a server that was taken for dead adds nothing when it comes back.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenmill.errors import SessionElsewhere, SessionMoved

TABLES = """
CREATE TABLE blobs (name text COLLATE "C", begin bigint, bytes bytea NOT NULL,
    made_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (name, begin));
CREATE TABLE jobs (id text COLLATE "C" PRIMARY KEY, epoch bigint NOT NULL, owner text);
"""
PIECE_BYTES = 1 << 20
CLAIM = """
INSERT INTO jobs VALUES (%(id)s, 1, %(me)s) ON CONFLICT (id) DO UPDATE SET epoch = jobs.epoch + 1, owner = %(me)s
WHERE jobs.owner IS NULL OR jobs.owner = %(me)s
    OR NOT EXISTS (SELECT 1 FROM servers WHERE id = jobs.owner AND lease_until > now())
RETURNING epoch"""
OURS = "id = %(id)s AND epoch = %(epoch)s AND owner = %(me)s"
"""The fence around what is written for a job."""
HOLD = f"SELECT 1 FROM jobs WHERE {OURS} FOR UPDATE"
RELEASE = f"UPDATE jobs SET owner = NULL WHERE {OURS}"
FINISH = f"DELETE FROM jobs WHERE {OURS}"
OWNER = "SELECT servers.address FROM jobs JOIN servers ON servers.id = jobs.owner WHERE jobs.id = %s"
PUT = """
INSERT INTO blobs VALUES (%(name)s, %(begin)s, %(bytes)s)
ON CONFLICT (name, begin) DO UPDATE SET bytes = excluded.bytes"""
"""A piece that was written before, and not acknowledged, may be written again with more."""
PIECES = "SELECT begin, bytes FROM blobs WHERE name = %s AND begin >= %s ORDER BY begin LIMIT %s"
PIECES_AT_ONCE = 4
ORPHANS = """
DELETE FROM blobs WHERE made_at < now() - interval '1 day'
    AND NOT EXISTS (SELECT 1 FROM documents WHERE kind = 'file' AND id = blobs.name)
    AND NOT EXISTS (SELECT 1 FROM jobs WHERE 'file-' || substr(id, 7) IN (substr(name, 1, length(name) - 1)))"""
"""Of uploads that were cut off, and of batches that are gone."""
T = TypeVar("T")
Connection = Any


class Post(Protocol):
    """Has work done in a transaction, by a thread that owns a connection."""

    def __call__(self, work: Callable[[Any], T]) -> Future[T]: ...


@dataclass(frozen=True)
class Claim:
    """That a server works on a job."""

    id: str
    epoch: int
    me: str

    def hold(self, connection: Connection) -> None:
        """Keep it to the end of a transaction; `SessionMoved` if another server has it."""
        if connection.execute(HOLD, vars(self)).fetchone() is None:
            raise SessionMoved(f"another server has taken {self.id} over")


class Blobs:
    """The blobs and jobs of a database. Any thread may call it."""

    def __init__(
        self, post: Post, read: Post, server_id: str, elsewhere: Callable[[str, str], SessionElsewhere]
    ) -> None:
        self._post = post
        self._read = read
        self._server_id = server_id
        self._elsewhere = elsewhere

    def put(self, name: str, path: Path) -> None:
        """Store a file, piece by piece. Waits for the database."""
        with path.open("rb") as file:
            for begin, data in _pieces(file.read):
                self._put(name, begin, data).result()

    def append(self, name: str, begin: int, data: bytes, claim: Claim) -> Future[None]:
        """Add to a blob of a job; what was there from `begin` on is replaced."""
        return self._put(name, begin, data, claim)

    def _put(self, name: str, begin: int, data: bytes, claim: Claim | None = None) -> Future[None]:
        def work(connection: Connection) -> None:
            if claim is not None:
                claim.hold(connection)
            connection.execute(PUT, {"name": name, "begin": begin, "bytes": data})

        return self._post(work)

    def fetch(self, name: str, path: Path) -> bool:
        """Write a blob to a file; False: there is none. Waits for the database, some pieces at a time."""
        found = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        found.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with found.open("wb") as file:
                while pieces := self._pieces_from(name, file.tell()).result():
                    for begin, piece in pieces:
                        if begin == file.tell():
                            file.write(piece)
            is_there = found.stat().st_size > 0
            if is_there:
                found.replace(path)
        finally:
            found.unlink(missing_ok=True)
        return is_there

    def _pieces_from(self, name: str, begin: int) -> Future[list[tuple[int, bytes]]]:
        def work(connection: Connection) -> list[tuple[int, bytes]]:
            rows = connection.execute(PIECES, (name, begin, PIECES_AT_ONCE), binary=True)
            found: list[tuple[int, bytes]] = rows.fetchall()
            return found if found and found[0][0] == begin else []

        return self._read(work)

    def delete(self, name: str) -> Future[None]:
        def work(connection: Connection) -> None:
            connection.execute("DELETE FROM blobs WHERE name = %s", (name,))
            connection.execute(ORPHANS)

        return self._post(work)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def claim(self, job: str) -> Future[Claim | None]:
        """Have a job for this server alone, under a new epoch; None while another one has it."""

        def work(connection: Connection) -> Claim | None:
            row = connection.execute(CLAIM, {"id": job, "me": self._server_id}).fetchone()
            return None if row is None else Claim(job, row[0], self._server_id)

        return self._post(work)

    def release(self, claim: Claim, *, is_over: bool = False) -> Future[None]:
        """Give a job up, for good if it `is_over`."""

        def work(connection: Connection) -> None:
            connection.execute(FINISH if is_over else RELEASE, vars(claim))

        return self._post(work)

    def owner(self, job: str) -> Future[SessionElsewhere | None]:
        """Where a job is worked on; None: nowhere."""

        def work(connection: Connection) -> SessionElsewhere | None:
            row = connection.execute(OWNER, (job,)).fetchone()
            return None if row is None else self._elsewhere(job, row[0])

        return self._post(work)


def _pieces(read: Callable[[int], bytes]) -> Iterator[tuple[int, bytes]]:
    begin = 0
    while data := read(PIECE_BYTES):
        yield begin, data
        begin += len(data)
