"""A service under load that is killed at any moment, and what must be found in its store afterwards.

A stage process imports everything once and forks an actor for each round; the actor opens the store, goes on with what
is there, and tells before each operation what it is about to do, and after it what was acknowledged. It is killed from
outside at a random moment, or kills itself at a random instruction of the database.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.session.helpers import continuation, read
from tokenmill import LLM, SessionService
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.contract import ModelHandle
from tokenmill.params import SamplingParams
from tokenmill.session import store as store_module
from tokenmill.session.log import SharedList
from tokenmill.session.records import SessionRecord
from tokenmill.session.store import SessionStore

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
NUM_ACTORS = 4
MOST_TURNS = 8
MOST_SECONDS = 20.0


def fake_model() -> ModelHandle:
    return FakeModel(FakeConfig(vocab_size=258, max_context=1024, block_size=4))


def torch_model(checkpoint: str) -> ModelHandle:
    from tokenmill.backends.loading import open_model

    model = open_model(checkpoint, dtype="float32", device="cpu", deterministic=True)
    model.path = None  # type: ignore[misc]  # it has no tokenizer: a token a byte
    return model


def make_model(checkpoint: str | None) -> ModelHandle:
    return fake_model() if checkpoint is None else torch_model(checkpoint)


def open_service(checkpoint: str | None, store: SessionStore) -> SessionService:
    return SessionService(make_model(checkpoint), store=store, kv_cache_tokens=4096)


# -- the actor --------------------------------------------------------------------------------------------------------


class Actor:
    """Works with sessions until it is killed. Everything that it was told is told on, at once."""

    def __init__(self, service: SessionService, name: str, sessions: list[str], seed: int) -> None:
        self.service = service
        self.sessions = sessions
        self.name = name
        self.random = random.Random(seed)
        self.count = 0

    def say(self, what: str, **about: Any) -> None:
        os.write(1, (json.dumps({"what": what, **about}) + "\n").encode())

    def ack(self, session: str) -> None:
        log = self.service._model().queue.find(session).log.tokens.tolist()
        self.say("ack", session=session, log=log, said=said(self.service, session))

    async def run(self) -> None:
        mine = self.sessions
        while True:
            if not mine or (len(mine) < 3 and self.random.random() < 0.1):
                self.say("begin", session=None, text=None)
                mine.append(await self.service.create_session(sampling_params=GREEDY, seed=1))
                self.ack(mine[-1])
            session = self.random.choice(mine)
            if len(self.service.get(session).turns) >= MOST_TURNS:
                self.say("begin", session=session, text=None, ends=True)
                await self.service.end_session(session)
                self.say("ended", session=session)
                mine.remove(session)
                continue
            if self.random.random() < 0.1:
                self.say("begin", session=None, text=None)
                mine.append(await self.service.fork(session))
                self.ack(mine[-1])
                continue
            await self.ask(session)

    async def ask(self, session: str) -> None:
        self.count += 1
        text = f"{self.name}-{self.count}"
        self.say("begin", session=session, text=text)
        if self.random.random() < 0.5:
            await self.service.append_input(session, text)
            self.ack(session)
            self.say("begin", session=session, text=text)
            live = await self.service.answer(session)
        else:
            live = await self.service.answer(session, given=text)
        _, _, last = await read(live.read())
        assert last.durable, "a disk that works"
        self.ack(session)


def said(service: SessionService, session: str) -> list[str]:
    """What its user has said, pending input included."""
    info = service.get(session)
    messages = [*(message for turn in info.turns for message in turn.messages), *info.pending]
    return [str(message["content"]) for message in messages if message["role"] == "user"]


async def act(
    checkpoint: str | None, directory: str, round_: int, seed: int, kill_at: int | None, bug: str | None
) -> None:
    store = SessionStore(directory)
    service = open_service(checkpoint, store)
    if bug is not None:
        BUGS[bug]()
    if kill_at is not None:
        kill_at_instruction(store, kill_at)
    found = sorted(info.session_id for info in service.list())
    actors = [Actor(service, f"r{round_}a{i}", found[i::NUM_ACTORS], seed + i) for i in range(NUM_ACTORS)]
    await asyncio.gather(*(actor.run() for actor in actors))


def kill_at_instruction(store: SessionStore, count: int) -> None:
    """Die when the database is at its `count`-th instruction from now, in the middle of whatever it does."""
    left = count

    def step() -> int:
        nonlocal left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    store._post(lambda connection: connection.set_progress_handler(step, 1)).result()


def acknowledge_what_is_not_committed() -> None:
    """A planted bug: commits come later than answers."""
    commit, kept = store_module._commit, []

    def late(connection: Any, jobs: Any) -> list[None]:
        kept.extend(jobs)
        if len(kept) >= 8:
            commit(connection, kept)
            kept.clear()
        return [None for _ in jobs]

    store_module._commit = late


def write_turns_again() -> None:
    """A planted bug: a turn that is there is written once more."""
    write = SessionStore._write

    def twice(store: SessionStore, connection: Any, record: SessionRecord, fingerprint: str) -> None:
        turns = record.turns[:]
        again = turns if len(turns) < 4 else [*turns[:-2], *turns[-4:-2], *turns[-2:]]
        write(store, connection, replace(record, turns=SharedList(again)), fingerprint)

    SessionStore._write = twice  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    "acknowledged before it is committed": acknowledge_what_is_not_committed,
    "turns are written twice": write_turns_again,
}


def stage() -> None:
    """Fork an actor for each line of standard input; tell when it is gone."""
    for line in sys.stdin:
        given = json.loads(line)
        pid = os.fork()
        if pid == 0:
            asyncio.run(act(**given))
            os._exit(1)
        os.write(1, (json.dumps({"what": "pid", "pid": pid}) + "\n").encode())
        _, status = os.waitpid(pid, 0)
        os.write(1, (json.dumps({"what": "over", "status": status}) + "\n").encode())


# -- the witness ------------------------------------------------------------------------------------------------------


@dataclass
class Witness:
    """What was acknowledged so far, and what was begun and may or may not have happened."""

    logs: dict[str, list[int]] = field(default_factory=dict)
    said: dict[str, list[str]] = field(default_factory=dict)
    begun: dict[str, str | None] = field(default_factory=dict)
    """Session -> the text it was about to be told."""
    ending: set[str] = field(default_factory=set)
    num_new: int = 0
    """New sessions that were begun and not acknowledged."""
    num_acks: int = 0

    def hear(self, told: dict[str, Any]) -> None:
        session = told.get("session")
        if told["what"] == "begin":
            if session is None:
                self.num_new += 1
            else:
                self.begun[session] = told["text"]
                self.ending |= {session} if told.get("ends") else set()
        elif told["what"] == "ack":
            self.num_acks += 1
            self.num_new -= session not in self.logs
            self.logs[session], self.said[session] = told["log"], told["said"]
            self.begun.pop(session, None)
        elif told["what"] == "ended":
            for known in (self.logs, self.said, self.begun):
                known.pop(session, None)
            self.ending.discard(session)

    def check(self, service: SessionService) -> None:
        """Every acknowledged turn is there, once; what was begun is there as a whole, or not at all."""
        found = {info.session_id: info for info in service.list()}
        missing = set(self.logs) - set(found) - self.ending
        assert not missing, f"lost: {missing}"
        assert len(set(found) - set(self.logs)) <= self.num_new, "a session that nobody has made"
        for session, log in self.logs.items():
            if session not in found:
                continue
            now, heard = log_of(service, session), said(service, session)
            assert now[: len(log)] == log or self.begun.get(session) is not None, "an acknowledged turn has changed"
            asked = self.begun.get(session)
            expected = self.said[session]
            more = [*expected, asked] if asked is not None and asked not in expected else expected
            assert heard in (expected, more), f"{session}: {heard}, not {expected}"
            assert len(heard) == len(set(heard)), "something is there twice"
            if session not in self.begun:
                assert now == log, "exactly what was acknowledged"
            answers = [turn for turn in found[session].turns if turn.kind == "answer"]
            assert all(turn.num_tokens == GREEDY.max_tokens for turn in answers), "half an answer"

    def go_on_from(self, service: SessionService) -> None:
        """From now on what is there is what was acknowledged."""
        names = [info.session_id for info in service.list()]
        self.logs = {name: log_of(service, name) for name in names}
        self.said = {name: said(service, name) for name in names}
        self.begun.clear()
        self.ending.clear()
        self.num_new = 0


def log_of(service: SessionService, session: str) -> list[int]:
    return service._model().queue.find(session).log.tokens.tolist()


async def continued(service: SessionService, session: str) -> tuple[list[int], list[int]]:
    """What a session says next, on a fork of it: the log before, and the ids."""
    fork = await service.fork(session)
    if not service.get(fork).pending:
        await service.append_input(fork, "and then?")
    live = await service.answer(fork)
    _, ids, _ = await read(live.read())
    log = log_of(service, fork)
    await service.end_session(fork)
    return log[: -len(ids)], ids


Continuation = Callable[[list[int]], list[int]]


def rounds(
    directory: Path,
    checkpoint: str | None,
    seed: int,
    count: int,
    continuation: Continuation,
    bug: str | None = None,
) -> Witness:
    """Kill it so many times, and look after each."""
    chance, witness = random.Random(seed), Witness()
    command = [sys.executable, "-m", "tests.session.killing"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(count):
            inside = chance.random() < 0.5
            given = {
                "checkpoint": checkpoint,
                "directory": str(directory),
                "round_": number,
                "seed": chance.randrange(1 << 30),
                "kill_at": chance.randrange(1, 20_000) if inside else None,
                "bug": bug,
            }
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()
            watch(process.stdout, witness, None if inside else chance)
            asyncio.run(look(directory, checkpoint, witness, chance, continuation))
        process.stdin.close()
    return witness


def watch(lines: Any, witness: Witness, chance: random.Random | None) -> None:
    """Hear the actor until it is dead; kill it after some acknowledgements and a moment, unless it does it itself."""
    left = 0 if chance is None else chance.randrange(1, 40)
    pid, deadline = 0, time.monotonic() + MOST_SECONDS
    for line in lines:
        told = json.loads(line)
        if told["what"] == "pid":
            pid = told["pid"]
        elif told["what"] == "over":
            assert told["status"] == signal.SIGKILL, "it was to be killed"
            return
        witness.hear(told)
        left -= told["what"] == "ack"
        if (chance is not None and told["what"] == "ack" and left == 0) or time.monotonic() > deadline:
            until = time.monotonic() + (0.0 if chance is None else chance.random() * 0.01)
            while time.monotonic() < until:
                pass
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def look(
    directory: Path, checkpoint: str | None, witness: Witness, chance: random.Random, continuation: Continuation
) -> None:
    store = SessionStore(directory)
    assert store.check_integrity() == "ok"
    async with open_service(checkpoint, store) as service:
        witness.check(service)
        if witness.logs and len(service):
            session = chance.choice(sorted(info.session_id for info in service.list()))
            log, ids = await continued(service, session)
            assert ids == continuation(log), "another continuation than that of the log"
        witness.go_on_from(service)
    store.close()


def kill_fake(directory: Path, seed: int, count: int, bug: str | None = None) -> Witness:
    def after(log: list[int]) -> list[int]:
        return continuation(log, GREEDY, seed=1, stop_ids=frozenset())

    return rounds(directory, None, seed, count, after, bug)


def small_checkpoint(folder: Path) -> str:
    """A small decoder with random weights, a token a byte."""
    import torch
    import transformers

    from tests.parity.checkpoints import SIZES

    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 258}, initializer_range=0.4)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def kill_real_decoder(directory: Path, seed: int, count: int) -> Witness:
    """On torch, in deterministic mode."""
    checkpoint = small_checkpoint(directory / "model")
    with LLM(torch_model(checkpoint), kv_cache_tokens=1024) as llm:

        def alone(log: list[int]) -> list[int]:
            return llm.generate([log], GREEDY)[0].outputs[0].token_ids

        return rounds(directory / "store", checkpoint, seed, count, alone)


if __name__ == "__main__":
    stage()
