"""Workloads have the shape that was asked for, and the same seed makes the same one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenmill.bench.workloads import (
    IdPrompts,
    Lengths,
    LoadConversation,
    TextPrompts,
    Word,
    from_file,
    multi_turn,
    random_requests,
    shared_prefix,
)

SINGLE = [Word(f" w{i}", (i,)) for i in range(100)]
"""Each word is a token."""
LETTERS = [Word(" the", (32, 116, 104, 101)), Word(" a", (32, 97))]
"""As a tokenizer of bytes has them."""


def prompts_of(conversations: list[LoadConversation]) -> list[object]:
    return [turn.prompt for one in conversations for turn in one.turns]


def test_ids_are_those_of_the_server_and_as_many_as_asked() -> None:
    made = random_requests(IdPrompts(LETTERS, 0), 5, Lengths(12, 3), seed=0)
    assert [len(one.turns) for one in made] == [1] * 5
    for prompt in prompts_of(made):
        assert isinstance(prompt, list)
        assert len(prompt) == 12
        assert set(prompt) <= {32, 97, 101, 104, 116}
    assert all(one.turns[0].max_tokens == 3 for one in made)


def test_texts_are_as_long_as_their_words_have_tokens() -> None:
    prompt = TextPrompts(SINGLE, 0).part(9)
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 9
    for num_tokens in (2, 4, 7, 100):
        text = TextPrompts(LETTERS, 0).part(num_tokens)
        assert num_tokens - 1 <= len(text) <= num_tokens
    assert TextPrompts(LETTERS, 0).part(1)  # shorter than any word, and yet not empty
    assert not TextPrompts(SINGLE, 0).join("", TextPrompts(SINGLE, 1).part(3)).startswith("w")
    made = random_requests(TextPrompts(SINGLE, 0), 1, Lengths(3, 3), seed=0)
    assert str(made[0].turns[0].prompt).startswith("w")


def test_lengths_stay_in_their_range_and_use_it() -> None:
    made = random_requests(IdPrompts(SINGLE, 0), 400, Lengths(100, 20, ratio=0.5), seed=1)
    lengths = {len(one.turns[0].prompt) for one in made}
    outputs = {one.turns[0].max_tokens for one in made}
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(lengths) > 50
    assert (min(outputs), max(outputs)) == (10, 30)


def test_the_seed_decides() -> None:
    def made(seed: int) -> list[object]:
        return prompts_of(random_requests(IdPrompts(SINGLE, seed), 3, Lengths(8, 1), seed))

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_prefixes_are_shared_in_turn_and_what_follows_is_not() -> None:
    made = shared_prefix(IdPrompts(SINGLE, 0), 6, num_prefixes=2, prefix_len=10, suffix_len=5, max_tokens=4)
    asked = [one.turns[0].prompt for one in made]
    assert [len(prompt) for prompt in asked] == [15] * 6
    prefixes = [tuple(prompt[:10]) for prompt in asked]
    assert prefixes[0] == prefixes[2] == prefixes[4] != prefixes[1] == prefixes[3] == prefixes[5]
    assert len({tuple(prompt[10:]) for prompt in asked}) == 6
    texts = shared_prefix(TextPrompts(SINGLE, 0), 2, num_prefixes=1, prefix_len=10, suffix_len=5, max_tokens=4)
    first, second = (str(one.turns[0].prompt).split() for one in texts)
    assert len(first) == 15
    assert first[:10] == second[:10]
    assert first[10:] != second[10:]


def test_conversations_have_turns_of_their_own() -> None:
    made = multi_turn(TextPrompts(SINGLE, 0), 3, 4, Lengths(6, 2), seed=0)
    assert [len(one.turns) for one in made] == [4] * 3
    assert len({str(prompt) for prompt in prompts_of(made)}) == 12


def test_prompts_of_a_file_come_over_and_over(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "one"}, {"prompt": "two", "output_tokens": 5}]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    made = from_file(path, 3, 9)
    assert prompts_of(made) == ["one", "two", "one"]
    assert [one.turns[0].max_tokens for one in made] == [9, 5, 9]


@pytest.mark.parametrize("line", ['{"text": "hi"}', '{"prompt": "hi", "output_tokens": "many"}', "[1]", "no json"])
def test_a_file_that_is_wrong_says_where(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2"):
        from_file(path, 1, 1)


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        from_file(tmp_path / "empty.jsonl", 1, 1)
    with pytest.raises(ValueError, match="at least 1 token"):
        Lengths(0, 1)
    with pytest.raises(ValueError, match="range ratio"):
        Lengths(1, 1, 1.0)
    with pytest.raises(ValueError, match="at least 1 turn"):
        multi_turn(TextPrompts(SINGLE, 0), 1, 0, Lengths(1, 1), 0)
    with pytest.raises(ValueError, match="the ids of no word are known"):
        IdPrompts([Word(" a")], 0)
