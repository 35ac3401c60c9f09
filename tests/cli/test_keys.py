"""`tokenmill keys`: what is printed once, what is written, and what is left of a file that is edited."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenmill.cli.main import app
from tokenmill.errors import ConfigError
from tokenmill.server.config import hash_key
from tokenmill.server.keys import read_keys

LIMITED = ("--limit", "requests_per_minute=60", "--limit", "sessions=3", "--expires", "30", "--admin")


def keys(*arguments: str) -> tuple[str, str]:
    """What it prints to standard output and standard error."""
    done = CliRunner().invoke(app, ["keys", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout, done.stderr


@pytest.mark.parametrize("name", ["keys.toml", "keys.json"])
def test_a_key_is_printed_once_and_its_hash_is_kept(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    printed, said = keys("add", "alice", "--file", str(file), *LIMITED)
    key = printed.strip()
    assert key.startswith("sk-")
    assert len(key) > 40
    assert key not in file.read_text()
    assert key not in said
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (alice,) = read_keys(file).keys
    assert (alice.name, alice.sha256, alice.is_admin) == ("alice", hash_key(key), True)
    assert (alice.limits.requests_per_minute, alice.limits.sessions) == (60, 3)
    assert alice.expires_at == pytest.approx(time.time() + 30 * 86_400, abs=60)
    keys("add", "bob", "--file", str(file))
    listed, _ = keys("list", "--file", str(file))
    assert [line.split()[0] for line in listed.splitlines()] == ["alice", "bob"]
    assert "requests_per_minute=60 sessions=3" in listed
    keys("revoke", "alice", "--file", str(file))
    assert [one.name for one in read_keys(file).keys] == ["bob"]


def test_a_file_keeps_what_its_owner_wrote(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    head = "# our keys\n[limits]\nsessions = 5\n"
    file.write_text(head)
    keys("add", "alice", "--file", str(file))
    keys("add", "alice2", "--file", str(file))
    keys("revoke", "alice", "--file", str(file))
    assert file.read_text().startswith(head)
    assert [one.name for one in read_keys(file).keys] == ["alice2"]


def test_a_change_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys("add", "alice", "--file", str(file))
    before = file.read_text()
    for arguments, message in (
        (("add", "alice"), f"{file}: keys alice have the same name"),
        (("add", "a b"), "name must be 1 to 64 letters"),
        (("add", "bob", "--limit", "rpm=1"), "unknown rpm"),
        (("add", "bob", "--limit", "sessions"), "--limit must be NAME=N"),
        (("add", "bob", "--expires", "soon"), "expires must be a date"),
        (("revoke", "bob"), "has no key 'bob'"),
    ):
        with pytest.raises(ConfigError) as found:
            keys(*arguments, "--file", str(file))
        assert message in str(found.value)
        assert file.read_text() == before
        assert [one.name for one in tmp_path.iterdir()] == [file.name]
    assert len(json.loads(before)["key"]) == 1
