"""`overflow="drop_oldest_turns"`: a conversation that outgrows its context loses old turns, seldom and many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.session.helpers import REWRITES, continuation, read, tokens_of, with_template, with_text
from tests.session.storing import ask
from tests.text.families import TEMPLATES, VARIABLES, byte_level
from tokenmill import LLM, SessionService
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.errors import ContextOverflow, InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.session.explain import Cause, in_words
from tokenmill.session.manager import SessionLimits
from tokenmill.session.records import open_file, replay, unpack
from tokenmill.session.session import Session, SessionOptions, TurnInfo
from tokenmill.text.messages import Message
from tokenmill.text.model_text import ModelText
from tokenmill.text.template import PLAIN_TEMPLATE, ChatTemplate
from tokenmill.text.tokenizer import ByteTokenizer

CONTEXT = 512
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
DROPPING: dict[str, Any] = {"sampling_params": PARAMS, "seed": 1, "overflow": "drop_oldest_turns"}
QUESTION = "what comes after the number {}?"
PLAIN = ModelText(ByteTokenizer(258), ChatTemplate(PLAIN_TEMPLATE, ByteTokenizer(258)))


def make(text: ModelText | None = None, **options: Any) -> SessionService:
    """A service whose model has a short context."""
    vocab_size = 258 if text is None else text.tokenizer.vocab_size
    model = FakeModel(FakeConfig(vocab_size=vocab_size, max_context=CONTEXT, block_size=4))
    service = SessionService(model, kv_cache_tokens=4096, limits=SessionLimits(stall_timeout_s=None), **options)
    if text is not None:
        with_text(service, text)
    return service


def scene(play: Callable[[SessionService], Awaitable[Any]], text: ModelText | None = None, **options: Any) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(60), make(text, **options) as service:
            return await play(service)

    return asyncio.run(run())


def family(name: str) -> ModelText:
    """A real kind of tokenizer and template."""
    tokenizer = byte_level()
    return ModelText(tokenizer, ChatTemplate(TEMPLATES[name], tokenizer, VARIABLES))


async def until_dropped(service: SessionService, name: str) -> int:
    """Ask until the first turns are gone; the number of questions."""
    number = 0
    while number == 0 or QUESTION.format(0) in contents(service.get(name).turns):
        await ask(service, name, QUESTION.format(number))
        number += 1
    return number


def contents(turns: Sequence[TurnInfo]) -> list[str]:
    return [str(message["content"]) for turn in turns for message in turn.messages]


def dropping(keep: float = 0.5, system: str | None = "be brief") -> Session:
    """A session on its own: what would be generated is given to it."""
    options = SessionOptions(sampling=PARAMS, overflow="drop_oldest_turns", overflow_keep=keep)
    return Session("s", 0, options, system, now=0.0)


def exchange(session: Session, question: str, answer: str, text: ModelText = PLAIN) -> list[int]:
    """Ask and have this answered; the answer's ids."""
    num_prompt = session.append(question, text, CONTEXT, raw=False)
    session.commit_input(text)
    assert len(session.log) == num_prompt < CONTEXT
    ids = text.tokenizer.encode(answer, add_special=False)
    session.take_answer(ids, "length", None, PARAMS, text.tokenizer)
    return ids


def messages(session: Session) -> list[Message]:
    return session.log.messages


# -- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.req("R36")
@pytest.mark.parametrize("name", ["chatml", "llama 3"])
def test_21_3_what_is_computed_again_is_amortized_over_many_turns(name: str) -> None:
    async def play(service: SessionService) -> None:
        session = await service.create_session(**DROPPING, system="be good")
        number = await until_dropped(service, session)
        num_new = num_computed = num_drops = 0
        for turn in range(number, number + 200):
            await service.append_input(session, QUESTION.format(turn))
            _, ids, last = await read(await service.generate_stream(session))
            assert last.usage is not None
            assert len(ids) == PARAMS.max_tokens, "there is always room for the answer"
            num_new += service.get(session).turns[-2].num_tokens or 0
            num_computed += last.usage.prompt_tokens - last.usage.cached_tokens
            num_drops += service.explain(session)[-1].cause is Cause.DROPPED_TURNS
        assert num_drops >= 5
        assert num_computed <= 3 * num_new, "of prompt tokens alone, although the answers fill the context, too"

    scene(play, family(name))


