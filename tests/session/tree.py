"""Random trees of sessions on a service with little KV and few sequence ids, beside a model that computes all anew."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.operations import Chooser, one_in
from tests.session.helpers import continuation, make_service, read
from tokenmill import SessionService
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.engine.events import Event, ParkedChange, ParkedEvent, StartEvent
from tokenmill.engine.stats import CoreSnapshot
from tokenmill.params import SamplingParams

WORDS = ["hi", "what", "is this", "é", "😀", "tell me more", "no"]
SEED = 11
EOS = 256


@dataclass
class Twin:
    """What a session must be: written down turn by turn, without any of the service's code."""

    log: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Where each turn ends."""
    inbox: list[str] = field(default_factory=list)
    asked: list[list[str]] = field(default_factory=list)
    """The messages of each input turn."""
    attempt: int = 0

    def render_inbox(self) -> list[int]:
        """What the plain template writes between an answer and the next."""
        text = "".join(f"user: {one}\n" for one in self.inbox) + "assistant: "
        return list((("\n" if self.log else "") + text).encode())

    def commit(self) -> None:
        if self.inbox:
            self.log += self.render_inbox()
            self.ends.append(len(self.log))
            self.asked.append(self.inbox)
            self.inbox = []

    def reopen(self) -> None:
        """What is in the log and not answered waits again: more comes, and all is one turn."""
        if len(self.ends) % 2:
            self.ends.pop()
            del self.log[self.ends[-1] if self.ends else 0 :]
            self.inbox = self.asked.pop()

    def copy(self) -> Twin:
        return Twin(list(self.log), list(self.ends), list(self.inbox), list(self.asked), self.attempt)

    @property
    def is_complete(self) -> bool:
        """Has the last answer said that it is?"""
        return self.is_answered and self.log[-1:] == [EOS]

    @property
    def is_answered(self) -> bool:
        return len(self.ends) % 2 == 0 and not self.inbox


class OneEach:
    """Hears a core's events, and notes each time a session has more than one parked sequence."""

    def __init__(self, snapshot: CoreSnapshot) -> None:
        self.owners = {one.seq: one.owner for one in snapshot.parked}
        self.found: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, StartEvent):
            self.owners.clear()
        elif isinstance(event, ParkedEvent):
            self.owners.pop(event.seq, None)
            if event.change in (ParkedChange.PARKED, ParkedChange.SHORTENED):
                if event.owner in self.owners.values():
                    self.found.append(f"{event.owner} has two parked sequences")
                self.owners[event.seq] = event.owner


