"""The way to the database: TLS that is verified, and a role that may do what the guide grants it and no more."""

from __future__ import annotations

import asyncio
import re
import subprocess
import tracemalloc
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from benchmarks.stores import fill, service, turn
from tests.cluster.database import Database, database
from tests.cluster.serving import nodes
from tests.cluster.test_shared_batches import client
from tests.server.test_batches import begin, line, results, until_over
from tokenmill.errors import ConfigError
from tokenmill.session import postgres
from tokenmill.session.postgres import PostgresStore

MANY = 100_000
GUIDE = Path("docs/guides/several-servers.md")


def authority(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate authority: its certificate and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    _openssl(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
        "-keyout",
        key,
        "-out",
        cert,
    )
    return cert, key


def certificate(folder: Path, host: str, signed_by: tuple[Path, Path]) -> tuple[Path, Path]:
    cert, key, asked, names = (folder / f"server{suffix}" for suffix in (".pem", ".key", ".csr", ".ext"))
    _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={host}", "-keyout", key, "-out", asked)
    names.write_text(f"subjectAltName = DNS:{host}\n")
    ca, ca_key = signed_by
    _openssl("x509", "-req", "-in", asked, "-CA", ca, "-CAkey", ca_key, "-days", "2", "-extfile", names, "-out", cert)
    return cert, key


def _openssl(*arguments: object) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.req("B3")
def test_tls_to_the_database_is_verified(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    with database() as db:
        db.use_tls(*certificate(tmp_path, "localhost", ours))

        def url(ca: Path, host: str = "localhost", mode: str = "verify-full") -> str:
            return f"postgresql://tokenmill@{host}:{db.port}/postgres?sslmode={mode}&sslrootcert={quote(str(ca))}"

        with nodes(db, tmp_path, 2, url=url(ours[0])) as (one, two):
            session = one.create()
            assert one.tokens(session, "first") != two.tokens(session, "second")
            open_ones = db.query(
                "SELECT ssl, count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) "
                "WHERE application_name LIKE 'tokenmill %%' GROUP BY ssl"
            )
            assert [encrypted for encrypted, _ in open_ones] == [True]
        for refused, why in (
            (url(theirs[0]), "certificate verify failed"),
            (url(ours[0], "127.0.0.1"), 'does not match host name "127.0.0.1"'),
            (url(ours[0], mode="disable"), "no encryption"),
        ):
            with pytest.raises(ConfigError, match=why):
                PostgresStore(refused)


@pytest.mark.req("B3")
def test_the_database_of_an_earlier_version_is_upgraded(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier, psycopg.connect(db.url) as connection:
        earlier.setattr(postgres, "MIGRATIONS", postgres.MIGRATIONS[:1])
        postgres.migrate(connection)
    assert db.query("SELECT to_regclass('blobs')") == [(None,)]
    PostgresStore(db.url).close()
    version = len(postgres.MIGRATIONS)
    assert db.query("SELECT to_regclass('blobs')::text, version FROM tokenmill_version") == [("blobs", version)]


@pytest.mark.req("B3")
def test_a_server_starts_without_reading_a_hundred_thousand_sessions(db: Database) -> None:
    fill(db.url, MANY)

    async def start() -> None:
        store = PostgresStore(db.url)
        async with service(store) as one:
            assert len(one) == MANY + 1
            assert not one._model().queue.sessions, "none is in memory"
            await turn(one, f"copy-{MANY // 2}")
            assert list(one._model().queue.sessions) == [f"copy-{MANY // 2}"]
        store.close()

    tracemalloc.start()
    try:
        asyncio.run(start())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 50 * MANY, "not even 50 bytes for each"


@pytest.mark.req("B3")
def test_the_role_of_the_guide_serves_and_can_do_no_more(db: Database, tmp_path: Path) -> None:
    PostgresStore(db.url).close()  # an administrator has made the tables
    (statements,) = re.findall(r"```sql\n(CREATE ROLE.*?)```", GUIDE.read_text(), re.DOTALL)
    for statement in (
        statements.replace("CREATE ROLE tokenmill", "CREATE ROLE limited")
        .replace("TO tokenmill", "TO limited")
        .split(";")
    ):
        if statement.strip():
            db.query(statement)
    try:
        url = db.url.replace("//tokenmill@", "//limited@")
        with nodes(db, tmp_path, 2, url=url) as (one, two):
            session = one.create()
            said = [one.tokens(session, "first"), two.tokens(session, "second")]
            one.request("POST", f"/v1/sessions/{session}/rewind", {"at_turn": 2})
            assert two.tokens(session, "second") == said[1]
            fork = two.request("POST", f"/v1/sessions/{session}/fork", {}).json()["data"][0]["id"]
            assert one.request("DELETE", f"/v1/sessions/{fork}").status == 204
            asked = {"model": "fake", "input": "hi", "max_output_tokens": 4}
            response = one.request("POST", "/v1/responses", asked).json()["id"]
            assert two.request("GET", f"/v1/responses/{response}").json()["id"] == response
            assert two.request("DELETE", f"/v1/responses/{response}").status == 200
            over = until_over(client(two), begin(client(one), [line("q")]))
            assert set(results(client(one), over.output_file_id)) == {"q"}
        with psycopg.connect(url, autocommit=True) as limited:
            for statement in (
                "CREATE TABLE mine (id integer)",
                "DROP TABLE sessions",
                "ALTER TABLE sessions ADD COLUMN more text",
                "TRUNCATE sessions",
                "UPDATE tokenmill_version SET version = 0",
                "CREATE ROLE another",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    limited.execute(statement)
    finally:
        db.query("DROP OWNED BY limited")
        db.query("DROP ROLE limited")
