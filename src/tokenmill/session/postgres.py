"""`PostgresStore`: sessions and documents in a PostgreSQL database that several servers share.

A session belongs to the server that has claimed it, until another one does. Every claim raises the session's epoch,
and every write names the epoch of its claim: a server that was taken for dead changes nothing when it comes back. Each
server has one lease, a row that it renews by the database's clock. The lease only decides when a session may be taken
from a server that is answering in it; an idle session may be claimed at any time.

When an answer begins, all that is needed to run it again is written; the log itself is written when the answer ends. So
what a dead server has left is a whole conversation and perhaps a question, never half an answer.

Threads own the connections (`_Lane`). All writes of a session go through the same one, in order. What waits there is
committed together, as one statement for all sessions in one round trip; a session that has moved is refused alone.
"""

from __future__ import annotations

import base64
import hmac
import http.client
import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode, urlsplit

from tokenmill.contract import IntArray
from tokenmill.errors import (
    ConfigError,
    InvalidRequest,
    NotDurable,
    SessionElsewhere,
    SessionMoved,
    StoreUnavailable,
    TokenmillError,
)
from tokenmill.session.blobs import TABLES as BLOBS
from tokenmill.session.blobs import Blobs
from tokenmill.session.documents import Documents
from tokenmill.session.log import SharedList, Tokens, Turn
from tokenmill.session.records import SessionRecord, head_json, turn_json, unpacked_kv
from tokenmill.session.session import KVSource, SavedKV
from tokenmill.session.store import Place, Scope, Stored, as_numbers, dump, listed, read_stored

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger(__name__)

LEASE_S = 6.0
"""How long a server that has stopped renewing its lease keeps the sessions that it is answering in."""
TIMEOUT_S = 5.0
"""A database that does not answer for so long is given up, and connected to again."""
LOCK_S = 2.0
"""Lock timeout: a server that is suspended in the middle of a transaction keeps its row locks."""
NUM_WRITERS, NUM_READERS = 1, 4
"""Connections. What waits for one writer is committed together."""
KV_PATH, SECRET_HEADER = "/v1/servers/kv", "x-tokenmill-secret"
"""Where a server gives the KV of a session to its next owner, and how that one shows that it is a server."""
FETCH_S, FETCH_ALL_S = 2.0, 10.0
"""Timeouts of a KV transfer: without a byte, and in all."""
FETCH_BYTES = 1 << 20
FORGET_S = 24 * 3600.0
"""Servers whose lease ended so long ago are forgotten."""
LOCK_NOT_AVAILABLE = "55P03"
IDLE_AT_ONCE = 1000
"""Idle sessions that are deleted in one statement."""
MIGRATIONS = (
    """
    CREATE TABLE servers (id text PRIMARY KEY, address text NOT NULL, lease_until timestamptz NOT NULL);
    CREATE TABLE sessions (id text COLLATE "C" PRIMARY KEY, fingerprint text NOT NULL, head text NOT NULL,
        used_at double precision NOT NULL, key text NOT NULL, created_at double precision NOT NULL,
        num_bytes bigint NOT NULL, epoch bigint NOT NULL, owner text, answering boolean NOT NULL DEFAULT false,
        answer_id text, answer text);
    CREATE INDEX sessions_of_key ON sessions (fingerprint, key, created_at, id) INCLUDE (num_bytes);
    CREATE INDEX sessions_by_use ON sessions (fingerprint, used_at);
    CREATE TABLE tokens (session text COLLATE "C", begin integer, ids bytea NOT NULL, PRIMARY KEY (session, begin));
    CREATE TABLE turns (session text COLLATE "C", number integer, turn text NOT NULL, PRIMARY KEY (session, number));
    CREATE TABLE documents (kind text NOT NULL, id text NOT NULL, owner text NOT NULL,
        created_at double precision NOT NULL, used_at double precision NOT NULL, expires_at double precision,
        num_bytes bigint NOT NULL, body text NOT NULL, rowid bigserial, PRIMARY KEY (kind, id));
    CREATE INDEX documents_of_owner ON documents (owner, kind, created_at, used_at, id, num_bytes);
    CREATE INDEX documents_by_expiry ON documents (expires_at) WHERE expires_at IS NOT NULL;
    """,
    BLOBS,
    "ALTER TABLE servers ADD COLUMN secret text NOT NULL DEFAULT ''",
)
"""Each brings the tables from one version to the next. They only add, so that servers of both can run side by side."""
MIGRATING = 0x746D696C
"""Advisory lock around migrations."""

