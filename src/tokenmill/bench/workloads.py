"""Load on a server: conversations of random words or ids or from a file, arrival times, and `Load`, which sends them.

A server is asked once for the ids of some common words; prompts are then drawn from them, so every id is one of its
own and every text is about as long as it should be. How long prompts really were is for the server to say (`usage`).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tokenmill.bench.load_clients import HttpFailure, Sample, Stream, Target, call, chat_body, completion_body
from tokenmill.progress import ProgressLine

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
class LoadTurn:
    """Something to be answered."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True)
class LoadConversation:
    """Turns that follow each other; a request on its own is a conversation of one."""

    turns: tuple[LoadTurn, ...]


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
    except (HttpFailure, TypeError, KeyError, ValueError):
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


def random_requests(prompts: Prompts, count: int, lengths: Lengths, seed: int) -> list[LoadConversation]:
    """Requests that have nothing in common."""
    return multi_turn(prompts, count, 1, lengths, seed)


def multi_turn(prompts: Prompts, count: int, num_turns: int, lengths: Lengths, seed: int) -> list[LoadConversation]:
    """Conversations; the lengths are those of one turn."""
    if num_turns < 1:
        raise ValueError(f"a conversation has at least 1 turn, not {num_turns}")
    numbers = random.Random(seed)
    found = []
    for _ in range(count):
        drawn = [lengths.draw(numbers) for _ in range(num_turns)]
        found.append(LoadConversation(tuple(_turn(prompts.part(prompt), output) for prompt, output in drawn)))
    return found


def shared_prefix(
    prompts: Prompts, count: int, num_prefixes: int, prefix_len: int, suffix_len: int, max_tokens: int
) -> list[LoadConversation]:
    """Requests that begin with one of a few prefixes, in turn, and then differ."""
    if num_prefixes < 1 or prefix_len < 1 or suffix_len < 1:
        raise ValueError(f"at least 1 prefix, of 1 token, and 1 token after it: not {num_prefixes} x {prefix_len}")
    prefixes = [prompts.part(prefix_len) for _ in range(min(num_prefixes, count))]
    asked = [prompts.join(prefixes[i % len(prefixes)], prompts.part(suffix_len)) for i in range(count)]
    return [LoadConversation((_turn(prompt, max_tokens),)) for prompt in asked]


def from_file(path: Path, count: int, max_tokens: int) -> list[LoadConversation]:
    """The `prompt` of each line of a .jsonl file, over and over; `output_tokens` says how long its answer is."""
    turns = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns.append(LoadTurn(str(row["prompt"]), int(row.get("output_tokens", max_tokens))))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f'{path}:{number}: a line is {{"prompt": "..."}}, not {line[:80]}') from None
    if not turns:
        raise ValueError(f"{path} has no prompts")
    return [LoadConversation((turns[i % len(turns)],)) for i in range(count)]


def _turn(prompt: Prompt, max_tokens: int) -> LoadTurn:
    return LoadTurn(prompt.lstrip() if isinstance(prompt, str) else prompt, max_tokens)


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the start to each of `count` requests.

    `rate` is requests a second; infinite means all at once. The times between them are drawn from a gamma distribution
    of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is more even, infinite is a metronome.
    All are stretched so that the last one comes at count / rate: whatever the seed, a run sends as much in as long.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate and burstiness must be positive, not {rate:g} and {burstiness:g}")
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count, 1 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    moments = np.cumsum(gaps)
    if count and moments[-1] > 0:
        moments *= count / rate / moments[-1]
    return [float(moment) for moment in moments]


@dataclass
class Load:
    """Sends conversations to a server and keeps what became of their requests."""

    target: Target
    model: str
    endpoint: str
    is_chat: bool
    timeout_s: float
    sampling: Mapping[str, Any]
    """Fields of every request's body."""
    uses_sessions: bool
    places: AbstractAsyncContextManager[Any]
    """Where a request waits while too many others run."""
    samples: list[Sample] = field(default_factory=list)

    async def run(self, conversations: Sequence[LoadConversation], moments: Sequence[float]) -> float:
        """All of them, each beginning at its moment; how many seconds it took."""
        num_requests = sum(len(one.turns) for one in conversations)
        began = time.perf_counter()
        with ProgressLine("requests", num_requests) as line:
            async with asyncio.TaskGroup() as tasks:
                for conversation, moment in zip(conversations, moments, strict=True):
                    await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
                    tasks.create_task(self._converse(conversation, line))
        return time.perf_counter() - began

    async def warm_up(self, conversations: Sequence[LoadConversation]) -> None:
        """The first turn of each; nothing of it is kept."""
        await asyncio.gather(*(self._send(self._body(one.turns[0], [])) for one in conversations))

    async def _converse(self, conversation: LoadConversation, line: ProgressLine) -> None:
        """LoadTurn after turn; the first failure is the end."""
        history: list[dict[str, str]] = []
        session: str | None = None
        try:
            for turn in conversation.turns:
                if self.uses_sessions and session is None:
                    session = await self._open_session()
                sample = await self._send(self._body(turn, history, session))
                self._keep(sample, line)
                if not sample.is_ok:
                    break
                if self.is_chat and session is None:
                    history += [_message("user", turn), {"role": "assistant", "content": sample.text}]
        except HttpFailure as error:  # its session could not be opened
            self._keep(Sample(time.perf_counter(), error=error.kind, detail=error.detail), line)
        if session is not None:
            with suppress(HttpFailure):  # it ends by itself some time
                await call(self.target, "DELETE", f"/v1/sessions/{session}")

    async def _send(self, body: Mapping[str, Any]) -> Sample:
        arrived = time.perf_counter()
        async with self.places:
            queued_s = time.perf_counter() - arrived
            sample = await Stream(self.target, self.endpoint, body, self.timeout_s).run()
        return replace(sample, queued_s=queued_s)

    def _body(
        self, turn: LoadTurn, history: Sequence[Mapping[str, str]], session: str | None = None
    ) -> Mapping[str, Any]:
        if not self.is_chat:
            return completion_body(self.model, turn.prompt, turn.max_tokens, **self.sampling)
        named = {} if session is None else {"session_id": session}
        messages = [*history, _message("user", turn)]
        return chat_body(self.model, messages, turn.max_tokens, **self.sampling, **named)

    async def _open_session(self) -> str:
        return str((await call(self.target, "POST", "/v1/sessions", {"model": self.model}))["id"])

    def _keep(self, sample: Sample, line: ProgressLine) -> None:
        self.samples.append(sample)
        line.update(len(self.samples), self._so_far)

    def _so_far(self, took_s: float) -> str:
        num_failed = sum(not one.is_ok for one in self.samples)
        return f"{num_failed} failed, {sum(one.output_tokens for one in self.samples) / took_s:.0f} tok/s"


def _message(role: str, turn: LoadTurn) -> dict[str, str]:
    assert isinstance(turn.prompt, str), "chats are texts"
    return {"role": role, "content": turn.prompt}
