"""What sessions must be after each operation, in memory and on the disk: written down in plain Python.

Of the service's code nothing is used, but for the format of what it writes: rows of the database, headers of KV files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sqlite3
import struct
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill.session.session import SessionInfo

EOS = 256
EPOCH = 2_000_000_000
CENTISECOND = 0.01
MAX_TOKENS = 6


class HeldClock:
    """Time that passes only when told to, in centiseconds; no two looks at the wall clock are the same."""

    def __init__(self) -> None:
        self.now = 0
        self._looks = itertools.count(1)

    def advance(self, centiseconds: int) -> None:
        self.now += centiseconds
        self._looks = itertools.count(1)

    def seen(self, at: float) -> int:
        """When, by this clock, the wall clock said so."""
        return int((at - EPOCH) / CENTISECOND + 1e-3)

    def _time(self) -> float:
        return EPOCH + self.now * CENTISECOND + min(next(self._looks), 4000) * 1e-6

    @contextmanager
    def running(self) -> Iterator[None]:
        """In its place, for everybody, but for engine cores: they have been given theirs."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", self._time)
            patch.setattr(time, "monotonic", lambda: self.now * CENTISECOND)
            yield


@dataclass(frozen=True)
class TwinTurn:
    kind: str
    texts: tuple[str, ...]
    end: int
    finish_reason: str | None = None
    ended_with: int | None = None
    attempt: int = 0

    def as_json(self) -> dict[str, Any]:
        role = "user" if self.kind == "input" else "assistant"
        return {
            "kind": self.kind,
            "messages": messages(role, self.texts),
            "end": self.end,
            "ended_with": self.ended_with,
            "finish_reason": self.finish_reason,
            "changes": {"attempt": self.attempt} if self.attempt else None,
            "is_replayable": True,
        }


@dataclass
class Twin:
    """A session. Times are in centiseconds of the clock."""

    created: int = 0
    used: int = 0
    saved: int = 0
    """When it was last used, as far as the disk knows."""
    temperature: float = 0.0
    seed: int = 0
    title: str | None = None
    log: list[int] = field(default_factory=list)
    turns: list[TwinTurn] = field(default_factory=list)
    inbox: list[str] = field(default_factory=list)
    attempt: int = 0
    num_said: int | None = None
    """Tokens of its last answer."""
    said: list[int] | None = None
    """The last answer itself, which only the process that made it knows."""
    is_from_disk: bool = False
    """Has it not been asked for an answer since it was read from the disk?"""
    seeds_of_forks: list[int] = field(default_factory=list)

    # -- rules --------------------------------------------------------------------------------------------------------

    def render_inbox(self) -> list[int]:
        """What the plain template writes between an answer and the next."""
        text = "".join(f"user: {one}\n" for one in self.inbox) + "assistant: "
        return list((("\n" if self.log else "") + text).encode())

    def commit(self) -> None:
        if self.inbox:
            self.log += self.render_inbox()
            self.turns.append(TwinTurn("input", tuple(self.inbox), len(self.log)))
            self.inbox = []

    def reopen(self) -> None:
        """What is in the log and not answered waits again: more comes, and all is one turn."""
        if self.turns and self.turns[-1].kind == "input":
            self.inbox = list(self.turns.pop().texts)
            del self.log[self.end :]

    def take(self, said: list[int], finish_reason: str | None) -> None:
        """Hear an answer, or more of one that was cut short."""
        self.said = said
        if not said:
            return
        self.num_said = len(said)
        self.log += said
        if self.turns[-1].kind == "answer":
            self.turns.pop()
        stop = EOS if said[-1] == EOS else None
        text = spoken(self.log[self.end : -1 if stop else None])
        self.turns.append(TwinTurn("answer", (text,), len(self.log), finish_reason, stop, self.attempt))

    def cut(self, keep: int) -> Twin:
        """The same one, with so many turns."""
        twin = replace(self, log=list(self.log), turns=self.turns[:keep], inbox=[])
        del twin.log[twin.end :]
        return twin

    def copy(self) -> Twin:
        return replace(self, log=list(self.log), turns=list(self.turns), inbox=list(self.inbox))

    def forked(self, now: int, seed: int, keep: int | None) -> Twin:
        assert seed not in (self.seed, *self.seeds_of_forks), "a fork draws what its parent or a sibling draws"
        self.seeds_of_forks.append(seed)
        child = self.copy() if keep is None else self.cut(keep)
        child.created = child.used = child.saved = now
        child.seed, child.seeds_of_forks = seed, []
        child.num_said, child.said, child.is_from_disk = None, None, False
        return child

    @property
    def end(self) -> int:
        return self.turns[-1].end if self.turns else 0

    @property
    def is_complete(self) -> bool:
        """Has the last answer said that it is?"""
        return self.is_answered and self.log[-1:] == [EOS]

    @property
    def is_answered(self) -> bool:
        return not self.inbox and (not self.turns or self.turns[-1].kind == "answer")

    # -- what is to be seen -------------------------------------------------------------------------------------------

    def as_row(self) -> dict[str, Any]:
        """What the database must have of it."""
        return {
            "tokens": self.log,
            "turns": [turn.as_json() for turn in self.turns],
            "inbox": messages("user", self.inbox),
            "attempt": self.attempt,
            "num_forks": len(self.seeds_of_forks),
            "last_answer": self.num_said,
            "title": self.title,
            "sampling": (self.temperature, self.seed, MAX_TOKENS),
            "created": self.created,
            "used": [self.saved, self.saved],
        }

    def check_info(self, info: SessionInfo, clock: HeldClock) -> None:
        begins = [0, *(turn.end for turn in self.turns)]
        turns = [
            (one.kind, one.as_json()["messages"], one.end - begin, one.finish_reason)
            for begin, one in zip(begins, self.turns, strict=False)
        ]
        assert [(one.kind, list(one.messages), one.num_tokens, one.finish_reason) for one in info.turns] == turns
        assert (info.num_tokens, list(info.pending)) == (len(self.log), messages("user", self.inbox))
        assert info.state == ("idle" if self.is_answered else "appending")
        assert (info.title, info.problem) == (self.title, None)
        assert (clock.seen(info.created_at), clock.seen(info.used_at)) == (self.created, self.used)