@pytest.mark.req("R36", "B4")
def test_21_3_the_cause_is_told() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(**DROPPING, system="be brief")
        await until_dropped(service, name)
        cost = service.explain(name)[-1]
        assert cost.cause is Cause.DROPPED_TURNS
        assert cost.num_cached >= len("system: be brief\n") - 4, "the system prompt's KV is reused"
        assert "dropped to fit the context" in in_words(cost)
        await ask(service, name)
        assert service.explain(name)[-1].cause is Cause.NEW

    scene(play)


# -- what is left -----------------------------------------------------------------------------------------------------


@pytest.mark.req("R36")
def test_21_3_the_turns_that_are_kept_stay_turns_with_their_own_ids() -> None:
    session, said, answers, num_drops = dropping(), [], [], 0
    for number in range(60):
        said.append(f"{number} " + "x" * 30)
        answers.append(exchange(session, said[-1], f"{number} " + "y" * 10))
        turns, log = session.log.turns, session.log.tokens.tolist()
        kept = len(turns) // 2
        num_drops += kept < len(said) and kept <= 6
        assert [turn.kind for turn in turns] == ["input", "answer"] * kept
        assert [message["role"] for message in messages(session)] == ["system", *["user", "assistant"] * kept]
        assert [message["content"] for message in messages(session)][1::2] == said[-kept:]
        ends = [0, *(turn.end for turn in turns)]
        ids = [log[begin:end] for begin, end in pairwise(ends)]
        assert ids[1::2] == answers[-kept:], "what was generated is never tokenized anew"
        rendered = "".join(f"{message['role']}: {message['content']}\n" for message in messages(session))
        assert bytes(log).decode() == rendered.removesuffix("\n")
    assert num_drops > 5


@pytest.mark.req("R36")
def test_21_3_kept_turns_can_be_gone_back_to_forked_and_exported() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(**DROPPING, system="be brief")
        await until_dropped(service, name)
        before, log = service.get(name), tokens_of(service, name)
        copy = await service.restore(await service.export(name))
        assert service.get(copy).turns == before.turns
        assert tokens_of(service, copy) == log
        child = await service.fork(name, at_turn=4)
        assert service.get(child).turns == before.turns[:4]
        kept = sum(turn.num_tokens or 0 for turn in before.turns[:3])
        await service.rewind(name, at_token=kept + 5)
        assert service.get(name).turns[:3] == before.turns[:3]
        assert service.get(name).turns[3].finish_reason == "cut"
        await service.rewind(name, at_turn=2)
        assert service.get(name).turns == before.turns[:2]
        ids = await ask(service, name, "and now?")
        log = tokens_of(service, name)
        assert ids == continuation(log[: len(log) - len(ids)], PARAMS, seed=1, stop_ids=frozenset())

    scene(play)


def test_21_3_a_last_exchange_above_the_mark_stays_if_it_fits() -> None:
    session = dropping()
    for question in ("short", "x" * 300, "y" * 140):
        exchange(session, question, "answer")
    assert [message["content"] for message in messages(session)[1::2]] == ["x" * 300, "y" * 140]
    exchange(session, "z" * 400, "answer")
    before = messages(session)
    assert [message["content"] for message in before] == ["be brief", "z" * 400, "answer"]
    with pytest.raises(ContextOverflow, match=f"is {CONTEXT} tokens"):
        session.append("x" * CONTEXT, PLAIN, CONTEXT, raw=False)
    assert messages(session) == before
    assert session.inbox == ()


