"""Why an answer's prompt was computed: each cause is brought about, and named."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planting import PlantedBug, plant
from tests.session.helpers import GREEDY, REWRITES, make_service, read, scene, with_template
from tokenmill import SessionService
from tokenmill.backends.fake import FakeConfig, FakeModel, Fault, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.engine.kv_manager import KVManager
from tokenmill.engine.prefix import PrefixIndex
from tokenmill.outputs import CacheVerdict, Loss
from tokenmill.session import persistence
from tokenmill.session.explain import MOST_TURNS, Cause, KVMark, TurnCost, cost_of, in_words, message_at
from tokenmill.session.log import TokenLog, Turn

LONG = "words " * 20


async def ask(service: SessionService, name: str, said: str = "more", **options: Any) -> TurnCost:
    """What the answer to this cost."""
    live = await service.answer(name, given=said, **options)
    _, _, last = await read(live.read())
    cost = service.explain(name)[-1]
    assert cost.request_id == live.request_id
    assert last.usage is not None
    assert (cost.num_prompt, cost.num_cached) == (last.usage.prompt_tokens, last.usage.cached_tokens)
    return cost


async def new(service: SessionService, **options: Any) -> str:
    return await service.create_session(sampling_params=GREEDY, seed=1, **options)


@pytest.mark.req("B4")
def test_a_conversation_that_goes_on_computes_what_is_new() -> None:
    async def play(service: SessionService) -> None:
        name = await new(service)
        assert (await ask(service, name, LONG)).cause is Cause.FIRST
        for _ in range(4):
            cost = await ask(service, name)
            assert (cost.cause, cost.num_again <= 1) == (Cause.NEW, True)
        await read(await service.regenerate(name))
        assert service.explain(name)[-1].cause is Cause.NEW
        assert "only what is new" in in_words(cost)

    scene(play)


def test_the_costs_of_the_latest_answers_are_remembered() -> None:
    async def play(service: SessionService) -> None:
        name = await new(service)
        asked = [(await ask(service, name, "x", max_new_tokens=1)).request_id for _ in range(MOST_TURNS + 3)]
        assert [cost.request_id for cost in service.explain(name)] == asked[-MOST_TURNS:]

    scene(play)


@pytest.mark.req("B4")
def test_an_edit_is_named_with_both_texts_and_the_message() -> None:
    async def play(service: SessionService) -> None:
        name = await new(service, system="be brief")
        await ask(service, name, "the first question")
        await ask(service, name, "the second question")
        await service.edit(name, 2, "the SECOND question")
        await read(await service.generate_stream(name))
        cost = service.explain(name)[-1]
        assert cost.cause is Cause.CHANGED
        assert cost.difference is not None
        assert (cost.difference.turn, cost.difference.message, cost.difference.role) == (2, 0, "user")
        assert cost.difference.before.startswith("second question")
        assert cost.difference.now.startswith("SECOND question")
        assert "'SECOND" in in_words(cost)
        await service.edit(name, 0, "another question")
        await read(await service.generate_stream(name))
        cost = service.explain(name)[-1]
        assert cost.difference is not None
        assert (cost.difference.turn, cost.difference.message, cost.difference.role) == (0, 1, "user"), "not the system"

    scene(play)


@pytest.mark.req("B4")
def test_a_template_that_rewrites_the_past_is_a_change() -> None:
    async def play(service: SessionService) -> None:
        with_template(service, REWRITES)
        name = await new(service)
        await ask(service, name, "q")
        cost = await ask(service, name, "r")
        assert cost.cause is Cause.CHANGED
        assert cost.difference is not None
        assert cost.difference.now.startswith("*;U:r;")

    scene(play)


@pytest.mark.req("B4")
def test_an_eviction_is_named_with_when_and_for_whom() -> None:
    async def play(service: SessionService) -> None:
        name = await new(service)
        await ask(service, name, LONG)
        other = await new(service, key="theirs")
        live = await service.answer(other, given="x" * 300)
        await read(live.read())
        cost = await ask(service, name)
        assert cost.cause is Cause.EVICTED
        assert cost.lost_to is not None
        assert cost.lost_to[0].startswith(live.request_id)
        assert cost.lost_to[1] == "theirs"
        assert cost.lost_s is not None
        assert 0 <= cost.lost_s < 60
        assert cost.num_again > 50
        assert f"for {live.request_id}" in in_words(cost, live.request_id)
        assert (await ask(service, name)).cause is Cause.NEW, "it is told once"

    scene(play, cells=400)


@pytest.mark.req("B4")
def test_others_that_begin_alike_are_no_reason() -> None:
    """KV of another session shares a beginning and goes on otherwise; what counts is that one's own was evicted."""

    async def play(service: SessionService) -> None:
        name = await new(service)
        await ask(service, name, LONG)
        other = await new(service)
        await read((await service.answer(other, given="words and " + "x" * 290)).read())
        cost = await ask(service, name)
        assert cost.num_cached > 0
        assert cost.cause is Cause.EVICTED

    scene(play, cells=400)


