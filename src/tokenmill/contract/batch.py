"""`Batch`: the tokens of one forward pass, as a structure of arrays.

Prefill and decode tokens are mixed; they differ only in how many tokens of a sequence a batch has. A batch validates
its own shape here; what depends on memory (positions, sequence limits, room) is validated by the backend that runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import InvalidBatch

IntArray = NDArray[np.int32]

NO_SEQ = -1
"""Padding in `Batch.seq_ids` for tokens that belong to fewer sequences than the batch's width."""


class Output(IntFlag):
    """What the backend returns for a token after the forward pass."""

    NONE = 0
    LOGITS = 1
    HIDDEN = 2


def last_sampled(row: int) -> int:
    """The token value that refers to the last id sampled in this row; resolved by the backend.

    Lets step t+1 be submitted before the ids of step t have reached the host.
    """
    if row < 0:
        raise InvalidBatch(f"rows must be non-negative, not {row}")
    return -1 - row


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The tokens of one forward pass. Index i of every array describes token i.

    The arrays must not change until `forward` returns; a backend that needs them longer copies them. Fields are
    keyword-only, so that input embeddings, adapters and multi-axis positions can be added.
    """

    token: IntArray
    """Token id, or `last_sampled(row)`."""
    pos: IntArray
    """Position of the token in its sequences."""
    seq_ids: IntArray
    """[n, width]: the sequences of each token, padded with `NO_SEQ`. Usually of width 1."""
    output: NDArray[np.uint8]
    """What to return for each token: an `Output`."""

    def __post_init__(self) -> None:
        for name, dtype, ndim in _LAYOUT:
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != ndim:
                wanted = f"{ndim} of {dtype}"
                raise InvalidBatch(f"{name} has {array.ndim} dimensions of {array.dtype}, not {wanted}")
        n = len(self.token)
        if n == 0:
            raise InvalidBatch("a batch must contain at least one token")
        if self.seq_ids.shape[1] == 0:
            raise InvalidBatch(f"seq_ids must have shape [tokens, width], not {self.seq_ids.shape}")
        if not len(self.pos) == len(self.seq_ids) == len(self.output) == n:
            lengths = f"{len(self.pos)} positions, {len(self.seq_ids)} seq_ids and {len(self.output)} outputs"
            raise InvalidBatch(f"{n} tokens, but {lengths}")
        if self.pos.min() < 0:
            raise InvalidBatch(f"position {self.pos.min()} is negative")
        if self.output.max() > (Output.LOGITS | Output.HIDDEN):
            raise InvalidBatch(f"output {self.output.max()} is not a combination of LOGITS (1) and HIDDEN (2)")
        self._check_sequences()

    def _check_sequences(self) -> None:
        if self.seq_ids[:, 0].min() < 0:
            raise InvalidBatch(f"token {int(self.seq_ids[:, 0].argmin())} belongs to no sequence")
        if self.seq_ids.shape[1] == 1:
            return
        padding = self.seq_ids < 0
        if (self.seq_ids[padding] != NO_SEQ).any() or (padding[:, :-1] & ~padding[:, 1:]).any():
            raise InvalidBatch("seq_ids may only be padded with -1 at the end of a row")
        ordered = np.sort(self.seq_ids, axis=1)
        if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
            raise InvalidBatch("a token names the same sequence twice")

    def __len__(self) -> int:
        return len(self.token)

    def rows(self, kind: Output) -> IntArray:
        """Batch indices of the tokens with this output kind, in order."""
        return asking_for(self.output, kind)

    def sequences_of(self, index: int) -> list[int]:
        """The sequences of token `index`."""
        ids = self.seq_ids[index]
        return [int(seq) for seq in ids if seq >= 0]


_INT, _BYTE = np.dtype(np.int32), np.dtype(np.uint8)
_LAYOUT = (("token", _INT, 1), ("pos", _INT, 1), ("seq_ids", _INT, 2), ("output", _BYTE, 1))


_BIT = {kind: np.uint8(kind) for kind in (Output.NONE, Output.LOGITS, Output.HIDDEN, Output.LOGITS | Output.HIDDEN)}
"""Enum members as numpy integers: converting one takes longer than the operations that use it."""


def num_asking_for(output: NDArray[np.uint8], kind: Output) -> int:
    """Number of tokens with this output kind."""
    return int(np.count_nonzero(output & _BIT[kind]))


def asking_for(output: NDArray[np.uint8], kind: Output) -> IntArray:
    """Indices of tokens with this output kind."""
    return (output & _BIT[kind]).nonzero()[0].astype(np.int32)


class BatchBuilder:
    """Builds a batch one run of tokens at a time. The engine's hot path fills arrays directly."""

    def __init__(self) -> None:
        self._token: list[int] = []
        self._pos: list[int] = []
        self._seq_ids: list[tuple[int, ...]] = []
        self._output: list[int] = []

    def add(self, token: int, pos: int, seq_ids: int | Iterable[int], output: int = Output.NONE) -> BatchBuilder:
        """Append one token that belongs to one or more sequences."""
        self._token.append(token)
        self._pos.append(pos)
        self._seq_ids.append(_as_tuple(seq_ids))
        self._output.append(int(output))
        return self

    def add_run(
        self, tokens: Sequence[int], start: int, seq_ids: int | Iterable[int], last_output: int = Output.LOGITS
    ) -> BatchBuilder:
        """Append consecutive tokens from position `start`; only the last one has an output."""
        shared = _as_tuple(seq_ids)
        for offset, token in enumerate(tokens):
            is_last = offset == len(tokens) - 1
            self.add(token, start + offset, shared, last_output if is_last else Output.NONE)
        return self

    def __len__(self) -> int:
        return len(self._token)

    def build(self) -> Batch:
        width = max((len(ids) for ids in self._seq_ids), default=1)
        padded = [ids + (NO_SEQ,) * (width - len(ids)) for ids in self._seq_ids]
        try:
            return Batch(
                token=np.array(self._token, dtype=np.int32),
                pos=np.array(self._pos, dtype=np.int32),
                seq_ids=np.array(padded, dtype=np.int32).reshape(len(padded), width),
                output=np.array(self._output, dtype=np.uint8),
            )
        except OverflowError as error:
            raise InvalidBatch(f"a number is out of range: {error}") from None


def _as_tuple(seq_ids: int | Iterable[int]) -> tuple[int, ...]:
    return (int(seq_ids),) if isinstance(seq_ids, (int, np.integer)) else tuple(seq_ids)
