"""Where sessions outlive their process: the `Store` protocol, and `SessionStore`, a directory.

    sessions.sqlite   heads, ids and turns of all sessions, and documents (`documents.py`); SQLite with a write-ahead
                      log, synced at each commit
    kv/               KV bytes of some of them: a cache (`records.py`)
    reserve           disk space for deletions: SQLite needs some to delete, too
    lock              held by the one process that uses the directory

One thread owns the database. Other threads queue work for it and get a future; queued work is committed together, so
that many sessions cost one sync. A write is the whole state of a session, but only its difference from the stored state
is written: it can be repeated, and never leaves half a turn or a turn twice. Sessions are read when they are asked for,
on a second connection that no write holds up.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import shutil
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from tokenmill.errors import ConfigError, NotDurable, TokenmillError
from tokenmill.files import lock_file
from tokenmill.session.blobs import Blobs
from tokenmill.session.documents import Documents, create_tables
from tokenmill.session.log import SharedList, Tokens, Turn
from tokenmill.session.records import MAX_KV_BYTES, KVFiles, SessionRecord, head_json, read_record, turn_json
from tokenmill.session.session import KVSource

log = logging.getLogger(__name__)

DATABASE = "sessions.sqlite"
VERSION = 3
"""Of the tables, as `user_version`. A later one is not touched; version 1 had no documents, 2 no columns to list by."""
APPLICATION = 0x746D696C
"""`application_id`: it is a store of ours."""
RESERVE_BYTES = 8 << 20
"""Enough to write back a full write-ahead log (4 MB) and to delete the largest session."""
MIN_RESERVE_BYTES = 64 << 10
RETRY_S = 10.0
"""How long after a deletion that failed it is tried again, if nothing else is written before."""
INCREMENTAL = 2
"""The `auto_vacuum` of a database that can give pages back to the file system."""
SHRINK_PAGES = 256
"""Free pages that the database may keep, and how many at a time it gives back."""
MOST_SLICES = 16
"""How often it does so before a deletion on a full disk is acknowledged; the rest follows when there is time."""
TABLES = """
CREATE TABLE sessions (id TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, head TEXT NOT NULL, used_at REAL NOT NULL);
CREATE TABLE tokens (session TEXT NOT NULL, begin INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (session, begin));
CREATE TABLE turns (session TEXT NOT NULL, number INTEGER NOT NULL, turn TEXT NOT NULL, PRIMARY KEY (session, number));
"""
LISTED = """
ALTER TABLE sessions ADD COLUMN key TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN created_at REAL NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN num_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE sessions SET (key, created_at, num_bytes) = (SELECT key, created_at, num_bytes FROM ({columns}) old \
WHERE old.id = sessions.id);
CREATE INDEX sessions_of_key ON sessions (fingerprint, key, created_at, id, num_bytes);
CREATE INDEX sessions_by_use ON sessions (fingerprint, used_at);
"""
"""What version 3 adds."""
COLUMNS = """\
SELECT id, fingerprint, head, used_at, ifnull(json_extract(head, '$.key'), '') AS key, \
ifnull(json_extract(head, '$.created_at'), used_at) AS created_at, 1024 + length(head) + \
(SELECT ifnull(sum(length(ids)), 0) FROM tokens WHERE session = id) + \
(SELECT ifnull(sum(length(turn)), 0) FROM turns WHERE session = id) AS num_bytes FROM main.sessions"""
"""The sessions of version 2, with the columns that it does not have."""
IDLE_AT_ONCE = 1000
"""Idle sessions that are deleted in one transaction."""
T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]


@dataclass(frozen=True)
class Job:
    """Something to be done with the database, and who wants to know how it went."""

    work: Work
    done: Future[Any]
    frees_space: bool = False
    """On a full disk it may use the reserve."""


@dataclass(frozen=True)
class Stored:
    """A session as it is in the store."""

    record: SessionRecord
    idle_s: float
    """For how many seconds it has been idle."""
    epoch: int = 0
    """Of the claim on it, in a store that several servers share."""
    unfinished: Mapping[str, Any] | None = None
    """The answer that was begun and has not ended: all that is needed to run it again."""
    kv: KVSource | None = None
    """Where its KV may be."""


@dataclass(frozen=True)
class Scope:
    """Which sessions of a store a model has."""

    fingerprint: str
    vocab_size: int
    ttl_s: float | None = None
    """Those idle for longer are not there any more, though they may not be deleted yet."""

    @property
    def used_after(self) -> float:
        """The Unix time since when a session must have been used."""
        return 0.0 if self.ttl_s is None else time.time() - self.ttl_s


Place = tuple[float, str]
"""Where a session stands in a list: when it was created, and its name."""


class Store(Protocol):
    """Sessions and documents that outlive their process. Any thread may call it.

    Writes are queued and give a future, which fails with `NotDurable`; reads wait for the database.
    """

    documents: Documents
    is_read_only: bool

    @property
    def blobs(self) -> Blobs | None:
        """Contents of files and who works on batches, if other servers share them."""
        ...

    @property
    def kv(self) -> KVFiles | None:
        """Where KV bytes are written, if anywhere."""
        ...

    @property
    def is_shared(self) -> bool:
        """May other servers take sessions over? Then claims have epochs, and answers are noted when they begin."""
        ...

    def claim(self, scope: Scope, session_id: str, *, resumes: str | None = None) -> Stored | None:
        """Have a session for this process alone; None if there is none, or it is in use in this process.

        `SessionElsewhere` while another server answers in it. What was begun by a server that is gone is forgotten,
        unless it is the answer that is to be resumed.
        """
        ...

    def holds(self, session_id: str, epoch: int) -> Future[bool]:
        """Is a claim still ours? If not, the session has moved or ended."""
        ...

    def save(self, record: SessionRecord, fingerprint: str, epoch: int = 0, *, is_new: bool = False) -> Future[None]:
        """Make this the state of a session, and end its answer. `SessionMoved` if the claim on it is lost.

        Unless it `is_new`, a session that is not in the store any more stays gone.
        """
        ...

    def begin_answer(self, session_id: str, epoch: int, answer: Mapping[str, Any]) -> Future[None]:
        """Note that an answer begins, in a store that is shared. `SessionMoved` if the claim is lost."""
        ...

    def delete(self, session_id: str, epoch: int = 0) -> Future[None]:
        """The session has ended."""
        ...

    def let_go(self, session_id: str, epoch: int = 0) -> None:
        """Give a claim up: the session has not ended, and can be claimed again."""
        ...

    def read(self, scope: Scope, session_ids: Sequence[str]) -> list[Stored]:
        """Sessions as they are in the store, claimed or not."""
        ...

    def key_of(self, scope: Scope, session_id: str) -> str | None:
        """Whose session it is; None if there is none."""
        ...

    def page(
        self, scope: Scope, key: str | None, limit: int, after: Place | None = None, *, newest_first: bool = False
    ) -> list[Place]:
        """Sessions of a key (None: of all) in the order of their creation, those in use in this process left out."""
        ...

    def usage(self, scope: Scope) -> dict[str, tuple[int, int]]:
        """How many sessions each key has and their bytes, those in use in this process left out."""
        ...

    def delete_idle(self, scope: Scope, seconds: float) -> Future[int]:
        """Delete the sessions that nobody has used for so long; their number."""
        ...

    def close(self) -> None: ...


class SessionStore:
    """A store in a directory, for one process. `ConfigError` if the directory can't be used at all."""

    is_shared = False
    blobs = None

    def __init__(
        self, directory: str | Path, *, max_kv_bytes: int = MAX_KV_BYTES, reserve_bytes: int = RESERVE_BYTES
    ) -> None:
        self.directory = Path(directory)
        self._reserve = _Reserve(self.directory / "reserve", reserve_bytes)
        self._lock = _lock(self.directory)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._is_closed = False
        self._closing = threading.Lock()
        self._held: set[str] = set()
        """Sessions that a service of this process has: no other one loads them."""
        self._loading = threading.Lock()
        self._counting = threading.Lock()
        self._gone: set[str] = set()
        """Sessions that have ended, though the disk may not know it yet."""
        self._undeleted: set[str] = set()
        """Those of them whose deletion has failed. Changed by the store's thread only."""
        self._unwritten: Counter[str] = Counter()
        """Writes that wait, by session: what is on the disk is older."""
        self._written: dict[str, tuple[Tokens, SharedList[Turn]]] = {}
        """What the database has of a session's log, once it was written. Changed by the store's thread only."""
        self.is_read_only = False
        opened: Future[Sequence[str]] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="tokenmill-store", daemon=True)
        self._thread.start()
        try:
            options = opened.result()
        except BaseException:
            _unlock(self._lock)
            raise
        self._reader = _open_reader(self.directory / DATABASE, options)
        self._reading = threading.Lock()
        self.documents = Documents(self._post)
        self.kv = KVFiles(self.directory / "kv", max_kv_bytes)
        if self._lock is not None and not self.is_read_only:
            with suppress(NotDurable, sqlite3.Error), self._reading:
                self.kv.keep_only(_names(self._reader))

    # -- for any thread -----------------------------------------------------------------------------------------------

    def save(
        self,
        record: SessionRecord,
        fingerprint: str,
        epoch: int = 0,  # noqa: ARG002
        *,
        is_new: bool = False,  # noqa: ARG002
    ) -> Future[None]:
        """Make this the state of a session; done when it is on the disk, `NotDurable` if that failed."""
        self._held.add(record.session_id)
        with self._counting:
            self._unwritten[record.session_id] += 1
        return self._post(lambda connection: self._write(connection, record, fingerprint), writes=record.session_id)

    def begin_answer(self, session_id: str, epoch: int, answer: Mapping[str, Any]) -> Future[None]:
        """An answer of a process that dies is as if it had not been asked for."""
        raise NotImplementedError("the store is not shared")

    def delete(self, session_id: str, epoch: int = 0) -> Future[None]:  # noqa: ARG002
        """The session has ended; done when the disk knows it. On a full disk the reserve is used, and space is freed.

        Where it fails it is tried again, until this process ends.
        """

        def work(connection: sqlite3.Connection) -> None:
            self.kv.remove(session_id)  # here: to remove a large file takes its time
            self._delete(connection, session_id)

        self._gone.add(session_id)
        deleting = self._post(work, frees_space=True)
        deleting.add_done_callback(lambda done: self._note_deleted(session_id, done))
        self._held.discard(session_id)
        return deleting

    def delete_idle(self, scope: Scope, seconds: float) -> Future[int]:
        before, ended = time.time() - seconds, list[str]()

        def work(connection: sqlite3.Connection) -> int:
            ended.clear()  # it may be done once more, if the transaction fails
            for name in _idle(connection, scope.fingerprint, before):
                self._gone.add(name)  # before looking who has it: `claim` looks in the other order
                if name in self._held:
                    self._gone.discard(name)
                    continue
                ended.append(name)
                self.kv.remove(name)
                self._delete(connection, name)
                if len(ended) == IDLE_AT_ONCE:
                    break
            return len(ended)

        deleting = self._post(work, frees_space=True)
        deleting.add_done_callback(lambda _: self._gone.difference_update(ended))
        return deleting

    def let_go(self, session_id: str, epoch: int = 0) -> None:  # noqa: ARG002
        """A service no longer has the session, but it has not ended: it can be claimed again."""
        self._held.discard(session_id)

    def claim(self, scope: Scope, session_id: str, *, resumes: str | None = None) -> Stored | None:  # noqa: ARG002
        with self._loading:
            if session_id in self._held or session_id in self._gone:
                return None
            found = self._read(lambda connection: _read_session(connection, scope, session_id), session_id)
            if found is None:
                return None
            self._held.add(session_id)
            if session_id in self._gone:  # it has ended meanwhile
                self._held.discard(session_id)
                return None
            return replace(found, kv=KVSource(partial(self.kv.read, session_id)))

    def holds(self, session_id: str, epoch: int) -> Future[bool]:
        """No other process takes a session away."""
        raise NotImplementedError("the store is not shared")

    def read(self, scope: Scope, session_ids: Sequence[str]) -> list[Stored]:
        names = [name for name in session_ids if name not in self._gone]
        found = [self._read(partial(_read_session, scope=scope, name=name), name) for name in names]
        return [one for one in found if one is not None]

    def key_of(self, scope: Scope, session_id: str) -> str | None:
        if session_id in self._gone:
            return None
        asked = (session_id, scope.fingerprint, scope.used_after)
        query = "SELECT key FROM sessions WHERE id = ? AND fingerprint = ? AND used_at > ?"
        rows = self._read(lambda connection: connection.execute(query, asked).fetchall(), session_id)
        return rows[0][0] if rows else None

    def page(
        self, scope: Scope, key: str | None, limit: int, after: Place | None = None, *, newest_first: bool = False
    ) -> list[Place]:
        unlisted = self._held | self._gone
        rows = self._read(lambda reader: _page(reader, scope, key, limit + len(unlisted), after, newest_first))
        return [row for row in rows if row[1] not in unlisted][:limit]

    def usage(self, scope: Scope) -> dict[str, tuple[int, int]]:
        unlisted = self._held | self._gone
        return self._read(lambda connection: _usage(connection, scope, unlisted))

    def _read(self, work: Callable[[sqlite3.Connection], T], session_id: str | None = None) -> T:
        """Read the database; by the store's thread, after what waits, if the session is among that."""
        if session_id is not None and self._unwritten[session_id]:
            return self._post(work).result()
        with self._reading:
            if self._is_closed:
                raise NotDurable("the store was closed")
            try:
                return work(self._reader)
            except sqlite3.Error as error:
                raise NotDurable(str(error)) from None

    def check_integrity(self) -> str:
        """SQLite's own check of the database: "ok"."""
        return str(self._post(lambda connection: connection.execute("PRAGMA integrity_check").fetchone()[0]).result())

    def close(self) -> None:
        """Write what waits, and let go of the directory."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._jobs.put(None)
        self._thread.join()
        with self._reading:
            self._reader.close()
        _unlock(self._lock)

    def _post(
        self, work: Callable[[sqlite3.Connection], T], *, frees_space: bool = False, writes: str | None = None
    ) -> Future[T]:
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
        if writes is not None:
            done.add_done_callback(lambda _: self._note_written(writes))
        with self._closing:
            if self._is_closed:
                done.set_exception(NotDurable("the store was closed"))
            else:
                self._jobs.put(Job(work, done, frees_space))
        return done

    # -- one session, on the store's thread ---------------------------------------------------------------------------

    def _write(self, connection: sqlite3.Connection, record: SessionRecord, fingerprint: str) -> None:
        """Write the difference from the stored state. After the first write that is known without reading it back."""
        name, known = record.session_id, self._written.get(record.session_id)
        _write_head(connection, record, fingerprint)
        if known is None:
            stored, old = Tokens(as_numbers(_tokens(connection, name))), _turns(connection, name)
            new = [dump(turn_json(turn)) for turn in record.turns]
            pairs = zip(old, new, strict=False)
            same = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(old), len(new)))
            new, num_stored = new[same:], len(old)
        else:
            (stored, turns), num_stored = known, len(known[1])
            same = turns.num_shared(record.turns)
            new = [dump(turn_json(turn)) for turn in record.turns[same:]]
        _write_tokens(connection, name, record.tokens, stored)
        _write_turns(connection, name, new, same, num_stored)
        self._written[name] = (record.tokens, record.turns)

    def _delete(self, connection: sqlite3.Connection, name: str) -> None:
        self._written.pop(name, None)
        _delete_rows(connection, name)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, opened: Future[Sequence[str]]) -> None:
        try:
            if self._lock is not None:
                self._reserve.release()  # on a full disk SQLite could not even open its files
            connection, options = _open(self.directory / DATABASE)
            self.is_read_only = options[0] == "mode=ro"
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(options)
        is_open = True
        while is_open:
            self._tidy_up(connection)
            jobs = self._waiting_jobs()
            is_open = None not in jobs
            self._carry_out(connection, [job for job in [*jobs, *self._deletions()] if job is not None])
        connection.close()

    def _waiting_jobs(self) -> list[Job | None]:
        """All that is to be done, once there is something, or some deletion is to be tried again. None: close."""
        jobs: list[Job | None] = []
        with suppress(queue.Empty):
            jobs.append(self._jobs.get(timeout=RETRY_S if self._undeleted else None))
            while jobs[-1] is not None:
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _carry_out(self, connection: sqlite3.Connection, jobs: Sequence[Job]) -> None:
        """All of it in one transaction; if that fails each job has one of its own, and fails alone."""
        if not jobs:
            return
        try:
            results = _commit(connection, jobs)
        except Exception as error:
            self._written.clear()  # some of it may have been written by the jobs, and was rolled back
            if len(jobs) > 1:
                for job in jobs:
                    self._carry_out(connection, [job])
            elif _is_full(error):
                self._carry_out_on_full_disk(connection, jobs[0])
            else:
                jobs[0].done.set_exception(_not_durable(error))
            return
        for job, result in zip(jobs, results, strict=True):
            job.done.set_result(result)

    def _carry_out_on_full_disk(self, connection: sqlite3.Connection, job: Job) -> None:
        """Try once more after a checkpoint; a deletion may use the reserve, and gives back what it frees."""
        if job.frees_space:  # others would leave nothing of it
            self._reserve.release()
        with suppress(sqlite3.Error):
            _checkpoint(connection)  # needs space before it frees more
        try:
            (result,) = _commit(connection, [job])
        except Exception as error:
            self._written.clear()
            job.done.set_exception(_not_durable(error))
        else:
            if job.frees_space:
                _give_back(connection)
            job.done.set_result(result)
        finally:
            self._reserve.hold()

    def _tidy_up(self, connection: sqlite3.Connection) -> None:
        """While nothing else is to be done: give back pages that became free, and hold the reserve."""
        if self.is_read_only:
            return
        self._reserve.hold()
        with suppress(sqlite3.Error):
            has_shrunk = False
            while self._jobs.empty() and _num_free_pages(connection) > max(SHRINK_PAGES, _num_pages(connection) // 4):
                _shrink(connection)
                has_shrunk = True
            if has_shrunk:
                _checkpoint(connection)  # only now the file gets shorter

    def _note_written(self, session_id: str) -> None:
        with self._counting:
            self._unwritten[session_id] -= 1
            if self._unwritten[session_id] <= 0:
                del self._unwritten[session_id]

    def _note_deleted(self, session_id: str, done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            self._gone.discard(session_id)
        else:
            log.warning("session %s has ended, but is still on the disk: %s", session_id, error)
            if not self.is_read_only:
                self._undeleted.add(session_id)

    def _deletions(self) -> list[Job]:
        """Once more what could not be deleted: with whatever is written next."""
        names, done = tuple(self._undeleted), Future[None]()
        if not names:
            return []

        def work(connection: sqlite3.Connection) -> None:
            for name in names:
                self._delete(connection, name)

        def note(done: Future[None]) -> None:
            if done.exception() is None:
                self._undeleted.difference_update(names)
                self._gone.difference_update(names)

        done.add_done_callback(note)
        return [Job(work, done, frees_space=True)]


def _commit(connection: sqlite3.Connection, jobs: Sequence[Job]) -> list[Any]:
    """Do some work as one transaction; the results. If it raises, nothing was done."""
    try:
        if connection.in_transaction:  # what failed before could not even be taken back
            connection.execute("ROLLBACK")
        connection.execute("BEGIN")
        results = [job.work(connection) for job in jobs]
        connection.execute("COMMIT")
    except Exception:
        with suppress(sqlite3.Error):  # whatever happens to the disk, the store's thread goes on
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        raise
    return results


def _is_full(error: Exception) -> bool:
    """No space left, or a quota or limit reached: to SQLite the latter are I/O errors."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _not_durable(error: Exception) -> NotDurable:
    if not isinstance(error, sqlite3.Error | OSError | TokenmillError | TypeError | ValueError):
        log.error("the store could not do its work", exc_info=error)
    return NotDurable(str(error))