LIMITS = f"""
SET lock_timeout = {round(1000 * LOCK_S)};
SET idle_in_transaction_session_timeout = {round(1000 * TIMEOUT_S)}"""
"""Of every connection that takes part in transactions of sessions."""
MINE = "json_to_recordset(%(rows)s::json) AS mine (id text, epoch bigint)"
"""The sessions of a statement as one text, which costs less to send than an array for each column."""
OURS = "sessions.id = mine.id AND sessions.epoch = mine.epoch AND sessions.owner = %(me)s"
"""The fence: what every write of sessions demands."""
ALIVE = "EXISTS (SELECT 1 FROM servers WHERE id = {owner} AND lease_until > now())"
THEIRS_IS_ALIVE = ALIVE.format(owner="sessions.owner")
RENEW = """
INSERT INTO servers (id, address, secret, lease_until)
VALUES (%(me)s, %(address)s, %(secret)s, now() + %(lease_s)s * interval '1 s')
ON CONFLICT (id) DO UPDATE
SET lease_until = excluded.lease_until, address = excluded.address, secret = excluded.secret"""
CLAIM = f"""
UPDATE sessions SET epoch = epoch + 1, owner = %(me)s, answering = answering AND {{resumed}},
    answer_id = CASE WHEN answering AND {{resumed}} THEN answer_id END,
    answer = CASE WHEN answering AND {{resumed}} THEN answer END
WHERE id = %(id)s AND fingerprint = %(fingerprint)s AND used_at > %(used_after)s
    AND (NOT answering OR owner IS NULL OR owner = %(me)s OR NOT {THEIRS_IS_ALIVE})
RETURNING epoch, answer, (
    SELECT ARRAY[address, secret] FROM servers
    WHERE id = (SELECT owner FROM sessions AS before WHERE id = %(id)s) AND id <> %(me)s AND lease_until > now())
""".format(resumed="(%(resumes)s::text = '' OR answer_id = %(resumes)s) IS TRUE")
OWNER = """
SELECT servers.address FROM sessions JOIN servers ON servers.id = sessions.owner
WHERE sessions.id = %(id)s AND fingerprint = %(fingerprint)s AND answering"""
READ = """
SELECT id, head, used_at, answer, ARRAY(SELECT turn FROM turns WHERE session = sessions.id ORDER BY number),
    (SELECT string_agg(ids, ''::bytea ORDER BY begin) FROM tokens WHERE session = sessions.id)
FROM sessions WHERE id = ANY(%(ids)s) AND fingerprint = %(fingerprint)s AND used_at > %(used_after)s"""
CREATE = """
INSERT INTO sessions (id, fingerprint, head, used_at, key, created_at, num_bytes, epoch, owner)
VALUES (%(id)s, %(fingerprint)s, %(head)s, %(used_at)s, %(key)s, %(created_at)s, %(num_bytes)s, %(epoch)s, %(me)s)
ON CONFLICT (id) DO NOTHING"""
HOLDS = f"SELECT sessions.id FROM sessions, {MINE} WHERE {OURS}"
HOLD = f"{HOLDS} FOR UPDATE OF sessions"
APPEND = f"""
WITH mine AS (
    SELECT * FROM json_to_recordset(%(rows)s::json) AS mine (id text, epoch bigint, fingerprint text, head text,
        used_at double precision, num_bytes bigint, begin integer, ids text, first integer, turns json)),
ours AS (
    UPDATE sessions SET fingerprint = mine.fingerprint, head = mine.head, used_at = mine.used_at,
        num_bytes = mine.num_bytes, answering = false, answer_id = NULL, answer = NULL
    FROM mine WHERE {OURS} RETURNING sessions.id),
new_tokens AS (
    INSERT INTO tokens SELECT id, begin, decode(ids, 'base64') FROM mine JOIN ours USING (id) WHERE ids <> ''),
new_turns AS (
    INSERT INTO turns SELECT id, first + place - 1, turn
    FROM mine JOIN ours USING (id), json_array_elements_text(turns) WITH ORDINALITY AS new (turn, place))
SELECT id FROM ours"""
CUT_TOKENS = f"""
DELETE FROM tokens USING sessions, {MINE} WHERE session = sessions.id AND begin >= %(same)s AND {OURS}"""
CUT_PIECE = f"""
UPDATE tokens SET ids = substr(ids, 1, 4 * (%(same)s - begin)) FROM sessions, {MINE}
WHERE session = sessions.id AND begin < %(same)s AND begin + length(ids) / 4 > %(same)s AND {OURS}"""
CUT_TURNS = f"DELETE FROM turns USING sessions, {MINE} WHERE session = sessions.id AND number >= %(same)s AND {OURS}"
BEGIN_ANSWER = f"""
UPDATE sessions SET answering = true, answer_id = mine.answer_id, answer = mine.answer
FROM json_to_recordset(%(rows)s::json) AS mine (id text, epoch bigint, answer_id text, answer text)
WHERE {OURS} RETURNING sessions.id"""
PLAIN_BODY = r"""
CASE WHEN strpos(body, '\u0000') = 0 THEN body ELSE regexp_replace(body, '(?<!\\)((?:\\\\)*)\\u0000', '\1', 'g') END"""
"""Without characters that PostgreSQL cannot have in a text, and therefore reads in no JSON, either."""
RELEASE = f"UPDATE sessions SET owner = NULL FROM {MINE} WHERE {OURS} RETURNING sessions.id"
DELETE = """
WITH gone AS (DELETE FROM sessions WHERE {which} RETURNING id),
    their_tokens AS (DELETE FROM tokens USING gone WHERE session = gone.id),
    their_turns AS (DELETE FROM turns USING gone WHERE session = gone.id)
SELECT count(*) FROM gone"""
DELETE_OURS = DELETE.format(which=f"id IN ({HOLD})")
IDLE = f"""id IN (
    SELECT id FROM sessions WHERE fingerprint = %(fingerprint)s
        AND used_at <= extract(epoch FROM now()) - %(seconds)s
        AND NOT (answering AND {THEIRS_IS_ALIVE})
    ORDER BY used_at LIMIT {IDLE_AT_ONCE} FOR UPDATE SKIP LOCKED)"""