def messages(role: str, texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for text in texts]


def spoken(ids: Sequence[int]) -> str:
    """Bytes as text; what is no byte stands between them and says nothing."""
    pieces, piece = [], bytearray()
    for token in [*ids, EOS]:
        if token < EOS:
            piece.append(token)
        else:
            pieces.append(piece.decode("utf-8", errors="replace"))
            piece = bytearray()
    return "".join(pieces)


# -- the disk ---------------------------------------------------------------------------------------------------------

HEADER = struct.Struct("<8s32s32sq")
Seen = tuple[int, bytes, float]
"""A KV file: how many tokens, their digest, its time of modification."""


@dataclass
class KVFile:
    tokens: list[int]
    size: int
    used_at: float


class Disk:
    """A store's directory, and the KV that must be in it."""

    def __init__(self, directory: Path, clock: HeldClock, max_kv_bytes: int) -> None:
        self.directory = directory
        self.max_kv_bytes = max_kv_bytes
        self._clock = clock
        self._kv: dict[str, KVFile] = {}

    def rows(self) -> dict[str, dict[str, Any]]:
        """All sessions of the database."""
        with closing(sqlite3.connect(self.directory / "sessions.sqlite")) as connection:
            sessions = connection.execute("SELECT id, head, used_at FROM sessions").fetchall()
            tokens = connection.execute("SELECT session, begin, ids FROM tokens ORDER BY session, begin").fetchall()
            turns = connection.execute("SELECT session, number, turn FROM turns ORDER BY session, number").fetchall()
        found = {name: self._row(json.loads(head), used_at) for name, head, used_at in sessions}
        for name, begin, ids in tokens:
            assert begin == len(found[name]["tokens"]), "pieces follow each other"
            assert ids, "a piece without tokens"
            found[name]["tokens"] += memoryview(ids).cast("i").tolist()
        for name, number, turn in turns:
            assert number == len(found[name]["turns"])
            found[name]["turns"].append(json.loads(turn))
        return found

    def _row(self, head: dict[str, Any], used_at: float) -> dict[str, Any]:
        answer, sampling = head["last_answer"], head["sampling"]
        return {
            "tokens": [],
            "turns": [],
            **{name: head[name] for name in ("inbox", "attempt", "num_forks", "title")},
            "last_answer": None if answer is None else answer["num_tokens"],
            "sampling": tuple(sampling[name] for name in ("temperature", "seed", "max_tokens")),
            "created": self._clock.seen(head["created_at"]),
            "used": [self._clock.seen(used_at), self._clock.seen(head["used_at"])],
        }

    def check(self, twins: dict[str, Twin]) -> None:
        found = self.rows()
        assert found.keys() == twins.keys(), "sessions on the disk"
        for name, twin in twins.items():
            wanted = twin.as_row()
            differs = {key: (found[name][key], value) for key, value in wanted.items() if found[name][key] != value}
            assert not differs, f"{name} on the disk, and as it must be: {differs}"
        assert self.kv_seen() == self.kv_wanted(), "KV files"

    # -- KV files -----------------------------------------------------------------------------------------------------

    def kv_seen(self) -> dict[str, Seen]:
        found = {}
        for path in (self.directory / "kv").glob("*"):
            assert path.suffix == ".kv", "a file that is not finished"
            with suppress(FileNotFoundError):  # it may be evicted at this moment
                data, about = path.read_bytes(), path.stat()
                _, _, digest, count = HEADER.unpack(data[: HEADER.size])
                found[path.name] = (count, digest, round(about.st_mtime, 5))
        return found

    def kv_wanted(self) -> dict[str, Seen]:
        return {
            hashlib.sha256(name.encode()).hexdigest()[:32] + ".kv": (
                len(file.tokens),
                hashlib.sha256(array("i", file.tokens).tobytes()).digest(),
                round(file.used_at, 5),
            )
            for name, file in self._kv.items()
        }

    def kv_written(self, name: str, tokens: list[int], num_bytes: int, used_at: float) -> None:
        """KV is to be kept: what was used less recently makes room for it, if that is enough."""
        size = HEADER.size + num_bytes
        others = sorted((file.used_at, file.size, other) for other, file in self._kv.items() if other != name)
        excess = size + sum(size for _, size, _ in others) - self.max_kv_bytes
        older = [one for one in others if one[0] < used_at]
        if size > self.max_kv_bytes or excess > sum(size for _, size, _ in older):
            return
        while excess > 0:
            _, freed, other = older.pop(0)
            excess -= freed
            del self._kv[other]
        self._kv[name] = KVFile(tokens, size, used_at)

    def kv_read(self, name: str, log: list[int]) -> None:
        """KV is looked for: of a beginning of the log, it is used."""
        file = self._kv.get(name)
        if file is not None and file.tokens == log[: len(file.tokens)]:
            path = self.directory / "kv" / (hashlib.sha256(name.encode()).hexdigest()[:32] + ".kv")
            file.used_at = path.stat().st_mtime
            assert self._clock.seen(file.used_at) == self._clock.now, "reading KV is no use of it"

    def kv_removed(self, name: str) -> None:
        self._kv.pop(name, None)