# -- the directory ----------------------------------------------------------------------------------------------------


def _lock(directory: Path) -> int | None:
    """Have the directory for this process alone; None where even the lock can't be written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # conversations are private
        held = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except PermissionError:
        return None
    except OSError as error:
        if error.errno == errno.EROFS:
            return None
        raise ConfigError(f"cannot use the store {directory}: {error.strerror}") from None
    try:
        lock_file(held, wait=False)
    except OSError:
        os.close(held)
        raise ConfigError(f"the store {directory} is in use by another process") from None
    return held


def _unlock(held: int | None) -> None:
    if held is not None:
        os.close(held)


class _Reserve:
    """A file that does nothing but take disk space, to be given up when the space is needed. For one thread."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        self._wanted = num_bytes
        self._num_released = 0

    def hold(self) -> None:
        """Take what was released, or more if the disk has plenty: at most a third of what is free."""
        with suppress(OSError):
            held = self._path.stat().st_size if self._path.exists() else 0
            if held >= self._wanted:
                return
            free = shutil.disk_usage(self._path.parent).free
            size = min(self._wanted, max(self._num_released, free // 3))
            while size > max(held, MIN_RESERVE_BYTES) and not self._grow(held, size):
                size //= 2

    def release(self) -> None:
        with suppress(OSError):
            self._num_released = self._path.stat().st_size
            self._path.unlink()

    def _grow(self, held: int, size: int) -> bool:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if sys.platform in ("darwin", "win32"):
                os.lseek(file, held, os.SEEK_SET)
                os.write(file, bytes(size - held))
            else:
                os.posix_fallocate(file, 0, size)
        except OSError:  # the disk is fuller than it said
            os.ftruncate(file, held)
            return False
        finally:
            os.close(file)
        return True


def _open(path: Path) -> tuple[sqlite3.Connection, Sequence[str]]:
    """The database, and how it was opened: it may be that it can only be read."""
    for options, is_read_only in ((("mode=rwc",), False), (("mode=ro",), True), (("mode=ro", "immutable=1"), True)):
        if "immutable=1" in options and path.with_name(path.name + "-wal").exists():
            break  # what is only in there would not be seen
        try:
            connection = _connect(path, options, is_read_only)
        except sqlite3.OperationalError as error:
            problem = error
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path} is not a session store, or is corrupt: {error}") from None
        else:
            if is_read_only:
                log.warning("%s can only be read: sessions are not durable", path)
            return connection, options
    raise ConfigError(f"cannot open the store {path}: {problem}")


def _connect(path: Path, options: Sequence[str], is_read_only: bool) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{'&'.join(options)}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if num_tables and application != APPLICATION:
            raise ConfigError(f"{path} is a database, but not a session store")
        if version > VERSION:
            raise ConfigError(
                f"{path} has version {version}, newer than the supported version {VERSION}; upgrade tokenmill"
            )
        if not is_read_only:
            if not num_tables:
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # before anything is written
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN IMMEDIATE")  # a file that can only be read is found out here
            if not num_tables:
                for statement in TABLES.strip().splitlines():
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id={APPLICATION}")
            if version < 2:
                create_tables(connection)
            if version < VERSION:
                for statement in LISTED.format(columns=COLUMNS.replace("main.", "")).strip().splitlines():
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version={VERSION}")
            connection.execute("COMMIT")
            _make_shrinkable(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _open_reader(path: Path, options: Sequence[str]) -> sqlite3.Connection:
    """A second connection, to read what is committed."""
    uri = f"{path.absolute().as_uri()}?{'&'.join(options)}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0, check_same_thread=False)
    if connection.execute("PRAGMA user_version").fetchone()[0] < VERSION:  # an earlier one that can only be read
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute(f"CREATE TEMP VIEW sessions AS {COLUMNS}")
    connection.execute("PRAGMA query_only=1")
    return connection


# -- space ------------------------------------------------------------------------------------------------------------


def _make_shrinkable(connection: sqlite3.Connection, path: Path) -> None:
    """Rewrite a database of an earlier version, which can't shrink, if there is space for a copy."""
    is_shrinkable = connection.execute("PRAGMA auto_vacuum").fetchone()[0] == INCREMENTAL
    with suppress(sqlite3.Error, OSError):
        if not is_shrinkable and shutil.disk_usage(path.parent).free > 2 * path.stat().st_size + RESERVE_BYTES:
            log.info("%s is rewritten once, so that it can shrink", path)
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("VACUUM")


def _num_pages(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA page_count").fetchone()[0])


def _num_free_pages(connection: sqlite3.Connection) -> int:
    """Pages that the database could give back."""
    if connection.execute("PRAGMA auto_vacuum").fetchone()[0] != INCREMENTAL:
        return 0
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


def _shrink(connection: sqlite3.Connection) -> None:
    """Move pages from the end of the database to free ones; the file gets shorter with the next checkpoint."""
    connection.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")  # `execute` would stop after one page


def _give_back(connection: sqlite3.Connection) -> None:
    """Give free pages to the file system now, a few at a time: moving pages takes space, too."""
    with suppress(sqlite3.Error):
        for _ in range(MOST_SLICES):
            if not _num_free_pages(connection):
                return
            _shrink(connection)
            _checkpoint(connection)


def _checkpoint(connection: sqlite3.Connection) -> None:
    """Write the write-ahead log back to the database, and empty it."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


# -- one session ------------------------------------------------------------------------------------------------------


def _write_head(connection: sqlite3.Connection, record: SessionRecord, fingerprint: str) -> None:
    connection.execute(
        "INSERT INTO sessions (id, fingerprint, head, used_at, key, created_at, num_bytes) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET fingerprint = excluded.fingerprint, head = excluded.head, "
        "used_at = excluded.used_at, num_bytes = excluded.num_bytes",
        (record.session_id, fingerprint, dump(head_json(record)), *listed(record)),
    )


def _write_tokens(connection: sqlite3.Connection, name: str, tokens: Tokens, stored: Tokens) -> None:
    """Truncate the stored ids at the first difference, and insert the rest as one piece."""
    same = stored.num_same(tokens)
    if same < len(stored):
        connection.execute("DELETE FROM tokens WHERE session = ? AND begin >= ?", (name, same))
        connection.execute(
            "UPDATE tokens SET ids = substr(ids, 1, 4 * (? - begin)) "
            "WHERE session = ? AND begin < ? AND begin + length(ids) / 4 > ?",
            (same, name, same, same),
        )
    if same < len(tokens):
        rest = tokens.array[same:].astype("<i4").tobytes()
        connection.execute("INSERT INTO tokens VALUES (?, ?, ?)", (name, same, rest))


def _write_turns(connection: sqlite3.Connection, name: str, turns: Sequence[str], same: int, num_stored: int) -> None:
    """Keep the first `same` turns that are there, and add these."""
    if same < num_stored:
        connection.execute("DELETE FROM turns WHERE session = ? AND number >= ?", (name, same))
    added = [(name, number, turn) for number, turn in enumerate(turns, same)]
    connection.executemany("INSERT INTO turns VALUES (?, ?, ?)", added)


def _delete_rows(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("DELETE FROM sessions WHERE id = ?", (name,))
    connection.execute("DELETE FROM tokens WHERE session = ?", (name,))
    connection.execute("DELETE FROM turns WHERE session = ?", (name,))


def _read_session(connection: sqlite3.Connection, scope: Scope, name: str) -> Stored | None:
    rows = connection.execute(
        "SELECT head, used_at FROM sessions WHERE id = ? AND fingerprint = ? AND used_at > ?",
        (name, scope.fingerprint, scope.used_after),
    ).fetchall()
    if not rows:
        return None
    ((head, used_at),) = rows
    return read_stored(name, head, used_at, _turns(connection, name), _tokens(connection, name), scope.vocab_size)


def read_stored(
    name: str, head: str, used_at: float, turns: Sequence[str], tokens: bytes, vocab_size: int
) -> Stored | None:
    """A session from its rows; None if they are not valid."""
    try:
        # Heads of earlier versions have no times of their own.
        whole = {"used_at": used_at, **json.loads(head)}
        record = read_record(name, whole, [json.loads(turn) for turn in turns], as_numbers(tokens), vocab_size)
    except (TokenmillError, ValueError) as error:
        log.warning("session %s stays in the store: %s", name, error)
        return None
    return Stored(record, max(0.0, time.time() - used_at))


def _page(
    connection: sqlite3.Connection, scope: Scope, key: str | None, limit: int, after: Place | None, newest_first: bool
) -> list[Place]:
    conditions, values = ["fingerprint = ?", "used_at > ?"], [scope.fingerprint, scope.used_after]
    if key is not None:
        conditions.append("key = ?")
        values.append(key)
    if after is not None:
        conditions.append(f"(created_at, id) {'<' if newest_first else '>'} (?, ?)")
        values += after
    order = "DESC" if newest_first else "ASC"
    return connection.execute(
        f"SELECT created_at, id FROM sessions WHERE {' AND '.join(conditions)} "
        f"ORDER BY created_at {order}, id {order} LIMIT ?",
        (*values, limit),
    ).fetchall()


def _usage(connection: sqlite3.Connection, scope: Scope, unlisted: set[str]) -> dict[str, tuple[int, int]]:
    query = "SELECT key, count(*), sum(num_bytes) FROM sessions WHERE fingerprint = ? GROUP BY key"
    rows = connection.execute(query, (scope.fingerprint,)).fetchall()
    totals = {key: (count, num_bytes) for key, count, num_bytes in rows}
    for name in unlisted:
        row = "SELECT key, num_bytes FROM sessions WHERE id = ? AND fingerprint = ?"
        for key, num_bytes in connection.execute(row, (name, scope.fingerprint)).fetchall():
            count, total = totals[key]
            totals[key] = (count - 1, total - num_bytes)
    return totals


def _idle(connection: sqlite3.Connection, fingerprint: str, before: float) -> list[str]:
    rows = connection.execute(
        "SELECT id FROM sessions WHERE fingerprint = ? AND used_at <= ? ORDER BY used_at", (fingerprint, before)
    )
    return [name for (name,) in rows.fetchall()]


def _names(connection: sqlite3.Connection) -> Iterator[str]:
    for (name,) in connection.execute("SELECT id FROM sessions"):
        yield name


def _tokens(connection: sqlite3.Connection, name: str) -> bytes:
    rows = connection.execute("SELECT ids FROM tokens WHERE session = ? ORDER BY begin", (name,))
    return b"".join(ids for (ids,) in rows)


def _turns(connection: sqlite3.Connection, name: str) -> list[str]:
    rows = connection.execute("SELECT turn FROM turns WHERE session = ? ORDER BY number", (name,))
    return [turn for (turn,) in rows]


def as_numbers(ids: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.frombuffer(ids, dtype="<i4").astype(np.int32)


def listed(record: SessionRecord) -> tuple[float, str, float, int]:
    """What sessions are listed by: last use, key, creation, size."""
    head = record.head
    return head["used_at"], head["key"], head["created_at"], record.num_bytes


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
