"""A PostgreSQL server for tests: a real one in a directory of its own, to be killed, paused and started again."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 60.0
SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
shared_buffers = 64MB
"""


def binaries() -> Path | None:
    """Where PostgreSQL's programs are, if they are here."""
    if named := os.environ.get("TOKENMILL_POSTGRES"):
        return Path(named)
    found = shutil.which("postgres")
    if found is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    return versions[-1].parent if versions else None


def require() -> Path:
    found = binaries()
    if found is None:
        what = "no PostgreSQL: install it (tools/test_packages.sh), or name its directory with TOKENMILL_POSTGRES"
        if os.environ.get("TOKENMILL_REQUIRE_POSTGRES"):
            pytest.fail(what)
        pytest.skip(what)
    return found


class Database:
    """One server and its data."""

    def __init__(self, folder: Path) -> None:
        self._programs = require()
        self._folder = folder
        self._user = "nobody" if os.getuid() == 0 else None
        """It refuses to run as root."""
        self._data = folder / "data"
        self._data.mkdir(mode=0o700)
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            for path in (folder, self._data):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._run("initdb", "-D", str(self._data), "-U", "tokenmill", "-A", "trust", "-N", "-E", "UTF8", "--locale=C")
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(f"{SETTINGS}port = {self.port}\n")
        self.process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._observer = "tokenmill"
        """The role of its own connection."""
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://tokenmill@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        with (self._folder / "log").open("ab") as file:
            command = [str(self._programs / "postgres"), "-D", str(self._data)]
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, user=self._user, cwd="/", group=self._group
            )
        deadline = time.monotonic() + WAIT_S
        while not self._answers():
            assert self.process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self) -> None:
        """As a power cut would: all of its processes, at once."""
        assert self.process is not None
        self._hang_up()
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes: SIGSTOP, SIGCONT."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def stop(self) -> None:
        self._hang_up()
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    @property
    def _group(self) -> int | None:
        return None if self._user is None else pwd.getpwnam(self._user).pw_gid

    def _pids(self) -> list[int]:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.Error:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, user=self._user, cwd="/", group=self._group)
        assert done.returncode == 0, done.stderr

    def query(self, text: str, *values: object) -> list[tuple[object, ...]]:
        """What the database has, read without any of our code."""
        import psycopg

        if self._connection is None or self._connection.closed or self._connection.broken:
            url = self.url.replace("//tokenmill@", f"//{self._observer}@")
            self._connection = psycopg.connect(url, autocommit=True)
        cursor = self._connection.execute(text, values)
        return cursor.fetchall() if cursor.description is not None else []

    def empty(self) -> None:
        """As it was made."""
        self.query("DROP SCHEMA public CASCADE")
        self.query("CREATE SCHEMA public")
        self.query("GRANT USAGE ON SCHEMA public TO public")

    def use_tls(self, certificate: Path, key: Path) -> None:
        """From now on it takes encrypted connections only, apart from this one's own."""
        for path, name, mode in ((certificate, "server.crt", 0o644), (key, "server.key", 0o600)):
            to = self._data / name
            shutil.copyfile(path, to)
            to.chmod(mode)
            if self._user is not None:
                owner = pwd.getpwnam(self._user)
                os.chown(to, owner.pw_uid, owner.pw_gid)
        with (self._data / "pg_hba.conf").open("w") as rules:
            rules.write("host all observer 127.0.0.1/32 trust\nhostssl all all 127.0.0.1/32 trust\n")
        self.query("CREATE ROLE observer SUPERUSER LOGIN")
        self.query("ALTER SYSTEM SET ssl = on")
        self.query("SELECT pg_reload_conf()")
        self._hang_up()
        self._observer = "observer"


@contextmanager
def database() -> Iterator[Database]:
    """In a directory outside of pytest's, which only their owner may enter."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-postgres-") as folder:
        made = Database(Path(folder))
        try:
            yield made
        finally:
            made.stop()
