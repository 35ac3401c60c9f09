"""Random trees of sessions on a service with little KV and few sequence ids, and beside each session its twin.

After every operation each session is what its twin says, in memory and on the disk, and every answer is that of its log
computed anew.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.operations import Chooser, one_in
from tests.session.helpers import continuation, make_service, read
from tests.session.twin import MAX_TOKENS, Disk, HeldClock, Twin
from tokenmill import SessionService
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.engine.events import CoreSnapshot, Event, ParkedChange, ParkedEvent, StartEvent
from tokenmill.errors import AnswerLost, InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.session.manager import SessionLimits
from tokenmill.session.store import SessionStore

WORDS = ["hi", "what", "is this", "é", "😀", "tell me more", "no"]
LONG_WORDS = [*WORDS, *(["so long that its KV is soon worth to be written"] * 7)]
SEED = 11
MIN_KV_TOKENS = 64
"""KV of shorter logs is not written."""
QUIET_CS, TTL_CS = 600, 100_000
"""Centiseconds: more than it takes until KV is written, and how long sessions live that nobody uses."""


def run_within(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    """Run it to its end, or fail after so many seconds by a clock that nobody holds."""

    async def watched() -> Any:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        alarm = threading.Timer(seconds, lambda: loop.call_soon_threadsafe(task.cancel))
        alarm.start()
        try:
            return await task
        except asyncio.CancelledError:
            raise TimeoutError(f"it takes longer than {seconds} s") from None
        finally:
            alarm.cancel()

    return asyncio.run(watched())


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
    """A service, a twin of each of its sessions, and what must be on the disk."""

    patience_s = 20.0

    def __init__(
        self, make: Callable[[], SessionService], choose: Chooser, clock: HeldClock, disk: Disk | None
    ) -> None:
        self.choose = choose
        self.clock = clock
        self.disk = disk
        self.twins: dict[str, Twin] = {}
        self.notes: list[str] = []
        self.unwritten: list[str] = []
        """Sessions whose KV is to be written when they are quiet, longest waiting first."""
        self.last_in_line: str | None = None
        """A session that is used for one thing only: once its KV is written, so is that of all before it."""
        self._make = make
        self._open()

    def _open(self) -> None:
        self.service = self._make()
        self.service.watch_idle()
        watches: list[OneEach] = []
        self.service._model().client.subscribe(0, lambda snapshot: watches.append(OneEach(snapshot)) or watches[0])
        self.watch = watches[0]

    def note(self, what: str) -> None:
        self.notes.append(what)

    def core(self) -> Any:
        client: Any = self.service._model().client
        return client.pool.cores[0]

    def names(self) -> list[str]:
        """In the order in which they were made: the names themselves differ from run to run."""
        return [name for name in self.twins if name != self.last_in_line]

    def any_session(self) -> str | None:
        names = self.names()
        return self.choose.one_of(names) if names else None

    def _used(self, *names: str) -> None:
        """Operations that are written have been done with these."""
        for name in names:
            twin = self.twins[name]
            twin.used = twin.saved = self.clock.now

    # -- what must be so ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything is as the twins say, at once: what was acknowledged is on the disk."""
        self.check_memory()
        if self.disk is not None:
            self.disk.check(self.twins)

    def check_memory(self) -> None:
        found = {info.session_id: info for info in self.service.list()}
        assert found.keys() == self.twins.keys(), "sessions that there are"
        for name, twin in self.twins.items():
            twin.check_info(found[name], self.clock)
            assert self.log_of(name) == twin.log, f"the log of {name}"

    def check_empty(self) -> None:
        """Nothing is left of anything."""
        stats = self.core().call(lambda core: (core.check_integrity(), core.stats())[1]).result(30)
        assert (stats.num_running, stats.num_waiting, stats.num_parked) == (0, 0, 0)
        assert stats.kv.referenced_cells == 0
        assert not self.watch.owners
        self.check()

    async def until_so(self) -> None:
        """Wait until everything is as the twins say: for what nobody acknowledges."""
        ends = time.perf_counter() + self.patience_s
        while time.perf_counter() < ends:
            with suppress(AssertionError):
                self.check()
                return
            await asyncio.to_thread(time.sleep, 0.003)
        self.check()

    def log_of(self, name: str) -> list[int]:
        return self.service._model().queue.find(name).log.tokens.tolist()

    def seed_of(self, name: str) -> int:
        return self.service._model().queue.find(name).options.sampling.seed or 0

    # -- operations ---------------------------------------------------------------------------------------------------

    async def create(self) -> str:
        temperature = self.choose.one_of([0.0, 1.0])
        params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)
        name = await self.service.create_session(sampling_params=params, seed=SEED)
        self.twins[name] = Twin(self.clock.now, temperature=temperature, seed=SEED)
        self._used(name)
        self.note(f"create {name}")
        return name

    async def append(self, name: str, text: str | None = None) -> None:
        twin, text = self.twins[name], text or self.choose.one_of(WORDS if self.disk is None else LONG_WORDS)
        if len(twin.log) > 150 or len(twin.inbox) > 2:
            return
        self.note(f"append {name} {text!r}")
        twin.reopen()
        twin.inbox = [*twin.inbox, text]
        total = await self.service.append_input(name, text)
        assert total == len(twin.log) + len(twin.render_inbox())
        self._used(name)

    async def generate(self, name: str, *, regenerate: bool = False) -> None:
        if await self._generate(name, regenerate=regenerate, cancels=one_in(4, self.choose)):
            self._answered([name])

    async def several(self) -> None:
        """Some of them at once."""
        chosen = [name for name in self.names() if one_in(2, self.choose)][:5]
        cancels = [one_in(4, self.choose) for _ in chosen]
        asked = await asyncio.gather(
            *(self._generate(name, cancels=some) for name, some in zip(chosen, cancels, strict=True))
        )
        self._answered([name for name, was_asked in zip(chosen, asked, strict=True) if was_asked])

    def _answered(self, names: Iterable[str]) -> None:
        """Their KV is to be written, in the order in which their answers ended."""
        for name in sorted(names, key=lambda name: self.service.get(name).used_at):
            if len(self.twins[name].log) >= MIN_KV_TOKENS:
                self.unwritten = [*(other for other in self.unwritten if other != name), name]

    async def _generate(self, name: str, *, regenerate: bool = False, cancels: bool = False) -> bool:
        """An answer, read to its end or cancelled on the way; then the log is the twin's and the answer is right."""
        twin = self.twins[name]
        before = twin.copy()
        if regenerate:
            if not twin.turns or not twin.is_answered:
                return False
            twin = self.twins[name] = twin.cut(len(twin.turns) - 1)
            twin.attempt += 1
        else:
            if not twin.inbox and (not twin.log or twin.is_complete):
                return False
            twin.attempt = 0
            twin.commit()
        count = self.choose.one_of([3, 1, 8])
        self.note(f"{'regenerate' if regenerate else 'generate'} {name} {count}{' and cancel' if cancels else ''}")
        verb = self.service.regenerate if regenerate else self.service.generate_stream
        stream = await verb(name, count + (200 if cancels else 0))
        last = await anext(stream) if cancels else (await read(stream))[2]
        if last.finish_reason is None:
            was_running = await self.service.cancel_generate(name)  # it may have ended by itself meanwhile
            _, _, last = await read(stream)
            assert was_running or last.finish_reason != "cancelled"
        assert last.finish_reason in ("length", "stop", "cancelled", "error"), last
        assert last.durable is (None if self.disk is None else True)
        if self.disk is not None and twin.is_from_disk:
            self.disk.kv_read(name, before.log)
        log = self.log_of(name)
        said = log[len(twin.log) :]
        if regenerate and not last.offset and not last.token_ids:  # without a word: the old answer stays
            assert log == before.log
            twin, said = before, []
            self.twins[name] = before
        assert log[: len(twin.log)] == twin.log, f"{name}: the log before the answer is not what it was"
        params = SamplingParams(temperature=twin.temperature, max_tokens=max(len(said), 1), attempt=twin.attempt)
        wanted = continuation(twin.log, params, seed=twin.seed)[: len(said)]
        assert said == wanted, f"{name} says {said}, computed anew {wanted}"
        twin.take(said, last.finish_reason)
        twin.is_from_disk = False
        self._used(name)
        return True

    async def fork(self, name: str) -> None:
        twin = self.twins[name]
        kind = self.choose.between(0, 2)
        if kind == 2 or (kind == 1 and not twin.turns):
            return
        keep = self.choose.between(0, len(twin.turns)) if kind == 1 else None
        child = await self.service.fork(name, at_turn=keep)
        self._used(name)
        self.twins[child] = twin.forked(self.clock.now, self.seed_of(child), keep)
        self.note(f"fork {name} -> {child} ({len(self.twins[child].turns)} turns)")

    async def rewind(self, name: str) -> None:
        twin = self.twins[name]
        keep = self.choose.between(0, len(twin.turns))
        self.note(f"rewind {name} to {keep} turns")
        await self.service.rewind(name, at_turn=keep)
        self.twins[name] = twin.cut(keep)
        self._used(name)

    async def edit(self, name: str) -> None:
        twin = self.twins[name]
        inputs = [number for number, turn in enumerate(twin.turns) if turn.kind == "input"]
        if not inputs:
            return
        turn, text = self.choose.one_of(inputs), self.choose.one_of(WORDS)
        self.note(f"edit {name} turn {turn} to {text!r}")
        await self.service.edit(name, turn, text)
        kept = twin.turns[turn].texts[:-1]
        self.twins[name] = twin.cut(turn)
        self.twins[name].inbox = [*kept, text]
        self._used(name)

    async def rename(self, name: str) -> None:
        title = self.choose.one_of([None, "a title", "é"])
        self.note(f"rename {name} to {title!r}")
        await self.service.update_session(name, title=title)
        self.twins[name].title = title
        self._used(name)

    async def attach(self, name: str) -> None:
        """The last answer is read again: only by the process that made it, and that is a use."""
        twin = self.twins[name]
        self.note(f"attach {name}")
        twin.used = self.clock.now
        assert not await self.service.cancel_generate(name), "nothing runs"
        if twin.said is not None:
            offset = self.choose.between(0, len(twin.said))
            _, ids, last = await read(await self.service.attach(name, offset))
            assert (ids, last.offset) == (twin.said[offset:], offset)
            return
        with pytest.raises(InvalidRequest if twin.num_said is None else AnswerLost) as failure:
            await self.service.attach(name)
        if isinstance(failure.value, AnswerLost):
            assert failure.value.durable_offset == twin.num_said

    async def end(self, name: str) -> None:
        self.note(f"end {name}")
        ended = await self.service.end_session(name)
        assert ended.durable is (None if self.disk is None else True)
        self._forget(name)

    def _forget(self, name: str) -> None:
        del self.twins[name]
        self.unwritten = [other for other in self.unwritten if other != name]
        if self.disk is not None:
            self.disk.kv_removed(name)

    def evict(self) -> None:
        self.note("evict")
        self.core().call(lambda core: core.kv.evict_all()).result(30)

    def die(self) -> None:
        """The next steps but one kill the core; a new one takes its place."""
        if self.core().num_restarts < 2:
            self.note("die")
            fault = Fault(FaultKind.FATAL, after=self.choose.between(0, 3))
            self.core().call(lambda core: core._executor.backend.faults.add(fault)).result(30)

    # -- time ---------------------------------------------------------------------------------------------------------

    async def idle(self) -> None:
        """Nothing is done for a while: sessions that nobody has used for too long end, on the disk, too."""
        await self.write_kv()
        self.clock.advance(self.choose.one_of([30_000, 50_000]))
        self.note(f"idle until {self.clock.now}")
        self._expire()
        await self.until_so()

    def _expire(self) -> None:
        for name, twin in list(self.twins.items()):
            if self.clock.now - twin.used >= TTL_CS:
                self.note(f"{name} expires")
                self._forget(name)

    async def write_kv(self) -> None:
        """Sessions are quiet: KV is written, those first that were answered first."""
        if self.disk is None:
            return
        await self._get_in_line()
        self.clock.advance(QUIET_CS)
        self.note(f"quiet: KV of {self.unwritten}")
        self._write_kv(self.unwritten)
        await self.until_so()

    async def _get_in_line(self) -> None:
        """Have the last one in line answered, so that its KV is written after all others'."""
        name = self.last_in_line
        if name not in self.twins:
            name = self.last_in_line = await self.create()
            await self.append(name, "x" * MIN_KV_TOKENS)
        for _ in range(20):  # its core may die
            await self._generate(name, regenerate=self.twins[name].is_answered)
            self._answered([name])
            if self._exported(name) is not None:
                return
        raise AssertionError("it is never answered")

    def _write_kv(self, names: Iterable[str]) -> None:
        assert self.disk is not None
        for name in names:
            found = self._exported(name)
            if found is not None:
                tokens, state = found
                self.disk.kv_written(name, tokens.tolist(), len(state), self.service.get(name).used_at)
        self.unwritten = []

    def _exported(self, name: str) -> Any:
        return self.core().call(lambda core: core.export_kv(name)).result(30)

    async def restart(self) -> None:
        """Close the service, which writes KV that waits, latest first; open another one, at once or after a while."""
        self.note("restart")
        assert not self.watch.found, self.watch.found
        if self.disk is not None:
            self._write_kv(reversed(self.unwritten))
        await self.service.close()
        if self.disk is not None:
            self.disk.check(self.twins)
        if one_in(2, self.choose):
            self.clock.advance(70_000)
        for name, twin in list(self.twins.items()):
            twin.used, twin.said, twin.is_from_disk = twin.saved, None, True
            if self.disk is None:
                self._forget(name)
        self._open()
        self._expire()
        await self.until_so()


