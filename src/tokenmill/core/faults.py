"""`Fault`: what the fake backend can be told to do wrong, so that everything above it can be tested against it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tokenmill.core.batch import Batch, IntArray


class FaultKind(Enum):
    FAIL = "the forward raises ForwardFailed"
    FATAL = "the forward raises ForwardFailed(fatal=True), and the backend is lost"
    LATE_FAIL = "the forward is submitted, its collect raises ForwardFailed"
    LATE_FATAL = "the forward is submitted, its collect raises ForwardFailed(fatal=True)"
    OUT_OF_KV = "the forward raises OutOfKV, though there is room"
    NAN = "the logits and hidden rows of the matching sequences are NaN"
    STALL = "the collect waits until `release` is set"


@dataclass(eq=False)
class Fault:
    """Strikes the next `times` batches that match; None of both `token` and `seq` matches every batch."""

    kind: FaultKind
    token: int | None = None
    """Match the sequences that have this token in the batch."""
    seq: int | None = None
    """Match this sequence."""
    times: int | None = 1
    """How many batches to strike; None for all of them."""
    after: int = 0
    """How many matching batches to let pass first."""
    release: threading.Event = field(default_factory=threading.Event)
    """STALL only: set it to let the collect go on."""
    stalled: threading.Event = field(default_factory=threading.Event)
    """STALL only: set when the collect has begun to wait."""

    def matching(self, token: IntArray, batch: Batch) -> NDArray[np.bool_]:
        """[tokens]: which tokens of the batch belong to a sequence that this fault matches."""
        if self.seq is not None:
            matched = {self.seq}
        elif self.token is not None:
            matched = set(batch.seq_ids[token == self.token].ravel().tolist()) - {-1}
        else:
            return np.ones(len(batch), dtype=bool)
        return np.asarray(np.isin(batch.seq_ids, list(matched)).any(axis=1))


class FaultPlan:
    """The faults still to come."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        self._faults.append(fault)

    def remove(self, fault: Fault) -> None:
        self._faults.remove(fault)

    def strike(self, token: IntArray, batch: Batch) -> dict[FaultKind, tuple[Fault, NDArray[np.bool_]]]:
        """The faults that strike this batch, with the tokens they match; counts them down."""
        struck: dict[FaultKind, tuple[Fault, NDArray[np.bool_]]] = {}
        for fault in list(self._faults):
            matched = fault.matching(token, batch)
            if not matched.any():
                continue
            if fault.after > 0:
                fault.after -= 1
                continue
            struck[fault.kind] = (fault, matched)
            if fault.times is not None:
                fault.times -= 1
                if fault.times == 0:
                    self._faults.remove(fault)
        return struck