T = TypeVar("T")
Connection = Any
"""psycopg's."""
Known = tuple[int, Tokens, SharedList[Turn]]
"""What the database has of a session: the epoch under which it was written, ids and turns."""


class PostgresStore:
    """A store that several servers share. `ConfigError` if the database can't be used.

    `address` is the base URL under which other servers reach this one, `name` one that no other server ever has.
    """

    is_shared = True
    is_read_only = False
    kv = None

    def __init__(
        self,
        url: str,
        *,
        address: str = "",
        lease_s: float = LEASE_S,
        name: str | None = None,
        kv_transfer: bool = True,
    ) -> None:
        driver = _driver()
        self.server_id = name or secrets.token_hex(8)
        self.address = address
        self.lease_s = lease_s
        self._fetches_kv = kv_transfer
        self._secret = secrets.token_hex(16)
        """Those who name it have read it in the database."""
        self._silent_until: dict[str, float] = {}
        """Addresses from which KV did not come lately: not asked for another lease."""
        self._url = url

        def connect() -> Connection:
            name, limit = f"tokenmill {self.server_id}", max(1, round(TIMEOUT_S))
            return driver.connect(url, autocommit=True, connect_timeout=limit, application_name=name)

        self._connect = connect
        try:
            connection = connect()
            migrate(connection)
            self._renew(connection)
        except driver.Error as error:
            raise ConfigError(f"cannot use the store {_shown(url)}: {_first_line(error)}") from None
        self._failures: tuple[type[Exception], ...] = (driver.Error, OSError)

        def connect_lane() -> Connection:
            connection = connect()
            connection.execute(LIMITS)
            return connection

        lane = partial(_Lane, connect=connect_lane, failure=driver.Error, server_id=self.server_id)
        self._writers = [lane(f"tokenmill-store-{i}") for i in range(NUM_WRITERS)]
        self._readers = [lane(f"tokenmill-reads-{i}") for i in range(NUM_READERS)]
        self._turn = 0
        self.documents = Documents(self._post_document, read=self._read_document)
        self.blobs = Blobs(self._post, self._post_read, self.server_id, self._elsewhere)
        self._closing = threading.Event()
        self._is_closed = False
        self._heart = threading.Thread(target=self._beat, args=(connection,), name="tokenmill-lease", daemon=True)
        self._heart.start()

    # -- claims -------------------------------------------------------------------------------------------------------

    def claim(self, scope: Scope, session_id: str, *, resumes: str | None = None) -> Stored | None:
        asked = {"id": session_id, "me": self.server_id, **_scoped(scope), "resumes": resumes}
        lane = self._writer(session_id)

        def work(connection: Connection) -> Stored | SessionElsewhere | None:
            row = connection.execute(CLAIM, asked).fetchone()
            if row is None:
                owner = connection.execute(OWNER, asked).fetchone()
                return None if owner is None else self._elsewhere(f"session {session_id}", *owner)
            epoch, answer, owner = row
            (found,) = _read(connection, scope, [session_id]) or (None,)
            if found is not None:
                lane.known[session_id] = (epoch, found.record.tokens, found.record.turns)
            unfinished = None if answer is None else json.loads(answer)
            kv = None
            if owner is not None and self._fetches_kv:
                address, secret = owner
                kv = KVSource(partial(self._fetch_kv, address, secret, session_id, epoch), is_remote=True)
            return None if found is None else replace(found, epoch=epoch, unfinished=unfinished, kv=kv)

        found = lane.post(work, session_id).result()
        if isinstance(found, SessionElsewhere):
            raise found
        return found

    def servers(self) -> dict[str, str]:
        """The servers of this database that hold a lease, by name: where they are reached."""
        query = "SELECT id, address FROM servers WHERE lease_until > now() ORDER BY id"
        return dict(self._read(lambda connection: connection.execute(query).fetchall()))

    def refer_to(self, server_id: str) -> None:
        """Raise the `SessionElsewhere` that has a request forwarded to this server, unless it is this one."""
        if server_id == self.server_id:
            return
        address = self.servers().get(server_id)
        if address is None:
            raise InvalidRequest(f"no server {server_id!r:.80}; GET /v1/servers lists them", param="server")
        raise self._elsewhere(f"server {server_id}", address, is_named=True)

    def _elsewhere(self, name: str, address: str, *, is_named: bool = False) -> SessionElsewhere:
        """By address: a server that was restarted there may be carrying out what was sent to the one before it."""
        query = "SELECT 1 FROM servers WHERE address = %s AND lease_until > now()"

        def is_there() -> bool:
            with suppress(NotDurable):
                return self._read(lambda connection: connection.execute(query, (address,)).fetchone() is not None)
            return True

        message = f"{name} is on another server"
        return SessionElsewhere(message, address, is_there, self.lease_s / 6, is_named=is_named)

    def holds(self, session_id: str, epoch: int) -> Future[bool]:
        return self._next(self._readers).post_row(HOLDS, session_id, lambda _: _Row(_one(session_id, epoch)))

    def let_go(self, session_id: str, epoch: int = 0) -> None:
        lane = self._writer(session_id)

        def row(_: Connection) -> _Row:
            lane.known.pop(session_id, None)
            return _Row(_one(session_id, epoch))

        lane.post_row(RELEASE, session_id, row)

    # -- writes -------------------------------------------------------------------------------------------------------

    def save(self, record: SessionRecord, fingerprint: str, epoch: int = 0, *, is_new: bool = False) -> Future[None]:
        lane = self._writer(record.session_id)

        def row(connection: Connection) -> _Row:
            return self._difference(connection, lane.known, record, fingerprint, epoch, is_new)

        return _if_ours(lane.post_row(APPEND, record.session_id, row), record.session_id)

    def begin_answer(self, session_id: str, epoch: int, answer: Mapping[str, Any]) -> Future[None]:
        row = _Row({**_one(session_id, epoch), "answer_id": answer["id"], "answer": dump(answer)})
        # Nothing is acknowledged by it: if the database dies in this moment, the answer can't be run again, no more.
        begun = self._writer(session_id).post_row(BEGIN_ANSWER, session_id, lambda _: row, is_lazy=True)
        return _if_ours(begun, session_id)

    def delete(self, session_id: str, epoch: int = 0) -> Future[None]:
        ours, lane = self._fenced(session_id, epoch), self._writer(session_id)

        def work(connection: Connection) -> None:
            lane.known.pop(session_id, None)
            there = "SELECT 1 FROM sessions WHERE id = %s"
            if not _count(connection, DELETE_OURS, ours) and connection.execute(there, (session_id,)).fetchone():
                raise _moved(session_id)

        return lane.post(work, session_id)

    def delete_idle(self, scope: Scope, seconds: float) -> Future[int]:
        asked = {**_scoped(scope), "seconds": seconds}
        return self._next(self._writers).post(lambda connection: _count(connection, DELETE.format(which=IDLE), asked))

    def _difference(
        self,
        connection: Connection,
        written: dict[str, Known],
        record: SessionRecord,
        fingerprint: str,
        epoch: int,
        is_new: bool,
    ) -> _Row:
        """What a session has beyond its stored state. After the first write that is known without reading it back."""
        name, known = record.session_id, written.pop(record.session_id, None)
        used_at, key, created_at, num_bytes = listed(record)
        values = {
            **_one(name, epoch),
            "fingerprint": fingerprint,
            "head": dump(head_json(record)),
            "used_at": used_at,
            "num_bytes": num_bytes,
        }
        before: list[_Statement] = []
        if is_new:
            before.append((CREATE, {**values, "key": key, "created_at": created_at, "me": self.server_id}))
        if known is None or known[0] != epoch:
            rows = connection.execute("SELECT ids FROM tokens WHERE session = %s ORDER BY begin", (name,)).fetchall()
            stored = Tokens(as_numbers(b"".join(ids for (ids,) in rows)))
            rows = connection.execute("SELECT turn FROM turns WHERE session = %s ORDER BY number", (name,)).fetchall()
            old, new = [turn for (turn,) in rows], [dump(turn_json(turn)) for turn in record.turns]
            pairs = zip(old, new, strict=False)
            same = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(old), len(new)))
            new, num_turns = new[same:], len(old)
        else:
            _, stored, turns = known
            same, num_turns = turns.num_shared(record.turns), len(turns)
            new = [dump(turn_json(turn)) for turn in record.turns[same:]]
        begin = stored.num_same(record.tokens)
        before += self._cut(name, epoch, begin if begin < len(stored) else None, same if same < num_turns else None)
        rest = base64.b64encode(record.tokens.array[begin:].astype("<i4").tobytes()).decode()
        written[name] = (epoch, record.tokens, record.turns)  # until it is refused
        return _Row({**values, "begin": begin, "ids": rest, "first": same, "turns": new}, before)

    def _cut(self, session_id: str, epoch: int, tokens: int | None, turns: int | None) -> list[_Statement]:
        """Truncate the stored ids and turns, after a rewind and the like."""
        if tokens is None and turns is None:
            return []
        ours = self._fenced(session_id, epoch)
        cuts: list[_Statement] = [(HOLD, ours)]
        if tokens is not None:
            cuts += [(CUT_TOKENS, {**ours, "same": tokens}), (CUT_PIECE, {**ours, "same": tokens})]
        if turns is not None:
            cuts.append((CUT_TURNS, {**ours, "same": turns}))
        return cuts

    # -- reads --------------------------------------------------------------------------------------------------------

    def read(self, scope: Scope, session_ids: Sequence[str]) -> list[Stored]:
        return self._read(lambda connection: _read(connection, scope, session_ids))

    def key_of(self, scope: Scope, session_id: str) -> str | None:
        query = (
            "SELECT key FROM sessions WHERE id = %(id)s AND fingerprint = %(fingerprint)s AND used_at > %(used_after)s"
        )
        asked = {"id": session_id, **_scoped(scope)}
        row = self._read(lambda connection: connection.execute(query, asked).fetchone())
        return None if row is None else str(row[0])

    def page(
        self, scope: Scope, key: str | None, limit: int, after: Place | None = None, *, newest_first: bool = False
    ) -> list[Place]:
        conditions = ["fingerprint = %(fingerprint)s", "used_at > %(used_after)s"]
        values = {**_scoped(scope), "key": key, "limit": limit}
        if key is not None:
            conditions.append("key = %(key)s")
        if after is not None:
            conditions.append(f"(created_at, id) {'<' if newest_first else '>'} (%(created_at)s, %(id)s)")
            values |= {"created_at": after[0], "id": after[1]}
        order = "DESC" if newest_first else "ASC"
        query = (
            f"SELECT created_at, id FROM sessions WHERE {' AND '.join(conditions)} "
            f"ORDER BY created_at {order}, id {order} LIMIT %(limit)s"
        )
        return self._read(lambda connection: connection.execute(query, values).fetchall())

    def usage(self, scope: Scope) -> dict[str, tuple[int, int]]:
        query = "SELECT key, count(*), sum(num_bytes)::bigint FROM sessions WHERE fingerprint = %s GROUP BY key"
        rows = self._read(lambda connection: connection.execute(query, (scope.fingerprint,)).fetchall())
        return {key: (count, num_bytes) for key, count, num_bytes in rows}

    # -- the lease ----------------------------------------------------------------------------------------------------

    def _beat(self, connection: Connection | None) -> None:
        """Renew the lease, and give up connections that hang."""
        while not self._closing.wait(self.lease_s / 3):
            for lane in (*self._writers, *self._readers):
                lane.give_up_if_hung()
            try:
                connection = connection or self._connect()
                with _Deadline(connection, min(TIMEOUT_S, self.lease_s / 3)):
                    self._renew(connection)
            except self._failures as error:
                log.warning("the lease of this server could not be renewed: %s", _first_line(error))
                with suppress(Exception):
                    if connection is not None:
                        connection.close()
                connection = None
        with suppress(*self._failures):
            connection = connection or self._connect()
            with connection, _Deadline(connection, TIMEOUT_S):  # what is answered elsewhere need not wait
                connection.execute(
                    "UPDATE sessions SET owner = NULL WHERE owner = %s AND NOT answering", (self.server_id,)
                )
                connection.execute("UPDATE jobs SET owner = NULL WHERE owner = %s", (self.server_id,))
                connection.execute("DELETE FROM servers WHERE id = %s", (self.server_id,))

    def _renew(self, connection: Connection) -> None:
        about = {"address": self.address, "secret": self._secret, "lease_s": self.lease_s}
        connection.execute(RENEW, {"me": self.server_id, **about})
        connection.execute("DELETE FROM servers WHERE lease_until < now() - %s * interval '1 s'", (FORGET_S,))

    def is_peer(self, secret: str) -> bool:
        """Does a request with this secret come from a server of the same database?"""
        return hmac.compare_digest(secret.encode(), self._secret.encode())

    def announce(self, address: str) -> None:
        """Tell other servers where this one is reached."""
        self.address = address
        self._next(self._writers).post(self._renew)

    def close(self) -> None:
        """Write what waits, and give up the lease and all claims."""
        if self._is_closed:
            return
        self._is_closed = True
        for lane in (*self._writers, *self._readers):
            lane.close()
        self._closing.set()
        self._heart.join(2 * TIMEOUT_S)

    # -- lanes --------------------------------------------------------------------------------------------------------

    def _fenced(self, session_id: str, epoch: int) -> dict[str, Any]:
        return {"rows": dump([_one(session_id, epoch)]), "me": self.server_id}

    def _writer(self, session_id: str) -> _Lane:
        return self._writers[zlib.crc32(session_id.encode()) % len(self._writers)]

    def _next(self, lanes: Sequence[_Lane]) -> _Lane:
        self._turn += 1
        return lanes[self._turn % len(lanes)]

    def _read(self, work: Callable[[Connection], T]) -> T:
        return self._post_read(work).result()

    def _post(self, work: Callable[[Connection], T]) -> Future[T]:
        return self._next(self._writers).post(work)

    def _post_read(self, work: Callable[[Connection], T]) -> Future[T]:
        return self._next(self._readers).post(work)

    def _post_document(self, work: Callable[[Any], T], *, frees_space: bool = False) -> Future[T]:  # noqa: ARG002
        return self._next(self._writers).post(lambda connection: work(_Dialect(connection)))

    def _read_document(self, work: Callable[[Any], T]) -> Future[T]:
        return self._post_read(lambda connection: work(_Dialect(connection)))

    # -- KV of other servers -------------------------------------------------------------------------------------------

    def _fetch_kv(
        self, address: str, secret: str, session_id: str, epoch: int, form: str, tokens: IntArray
    ) -> SavedKV | None:
        """KV that a session's former server still has of this log. None if anything goes wrong: it is computed anew."""
        where = urlsplit(address)
        began = time.monotonic()
        if not secret or where.hostname is None or began < self._silent_until.get(address, 0.0):
            return None
        connect = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        connection = connect(where.hostname, where.port, timeout=FETCH_S)
        try:
            query = urlencode({"session": session_id, "epoch": epoch})
            connection.request("GET", f"{KV_PATH}?{query}", headers={SECRET_HEADER: secret})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                return None
            parts = []
            while part := response.read1(FETCH_BYTES):
                parts.append(part)
                if time.monotonic() - began > FETCH_ALL_S:
                    raise TimeoutError(f"incomplete after {FETCH_ALL_S:.0f} s")
        except (OSError, http.client.HTTPException) as error:
            log.info("KV of session %s is computed anew: %s: %s", session_id, address, error)
            self._silent_until[address] = time.monotonic() + self.lease_s
            return None
        finally:
            connection.close()
        return unpacked_kv(b"".join(parts), form, tokens)


