"""`SessionStore`: a directory in which sessions outlive their process.

    sessions.sqlite   heads, ids and turns of all sessions (SQLite, write-ahead log, synced at each commit)
    kv/               KV bytes of some of them: a cache (`records.py`)
    reserve           disk space for deletions: SQLite needs some to delete, too
    lock              held by the one process that uses the directory

One thread owns the database. Other threads queue work for it and get a future; queued work is committed together, so
that many sessions cost one sync. A write is the whole state of a session, but only its difference from the stored state
is written: it can be repeated, and never leaves half a turn or a turn twice.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import queue
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tokenmill.errors import ConfigError, NotDurable, TokenmillError
from tokenmill.session.log import SharedList, Tokens, Turn
from tokenmill.session.records import MAX_KV_BYTES, KVFiles, SessionRecord, head_json, read_record, turn_json

log = logging.getLogger(__name__)

DATABASE = "sessions.sqlite"
VERSION = 1
"""Of the tables, as `user_version`. A later one is not touched."""
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
    """A session that was in the store, and for how many seconds it has been idle."""

    record: SessionRecord
    idle_s: float


class SessionStore:
    """Any thread may call it. `ConfigError` if the directory can't be used at all."""

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
        self._undeleted: set[str] = set()
        """Sessions that have ended, though the disk does not know it yet. Changed by the store's thread only."""
        self._written: dict[str, tuple[Tokens, SharedList[Turn]]] = {}
        """What the database has of a session's log, once it was written. Changed by the store's thread only."""
        self.is_read_only = False
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="tokenmill-store", daemon=True)
        self._thread.start()
        try:
            opened.result()
        except BaseException:
            _unlock(self._lock)
            raise
        self.kv = KVFiles(self.directory / "kv", max_kv_bytes)
        if self._lock is not None and not self.is_read_only:
            with suppress(NotDurable):
                self.kv.keep_only(self._post(_names).result())

    # -- for any thread -----------------------------------------------------------------------------------------------

    def save(self, record: SessionRecord, fingerprint: str) -> Future[None]:
        """Make this the state of a session; done when it is on the disk, `NotDurable` if that failed."""
        self._held.add(record.session_id)
        return self._post(lambda connection: self._write(connection, record, fingerprint))

    def delete(self, session_id: str) -> Future[None]:
        """The session has ended; done when the disk knows it. On a full disk the reserve is used, and space is freed.

        Where it fails it is tried again, until this process ends.
        """

        def work(connection: sqlite3.Connection) -> None:
            self.kv.remove(session_id)  # here: to remove a large file takes its time
            self._delete(connection, session_id)

        deleting = self._post(work, frees_space=True)
        deleting.add_done_callback(lambda done: self._note_undeleted(session_id, done))
        self._held.discard(session_id)  # not before: a load from now on is queued behind the deletion
        return deleting

    def load(self, fingerprint: str, vocab_size: int) -> list[Stored]:
        """The sessions of a model that are not in use in this process; they are the caller's from now on."""
        with self._loading:
            taken = self._held | self._undeleted  # as it is before the sessions are read: some may end meanwhile
            found = self._post(lambda connection: _read_all(connection, fingerprint, vocab_size)).result()
            free = [one for one in found if one.record.session_id not in taken]
            self._held.update(one.record.session_id for one in free)
        return free

    def let_go(self, session_id: str) -> None:
        """A service no longer has the session, but it has not ended: it can be loaded again."""
        self._held.discard(session_id)

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
        _unlock(self._lock)

    def _post(self, work: Callable[[sqlite3.Connection], T], *, frees_space: bool = False) -> Future[T]:
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
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
            stored, old = Tokens(_as_numbers(_tokens(connection, name))), _turns(connection, name)
            new = [_dump(turn_json(turn)) for turn in record.turns]
            pairs = zip(old, new, strict=False)
            same = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(old), len(new)))
            new, num_stored = new[same:], len(old)
        else:
            (stored, turns), num_stored = known, len(known[1])
            same = turns.num_shared(record.turns)
            new = [_dump(turn_json(turn)) for turn in record.turns[same:]]
        _write_tokens(connection, name, record.tokens, stored)
        _write_turns(connection, name, new, same, num_stored)
        self._written[name] = (record.tokens, record.turns)

    def _delete(self, connection: sqlite3.Connection, name: str) -> None:
        self._written.pop(name, None)
        _delete_rows(connection, name)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, opened: Future[None]) -> None:
        try:
            if self._lock is not None:
                self._reserve.release()  # on a full disk SQLite could not even open its files
            connection, self.is_read_only = _open(self.directory / DATABASE)
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
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

    def _note_undeleted(self, session_id: str, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
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
        held = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError:
        return None
    except OSError as error:
        if error.errno == errno.EROFS:
            return None
        raise ConfigError(f"cannot use the store {directory}: {error.strerror}") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        """Take what was released, or more if the disk has plenty: at most a quarter of what is free."""
        with suppress(OSError):
            held = self._path.stat().st_size if self._path.exists() else 0
            if held >= self._wanted:
                return
            free = shutil.disk_usage(self._path.parent).free
            size = min(self._wanted, max(self._num_released, free // 4))
            while size > max(held, MIN_RESERVE_BYTES) and not self._grow(held, size):
                size //= 2

    def release(self) -> None:
        with suppress(OSError):
            self._num_released = self._path.stat().st_size
            self._path.unlink()

    def _grow(self, held: int, size: int) -> bool:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if sys.platform == "darwin":
                os.pwrite(file, bytes(size - held), held)
            else:
                os.posix_fallocate(file, 0, size)
        except OSError:  # the disk is fuller than it said
            os.ftruncate(file, held)
            return False
        finally:
            os.close(file)
        return True


def _open(path: Path) -> tuple[sqlite3.Connection, bool]:
    """The database, and whether it can only be read."""
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
            return connection, is_read_only
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
                connection.execute(f"PRAGMA user_version={VERSION}")
            connection.execute("COMMIT")
            _make_shrinkable(connection, path)
    except BaseException:
        connection.close()
        raise
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
        "INSERT INTO sessions VALUES (?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET fingerprint = excluded.fingerprint, head = excluded.head, "
        "used_at = excluded.used_at",
        (record.session_id, fingerprint, _dump(head_json(record)), record.head["used_at"]),
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


def _read_all(connection: sqlite3.Connection, fingerprint: str, vocab_size: int) -> list[Stored]:
    rows = connection.execute("SELECT id, fingerprint, head, used_at FROM sessions ORDER BY used_at").fetchall()
    foreign = sum(theirs != fingerprint for _, theirs, _, _ in rows)
    if foreign:
        log.info("%d sessions of other models stay in the store", foreign)
    found, now = [], time.time()
    for name, theirs, head, used_at in rows:
        if theirs != fingerprint:
            continue
        try:
            turns = [json.loads(turn) for turn in _turns(connection, name)]
            tokens = _as_numbers(_tokens(connection, name))
            # Heads of earlier versions have no times of their own.
            record = read_record(name, {"used_at": used_at, **json.loads(head)}, turns, tokens, vocab_size)
        except (TokenmillError, ValueError) as error:
            log.warning("session %s stays in the store: %s", name, error)
            continue
        found.append(Stored(record, max(0.0, now - used_at)))
    return found


def _names(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT id FROM sessions")]


def _tokens(connection: sqlite3.Connection, name: str) -> bytes:
    rows = connection.execute("SELECT ids FROM tokens WHERE session = ? ORDER BY begin", (name,))
    return b"".join(ids for (ids,) in rows)


def _turns(connection: sqlite3.Connection, name: str) -> list[str]:
    rows = connection.execute("SELECT turn FROM turns WHERE session = ? ORDER BY number", (name,))
    return [turn for (turn,) in rows]


def _as_numbers(ids: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.frombuffer(ids, dtype="<i4").astype(np.int32)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
