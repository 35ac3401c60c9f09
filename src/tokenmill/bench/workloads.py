"""What is asked of a server under load: conversations of random words or ids, or prompts from a file.

A server is asked once for the ids of some common words; prompts are then drawn from them, so every id is one of its
own and every text is about as long as it should be. How long prompts really were is for the server to say (`usage`).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenmill.bench.load_clients import RequestFailed, Target, call

Prompt = str | list[int]

WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even most made
after also did many off before must well back through years where much your way down should because long each just
state people those too little good world very year still see work men day get here old life both between being under
three never know same last another while us might great go come since against right came take used himself few house
use place during without again home around small however found part school every once general high upon until always
"""
AT_A_TIME = 8
"""Words whose ids are asked for at the same time."""


@dataclass(frozen=True)
class Word:
    """A word as it follows another, and its ids; none if the server does not tell them."""

    text: str
    ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.ids) or 1


@dataclass(frozen=True)
class Turn:
    """Something to be answered."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True)
class Conversation:
    """Turns that follow each other; a request on its own is a conversation of one."""

    turns: tuple[Turn, ...]


async def learn_words(target: Target, model: str) -> list[Word]:
    """The common words with their ids, from a server that has /tokenize: as vLLM has it, or as llama.cpp has it."""
    places = asyncio.Semaphore(AT_A_TIME)

    async def learn(text: str) -> Word:
        asked = {"model": model, "prompt": text, "add_special_tokens": False, "content": text, "add_special": False}
        async with places:
            answer = await call(target, "POST", "/tokenize", asked)
        return Word(text, tuple(int(token) for token in answer["tokens"]))

    texts = [f" {word}" for word in WORDS.split()]
    try:
        first = await learn(texts[0])
        return [first, *await asyncio.gather(*(learn(text) for text in texts[1:]))]
    except (RequestFailed, TypeError, KeyError, ValueError):
        return [Word(text) for text in texts]


# -- prompts ----------------------------------------------------------------------------------------------------------


class Prompts(Protocol):
    """Makes random prompts, of parts."""

    def part(self, num_tokens: int) -> Prompt: ...

    def join(self, first: Prompt, second: Prompt) -> Prompt: ...


class IdPrompts:
    """Prompts as ids: exactly as long as they should be."""

    def __init__(self, words: Sequence[Word], seed: int) -> None:
        self._ids = sorted({token for word in words for token in word.ids})
        if not self._ids:
            raise ValueError("the ids of no word are known")
        self._random = random.Random(seed)

    def part(self, num_tokens: int) -> Prompt:
        return self._random.choices(self._ids, k=num_tokens)

    def join(self, first: Prompt, second: Prompt) -> Prompt:
        return [*first, *second]


class TextPrompts:
    """Prompts as texts, about as long as they should be."""

    def __init__(self, words: Sequence[Word], seed: int) -> None:
        self._words = words
        self._random = random.Random(seed)

    def part(self, num_tokens: int) -> Prompt:
        chosen: list[str] = []
        left, words = num_tokens, list(self._words)
        while words and left > 0:
            word = self._random.choice(words)
            if word.num_tokens > left:
                words = [one for one in words if one.num_tokens <= left]
                continue
            chosen.append(word.text)
            left -= word.num_tokens
        return "".join(chosen) or self._words[0].text

    def join(self, first: Prompt, second: Prompt) -> Prompt:
        return f"{first}{second}"


# -- workloads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """How long prompts and answers are, in tokens; each is drawn from `ratio` less to `ratio` more."""

    prompt: int
    output: int
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1:
            raise ValueError(f"lengths must be at least 1 token, not {self.prompt} and {self.output}")
        if not 0 <= self.ratio < 1:
            raise ValueError(f"the range ratio must be in [0, 1), not {self.ratio:g}")

    def draw(self, numbers: random.Random) -> tuple[int, int]:
        return self._around(self.prompt, numbers), self._around(self.output, numbers)

    def _around(self, length: int, numbers: random.Random) -> int:
        return max(1, numbers.randint(round(length * (1 - self.ratio)), round(length * (1 + self.ratio))))


def random_requests(prompts: Prompts, count: int, lengths: Lengths, seed: int) -> list[Conversation]:
    """Requests that have nothing in common."""
    return multi_turn(prompts, count, 1, lengths, seed)


def multi_turn(prompts: Prompts, count: int, num_turns: int, lengths: Lengths, seed: int) -> list[Conversation]:
    """Conversations; the lengths are those of one turn."""
    if num_turns < 1:
        raise ValueError(f"a conversation has at least 1 turn, not {num_turns}")
    numbers = random.Random(seed)
    found = []
    for _ in range(count):
        drawn = [lengths.draw(numbers) for _ in range(num_turns)]
        found.append(Conversation(tuple(_turn(prompts.part(prompt), output) for prompt, output in drawn)))
    return found


def shared_prefix(
    prompts: Prompts, count: int, num_prefixes: int, prefix_len: int, suffix_len: int, max_tokens: int
) -> list[Conversation]:
    """Requests that begin with one of a few prefixes, in turn, and then differ."""
    if num_prefixes < 1 or prefix_len < 1 or suffix_len < 1:
        raise ValueError(f"at least 1 prefix, of 1 token, and 1 token after it: not {num_prefixes} x {prefix_len}")
    prefixes = [prompts.part(prefix_len) for _ in range(min(num_prefixes, count))]
    asked = [prompts.join(prefixes[i % len(prefixes)], prompts.part(suffix_len)) for i in range(count)]
    return [Conversation((_turn(prompt, max_tokens),)) for prompt in asked]


def from_file(path: Path, count: int, max_tokens: int) -> list[Conversation]:
    """The `prompt` of each line of a .jsonl file, over and over; `output_tokens` says how long its answer is."""
    turns = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns.append(Turn(str(row["prompt"]), int(row.get("output_tokens", max_tokens))))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f'{path}:{number}: a line is {{"prompt": "..."}}, not {line[:80]}') from None
    if not turns:
        raise ValueError(f"{path} has no prompts")
    return [Conversation((turns[i % len(turns)],)) for i in range(count)]


def _turn(prompt: Prompt, max_tokens: int) -> Turn:
    return Turn(prompt.lstrip() if isinstance(prompt, str) else prompt, max_tokens)
