"""Time to the first token, turn by turn: in a session, stateless with prefix reuse, stateless without.

The same conversation in all three, each turn measured in all of them before the next one begins. The stateless ones
send the whole history each time, as exact ids: what a client that keeps its own history could do at best.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.engine.request import Hints
from tokenmill.params import SamplingParams
from tokenmill.session.live import LiveTurn
from tokenmill.session.service import SessionService

ANSWER = SamplingParams(temperature=0, ignore_eos=True)
WAYS = ("session", "stateless, prefix reuse", "stateless, no reuse")


@dataclass
class ByTurn:
    """Seconds to the first token of each turn, each list of one conversation."""

    tokens_a_turn: int
    history: list[int] = field(default_factory=list)
    """Tokens of the prompt, by turn."""
    seconds: dict[str, list[list[float]]] = field(default_factory=lambda: {way: [] for way in WAYS})


async def first_token_by_turn(
    service: SessionService, num_turns: int, tokens: int, num_rounds: int, say: Callable[[str], None]
) -> ByTurn:
    found = ByTurn(tokens)
    numbers = itertools.count(1)
    vocabulary = service._model().opened.model.info.vocab_size
    for number in range(num_rounds):
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        name = await service.create_session(sampling_params=ANSWER, seed=0)
        history = []
        for turn in range(num_turns):
            given = [(7919 * next(numbers)) % (vocabulary - 300) + 200 for _ in range(tokens)]
            began = time.monotonic()
            await service.append_input(name, given)
            stream = await service.generate_stream(name, tokens)
            await anext(stream)
            taken["session"].append(time.monotonic() - began)
            async for _ in stream:
                pass
            log = service._model().master.find(name).log.tokens.tolist()
            prompt = log[: len(log) - tokens]
            history.append(len(prompt))
            reused = await stateless(service, prompt, tokens, ("reuse", number))
            taken["stateless, prefix reuse"].append(reused)
            taken["stateless, no reuse"].append(await stateless(service, prompt, 1, ("none", number, turn)))
            seconds = ", ".join(f"{values[-1]:.3f} s {way}" for way, values in taken.items())
            say(f"round {number + 1}, turn {turn + 1}, {len(prompt)} tokens: {seconds}")
        await service.end_session(name)
        found.history = history
        for way, values in taken.items():
            found.seconds[way].append(values)
    return found


async def stateless(
    service: SessionService, prompt: list[int], num_tokens: int, namespace: tuple[object, ...]
) -> float:
    """Seconds to the first token of a prompt as a request of its own; it finds KV of its namespace only."""
    loaded = service._model()
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
    began = time.monotonic()
    generation = loaded.intake.generation(prompt, params, None, Hints(namespace=namespace))
    live = LiveTurn(generation, loaded.client, lambda _: None, None, 1 << 30)
    loaded.client.submit(generation.choices[0].request, live.hear)
    first: float | None = None
    async for _ in live.read():
        first = time.monotonic() - began if first is None else first
    assert first is not None, "an answer ends with a chunk"
    return first
