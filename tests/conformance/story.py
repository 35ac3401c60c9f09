"""What the stories of the conformance suite are made of. They need no test framework.

A check takes a subject; `@proves` names the requirements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.conformance.subjects import Subject
from tokenmill.backends.fake import FakeConfig
from tokenmill.contract import Backend, BatchBuilder, Sampler, SampleRows

SMALL = FakeConfig(vocab_size=64, max_context=64, num_cells=64, block_size=4, max_seqs=8)


@dataclass(frozen=True)
class Check:
    name: str
    requirements: tuple[str, ...]
    needs_faults: bool
    needs_shift: bool
    run: Callable[[Subject], None]


CHECKS: list[Check] = []


def proves(
    *requirements: str, needs_faults: bool = False, needs_shift: bool = False
) -> Callable[[Callable[[Subject], None]], Check]:
    def register(run: Callable[[Subject], None]) -> Check:
        check = Check(run.__name__, requirements, needs_faults, needs_shift, run)
        CHECKS.append(check)
        return check

    return register


@contextmanager
def refused(error: type[Exception], saying: str = "") -> Iterator[None]:
    try:
        yield
    except error as refusal:
        assert saying in str(refusal), f"{refusal} does not say {saying!r}"
    else:
        raise AssertionError(f"no {error.__name__}")


def prefill(backend: Backend, tokens: list[int], seq: int | tuple[int, ...] = 0, start: int = 0) -> NDArray[np.float32]:
    """Run the tokens and give the logits of the last one."""
    return backend.decode(BatchBuilder().add_run(tokens, start, seq).build()).logits[0]


def fresh(subject: Subject, tokens: list[int], config: FakeConfig = SMALL) -> NDArray[np.float32]:
    """The logits these tokens give on a backend that has never run anything else."""
    with subject.make(config) as backend:
        return prefill(backend, tokens)


def same(subject: Subject, a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool(np.abs(a - b).max() <= subject.tolerance)


def rows_of(*pairs: tuple[int, int], sampler: Sampler | None = None) -> SampleRows:
    """(logits row, table row) pairs."""
    logits, table = np.array(pairs, dtype=np.int32).T
    return SampleRows(logits, table, sampler)