@pytest.mark.req("B4")
def test_replaced_weights_and_engines_that_died_are_named() -> None:
    async def play(service: SessionService) -> None:
        name = await new(service)
        await ask(service, name, LONG)
        service._model().opened.model.replace_weight("salt", 1)
        assert (await ask(service, name)).cause is Cause.WEIGHTS
        client: Any = service._model().client
        client.pool.cores[0].core._executor.backend.faults.add(Fault(FaultKind.FATAL))
        await read((await service.answer(name, given="dies")).read())
        assert (await ask(service, name)).cause is Cause.RESTART

    scene(play)


@pytest.mark.req("B4")
def test_another_worker_is_named() -> None:
    async def play(service: SessionService) -> None:
        name = await new(service)
        await ask(service, name, LONG)
        session = service._model().queue.find(name)
        client: Any = service._model().client
        client.pool.cores[session.core].stop()
        while session.core in service._model().cores_alive():
            await asyncio.sleep(0)
        assert (await ask(service, name)).cause is Cause.OTHER_WORKER

    scene(play, num_workers=2)


@pytest.mark.req("B4")
def test_a_restart_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "MIN_KV_TOKENS", 10_000)

    async def run() -> None:
        async with make_service(store=tmp_path) as service:
            name = await new(service)
            await ask(service, name, LONG)
        async with make_service(store=tmp_path) as service:
            cost = await ask(service, name)
            assert (cost.cause, cost.num_cached) == (Cause.RESTART, 0)
            assert (await ask(service, name)).cause is Cause.NEW
            data = await service.export(name)
            copy = await service.restore(data)
            assert (await ask(service, copy)).cause is Cause.NEW, "another one's KV is as good"

    asyncio.run(run())


@pytest.mark.req("B4")
def test_a_restart_is_no_reason_where_kv_comes_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with make_service(store=tmp_path) as service:
            name = await new(service)
            await ask(service, name, LONG)
        async with make_service(store=tmp_path) as service:
            cost = await ask(service, name)
            assert (cost.cause, cost.num_cached > 100) == (Cause.NEW, True)

    asyncio.run(run())


@pytest.mark.req("B4")
def test_a_restart_is_no_reason_for_what_was_never_computed(tmp_path: Path) -> None:
    async def run() -> None:
        async with make_service(store=tmp_path) as service:
            asked, answered = await new(service), await new(service)
            await service.append_input(asked, list(LONG.encode()))
            await ask(service, answered, LONG)
            await service.append_input(answered, list(LONG.encode()))
        async with make_service(store=tmp_path) as service:
            for name, cause in ((asked, Cause.FIRST), (answered, Cause.NEW)):
                await read(await service.generate_stream(name))
                assert service.explain(name)[-1].cause is cause

    asyncio.run(run())