def test_21_3_a_past_that_was_given_at_once_is_cut_between_its_messages() -> None:
    session = dropping(system=None, keep=0.75)
    past = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "x" * 40} for i in range(6)]
    first: list[Message] = [{"role": "developer", "content": "be brief"}, *past]
    session.append(first, PLAIN, CONTEXT, raw=False)
    exchange(session, "and now?", "answer")
    exchange(session, "y" * 170, "answer")
    turns = session.log.turns
    assert [turn.kind for turn in turns] == ["input", "answer", "input", "answer"]
    assert turns[0].messages == (first[0], *past[4:], {"role": "user", "content": "and now?"})
    assert all(turn.end is not None for turn in turns)


def test_21_3_raw_input_is_dropped_with_what_came_before_it() -> None:
    session = dropping(system=None)
    exchange(session, "first", "answer")
    session.append("x" * 200, PLAIN, CONTEXT, raw=True)
    for number in range(12):
        exchange(session, QUESTION.format(number), "answer")
    assert not session.log.num_raw
    kept = len(session.log.turns) // 2
    assert [one["content"] for one in messages(session)[::2]] == [QUESTION.format(i) for i in range(12 - kept, 12)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_21_3_whatever_the_template_the_log_is_what_it_would_write_now(name: str) -> None:
    text = family(name)
    session = dropping(system=None if name == "mistral" else "be good")
    for number in range(40):
        session.append(QUESTION.format(number), text, CONTEXT, raw=False)
        session.commit_input(text)
        assert text.tokenizer.decode(session.log.tokens.tolist(), skip_special=False) == text.chat_template().render(
            messages(session)
        )
        said = text.tokenizer.encode("good answer", add_special=False)
        session.take_answer(said, "length", None, PARAMS, text.tokenizer)
    kinds = [turn.kind for turn in session.log.turns]
    assert kinds == ["input", "answer"] * (len(kinds) // 2)
    assert 2 < len(kinds) < 60


def test_21_3_turns_that_a_template_rewrites_can_be_gone_back_to() -> None:
    async def play(service: SessionService) -> None:
        with_template(service, REWRITES)
        name = await service.create_session(**DROPPING)
        for number in range(16):
            ids = await ask(service, name, f"{number} " + "x" * 60)
            log = tokens_of(service, name)
            assert ids == continuation(log[: len(log) - len(ids)], PARAMS, seed=1, stop_ids=frozenset())
        info = service.get(name)
        assert [turn.kind for turn in info.turns] == ["input", "answer"] * (len(info.turns) // 2)
        assert 4 <= len(info.turns) < 20
        await service.rewind(name, at_turn=2)
        assert contents(service.get(name).turns) == contents(info.turns[:2])
        await ask(service, name, "and now?")

    scene(play)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 60)), min_size=5, max_size=30),
    keep=st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]),
)
def test_21_3_any_sizes_leave_the_latest_turns_and_never_outgrow_the_context(
    sizes: list[tuple[int, int]], keep: float
) -> None:
    session, said = dropping(keep=keep), []
    for number, (num_asked, num_answered) in enumerate(sizes):
        said.append(f"{number} " + "x" * num_asked)
        before = len(session.log.turns)
        exchange(session, said[-1], "y" * num_answered)
        kept = [message["content"] for message in messages(session)][1::2]
        assert kept == said[-len(kept) :]
        rendered = "".join(f"{message['role']}: {message['content']}\n" for message in messages(session))
        assert bytes(session.log.tokens.tolist()).decode() == rendered.removesuffix("\n")
        if len(session.log.turns) < before:
            num_prompt = session.log.turns[-2].end or 0
            assert num_prompt <= keep * (CONTEXT - 1) or len(kept) <= 2


# -- restarts and replays ---------------------------------------------------------------------------------------------


