"""A turn costs what is new in it: the work of a late turn is that of an early one, counted instead of timed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.session.helpers import make_service, read, with_text
from tests.text.families import TEMPLATES, VARIABLES, byte_level
from tokenmill import SessionService
from tokenmill.engine.request import RequestTokens
from tokenmill.params import SamplingParams
from tokenmill.pipeline.output import Generation
from tokenmill.session import log as session_log
from tokenmill.session import store as session_store
from tokenmill.session.log import SharedList, TokenLog, Tokens, Turn
from tokenmill.text import template
from tokenmill.text.model_text import ModelText
from tokenmill.text.template import ChatTemplate

NUM_TURNS = 60
MODEL = {"vocab_size": 600, "max_context": 8192}


class Work:
    """Counts what a turn does that could grow with its history."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: Counter[str] = Counter()
        run, encode, written = template.run_template, type(TOKENIZER).encode_template, session_store.turn_json
        copied, counted = session_log._Storage.__init__, session_log.num_chars
        listed, iterated = RequestTokens.__getitem__, RequestTokens.__iter__
        prompt_ids = Generation.prompt_token_ids.fget

        def run_counted(template: Any, variables: Any) -> str:
            self.done["templates run"] += 1
            self.done["messages rendered"] += len(variables["messages"])
            return run(template, variables)

        def encode_counted(*args: Any, **options: Any) -> list[int]:
            self.done["characters encoded"] += len(args[1])
            return encode(*args, **options)

        def written_counted(turn: Turn) -> Any:
            self.done["turns written"] += 1
            return written(turn)

        def copied_counted(storage: Any, ids: Any) -> None:
            self.done["ids copied"] += len(ids)
            copied(storage, ids)

        def counted_counted(value: Any) -> int:
            self.done["values counted"] += 1
            return counted(value)

        def listed_counted(tokens: RequestTokens, index: Any) -> Any:
            found = listed(tokens, index)
            self.done["ids listed"] += len(found) if isinstance(index, slice) else 1
            return found

        def iterated_counted(tokens: RequestTokens) -> Any:
            self.done["ids listed"] += len(tokens)
            return iterated(tokens)

        def prompt_ids_counted(generation: Generation) -> list[int]:
            self.done["ids listed"] += generation.choices[0].request.num_prompt
            return prompt_ids(generation)

        monkeypatch.setattr(RequestTokens, "__getitem__", listed_counted)
        monkeypatch.setattr(RequestTokens, "__iter__", iterated_counted)
        monkeypatch.setattr(Generation, "prompt_token_ids", property(prompt_ids_counted))
        monkeypatch.setattr(template, "run_template", run_counted)
        monkeypatch.setattr(type(TOKENIZER), "encode_template", encode_counted)
        monkeypatch.setattr(session_store, "turn_json", written_counted)
        monkeypatch.setattr(session_log._Storage, "__init__", copied_counted)
        monkeypatch.setattr(session_log, "num_chars", counted_counted)


TOKENIZER = byte_level()
LETTERS = TOKENIZER.encode("bcdfgjkmnpqvxz", add_special=False)
"""Of which answers consist: a template that trims them rewrites nothing."""
ANSWER = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, allowed_token_ids=tuple(LETTERS))


def text_of(name: str) -> ModelText:
    return ModelText(TOKENIZER, ChatTemplate(TEMPLATES[name], TOKENIZER, VARIABLES))


async def turns(service: SessionService, work: Work) -> list[Counter[str]]:
    """The work of each turn of one session, all of the same size."""
    name = await service.create_session(sampling_params=ANSWER, seed=1, system="be brief")
    found = []
    for number in range(NUM_TURNS):
        work.done.clear()
        await service.append_input(name, f"question {number:03}")
        await read(await service.generate_stream(name))
        found.append(+work.done)
    return found


@pytest.mark.parametrize("name", ["chatml", "llama 3", "phi 3"])
def test_23_3_the_work_of_a_turn_does_not_grow(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def run() -> list[Counter[str]]:
        async with asyncio.timeout(60), make_service(cells=8192, model=MODEL, store=tmp_path) as service:
            with_text(service, text_of(name))
            return await turns(service, Work(monkeypatch))

    found = asyncio.run(run())
    early, late = found[10:20], found[-10:]
    for kind in sorted({kind for one in found for kind in one}):
        most = max(one[kind] for one in early)
        assert max(one[kind] for one in late) <= most + 8, f"{kind}: {[one[kind] for one in found]}"
    assert max(one["templates run"] for one in found) <= 3, "what it wrote, what it writes, which tokens are its own"
    assert max(one["turns written"] for one in found) == 2


@pytest.mark.parametrize("name", ["qwen 3"])
def test_23_3_a_template_that_looks_at_everything_runs_once_a_turn(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def run() -> list[Counter[str]]:
        async with asyncio.timeout(60), make_service(cells=8192, model=MODEL, store=tmp_path) as service:
            with_text(service, text_of(name))
            return await turns(service, Work(monkeypatch))

    found = asyncio.run(run())
    assert max(one["templates run"] for one in found) <= 3
    assert max(one["turns written"] for one in found) == 2


# -- values that share storage ----------------------------------------------------------------------------------------


def test_23_3_logs_that_part_do_not_see_each_other() -> None:
    begin = TokenLog().added(0, [1, 2], Turn("input", ({"role": "user", "content": "x"},), 2))
    one = begin.added(2, [3], Turn("answer", ({"role": "assistant", "content": "y"},), 3))
    other = begin.added(2, [4, 5], Turn("answer", ({"role": "assistant", "content": "zz"},), 4))
    assert [log.tokens.tolist() for log in (begin, one, other)] == [[1, 2], [1, 2, 3], [1, 2, 4, 5]]
    assert [len(log.turns) for log in (begin, one, other)] == [1, 2, 2]
    assert [log.messages[-1]["content"] for log in (begin, one, other)] == ["x", "y", "zz"]
    assert one.tokens.num_same(other.tokens) == 2
    assert begin.tokens.num_same(one.tokens) == 2
    assert one.turns.num_shared(other.turns) == 1


def test_23_3_a_log_that_goes_on_copies_nothing() -> None:
    log = TokenLog()
    for number in range(100):
        log = log.added(len(log), [number] * 7, Turn("input", (), 7 * (number + 1)))
    longer = log.added(len(log), [7], Turn("answer", (), len(log) + 1))
    assert longer.turns._items is log.turns._items
    assert longer.tokens._storage is log.tokens._storage
    assert (len(log), len(log.turns), len(longer)) == (700, 100, 701)


def test_23_3_shared_sequences_behave_like_lists() -> None:
    items = SharedList(range(5))
    longer, shorter = items.extended([5]), items.first(2)
    assert (list(items), list(longer), list(shorter)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1])
    assert (shorter[-1], shorter[0:9], shorter[::-1], items[-1]) == (1, [0, 1], [1, 0], 4)
    assert shorter == [0, 1]
    assert shorter != [0]
    assert shorter.extended([9]) == [0, 1, 9]
    assert items == [0, 1, 2, 3, 4]
    for wrong in (2, -3):
        with pytest.raises(IndexError):
            shorter[wrong]
    assert not Tokens([1, 2]).array.flags.writeable
    assert Tokens([1, 2]).first(1).extended([3]) == Tokens([1, 3])
