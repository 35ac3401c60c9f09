"""`Documents`: JSON documents that belong to an API key: stored responses, conversations, batches and the like.

A document has a kind, an id, an owner and a body; nothing here knows what is in it. They live in the database of a
`SessionStore`, or in memory where there is none: the same SQL on both. `Bounds` limits what an owner may keep; kinds
that may be evicted make room for new ones, oldest first, and others are refused.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokenmill.errors import NotDurable

TABLES = """
CREATE TABLE documents (kind TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL, created_at REAL NOT NULL, \
used_at REAL NOT NULL, expires_at REAL, num_bytes INTEGER NOT NULL, body TEXT NOT NULL, PRIMARY KEY (kind, id));
CREATE INDEX documents_of_owner ON documents (owner, kind, created_at, used_at, id, num_bytes);
CREATE INDEX documents_by_expiry ON documents (expires_at) WHERE expires_at IS NOT NULL;
"""
DOCUMENTS, BYTES = "count(*)", "sum(num_bytes)"
"""What an owner may have most of."""
COLUMNS = "kind, id, owner, created_at, expires_at, num_bytes, body"
INSERT = f"""
INSERT INTO documents ({COLUMNS}, used_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (kind, id) DO UPDATE SET expires_at = excluded.expires_at, num_bytes = excluded.num_bytes,
    body = excluded.body WHERE documents.owner = excluded.owner"""
UPDATE = "UPDATE documents SET expires_at = ?, num_bytes = ?, body = ? WHERE kind = ? AND id = ? AND owner = ?"
T = TypeVar("T")
Json = dict[str, Any]
Work = Callable[[sqlite3.Connection], Any]


@dataclass(frozen=True)
class Document:
    """One document as it is stored."""

    kind: str
    id: str
    owner: str
    """The id of the API key that it belongs to."""
    body: Json
    created_at: float = field(default_factory=time.time)
    expires_at: float | None = None
    """Seconds since the epoch; None: never."""
    num_bytes: int = 0
    """Size of the body, once it is stored."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much may be stored; None: no limit."""

    evicts: frozenset[str] = frozenset()
    """Kinds whose oldest documents make room for new ones."""
    max_documents: int | None = None
    """Of the new document's kind, of its owner."""
    max_owner_bytes: int | None = None
    """Of all kinds, of the owner."""
    max_kind: int | None = None
    """Of the new document's kind, of all owners: the one that has most gives up its oldest."""
    max_bytes: int | None = None
    """Of all kinds and owners."""


@dataclass(frozen=True)
class Put:
    """What became of a document that was to be stored."""

    is_stored: bool
    """False: it was refused, the one that it replaces is gone or has changed, or its id is taken."""
    refusal: str | None = None
    """Which bound it exceeds, if it was refused; nothing was evicted then."""
    evicted: tuple[tuple[str, str], ...] = ()
    """Kind and id of those that made room for it."""


@dataclass(frozen=True)
class Page:
    documents: tuple[Document, ...]
    has_more: bool


class Documents:
    """The documents of a database. Any thread may call it; futures fail with `NotDurable` where the disk does."""

    def __init__(
        self,
        post: Callable[..., Future[Any]],
        close: Callable[[], None] = lambda: None,
        read: Callable[[Work], Future[Any]] | None = None,
    ) -> None:
        self._post = post
        """Has work done by the thread that owns the database; `frees_space` for deletions."""
        self._read = read or post
        """The same for work that only reads."""
        self.close = close
        """Gives up a database of its own."""

    @classmethod
    def in_memory(cls) -> Documents:
        """Documents that end with the process. They have a thread of their own, as those of a store do."""
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        create_tables(connection)
        thread = ThreadPoolExecutor(1, "tokenmill-documents")

        def post(work: Work, *, frees_space: bool = False) -> Future[Any]:  # noqa: ARG001
            done: Future[Any] = Future()
            done.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it

            def run() -> None:
                try:
                    done.set_result(work(connection))
                except Exception as error:
                    connection.rollback()
                    done.set_exception(error)

            try:
                thread.submit(run)
            except RuntimeError:
                done.set_exception(NotDurable("the documents are closed"))
            return done

        def close() -> None:
            thread.shutdown()
            connection.close()

        return cls(post, close)

    def put(
        self,
        document: Document,
        bounds: Bounds = Bounds(),
        *,
        replaces: bool = False,
        expected: Json | None = None,
        hold: Callable[[Any], None] = lambda connection: None,  # noqa: ARG005
    ) -> Future[Put]:
        """Store a document, or its new body; if it `replaces` one, only while that is still there.

        `expected`: compare-and-set, only while the stored body equals it. The body is not to be changed any more. What
        must hold at that moment is looked at by `hold`, which raises.
        """

        def work(connection: Any) -> Put:
            hold(connection)
            return _put(connection, document, bounds, replaces=replaces, expected=expected)

        return self._post(work)

    def get(self, kind: str, name: str, owner: str, *, is_used: bool = False) -> Future[Document | None]:
        """One of this owner's; those of others are not found. One that `is_used` is evicted later than others."""
        found = self._read(lambda connection: _get(connection, kind, name, owner))
        if is_used:  # work of its own: where nothing can be written, documents can still be read
            statement, now = "UPDATE documents SET used_at = ? WHERE kind = ? AND id = ? AND owner = ?", time.time()
            self._post(lambda connection: connection.execute(statement, (now, kind, name, owner)).rowcount)
        return found

    def delete(self, kind: str, name: str, owner: str) -> Future[bool]:
        """Was there one of this owner's?"""
        statement = "DELETE FROM documents WHERE kind = ? AND id = ? AND owner = ?"

        def work(connection: sqlite3.Connection) -> bool:
            return connection.execute(statement, (kind, name, owner)).rowcount > 0

        return self._post(work, frees_space=True)

    def list(
        self,
        kind: str,
        owner: str | None,
        *,
        limit: int = 1 << 30,
        after: str | None = None,
        newest_first: bool = False,
        where: Mapping[tuple[str, str], str] | None = None,
    ) -> Future[Page | None]:
        """A page by creation time, from the one after a document on; None if that is not there. Owner None: of all.

        `where` has values that fields of the body must have: by the path of an object in it in SQLite's notation
        (`$.completion`), and the field's name, which may be any text.
        """
        return self._read(lambda connection: _list(connection, kind, owner, limit, after, newest_first, where or {}))

    def usage(self, owner: str, kind: str | None = None) -> Future[tuple[int, int]]:
        """How many documents an owner has, of a kind or of all, and their bytes."""
        return self._read(lambda connection: _usage(connection, "owner = ? AND kind = ifnull(?, kind)", owner, kind))


def create_tables(connection: sqlite3.Connection) -> None:
    for statement in TABLES.strip().splitlines():
        connection.execute(statement)


# -- on the thread of the database ------------------------------------------------------------------------------------


def _put(
    connection: sqlite3.Connection, document: Document, bounds: Bounds, *, replaces: bool, expected: Json | None
) -> Put:
    text = _dump(document.body)  # here: it may be long
    now, num_bytes = time.time(), len(text.encode())
    connection.execute("DELETE FROM documents WHERE expires_at <= ?", (now,))
    name = (document.kind, document.id)
    found = connection.execute("SELECT num_bytes FROM documents WHERE kind = ? AND id = ?", name).fetchone()
    connection.execute("SAVEPOINT room")  # what fails rolls all of the transaction back
    evicted, refusal = _make_room(connection, document, num_bytes, bounds, None if found is None else found[0])
    is_stored = False
    if refusal is None and replaces:
        # The new body is taken for the old one: a transaction whose commit was not heard of is repeated.
        same, texts = ("", []) if expected is None else (" AND body IN (?, ?)", [_dump(expected), text])
        values = [document.expires_at, num_bytes, text, *name, document.owner, *texts]
        is_stored = connection.execute(UPDATE + same, values).rowcount > 0
    elif refusal is None:
        values = [*name, document.owner, document.created_at, document.expires_at, num_bytes, text, now]
        is_stored = connection.execute(INSERT, values).rowcount > 0
    if not is_stored:
        connection.execute("ROLLBACK TO room")  # what was evicted for nothing stays
    connection.execute("RELEASE room")
    if not is_stored:
        return Put(False, refusal)
    return Put(True, evicted=tuple(evicted))


def _make_room(
    connection: sqlite3.Connection, document: Document, num_bytes: int, bounds: Bounds, size_before: int | None
) -> tuple[list[tuple[str, str]], str | None]:
    """Evict until a document fits: those that had to go, and the bound that it exceeds all the same."""
    kind, owner, is_new = document.kind, document.owner, size_before is None
    more = num_bytes - (size_before or 0)
    evictable, evicted = bounds.evicts, list[tuple[str, str]]()

    def exceeded() -> tuple[str, str | None, Collection[str], str] | None:
        """What is too much, who has to give some up (None: whoever has most), the kinds that may go, most of what."""
        if more > 0 and bounds.max_owner_bytes is not None:
            total = _usage(connection, "owner = ?", owner)[1] + more
            if total > bounds.max_owner_bytes:
                what = f"{total} bytes would be stored for this API key, its limit is {bounds.max_owner_bytes}"
                return what, owner, evictable, BYTES
        if more > 0 and bounds.max_bytes is not None:
            total = _usage(connection, "TRUE")[1] + more
            if total > bounds.max_bytes:
                return f"{total} bytes would be stored, the limit is {bounds.max_bytes}", None, evictable, BYTES
        if is_new and bounds.max_documents is not None:
            count = _usage(connection, "owner = ? AND kind = ?", owner, kind)[0]
            if count + 1 > bounds.max_documents:
                what = f"this API key has {count} stored documents, its limit is {bounds.max_documents}"
                return what, owner, {kind}, DOCUMENTS
        if is_new and bounds.max_kind is not None:
            count = _usage(connection, "kind = ?", kind)[0]
            if count + 1 > bounds.max_kind:
                return f"{count} documents are stored, the limit is {bounds.max_kind}", None, {kind}, DOCUMENTS
        return None

    while (problem := exceeded()) is not None:
        what, whose, kinds, most_of = problem
        oldest = _oldest(connection, whose, evictable & set(kinds), (kind, document.id), most_of)
        if oldest is None:
            return evicted, what
        connection.execute("DELETE FROM documents WHERE kind = ? AND id = ?", oldest)
        evicted.append(oldest)
    return evicted, None


def _oldest(
    connection: sqlite3.Connection, owner: str | None, kinds: Collection[str], besides: tuple[str, str], most_of: str
) -> tuple[str, str] | None:
    """The oldest document of an owner that may be evicted; None: of the one that has most documents, or bytes."""
    if not kinds:
        return None
    marks = ", ".join("?" * len(kinds))
    which = f"kind IN ({marks}) AND NOT (kind = ? AND id = ?)"
    if owner is None:
        most = connection.execute(
            f"SELECT owner FROM documents WHERE {which} GROUP BY owner ORDER BY {most_of} DESC LIMIT 1",
            (*kinds, *besides),
        ).fetchone()
        if most is None:
            return None
        owner = most[0]
    row = connection.execute(
        f"SELECT kind, id FROM documents WHERE {which} AND owner = ? ORDER BY used_at, rowid LIMIT 1",
        (*kinds, *besides, owner),
    ).fetchone()
    return None if row is None else (row[0], row[1])


def _get(connection: sqlite3.Connection, kind: str, name: str, owner: str) -> Document | None:
    row = connection.execute(
        f"SELECT {COLUMNS} FROM documents WHERE kind = ? AND id = ? AND owner = ? "
        "AND (expires_at IS NULL OR expires_at > ?)",
        (kind, name, owner, time.time()),
    ).fetchone()
    return None if row is None else _document(row)


def _list(
    connection: sqlite3.Connection,
    kind: str,
    owner: str | None,
    limit: int,
    after: str | None,
    newest_first: bool,
    where: Mapping[tuple[str, str], str],
) -> Page | None:
    conditions, values = ["kind = ?", "(expires_at IS NULL OR expires_at > ?)"], [kind, time.time()]
    if owner is not None:
        conditions.append("owner = ?")
        values.append(owner)
    for (path, name), value in where.items():
        conditions.append("EXISTS (SELECT 1 FROM json_each(body, ?) WHERE key = ? AND value = ?)")
        values += [path, name, value]
    if after is not None:
        found = connection.execute(
            "SELECT created_at, rowid FROM documents WHERE kind = ? AND id = ? AND owner = ifnull(?, owner)",
            (kind, after, owner),
        ).fetchone()
        if found is None:
            return None
        conditions.append(f"(created_at, rowid) {'<' if newest_first else '>'} (?, ?)")
        values += found
    order = "DESC" if newest_first else "ASC"
    rows = connection.execute(
        f"SELECT {COLUMNS} FROM documents WHERE {' AND '.join(conditions)} "
        f"ORDER BY created_at {order}, rowid {order} LIMIT ?",
        (*values, limit + 1),
    ).fetchall()
    return Page(tuple(map(_document, rows[:limit])), len(rows) > limit)


def _usage(connection: sqlite3.Connection, where: str, *values: Any) -> tuple[int, int]:
    row = connection.execute(f"SELECT count(*), ifnull(sum(num_bytes), 0) FROM documents WHERE {where}", values)
    count, num_bytes = row.fetchone()
    return count, int(num_bytes)


def _dump(body: Json) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def _document(row: tuple[Any, ...]) -> Document:
    kind, name, owner, created_at, expires_at, num_bytes, body = row
    return Document(kind, name, owner, json.loads(body), created_at, expires_at, num_bytes)