# -- connections ------------------------------------------------------------------------------------------------------


_Statement = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _Row:
    """What one session adds to a statement for many."""

    values: Mapping[str, Any]
    before: Sequence[_Statement] = ()
    """Its own part of the transaction."""


@dataclass(frozen=True)
class _Queued:
    """Something to be done, and who wants to know how it went."""

    work: Callable[[Connection], Any]
    """Does it; for a `statement` it gives the row, and the result is whether the statement was carried out for it."""
    session_id: str | None
    """Jobs of a session are done one after the other."""
    statement: str | None = None
    is_lazy: bool = False
    """Need it not be on the disk, but only in the database, when it is done?"""
    done: Future[Any] = field(default_factory=Future)


class _Lane:
    """A connection and the thread that owns it. What waits is done in one transaction."""

    def __init__(
        self, name: str, *, connect: Callable[[], Connection], failure: type[Exception], server_id: str
    ) -> None:
        self._connect = connect
        self._failure = failure
        self._server_id = server_id
        self._jobs: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self.known: dict[str, Known] = {}
        """What the database has of the sessions that are written here. For jobs."""
        self._busy_since: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, work: Callable[[Connection], T], session_id: str | None = None) -> Future[T]:
        return self._post(_Queued(work, session_id))

    def post_row(
        self, statement: str, session_id: str, row: Callable[[Connection], _Row], *, is_lazy: bool = False
    ) -> Future[bool]:
        """Have a row added to a statement, which is carried out for all that wait at once. False: it was refused."""
        return self._post(_Queued(row, session_id, statement, is_lazy))

    def _post(self, job: _Queued) -> Future[Any]:
        job.done.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
        if self._is_closed:
            job.done.set_exception(NotDurable("the store was closed"))
        else:
            self._jobs.put(job)
        return job.done

    def close(self) -> None:
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join(2 * TIMEOUT_S)

    def give_up_if_hung(self) -> None:
        """For another thread: end a connection whose server has not answered for too long."""
        since, connection = self._busy_since, self._connection
        if since is not None and time.monotonic() - since > TIMEOUT_S and connection is not None:
            _hang_up(connection)

    def _run(self) -> None:
        waiting: deque[_Queued | None] = deque([self._jobs.get()])
        while jobs := _first_of_each_session(waiting):
            for is_row in (False, True):
                self._carry_out([job for job in jobs if (job.statement is not None) is is_row])
            with suppress(queue.Empty):
                while True:
                    waiting.append(self._jobs.get(block=not waiting))
        if self._connection is not None:
            self._connection.close()

    def _carry_out(self, jobs: Sequence[_Queued]) -> None:
        """All of it in one transaction; if that fails each job has one of its own, and fails alone."""
        if not jobs:
            return
        try:
            results = self._commit(jobs)
        except (self._failure, OSError, TokenmillError, TypeError, ValueError) as error:
            if len(jobs) > 1 and self._connection is not None:
                for job in jobs:
                    self._carry_out([job])
                return
            told = error if isinstance(error, TokenmillError) else _not_stored(error, is_lost=self._connection is None)
            for job in jobs:
                job.done.set_exception(told)
        except BaseException as error:  # a bug; but those who wait are told
            log.exception("the store could not do its work")
            for job in jobs:
                job.done.set_exception(NotDurable(str(error)))
        else:
            for job, result in zip(jobs, results, strict=True):
                job.done.set_result(result)

    def _commit(self, jobs: Sequence[_Queued]) -> list[Any]:
        """Do some work as one transaction. It can be repeated, so a connection that was lost is replaced once."""
        for is_last in (False, True):
            was_open = self._connection is not None
            self._busy_since = time.monotonic()
            try:
                if self._connection is None:
                    self._connection = self._connect()
                if jobs[0].statement is not None:
                    return self._commit_rows(self._connection, jobs)
                with self._connection.transaction():
                    return [job.work(self._connection) for job in jobs]
            except (self._failure, OSError):
                self.known.clear()  # some of it may have been written by the jobs, and was rolled back
                if self._connection is not None and not self._connection.closed and not self._connection.broken:
                    raise
                hung = time.monotonic() - self._busy_since > TIMEOUT_S
                self._connection = None
                if is_last or not was_open or hung:
                    raise
            except BaseException:
                self.known.clear()
                raise
            finally:
                self._busy_since = None
        raise AssertionError

    def _commit_rows(self, connection: Connection, jobs: Sequence[_Queued]) -> list[bool]:
        """Carry statements out for all rows at once: one transaction, and one round trip."""
        rows = [job.work(connection) for job in jobs]  # all of them before anything is sent
        places: dict[str, list[int]] = {}
        for place, job in enumerate(jobs):
            places.setdefault(str(job.statement), []).append(place)
        cursors = {}
        try:
            with connection.pipeline():  # with `transaction()` in it there would be a round trip for each part
                connection.execute("BEGIN")
                if all(job.is_lazy for job in jobs):
                    connection.execute("SET LOCAL synchronous_commit = off")
                for row in rows:
                    for statement, values in row.before:
                        connection.execute(statement, values)
                for statement, these in places.items():
                    values = json.dumps([rows[place].values for place in these])
                    cursors[statement] = connection.execute(statement, {"rows": values, "me": self._server_id})
                connection.execute("COMMIT")
        except BaseException:  # a pipeline that has failed skips the end of its transaction
            with suppress(self._failure):
                connection.rollback()
            raise
        found = {statement: {name for (name,) in cursor.fetchall()} for statement, cursor in cursors.items()}
        done = [job.session_id in found[str(job.statement)] for job in jobs]
        for job, is_done in zip(jobs, done, strict=True):
            if not is_done and job.session_id is not None:
                self.known.pop(job.session_id, None)
        return done


