"""Sessions over an engine on the card, a step ahead: what they say is what the model says anew, with nothing cached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from tests.gpu.card import needs_card
from tests.session.helpers import GREEDY, read, tokens_of
from tests.session.killing import small_checkpoint
from tokenmill import SessionService, open_model
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, ModelHandle
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.params import SamplingParams

pytestmark = needs_card()

ALONE = EngineConfig(max_num_seqs=1, prefix_caching=False)
BLOCK = 64
"""Cells of a block on the card: what is cached ends with a whole one when it is shared."""


def opened(folder: Path) -> ModelHandle:
    model = open_model(small_checkpoint(folder), dtype="float32", device="cuda")
    model.path = None  # type: ignore[misc]  # it has no tokenizer: a token a byte
    return model


class Anew:
    """The same model with nothing cached and nobody else there."""

    def __init__(self, model: ModelHandle) -> None:
        self._engine = EngineCore(model.new_backend(BackendLimits(num_cells=1024)), model.info, ALONE)
        self._count = 0

    def says(self, log: Sequence[int], params: SamplingParams, seed: int) -> list[int]:
        self._count += 1
        limits = Limits(max_new_tokens=params.max_tokens or 8, stop_ids=frozenset({256}))
        request = Request(f"anew-{self._count}", list(log), limits, draw=Draw(params=params, seed=seed))
        self._engine.add(request)
        while self._engine.has_work:
            self._engine.step()
        return request.output


def scene(folder: Path, play: Callable[[SessionService, Anew], Awaitable[None]], cells: int = 8192) -> None:
    model = opened(folder)

    async def run() -> None:
        config = EngineConfig(max_num_seqs=8)
        async with asyncio.timeout(120), SessionService(model, kv_cache_tokens=cells, config=config) as service:
            assert service._model().client.pool.cores[0].call(lambda core: core.depth).result(30) == 1  # type: ignore[attr-defined]
            await play(service, Anew(model))
            service._model().client.pool.cores[0].call(lambda core: core.check_integrity()).result(30)  # type: ignore[attr-defined]

    asyncio.run(run())


def test_conversations_side_by_side_compute_only_what_is_new(tmp_path: Path) -> None:
    async def play(service: SessionService, anew: Anew) -> None:
        names = [await service.create_session(sampling_params=GREEDY, seed=1) for _ in range(6)]
        for turn in range(8):
            before = [len(tokens_of(service, name)) for name in names]
            totals = [await service.append_input(name, f"{name[-4:]} asks {turn}") for name in names]
            answers = await asyncio.gather(*[read(await service.generate_stream(name)) for name in names])
            for name, had, total, (_, ids, last) in zip(names, before, totals, answers, strict=True):
                assert last.usage is not None
                assert last.usage.cached_tokens >= had - 1
                assert ids == anew.says(tokens_of(service, name)[:total], GREEDY, 1)

    scene(tmp_path, play)


def test_short_of_memory_they_are_evicted_and_computed_again(tmp_path: Path) -> None:
    async def play(service: SessionService, anew: Anew) -> None:
        names = [await service.create_session(sampling_params=GREEDY, seed=1) for _ in range(10)]
        for turn in range(3):
            totals = [await service.append_input(name, f"{name} asks for the time, {turn}") for name in names]
            answers = await asyncio.gather(*[read(await service.generate_stream(name)) for name in names])
            for name, total, (_, ids, _) in zip(names, totals, answers, strict=True):
                assert ids == anew.says(tokens_of(service, name)[:total], GREEDY, 1)

    scene(tmp_path, play, cells=8 * BLOCK)


def test_forks_new_answers_and_cancelled_ones(tmp_path: Path) -> None:
    async def play(service: SessionService, anew: Anew) -> None:
        params = SamplingParams(max_tokens=12)
        name = await service.create_session(sampling_params=params, seed=5)
        for question in ("one", "two", "three"):
            await service.append_input(name, question)
            await read(await service.generate_stream(name))
        log = tokens_of(service, name)
        for child in await service.fork(name, n=3):
            total = await service.append_input(child, "four")
            _, ids, last = await read(await service.generate_stream(child))
            seed = service._model().queue.find(child).options.sampling.seed or 0
            assert ids == anew.says(tokens_of(service, child)[:total], params, seed)
            assert last.usage is not None
            assert last.usage.cached_tokens >= len(log) // BLOCK * BLOCK
        _, again, _ = await read(await service.regenerate(name))
        assert again != log[-len(again) :]
        stream = await service.generate_stream(name, max_tokens=300, ignore_eos=True)
        await anext(stream)
        assert await service.cancel_generate(name)
        await read(stream)
        total = await service.append_input(name, "and now?")
        _, ids, _ = await read(await service.generate_stream(name))
        assert ids == anew.says(tokens_of(service, name)[:total], params, 5)

    scene(tmp_path, play)
