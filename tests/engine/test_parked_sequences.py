"""Parked sequences: one for each session and each plain prompt, evicted by what they hold exclusively, counted once."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from tests.conformance.operations import Chooser, RandomChooser, one_in
from tests.engine.helpers import VOCAB, alone, assert_clean, backend_of, make_engine, request, run
from tests.engine.shelf import Shelf
from tests.planting import PlantedBug, plant
from tokenmill.backends.fake import FakeBackend, FakeConfig, Fault, FaultKind
from tokenmill.contract import BatchBuilder
from tokenmill.engine import kv_manager
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import ParkedChange, ParkedEvent
from tokenmill.engine.request import BACKGROUND, Draw, Hints, Limits, Request
from tokenmill.outputs import FinishReason
from tokenmill.params import SamplingParams

ROOMY = {"num_cells": 16_384, "max_context": 2048, "max_seqs": 256}


def answer(engine: EngineCore, name: str, prompt: list[int], owner: str | None = None, **options: Any) -> Request:
    """Run a request to its end."""
    asked = request(name, prompt, **{"max_new_tokens": 2, "owner": owner} | options)
    engine.add(asked)
    run(engine)
    return asked


def converse(engine: EngineCore, session: str, turns: list[list[int]]) -> list[int]:
    """Say these things in a session, one after the other; its log."""
    log: list[int] = []
    for number, turn in enumerate(turns):
        log = answer(engine, f"{session} {number}", [*log, *turn], session).tokens
    return log


def parked(engine: EngineCore) -> dict[str | None, int]:
    """Parked tokens by session, which has one sequence."""
    views = engine.kv.parked_views()
    found = {view.owner: view.num_tokens for view in views}
    assert len(found) == len(views)
    return found


# -- one sequence for each session ------------------------------------------------------------------------------------


@pytest.mark.req("R4")
@pytest.mark.parametrize("depth", [0, 1])
def test_21_2_sessions_with_identical_histories_park_one_sequence_each(depth: int) -> None:
    """The report: five unrelated sessions, then the same 100 turns in several new sessions."""
    engine = make_engine(depth=depth, fake=ROOMY)
    for number in range(5):
        converse(engine, f"unrelated {number}", [[number, 9, 9, number]])
    for number in range(4):
        converse(engine, f"same {number}", [[20, turn % VOCAB, 21] for turn in range(100)])
        assert engine.kv.num_parked == 5 + number + 1
        assert engine.stats().num_evicted == 0
        assert engine.kv.num_parked_tokens <= engine.stats().kv.held_cells
    again = answer(engine, "again", [0, 9, 9, 0, 7, 7], "unrelated 0")
    assert again.num_cached == 4
    assert_clean(engine)


def test_what_a_full_cache_costs_a_step_does_not_grow_with_what_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full cache is the normal state of a server: every step that takes a block evicts one."""
    engine = make_engine(fake={"num_cells": 200 * 16, "max_context": 256, "max_seqs": 256})
    counted: list[int] = []
    exclusive = engine.kv.kv.exclusive

    def count(seqs: Collection[int]) -> int:
        counted.append(len(seqs))
        return exclusive(seqs)

    monkeypatch.setattr(engine.kv.kv, "exclusive", count)
    for number in range(220):
        answer(engine, f"r{number}", [number % VOCAB, number // VOCAB, *([5] * 12)])
    assert engine.kv.num_parked > 100
    assert engine.stats().num_evicted > 10
    assert max(counted) <= kv_manager.FEW_VICTIMS
    assert_clean(engine)


@pytest.mark.req("R4")
def test_21_2_new_kv_of_a_session_replaces_its_old_kv_whatever_prefix_it_started_from() -> None:
    engine = make_engine(fake=ROOMY)
    log = converse(engine, "s", [[1, 2, 3], [4, 5, 6]])
    for prompt in ([*log, 7], [1, 2, 3, 50], [60, 61]):  # goes on, goes back, begins anew
        asked = answer(engine, f"of {len(prompt)}", prompt, "s")
        assert parked(engine) == {"s": len(asked.tokens) - 1}
        found = engine.export_kv("s")
        assert found is not None
        assert found[0].tolist() == asked.tokens[:-1]


def test_21_2_kv_of_another_session_that_holds_more_replaces_a_sessions_own_at_once() -> None:
    """A session that starts from another one's KV needs one sequence, not two, while it runs."""
    engine = make_engine(fake=ROOMY)
    log = converse(engine, "longer", [[1, 2, 3], [4, 5, 6]])
    converse(engine, "shorter", [[1, 2, 3]])
    changes: list[ParkedChange] = []
    engine.events.subscribe(lambda event: changes.append(event.change) if isinstance(event, ParkedEvent) else None)
    engine.add(request("turn", log, max_new_tokens=3, owner="shorter"))
    engine.step()
    assert changes == [ParkedChange.REPLACED]
    assert list(parked(engine)) == ["longer"]
    run(engine)
    assert set(parked(engine)) == {"longer", "shorter"}


@pytest.mark.parametrize("session", ["one", "other"])
def test_21_2_a_session_goes_on_with_its_own_sequence_where_another_one_holds_as_much(session: str) -> None:
    engine = make_engine(fake=ROOMY)
    log = converse(engine, "one", [[1, 2, 3, 4]])
    converse(engine, "other", [[1, 2, 3, 4]])
    changes: list[tuple[ParkedChange, str | None]] = []
    engine.events.subscribe(
        lambda event: changes.append((event.change, event.owner)) if isinstance(event, ParkedEvent) else None
    )
    answer(engine, "turn", [*log, 9], session)
    assert changes == [(ParkedChange.TAKEN, session), (ParkedChange.PARKED, session)]


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_21_2_an_answer_that_ends_before_it_says_anything_leaves_the_sessions_kv(reason: FinishReason) -> None:
    """A regeneration that is given up: the session keeps its old answer, and the KV of it."""
    engine = make_engine(fake=ROOMY)
    log = converse(engine, "s", [[1, 2, 3, 4, 5, 6]])
    before = engine.kv.parked_views()
    engine.add(request("regenerate", log[:-2], owner="s"))
    engine.scheduler.schedule()  # it has its sequence, and nothing more
    engine.cancel("regenerate", reason)
    assert engine.kv.parked_views() == before
    assert answer(engine, "next", [*log, 9], "s").num_cached == len(log) - 1


def test_21_2_imported_kv_replaces_what_the_session_has() -> None:
    engine = make_engine(fake=ROOMY)
    converse(engine, "s", [[1, 2, 3]])
    long = answer(engine, "long", list(range(20)), "t")
    tokens, state = engine.export_kv("t") or ([], b"")
    assert engine.import_kv(tokens, state, Hints(owner="s"))  # type: ignore[arg-type]
    assert parked(engine) == {"s": len(long.tokens) - 1, "t": len(long.tokens) - 1}
    again = engine.export_kv("s")
    assert again is not None
    assert again[0].tolist() == long.tokens[:-1]
    engine.release("s")
    engine.release("t")
    assert engine.stats().kv.held_cells == 0


def test_kv_that_goes_for_an_import_was_not_taken_by_the_request_before_it() -> None:
    engine = make_engine(fake={"num_cells": 64, "block_size": 4, "max_context": 48}, max_num_seqs=1)
    answer(engine, "source", list(range(40)), "source")
    tokens, state = engine.export_kv("source") or ([], b"")
    engine.release("source")
    answer(engine, "victim", [50] * 20, "victim", key="victim's")
    answer(engine, "bystander", [51] * 20, key="bystander's")
    assert engine.import_kv(tokens, state, Hints(owner="source"))  # type: ignore[arg-type]
    verdict = answer(engine, "comes back", [50] * 20, "victim").verdict
    assert verdict is not None
    assert verdict.loss is not None
    assert (verdict.loss.by, verdict.loss.by_key) == (None, "")


def test_kv_that_a_failed_step_took_along_was_taken_by_no_request() -> None:
    engine = make_engine(depth=1, fake=ROOMY)
    backend_of(engine).faults.add(Fault(FaultKind.LATE_FAIL))
    engine.add(request("cancelled", range(20), owner="s"))
    engine.step()
    engine.cancel("cancelled")  # its KV is parked while the step that computes it is in flight
    answer(engine, "other", [50] * 8)
    verdict = answer(engine, "comes back", list(range(20)), "s").verdict
    assert verdict is not None
    assert verdict.loss is not None
    assert (verdict.loss.reason, verdict.loss.by, verdict.loss.num_tokens) == ("failure", None, 20)


def headless(length: int) -> bytes:
    """State bytes of a sequence whose first tokens are gone."""
    with FakeBackend(FakeConfig(vocab_size=VOCAB, block_size=4)) as backend:
        backend.decode(BatchBuilder().add_run(list(range(length)), 0, 0).build())
        backend.kv.seq_rm(0, -1, 5)
        return backend.kv.export(0)


@pytest.mark.parametrize("wrong", ["damaged", "of another length", "without its beginning"])
def test_a_rejected_import_leaves_nothing_behind(wrong: str) -> None:
    """More of them than there are sequence ids; then a good one is still taken."""
    engine = make_engine(fake={"max_seqs": 3}, max_num_seqs=1)
    answer(engine, "source", list(range(20)), "source")
    tokens, state = engine.export_kv("source") or (None, b"")
    assert tokens is not None
    engine.release("source")
    rejected = {
        "damaged": (tokens, state[:-1] + bytes([state[-1] ^ 1])),
        "of another length": (tokens[:-1], state),
        "without its beginning": (tokens, headless(len(tokens))),
    }
    for _ in range(5):
        assert not engine.import_kv(*rejected[wrong], Hints(owner="s"))
        assert (engine.kv.num_leased, engine.kv.num_parked, engine.stats().kv.held_cells) == (0, 0, 0)
    engine.check_integrity()
    assert engine.import_kv(tokens, state, Hints(owner="s"))
    assert answer(engine, "goes on", [*tokens.tolist(), 50], "s").num_cached == len(tokens)


# -- and for each plain prompt ----------------------------------------------------------------------------------------


@pytest.mark.req("R4")
def test_21_2_plain_conversations_park_one_sequence_however_often_they_are_replayed() -> None:
    engine = make_engine(fake=ROOMY)
    for replay in range(3):
        log: list[int] = []
        for turn in range(20):
            asked = answer(engine, f"{replay} {turn}", [*log, 20, turn, 21])
            assert asked.num_cached >= len(log) - 1
            log = asked.tokens
            assert engine.kv.num_parked == 1


def test_21_2_choices_of_one_prompt_leave_one_sequence() -> None:
    engine = make_engine(fake=ROOMY)
    draws = [Draw(params=SamplingParams(temperature=1.0), seed=seed, choice=seed) for seed in range(6)]
    for draw in draws:
        engine.add(Request(f"choice {draw.choice}", list(range(30)), Limits(max_new_tokens=8), draw=draw))
    run(engine)
    assert engine.kv.num_parked == 1
    answer(engine, "other prompt", [*range(29), 50])
    assert engine.kv.num_parked == 2
    assert engine.kv.num_parked_tokens < 30 + 8 + 10, "what they have in common counts once"


def test_21_2_kv_that_was_shortened_to_what_another_one_holds_is_not_kept() -> None:
    engine = make_engine(fake={"num_cells": 64, "block_size": 4, "max_context": 56}, max_num_seqs=1)
    answer(engine, "one", [*range(12), *[30] * 8])
    answer(engine, "two", [*range(12), *[40] * 8])
    assert engine.kv.num_parked == 2
    answer(engine, "large", [50] * 36)
    engine.check_integrity()
    assert engine.kv.num_parked <= 2


def test_21_2_a_plain_prompt_stays_when_a_session_goes_on_from_it_and_ends() -> None:
    engine = make_engine(fake=ROOMY)
    system = list(range(30))
    answer(engine, "warms up", [*system, 40])
    converse(engine, "s", [[*system, 41]])
    engine.release("s")
    assert answer(engine, "later", [*system, 42]).num_cached == 30


# -- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.req("R4")
def test_21_2_when_ids_run_short_redundant_kv_goes_first() -> None:
    engine = make_engine(fake={**ROOMY, "max_seqs": 5}, max_num_seqs=1)
    converse(engine, "oldest", [[1, 2, 3, 4, 5, 6]])
    answer(engine, "plain", [30] * 10)
    converse(engine, "longer", [[7, 8, 9], [10, 11, 12]])
    converse(engine, "same, shorter", [[7, 8, 9]])
    converse(engine, "new", [[40, 41]])
    converse(engine, "newer", [[42, 43]])
    assert set(parked(engine)) == {"oldest", None, "longer", "new", "newer"}
    converse(engine, "newest", [[44, 45]])
    assert set(parked(engine)) == {"oldest", "longer", "new", "newer", "newest"}, "then plain requests'"


@pytest.mark.req("R4")
def test_21_2_when_ids_run_short_the_sequence_with_the_fewest_tokens_of_its_own_goes() -> None:
    engine = make_engine(fake={**ROOMY, "max_seqs": 4}, max_num_seqs=1)
    system = list(range(30))
    converse(engine, "old and long", [[*system, *[40] * 20]])
    converse(engine, "a few of its own", [[*system, *[41] * 3]])
    converse(engine, "more of its own", [[*system, *[42] * 6]])
    converse(engine, "short", [[50] * 5])
    converse(engine, "new", [[51] * 8])
    assert set(parked(engine)) == {"old and long", "more of its own", "short", "new"}
    converse(engine, "newer", [[52] * 8])
    assert set(parked(engine)) == {"old and long", "more of its own", "new", "newer"}


def test_21_2_a_token_in_common_does_not_protect_the_cheapest_sequence() -> None:
    engine = make_engine(fake={**ROOMY, "max_seqs": 3}, max_num_seqs=1)
    for session, said in (("long", [1] * 30), ("longer", [2] * 40), ("short", [3, 4, 5])):
        converse(engine, session, [said])
    new = answer(engine, "new", [3, *[9] * 6], "new")
    assert set(parked(engine)) == {"long", "longer", "new"}
    assert new.num_cached == 1
    assert new.output == alone(tuple(new.tokens[:7]), 2)
    assert engine.stats().num_evicted == 1
    back = answer(engine, "back", [3, 4, 5, 6], "short")
    assert back.verdict is not None
    assert back.verdict.loss is not None
    assert back.verdict.loss.by == "new"


def test_21_2_long_kv_that_is_of_no_use_does_not_keep_its_id_for_ever() -> None:
    """Each of the short ones costs something: before long, more than the long one that nothing uses."""
    engine = make_engine(fake={**ROOMY, "max_seqs": 3}, max_num_seqs=1)
    converse(engine, "of no use", [[1] * 60])
    converse(engine, "of use", [[2] * 60])
    for number in range(20):
        for other in ("one", "other"):
            converse(engine, f"short {number} {other}", [[3 + number, len(other), 5, 6, 7, 8]])
        assert answer(engine, f"uses {number}", [2] * 60, "of use").num_cached == 59
    assert "of no use" not in parked(engine)


@pytest.mark.req("R4")
def test_21_2_cells_run_out_before_ids_do() -> None:
    """A service's engine has ids enough for short conversations to fill its memory."""
    from tests.session.helpers import make_service

    service = make_service(cells=65_536)
    loaded = service._model()
    try:
        assert loaded.opened.limits.max_seqs >= 65_536 // 64
    finally:
        loaded.client.close()


# -- cells ------------------------------------------------------------------------------------------------------------


def test_21_2_shared_kv_is_not_evicted_in_vain() -> None:
    """Three sessions with one history would free its cells once, which is not enough: all of them stay."""
    engine = make_engine(fake={"num_cells": 160, "block_size": 4, "max_context": 150}, max_num_seqs=2)
    for number in range(3):
        converse(engine, f"same {number}", [[1, 2, 3, 4] * 10])
    engine.add(request("runs", [40] * 50, max_new_tokens=20))
    engine.step()
    engine.add(request("too large beside it", [41] * 100, max_new_tokens=2))
    for _ in range(5):
        engine.step()
    assert engine.kv.num_parked == 3
    run(engine)


# -- the property -----------------------------------------------------------------------------------------------------

SCRIPTS = [[[7] * 9, [9], [10] * 8, [11] * 8], [[7] * 9, [12] * 9], [[30] * 12, [31] * 9]]
"""What is said in sessions, turn by turn: their histories have beginnings in common, or are the same."""


class Crowd:
    """Sessions and plain requests at random, with the bound checked after everything that happens."""

    def __init__(self, choose: Chooser, depth: int) -> None:
        self.choose = choose
        num_rows, block = choose.between(1, 4), choose.one_of([4, 1, 16])
        whole = one_in(6, choose)
        self.engine = make_engine(
            depth=depth,
            fake={
                "block_size": block,
                "num_cells": 64 + 2 * block + choose.one_of([2000, 0, 24]),
                "max_context": 64,
                "max_seqs": num_rows + choose.one_of([40, 0, 3]),
                "partial_cp": not whole,
                "partial_rm": not whole,
                "parked_cells": choose.one_of([None, None, 20]),
            },
            max_num_seqs=num_rows,
            prefill_chunk=choose.one_of([16, 3]),
            admission_margin=0,
            min_shared_prefix=choose.one_of([4, 0]),
        )
        self.shelf = Shelf(self.engine)
        self.logs: dict[str, list[int]] = {}
        """Session -> its log."""
        self.scripts: dict[str, list[list[int]]] = {}
        self.running: dict[str, tuple[str, Request]] = {}
        """Request -> its session and itself."""
        self.asked: list[Request] = []
        self.prompts: set[tuple[int, ...]] = set()
        """Of plain requests."""
        self.number = 0
        self.can_fail = one_in(2, choose)

    def new_name(self, kind: str) -> str:
        self.number += 1
        return f"{kind} {self.number}"

    def ask(self, prompt: list[int], owner: str | None, **options: Any) -> Request:
        options = {"max_new_tokens": self.choose.one_of([1, 3, 8, 30])} | options
        priority = BACKGROUND if one_in(3, self.choose) else self.choose.between(0, 1)
        asked = request(self.new_name("request"), prompt, owner=owner, priority=priority, **options)
        self.engine.add(asked)
        self.asked.append(asked)
        return asked

    # -- what happens -------------------------------------------------------------------------------------------------

    def create(self) -> None:
        name = self.new_name("session")
        self.logs[name], self.scripts[name] = [], list(self.choose.one_of(SCRIPTS))

    def turn(self, name: str) -> None:
        script = self.scripts[name]
        prompt = [*self.logs[name], *(script.pop(0) if script else [5])]
        if len(prompt) < 50:
            asked = self.ask(prompt, name)
            self.running[asked.request_id] = (name, asked)

    def go_back(self, name: str) -> None:
        log = self.logs[name]
        if log:
            del log[self.choose.between(1, len(log)) :]
            asked = self.ask(log, name)
            self.running[asked.request_id] = (name, asked)

    def fork(self, name: str) -> None:
        child = self.new_name("session")
        self.logs[child], self.scripts[child] = list(self.logs[name]), [[6, self.number % VOCAB]]

    def ask_plain(self, name: str) -> None:
        """With the beginning of a session's log as its prompt, or one of a few others; several times at once, maybe."""
        log = self.logs[name]
        prompt = log[: self.choose.between(1, len(log))] if log else [20, 21, self.choose.between(22, 24)]
        for _ in range(self.choose.one_of([1, 1, 3])):
            self.ask(prompt, None)
        self.prompts.add(tuple(prompt))

    def move(self, name: str) -> None:
        """KV of a session goes through bytes, back to it or to another one; some of them do not arrive as they were."""
        found = self.engine.export_kv(name)
        if found is not None:
            tokens, state = found
            other = self.choose.one_of(sorted(self.logs))
            if one_in(4, self.choose):
                state = state[:-1] + bytes([state[-1] ^ 1])
            self.engine.import_kv(tokens, state, Hints(owner=other))

    def cancel(self) -> None:
        names = sorted(self.engine.scheduler.requests)
        if names:
            self.engine.cancel(self.choose.one_of(names))

    def end(self, name: str) -> None:
        for request_id, (owner, _) in list(self.running.items()):
            if owner == name:
                self.engine.cancel(request_id)
                del self.running[request_id]
        self.engine.release(name)
        del self.logs[name]

    def fail(self) -> None:
        """One of the next steps fails; not while those of the last one that did are run alone."""
        faults = backend_of(self.engine).faults
        if not faults._faults and not self.engine._isolation._suspects:
            kind = self.choose.one_of([FaultKind.LATE_FAIL, FaultKind.FAIL])
            faults.add(Fault(kind, after=self.choose.between(0, 3)))

    def step(self) -> None:
        self.engine.step()
        if self.engine.failure is not None:
            raise self.engine.failure
        for request_id, (owner, asked) in list(self.running.items()):
            if asked.is_finished:
                del self.running[request_id]
                self.logs[owner] = list(asked.tokens)

    def happen(self) -> None:
        kind = self.choose.between(0, 19)
        if kind == 0 or not self.logs:
            self.create()
            return
        name = self.choose.one_of(sorted(self.logs))
        if kind <= 4:
            self.turn(name)
        elif kind <= 6:
            self.ask_plain(name)
        elif kind == 7:
            self.go_back(name)
        elif kind == 8:
            self.fork(name)
        elif kind == 9:
            self.move(name)
        elif kind == 10:
            self.cancel()
        elif kind == 11 and len(self.logs) > 2:
            self.end(name)
        elif kind == 12 and self.can_fail:
            self.fail()
        else:
            self.step()

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        kv = self.engine.kv
        kv.check_integrity()
        self.shelf.check_accounts()
        views = kv.parked_views()
        owners = [view.owner for view in views if view.owner is not None]
        assert len(owners) == len(set(owners)), "a session has two parked sequences"
        assert set(owners) <= set(self.logs), "KV is parked for a session that has ended"
        assert len(views) - len(owners) <= len(self.prompts), "a plain prompt has two parked sequences"
        logs = [one.entry.tokens.tolist() for one in kv._all_parked()]
        beginnings = {tuple(log[:end]) for log in logs for end in range(1, len(log) + 1)}
        assert kv.num_parked_tokens == len(beginnings) <= kv.kv.stats().held_cells

    def play(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.happen()
            self.check()
        while self.engine.has_work:
            self.step()
            self.check()
        for asked in self.asked:
            if asked.finish_reason is FinishReason.LENGTH:
                prompt = tuple(asked.tokens[: asked.num_prompt])
                assert asked.output == alone(prompt, len(asked.output)), f"{asked} is not itself"
        assert_clean(self.engine)


@pytest.mark.slow
@pytest.mark.req("R4", "R8")
@pytest.mark.parametrize("depth", [0, 1])
def test_21_2_parked_sequences_are_at_most_sessions_and_plain_prompts(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_manager, "MOST_BACKGROUND", 2)
    play_crowds(depth)


def play_crowds(depth: int) -> None:
    for seed in range(25):
        try:
            Crowd(RandomChooser(seed), depth).play(120)
        except Exception as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error!r}") from error


BUGS = [
    PlantedBug("a copy is no use", kv_manager.KVManager, "_start",
               "self._touch(entry, request.hints)", "pass"),
    PlantedBug("what others use stays behind", kv_manager.KVManager, "_touch", "not by.is_background", "False"),
    PlantedBug("lines push out what they replace", kv_manager.KVManager, "park",
               "all(one.seq in self._background for one in replaced)", "True"),
    PlantedBug("KV that others hold keeps its id", kv_manager.KVManager, "_cheapest", "cost[1] > 0", "cost[1] == 0"),
    PlantedBug("shortened by one token too many", kv_manager.KVManager, "_shorten",
               "len(parked.entry.tokens) - cells", "len(parked.entry.tokens) - cells - 1"),
    PlantedBug("a session's KV goes to others", kv_manager.KVManager, "_start",
               "self._may_take_over(entry, request.hints)", "True"),
    PlantedBug("lines take others' KV over", kv_manager.KVManager, "_may_take_over",
               "not by.is_background or entry.seq in self._background", "True"),
    PlantedBug("only the latest loss is told", kv_manager.KVManager, "_note_loss",
               "num_tokens + (before.num_tokens if before is not None else 0)", "num_tokens"),
    PlantedBug("sessions' KV goes first", kv_manager.KVManager, "_all_parked",
               "yield from self._background.values()",
               "yield from self._sessions.values()\nyield from self._background.values()"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    monkeypatch.setattr(kv_manager, "MOST_BACKGROUND", 2)
    with pytest.raises(AssertionError, match="seed"):
        play_crowds(0)