@pytest.mark.req("B3", "R36")
def test_21_3_a_restart_changes_nothing_in_what_is_kept(tmp_path: Path) -> None:
    async def begin(service: SessionService) -> None:
        await service.create_session(**DROPPING, system="be brief")

    def asking(*numbers: int) -> Callable[[SessionService], Awaitable[None]]:
        async def run(service: SessionService) -> None:
            (info,) = service.list()
            for number in numbers:
                await ask(service, info.session_id, QUESTION.format(number))

        return run

    async def wait(service: SessionService) -> None:
        (info,) = service.list()
        await service.append_input(info.session_id, "x" * 200)
        assert service.get(info.session_id).num_tokens < info.num_tokens, "turns are dropped before it is answered"

    async def answer(service: SessionService) -> None:
        (info,) = service.list()
        await read(await service.generate_stream(info.session_id))

    async def kept(service: SessionService) -> tuple[list[int], tuple[TurnInfo, ...]]:
        (info,) = service.list()
        return tokens_of(service, info.session_id), info.turns

    async def all_at_once(service: SessionService) -> tuple[list[int], tuple[TurnInfo, ...]]:
        for play in (begin, asking(*range(28)), wait, answer, asking(28, 29)):
            await play(service)
        return await kept(service)

    often = tmp_path / "often"
    for play in (begin, *(asking(*range(i, i + 4)) for i in range(0, 28, 4)), wait, answer, asking(28, 29)):
        scene(play, store=often)
    assert scene(kept, store=often) == scene(all_at_once, store=tmp_path / "never")


@pytest.mark.req("B5")
def test_21_3_replay_runs_the_answers_that_the_file_has_the_context_of(tmp_path: Path) -> None:
    path = tmp_path / "long.session"

    async def talk(service: SessionService) -> int:
        name = await service.create_session(**DROPPING, system="be brief")
        number = await until_dropped(service, name)
        for more in range(3):
            await ask(service, name, QUESTION.format(number + more))
        await service.save(name, path)
        return len(service.get(name).turns)

    num_turns = scene(talk)
    with LLM(FakeModel(FakeConfig(vocab_size=258, max_context=CONTEXT, block_size=4)), kv_cache_tokens=2048) as llm:
        found = list(replay(open_file(path, llm), llm))
    assert [one.turn for one in found] == [num_turns - 7, num_turns - 5, num_turns - 3, num_turns - 1]
    assert [one.at for one in found] == [None] * 4


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("R36")
@pytest.mark.parametrize("keep", [0, 0.25, 0.75, 1])
def test_21_3_the_low_water_mark_is_an_option(keep: float) -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(**DROPPING, overflow_keep=keep)
        await until_dropped(service, name)
        num_prompt, one = service.explain(name)[-1].num_prompt, len(QUESTION) + 40
        assert keep * CONTEXT - one < num_prompt <= max(keep * CONTEXT, 2 * one)
        assert len(service.get(name).turns) >= 4, "the last exchange stays"
        data = await service.export(name)
        assert unpack(data, "x", 258).record.head["overflow_keep"] == keep

    scene(play)


@pytest.mark.parametrize("keep", [-0.1, 1.1, float("nan"), True, "half", None])
def test_21_3_a_low_water_mark_that_is_no_fraction_is_refused(keep: Any) -> None:
    async def play(service: SessionService) -> None:
        with pytest.raises(InvalidRequest, match="overflow_keep must be a number from 0 to 1"):
            await service.create_session(**DROPPING, overflow_keep=keep)

    scene(play)


def test_21_3_room_is_made_for_an_answer_whose_length_is_asked_for() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(**DROPPING)
        for number in range(8):
            live = await service.answer(name, 100, given=QUESTION.format(number), must_fit=True)
            assert len((await read(live.read()))[1]) == 100
        for number in range(3):  # an upper bound only: half of the context is enough
            await service.append_input(name, QUESTION.format(number))
            _, ids, _ = await read(await service.generate_stream(name, 100_000))
            assert len(ids) >= CONTEXT // 2
        with pytest.raises(ContextOverflow):
            await service.answer(name, CONTEXT, given="x", must_fit=True)

    scene(play)