def _first_of_each_session(waiting: deque[_Queued | None]) -> list[_Queued]:
    """Take jobs up to the second one of a session, which waits for the first; none once the lane is to close."""
    jobs, sessions = list[_Queued](), set[str | None]()
    while waiting and (job := waiting[0]) is not None and (job.session_id is None or job.session_id not in sessions):
        jobs.append(job)
        sessions.add(job.session_id)
        waiting.popleft()
    return jobs


class _Deadline:
    """Hangs a connection up unless it is left in time."""

    def __init__(self, connection: Connection, seconds: float) -> None:
        self._timer = threading.Timer(seconds, _hang_up, (connection,))

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def _hang_up(connection: Connection) -> None:
    """A server that is stopped closes nothing: end the connection from here, and whoever waits for it is told."""
    with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


class _Dialect:
    """A connection to which SQLite's SQL can be spoken, as far as `documents.py` does."""

    WORDS = (
        ("?", "%s"),
        ("ifnull(", "coalesce("),
        (
            "EXISTS (SELECT 1 FROM json_each(body, %s) WHERE key = %s AND value = %s)",
            f"({PLAIN_BODY})::json #> string_to_array(substr(%s, 3), '.') ->> %s = %s",
        ),
    )

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Any:
        for theirs, ours in self.WORDS:
            statement = statement.replace(theirs, ours)
        return self._connection.execute(statement, values)