@pytest.mark.req("B4")
def test_kv_that_is_not_looked_for_was_not_evicted() -> None:
    async def play(service: SessionService) -> None:
        name = await new(service)
        await ask(service, name, LONG)
        cost = await ask(service, name)
        assert (cost.cause, cost.num_cached) == (Cause.NOT_REUSED, 0)
        assert "evicted" not in in_words(cost)

    scene(play, config=EngineConfig(max_num_seqs=8, prefix_caching=False))


@pytest.mark.req("B4")
def test_kv_that_can_only_be_had_as_a_whole_was_not_evicted() -> None:
    async def play(service: SessionService) -> None:
        name = await new(service)
        await ask(service, name, LONG)
        assert (await ask(service, name)).cause is Cause.NEW
        await read(await service.regenerate(name))
        assert service.explain(name)[-1].cause is Cause.NOT_REUSED

    async def run() -> None:
        model = FakeModel(FakeConfig(vocab_size=258, max_context=1024, partial_cp=False, partial_rm=False))
        async with asyncio.timeout(60), SessionService(model, kv_cache_tokens=4096) as service:
            await play(service)

    asyncio.run(run())


@pytest.mark.req("B4")
@pytest.mark.parametrize(
    ("num_same", "num_cached", "cause", "num_again"),
    [
        (20, 20, Cause.NEW, 0),
        (20, 19, Cause.NEW, 1),  # the last token was drawn, and never computed
        (20, 18, Cause.EVICTED, 2),
        (19, 19, Cause.NEW, 0),
        (18, 18, Cause.CHANGED, 2),
        (18, 17, Cause.CHANGED, 2),
        (18, 16, Cause.EVICTED, 2),
    ],
)
def test_one_token_without_kv_is_no_eviction(num_same: int, num_cached: int, cause: Cause, num_again: int) -> None:
    """A log of 20 tokens had KV; so many of them are the same now, and so many were found."""

    async def play(service: SessionService) -> None:
        session = service._model().queue.find(await new(service))
        session.log = replace(TokenLog().added(0, list(range(30)), Turn("input", (), 30)), low=num_same)
        session.mark = KVMark(20, session.core, 0, 5.0)
        verdict = CacheVerdict(num_cached, loss=Loss(6.0, "room", "other", "", 20))
        asked = ("request", 30, num_cached, verdict, 0, 7.0, service._model().opened.text.tokenizer)
        cost = cost_of(session, *asked)
        assert (cost.cause, cost.num_again) == (cause, num_again)

    scene(play)


def test_which_message_a_character_lies_in() -> None:
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}, {"role": "user"}]
    text = "system: be brief\nuser: hi\nassistant: "
    assert [message_at(said[:2], text, place) for place in (0, 10, 15, 16, 24)] == [0, 0, 0, 1, 1]
    assert message_at([], text, 0) is None


# -- these tests can fail ---------------------------------------------------------------------------------------------

BUGS = {
    PlantedBug(
        "nobody is blamed", KVManager, "_note_loss", "by is None", "True"
    ): test_an_eviction_is_named_with_when_and_for_whom,
    PlantedBug(
        "a cut goes unnoticed", TokenLog, "_cut", "min(self.low, keep)", "self.low"
    ): test_an_edit_is_named_with_both_texts_and_the_message,
    PlantedBug(
        "texts from a token too late", PrefixIndex, "divergence",
        "slice(matched, matched + num_shown)", "slice(matched + 1, matched + num_shown)"
    ): test_an_edit_is_named_with_both_texts_and_the_message,
    PlantedBug(
        "a loss is forgotten when the core looks", KVManager, "verdict", "request.hints.owner or ''", "''"
    ): test_an_eviction_is_named_with_when_and_for_whom,
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    with pytest.raises(AssertionError):
        BUGS[bug]()
