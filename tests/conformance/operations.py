"""Random operations for a `Machine`: mostly legal ones, some that the contract must refuse.

Each takes a chooser, so that hypothesis (which shrinks) and a plain seeded generator (which needs nothing installed)
make them the same way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tests.conformance.machine import FROM_ROW, Machine, Token
from tokenmill.backends.fake import FakeConfig, FaultKind
from tokenmill.contract import Output

T = TypeVar("T")


class Chooser(Protocol):
    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included. Small ones are the simple ones."""
        ...

    def one_of(self, options: Sequence[T]) -> T:
        """One of the options. The first is the simple one."""
        ...


class RandomChooser:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def between(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def one_of(self, options: Sequence[T]) -> T:
        return options[self._random.randrange(len(options))]


def one_in(n: int, choose: Chooser) -> bool:
    return choose.between(1, n) == n


def config(choose: Chooser, depth: int) -> FakeConfig:
    """Small memories, so that every limit is met often."""
    return FakeConfig(
        vocab_size=32,
        hidden_size=4,
        max_context=choose.one_of([24, 40]),
        windows=choose.one_of([(None,), (None, 4), (None, 3), (4,)]),
        num_cells=choose.one_of([48, 33]),
        block_size=choose.one_of([1, 2, 4, 16]),
        ubatch_size=choose.one_of([2048, 3]),
        max_seqs=5,
        depth=depth,
        partial_rm=not one_in(8, choose),
        partial_cp=not one_in(8, choose),
        shift=not one_in(8, choose),
    )


def run(machine: Machine, choose: Chooser) -> None:
    """One to three runs of tokens for sequences or groups of them, side by side or interleaved."""
    planned: dict[int, int] = {}
    runs = [_run(machine, choose, planned) for _ in range(choose.between(1, 3))]
    tokens = _interleave(runs, choose) if one_in(3, choose) else [token for run in runs for token in run]
    machine.run(tokens, _fault(machine, choose))


def _fault(machine: Machine, choose: Chooser) -> FaultKind | None:
    if not machine.subject.can_fail or not one_in(4, choose):
        return None
    return choose.one_of([FaultKind.FAIL, FaultKind.LATE_FAIL, FaultKind.OUT_OF_KV])


def _run(machine: Machine, choose: Chooser, planned: dict[int, int]) -> list[Token]:
    seqs = _group(machine, choose)
    pos = planned.get(seqs[0], _end(machine, seqs[0]))
    if one_in(20, choose):
        pos = max(0, pos + choose.one_of([1, -1]))
    count = choose.one_of([1, 2, 3, 7, 20])
    tokens = []
    for i in range(count):
        is_last = i == count - 1
        token = choose.between(0, machine.config.vocab_size - 1 + one_in(100, choose))
        if i == 0 and seqs[0] in machine.last_token and one_in(2, choose):
            token = FROM_ROW
        output = (
            choose.one_of([Output.LOGITS, Output.LOGITS | Output.HIDDEN]) if is_last else choose.one_of(list(Output))
        )
        tokens.append(Token(token, pos + i, seqs, int(output)))
    planned.update(dict.fromkeys(seqs, pos + count))
    return tokens


def _group(machine: Machine, choose: Chooser) -> tuple[int, ...]:
    """A sequence, sometimes with companions: those that hold the same cells, or (to be refused) any."""
    seq = choose.between(0, machine.config.max_seqs - 1 + one_in(50, choose))
    if seq >= machine.config.max_seqs or not one_in(3, choose):
        return (seq,)
    held = machine.spec.held
    same = [s for s in range(machine.config.max_seqs) if s != seq and (held[s] == held[seq]).all()]
    others = same if same and not one_in(10, choose) else [s for s in range(machine.config.max_seqs) if s != seq]
    return (seq, *others[: choose.between(1, len(others))])


def _interleave(runs: list[list[Token]], choose: Chooser) -> list[Token]:
    queues, merged = [list(run) for run in runs], []
    while any(queues):
        queue = choose.one_of([queue for queue in queues if queue])
        merged.append(queue.pop(0))
    return merged


def seq_rm(machine: Machine, choose: Chooser) -> None:
    seq = _sequence(machine, choose, low=-1)
    p0, p1 = _range(machine, choose, seq)
    machine.seq_rm(seq, p0, p1)


def seq_cp(machine: Machine, choose: Chooser) -> None:
    src = _sequence(machine, choose)
    empty = [s for s in range(machine.config.max_seqs) if machine.spec.seq_pos_max(s) < 0]
    dst = choose.one_of(empty) if empty and not one_in(8, choose) else _sequence(machine, choose)
    p0, p1 = _range(machine, choose, src)
    machine.seq_cp(src, dst, p0, p1)


def fork_and_write(machine: Machine, choose: Chooser) -> None:
    """Copy a prefix and let both write in one batch, in either order: copy-on-write at its busiest."""
    src, dst = _sequence(machine, choose), _sequence(machine, choose)
    if src == dst or _end(machine, src) < 2 or dst not in range(machine.config.max_seqs):
        return
    machine.seq_rm(dst, -1, -1)
    machine.seq_cp(src, dst, 0, choose.between(1, _end(machine, src)))
    writers = choose.one_of([(src, dst), (dst, src)])
    tokens = [
        Token(choose.between(0, machine.config.vocab_size - 1), _end(machine, seq) + i, (seq,), Output.LOGITS)
        for seq in writers
        for i in range(choose.between(1, 3))
    ]
    machine.run(tokens, _fault(machine, choose))


def look(machine: Machine, choose: Chooser) -> None:
    """See a whole sequence through one more token, and take that back."""
    seq = choose.between(0, machine.config.max_seqs - 1)
    end = _end(machine, seq)
    if 0 < end < machine.config.max_context:
        machine.run([Token(1, end, (seq,), Output.LOGITS | Output.HIDDEN)])
        machine.seq_rm(seq, end, -1)


def seq_keep(machine: Machine, choose: Chooser) -> None:
    machine.seq_keep(_sequence(machine, choose))


def seq_add(machine: Machine, choose: Chooser) -> None:
    """Often what a caller does: cut the head off and move the rest down."""
    seq = _sequence(machine, choose)
    if one_in(3, choose):
        p0, p1 = _range(machine, choose, seq)
        machine.seq_add(seq, p0, p1, choose.between(-5, 5))
        return
    if _end(machine, seq) > 1:
        cut = choose.between(1, _end(machine, seq) - 1)
        machine.seq_rm(seq, -1, cut)
        machine.seq_add(seq, -1, -1, -cut)


def move_through_bytes(machine: Machine, choose: Chooser) -> None:
    machine.move_through_bytes(choose.between(0, machine.config.max_seqs - 1))


def clear(machine: Machine, choose: Chooser) -> None:
    machine.clear()


def collect(machine: Machine, choose: Chooser) -> None:
    machine.collect()


def _end(machine: Machine, seq: int) -> int:
    """The next position of a sequence, also of one that does not exist."""
    return machine.spec.seq_pos_max(seq) + 1 if 0 <= seq < machine.config.max_seqs else 0


def _sequence(machine: Machine, choose: Chooser, low: int = 0) -> int:
    """A sequence id; once in a while one that does not exist (`low` = -1: "any" is an id too)."""
    if one_in(40, choose):
        return choose.one_of([machine.config.max_seqs, -2])
    return choose.between(low, machine.config.max_seqs - 1)


def _range(machine: Machine, choose: Chooser, seq: int) -> tuple[int, int]:
    """All, a tail, a head, or anything at all."""
    end = _end(machine, seq)
    middle = choose.between(0, end)
    return choose.one_of([(-1, -1), (middle, -1), (middle, end), (-1, middle), (0, middle), (middle, middle + 2)])


OPERATIONS: dict[str, tuple[int, Callable[[Machine, Chooser], None]]] = {
    "run": (10, run),
    "fork_and_write": (4, fork_and_write),
    "look": (3, look),
    "collect": (2, collect),
    "seq_rm": (4, seq_rm),
    "seq_cp": (4, seq_cp),
    "seq_add": (2, seq_add),
    "move_through_bytes": (1, move_through_bytes),
    "seq_keep": (1, seq_keep),
    "clear": (1, clear),
}
"""Name -> (weight, operation)."""
