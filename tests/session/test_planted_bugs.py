"""The session tests can fail: each of these small faults is found by the random trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.operations import RandomChooser
from tests.planting import PlantedBug, plant
from tests.session.tree import Tree, grow, run_within
from tokenmill.session import records, store
from tokenmill.session.log import TokenLog, Tokens
from tokenmill.session.manager import SessionManager
from tokenmill.session.records import KVFiles
from tokenmill.session.service import SessionService
from tokenmill.session.session import Session
from tokenmill.session.store import SessionStore

pytestmark = pytest.mark.slow

BUGS = [
    PlantedBug(
        "forks share one log", Tokens, "extended",
        "storage.used != self._count or self._count == 0", "self._count == 0",
    ),
    PlantedBug(
        "a cut keeps one token too many", TokenLog, "cut_at_turn",
        "0 if end is None else end", "0 if end is None else end + 1",
    ),
    PlantedBug("regenerate repeats itself", Session, "drop_answer", "self.attempt += 1", "self.attempt += 0"),
    PlantedBug(
        "the stop token is not in the log", Session, "take_answer",
        "self.log.added(len(self.log), token_ids, turn)",
        "self.log.added(len(self.log), [i for i in token_ids if i != stop], turn)",
    ),
    PlantedBug(
        "an edit keeps the answers after it", Session, "edit", "self.rewind(text, turn, None)", "pass",
    ),
    PlantedBug(
        "ended sessions keep their KV", SessionManager, "end", "self.client.release(session.session_id)", "pass"
    ),
    PlantedBug(
        "a fork draws with its parent's seed and attempt forgotten", SessionService, "answer",
        "session.attempt", "0",
    ),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    for seed in range(40):
        for depth in (0, 1):
            try:
                run_within(20, grow(RandomChooser(seed), depth, 40))
            except Exception:
                return
    pytest.fail("nothing noticed it")


BUGS_OF_STORES = [
    PlantedBug(
        "a rewind to the start of a piece keeps the piece", store, "_write_tokens",
        '"DELETE FROM tokens WHERE session = ? AND begin >= ?"', '"DELETE FROM tokens WHERE session = ? AND begin > ?"',
    ),
    PlantedBug(
        "turns of deleted sessions stay", store, "_delete_rows",
        'connection.execute("DELETE FROM turns WHERE session = ?", (name,))', "pass",
    ),
    PlantedBug("KV files of deleted sessions stay", SessionStore, "delete", "self.kv.remove(session_id)", "pass"),
    PlantedBug("reading a KV file is no use of it", KVFiles, "read", "os.utime(path, (now, now))", "pass"),
    PlantedBug(
        "KV used last is evicted first", KVFiles, "_make_room",
        "sorted(one for one in self._files() if one[1] != path)",
        "sorted((one for one in self._files() if one[1] != path), reverse=True)",
    ),
    PlantedBug(
        "a restart forgets how often a session was forked", records, "restored",
        'session.attempt, session.num_forks = head["attempt"], head["num_forks"]',
        'session.attempt = head["attempt"]',
    ),
    PlantedBug("a fork leaves its parent unsaved", SessionService, "fork", "loaded.save(session)", "pass"),
    PlantedBug(
        "reading an answer again is no use of a session", SessionService, "last_answer",
        "loaded.used(session)", "pass",
    ),
    PlantedBug(
        "sessions are as new after a restart", SessionManager, "adopt",
        "time.monotonic() - stored.idle_s", "time.monotonic()",
    ),
    PlantedBug(
        "a session that was just used expires", SessionManager, "end_idle",
        "now - session.last_used >= seconds", "now - session.last_used < seconds",
    ),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS_OF_STORES, ids=lambda bug: bug.name)
def test_a_bug_planted_in_a_store_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(bug, monkeypatch)
    monkeypatch.setattr(Tree, "patience_s", 2.0)
    for seed in range(20):
        try:
            run_within(60, grow(RandomChooser(seed), seed % 2, 60, tmp_path / str(seed)))
        except AssertionError:
            return
    pytest.fail("nothing noticed it")