class Tree:
    """The service, and a twin of each of its sessions."""

    def __init__(self, service: SessionService, choose: Chooser) -> None:
        self.service = service
        self.choose = choose
        self.twins: dict[str, Twin] = {}
        self.notes: list[str] = []

    def note(self, what: str) -> None:
        self.notes.append(what)

    def core(self) -> Any:
        client: Any = self.service._model().client
        return client.pool.cores[0]

    def any_session(self) -> str | None:
        names = sorted(self.twins)
        return self.choose.one_of(names) if names else None

    # -- operations ---------------------------------------------------------------------------------------------------

    async def create(self) -> None:
        params = SamplingParams(temperature=self.choose.one_of([0.0, 1.0]), max_tokens=6)
        name = await self.service.create_session(sampling_params=params, seed=SEED)
        self.twins[name] = Twin()
        self.note(f"create {name}")

    async def append(self, name: str) -> None:
        twin, text = self.twins[name], self.choose.one_of(WORDS)
        if len(twin.log) > 150 or len(twin.inbox) > 2:
            return
        self.note(f"append {name} {text!r}")
        twin.reopen()
        twin.inbox = [*twin.inbox, text]
        total = await self.service.append_input(name, text)
        assert total == len(twin.log) + len(twin.render_inbox())

    async def generate(self, name: str, *, regenerate: bool = False) -> None:
        """An answer, read to its end or cancelled on the way; then the log is the twin's and the answer is right."""
        twin = self.twins[name]
        if regenerate:
            if not twin.ends or not twin.is_answered:
                return
            before = twin.copy()
            del twin.ends[-1]
            del twin.log[twin.ends[-1] :]
            twin.attempt += 1
        else:
            if not twin.inbox and (not twin.log or twin.is_complete):
                return
            twin.attempt = 0
            twin.commit()
        count = self.choose.one_of([3, 1, 8])
        cancels = one_in(4, self.choose)
        self.note(f"{'regenerate' if regenerate else 'generate'} {name} {count}{' and cancel' if cancels else ''}")
        verb = self.service.regenerate if regenerate else self.service.generate_stream
        stream = await verb(name, count + (200 if cancels else 0))
        if cancels:
            first = await anext(stream)
            if first.finish_reason is None:
                await self.service.cancel_generate(name)
                _, _, last = await read(stream)
            else:
                last = first
        else:
            _, _, last = await read(stream)
        session = self.service._model().master.find(name)
        log = session.log.tokens.tolist()
        if regenerate and not last.offset and not last.token_ids:  # without a word: the old answer stays
            assert log == before.log
            self.twins[name] = before
            return
        said = log[len(twin.log) :]
        assert log[: len(twin.log)] == twin.log, f"{name}: the log before the answer is not what it was"
        params = SamplingParams(
            temperature=session.options.sampling.temperature, max_tokens=max(len(said), 1), attempt=twin.attempt
        )
        wanted = continuation(twin.log, params, seed=session.options.sampling.seed or 0)[: len(said)]
        assert said == wanted, f"{name} says {said}, computed anew {wanted}"
        assert last.finish_reason in ("length", "stop", "cancelled", "error"), last
        twin.log += said
        if not said:
            return
        if twin.is_answered:  # what was cut short has gone on
            twin.ends.pop()
        twin.ends.append(len(twin.log))
        assert (session.log.ended_with is not None) == twin.is_complete

    async def fork(self, name: str) -> None:
        twin = self.twins[name]
        kind = self.choose.between(0, 2)
        if kind == 0:
            child, copy = await self.service.fork(name), twin.copy()
        elif kind == 1 and twin.ends:
            keep = self.choose.between(0, len(twin.ends))
            child, copy = await self.service.fork(name, at_turn=keep), self.cut(twin, keep)
        else:
            return
        self.note(f"fork {name} -> {child} ({len(copy.ends)} turns)")
        self.twins[child] = copy

    def cut(self, twin: Twin, keep: int) -> Twin:
        ends = twin.ends[:keep]
        return Twin(twin.log[: ends[-1] if ends else 0], ends, [], twin.asked[: (keep + 1) // 2], twin.attempt)

    async def rewind(self, name: str) -> None:
        twin = self.twins[name]
        keep = self.choose.between(0, len(twin.ends))
        self.note(f"rewind {name} to {keep} turns")
        await self.service.rewind(name, at_turn=keep)
        self.twins[name] = self.cut(twin, keep)

    async def edit(self, name: str) -> None:
        twin = self.twins[name]
        inputs = range(0, len(twin.ends), 2)
        if not inputs:
            return
        turn, text = self.choose.one_of(list(inputs)), self.choose.one_of(WORDS)
        kept = twin.asked[turn // 2][:-1]
        self.note(f"edit {name} turn {turn} to {text!r}")
        await self.service.edit(name, turn, text)
        self.twins[name] = self.cut(twin, turn)
        self.twins[name].inbox = [*kept, text]

    async def end(self, name: str) -> None:
        self.note(f"end {name}")
        await self.service.end_session(name)
        del self.twins[name]

    async def several(self) -> None:
        """Some of them at once."""
        names = sorted(self.twins)
        chosen = [name for name in names if one_in(2, self.choose)][:5]
        await asyncio.gather(*(self.generate(name) for name in chosen))

    def evict(self) -> None:
        self.note("evict")
        self.core().call(lambda core: core.kv.evict_all()).result(30)

    def die(self) -> None:
        """The next steps but one kill the core; a new one takes its place."""
        if self.core()._restarts_left > 1:
            self.note("die")
            fault = Fault(FaultKind.FATAL, after=self.choose.between(0, 3))
            self.core().call(lambda core: core._executor.backend.faults.add(fault)).result(30)


async def grow(choose: Chooser, depth: int, num_operations: int) -> list[str]:
    """A random tree, checked as it grows; then everything is given back."""
    cells = choose.one_of([2048, 700])
    config = EngineConfig(max_num_seqs=choose.one_of([4, 1]), prefill_chunk=choose.one_of([64, 7]), min_shared_prefix=8)
    async with make_service(depth, cells=cells, max_seqs=choose.one_of([40, 5]), config=config) as service:
        tree = Tree(service, choose)
        watches: list[OneEach] = []
        service._model().client.subscribe(0, lambda snapshot: watches.append(OneEach(snapshot)) or watches[0])
        try:
            await tree.create()
            for _ in range(num_operations):
                await step(tree)
            for name in list(tree.twins):
                await tree.end(name)
            stats = tree.core().call(lambda core: (core.check_integrity(), core.stats())[1]).result(30)
            assert (stats.num_running, stats.num_waiting, stats.num_parked) == (0, 0, 0)
            assert stats.kv.referenced_cells == 0
            assert not watches[0].found, watches[0].found
            assert not watches[0].owners
            assert service._upkeep.room.total == 0
        except Exception as error:
            raise AssertionError("\n  ".join([repr(error), *tree.notes[-25:]])) from error
        return tree.notes


async def step(tree: Tree) -> None:
    name = tree.any_session()
    kind = tree.choose.between(0, 19)
    if name is None or kind == 0:
        await tree.create()
    elif kind <= 5:
        await tree.append(name)
    elif kind <= 9:
        await tree.generate(name)
    elif kind <= 11:
        await tree.several()
    elif kind <= 13:
        await tree.fork(name)
    elif kind == 14:
        await tree.rewind(name)
    elif kind == 15:
        await tree.edit(name)
    elif kind == 16:
        await tree.generate(name, regenerate=True)
    elif kind == 17:
        tree.evict()
    elif kind == 18 and one_in(3, tree.choose):
        tree.die()
    elif kind == 19 and len(tree.twins) > 3:
        await tree.end(name)
