"""What session tests share: a service on the fake model, and what a log says next when it is computed anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from typing import Any

import pytest

from tokenmill import SessionService
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.engine.client import ThreadClient
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.outputs import OutputDelta
from tokenmill.params import SamplingParams
from tokenmill.session.manager import SessionLimits
from tokenmill.text.model_text import ModelText
from tokenmill.text.template import ChatTemplate
from tokenmill.text.tokenizer import ByteTokenizer

CONFIG = FakeConfig(vocab_size=258, max_context=1024, block_size=4)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def make_service(
    depth: int = 0, *, num_workers: int = 1, cells: int = 4096, max_seqs: int = 64, **options: Any
) -> SessionService:
    """A service whose engine has so many cells and sequence ids."""
    sizes = {"vocab_size": 258, "max_context": 1024, **options.pop("model", {})}
    model = FakeModel(FakeConfig(**sizes, block_size=4, depth=depth))
    config = options.pop("config", EngineConfig(max_num_seqs=min(8, max_seqs)))
    limits = options.pop("limits", SessionLimits(stall_timeout_s=None))
    client = None
    if max_seqs < 64:  # fewer ids than the default gives
        client = ThreadClient(model, config, BackendLimits(num_cells=cells, max_seqs=max_seqs), num_cores=num_workers)
    return SessionService(
        model, num_workers=num_workers, kv_cache_tokens=cells, config=config, limits=limits, client=client, **options
    )


async def read(stream: AsyncIterator[OutputDelta]) -> tuple[str, list[int], OutputDelta]:
    """All of a stream: the text, the ids, the last chunk."""
    text, ids, last = "", [], None
    async for chunk in stream:
        assert last is None or last.finish_reason is None, "a chunk came after the last one"
        text, last = text + chunk.text, chunk
        ids += chunk.token_ids
    assert last is not None
    assert last.finish_reason is not None
    return text, ids, last


@cache
def _engine() -> EngineCore:
    model = FakeModel(CONFIG)
    config = EngineConfig(max_num_seqs=1, prefix_caching=False)
    return EngineCore(model.new_backend(BackendLimits(num_cells=1100)), model.info, config)


_numbers = iter(range(1 << 60))


def continuation(
    log: Sequence[int], params: SamplingParams, *, seed: int, stop_ids: frozenset[int] = frozenset({256})
) -> list[int]:
    """What the model says after a log, with nothing cached and nobody else there."""
    engine = _engine()
    draw = Draw(params=params, seed=seed)
    limits = Limits(max_new_tokens=params.max_tokens or 1024, stop_ids=stop_ids)
    request = Request(f"c{next(_numbers)}", list(log), limits, draw=draw)
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.output


def scene(play: Callable[[SessionService], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), make_service(**options) as service:
            await play(service)

    asyncio.run(run())


class SteppedClock:
    """Real time plus `ahead`: for event loops, for when a session was last used, and for what a store writes down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        for name in ("monotonic", "time"):
            monkeypatch.setattr(time, name, self._stepped(getattr(time, name)))

    def _stepped(self, real: Callable[[], float]) -> Callable[[], float]:
        return lambda: real() + self.ahead


def tokens_of(service: SessionService, name: str) -> list[int]:
    return service._model().queue.find(name).log.tokens.tolist()


REWRITES = (  # past answers are shown as a star
    "{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }};{% else %}*;{% endif %}{% endfor %}A:"
)


def with_template(service: SessionService, source: str) -> None:
    tokenizer = ByteTokenizer(258)
    with_text(service, ModelText(tokenizer, ChatTemplate(source, tokenizer)))


def with_text(service: SessionService, text: ModelText) -> None:
    """Let the service's model have another tokenizer and template."""
    loaded = service._model()
    object.__setattr__(loaded.opened, "text", text)
    loaded.intake.text = text
    loaded._renderers.clear()