async def grow(choose: Chooser, depth: int, num_operations: int, directory: Path | None = None) -> list[str]:
    """A random tree, checked as it grows, with a store if there is a directory; then everything is given back."""
    cells, max_seqs = choose.one_of([2048, 700]), choose.one_of([40, 5])
    config = EngineConfig(max_num_seqs=choose.one_of([4, 1]), prefill_chunk=choose.one_of([64, 7]), min_shared_prefix=8)
    limits = SessionLimits(stall_timeout_s=None, ttl_s=TTL_CS / 100)
    clock = HeldClock()
    disk = None if directory is None else Disk(directory, clock, choose.one_of([2400, 3200, 1 << 20]))
    stores: list[SessionStore] = []

    def make() -> SessionService:
        for store in stores:
            store.close()
        if disk is not None:
            stores[:] = [SessionStore(disk.directory, max_kv_bytes=disk.max_kv_bytes, reserve_bytes=0)]
        store = stores[0] if stores else None
        return make_service(depth, cells=cells, max_seqs=max_seqs, config=config, limits=limits, store=store)

    with clock.running():
        tree = Tree(make, choose, clock, disk)
        try:
            await tree.create()
            for _ in range(num_operations):
                clock.advance(1)
                await step(tree)
                tree.check()
            for name in list(tree.twins):
                await tree.end(name)
            tree.check_empty()
            assert not tree.watch.found, tree.watch.found
            assert tree.service._model().budget.total == 0
        except Exception as error:
            raise AssertionError("\n  ".join([repr(error), *tree.notes[-25:]])) from error
        finally:
            await tree.service.close()
            for store in stores:
                store.close()
        return tree.notes


async def step(tree: Tree) -> None:
    name = tree.any_session()
    kind = tree.choose.between(0, 24)
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
    elif kind == 20:
        await tree.attach(name)
    elif kind == 21:
        await tree.rename(name)
    elif kind == 22:
        await tree.write_kv()
    elif kind == 23 and one_in(2, tree.choose):
        await tree.idle()
    elif kind == 24 and (tree.disk is not None or one_in(8, tree.choose)):
        await tree.restart()