def _driver() -> Any:
    try:
        import psycopg
    except ImportError:
        raise ConfigError("a PostgreSQL store requires psycopg: pip install 'tokenmill[postgres]'") from None
    return psycopg


# -- the database -----------------------------------------------------------------------------------------------------


def migrate(connection: psycopg.Connection[Any]) -> None:
    """Bring the tables to this version; servers that start at the same time do it one after the other."""
    with connection.transaction():
        found = connection.execute("SELECT to_regclass('tokenmill_version')").fetchone()
        version = 0
        if found is not None and found[0] is not None:
            row = connection.execute("SELECT version FROM tokenmill_version").fetchone()
            version = 0 if row is None else row[0]
        if version == len(MIGRATIONS):
            return
        if version > len(MIGRATIONS):
            what = f"the store has version {version}, newer than the supported version {len(MIGRATIONS)}"
            raise ConfigError(f"{what}; upgrade tokenmill")
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATING,))
        connection.execute("CREATE TABLE IF NOT EXISTS tokenmill_version (version integer NOT NULL)")
        row = connection.execute("SELECT version FROM tokenmill_version").fetchone()  # another one may have been first
        for statements in MIGRATIONS[0 if row is None else row[0] :]:
            connection.execute(statements)
        connection.execute("DELETE FROM tokenmill_version")
        connection.execute("INSERT INTO tokenmill_version VALUES (%s)", (len(MIGRATIONS),))


