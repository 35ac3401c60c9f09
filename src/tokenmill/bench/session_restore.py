"""From which length on bringing KV bytes back from the disk is faster than computing them again.

Both end with the first token of an answer. The bytes have just been written, so the disk's own speed is not in it where
the system keeps them in memory.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.params import SamplingParams
from tokenmill.session import keeping
from tokenmill.session.service import SessionService
from tokenmill.session.store import SessionStore

ANSWER = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class Restored:
    """Seconds to the first token of a session with so many tokens."""

    num_tokens: int
    kv_bytes: int
    export_s: float
    """What the engine is held up for, when it has nothing else to do."""
    from_bytes_s: list[float]
    replayed_s: list[float]

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(a / b for a, b in zip(self.from_bytes_s, self.replayed_s, strict=True))


async def restoring(
    model: str, lengths: Sequence[int], num_pairs: int, say: Callable[[str], None], **options: int
) -> list[Restored]:
    """Sessions of these lengths, each brought back in both ways, in turn."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        store = SessionStore(folder)
        async with SessionService(model, store=store, **options) as service:  # type: ignore[arg-type]
            numbers = itertools.count(1)
            for length in lengths:
                one = await _one_length(service, store, length, num_pairs, numbers)
                found.append(one)
                say(f"{length} tokens, {one.kv_bytes / 1e6:.1f} MB: {statistics.median(one.from_bytes_s):.3f} s from "
                    f"bytes, {statistics.median(one.replayed_s):.3f} s replayed, ratio {one.ratio:.2f}")  # fmt: skip
        store.close()
    return found


async def _one_length(
    service: SessionService, store: SessionStore, length: int, num_pairs: int, numbers: itertools.count[int]
) -> Restored:
    loaded = service._model()
    assert loaded.keeper is not None
    loaded.keeper.min_kv_tokens = 1  # it is what is to be found out
    vocabulary = loaded.opened.model.info.vocab_size
    name = await service.create_session(sampling_params=ANSWER, seed=0)
    given = [(7919 * next(numbers)) % (vocabulary - 300) + 200 for _ in range(length)]
    await service.append_input(name, given)
    await _first_token(service, name)
    session = loaded.master.find(name)
    began = time.monotonic()
    kept = await keeping.export_kv(loaded.client, loaded.opened.model, session)
    export_s = time.monotonic() - began
    assert kept is not None, "nobody else is there to evict it"
    tokens, state = kept
    store.kv.write(name, loaded.fingerprint.form, tokens, state, session.used_at)
    from_bytes: list[float] = []
    replayed: list[float] = []
    for _ in range(num_pairs):
        for has_bytes, taken in ((True, from_bytes), (False, replayed)):
            await service.rewind(name, at_token=length)
            loaded.client.release(name)
            session.has_saved_kv = has_bytes
            taken.append(await _first_token(service, name))
    await service.end_session(name)
    return Restored(length, len(state), export_s, from_bytes, replayed)


async def _first_token(service: SessionService, name: str) -> float:
    began = time.monotonic()
    stream = await service.generate_stream(name, 1)
    await anext(stream)
    seconds = time.monotonic() - began
    async for _ in stream:
        pass
    return seconds


def pays_from(found: Sequence[Restored]) -> int | None:
    """The smallest length from which on bytes are faster at every length that was measured."""
    pays: int | None = None
    for one in reversed(found):
        if one.ratio >= 1:
            return pays
        pays = one.num_tokens
    return pays