def _read(connection: Connection, scope: Scope, session_ids: Sequence[str]) -> list[Stored]:
    rows = connection.execute(READ, {"ids": list(session_ids), **_scoped(scope)}).fetchall()
    found = []
    for name, head, used_at, answer, turns, tokens in rows:
        stored = read_stored(name, head, used_at, turns, tokens or b"", scope.vocab_size)
        if stored is not None:
            found.append(stored if answer is None else replace(stored, unfinished=json.loads(answer)))
    return found


def _count(connection: Connection, statement: str, values: Mapping[str, Any]) -> int:
    return int(connection.execute(statement, values).fetchone()[0])


def _one(session_id: str, epoch: int) -> dict[str, Any]:
    return {"id": session_id, "epoch": epoch}


def _if_ours(written: Future[bool], session_id: str) -> Future[None]:
    """A write that is done, or `SessionMoved`."""
    told: Future[None] = Future()

    def tell(done: Future[bool]) -> None:
        if (error := done.exception()) is not None:
            told.set_exception(error)
        elif done.result():
            told.set_result(None)
        else:
            told.set_exception(_moved(session_id))

    written.add_done_callback(tell)
    return told


def _scoped(scope: Scope) -> dict[str, Any]:
    return {"fingerprint": scope.fingerprint, "used_after": scope.used_after}


def _moved(session_id: str) -> SessionMoved:
    return SessionMoved(f"another server has taken session {session_id} over")


def _not_stored(error: Exception, *, is_lost: bool) -> NotDurable:
    is_locked = getattr(error, "sqlstate", None) == LOCK_NOT_AVAILABLE
    return (StoreUnavailable if is_lost or is_locked else NotDurable)(_first_line(error))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]


def _shown(url: str) -> str:
    """A URL without its password."""
    scheme, _, rest = url.partition("://")
    who, at, where = rest.rpartition("@")
    return f"{scheme}://{who.partition(':')[0]}{at}{where.partition('?')[0]}"
