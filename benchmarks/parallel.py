"""`python -m benchmarks.parallel MODEL`: one model on several ranks (tensor parallelism over gloo), beside one rank.

A prototype of docs/multi-device.md on the torch backend in float32. Every rank is a process with its share of heads,
MLP and vocabulary, and with the KV of its own heads. Rank 0 is the backend of the engine; it sends each call that
changes anything to the others, which repeat it in lockstep. Each layer has two all-reduces, the head an all-gather.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import IntEnum
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tokenmill.backends.checkpoints import Checkpoint, StoredTensor, TensorSource, check_tensors, open_checkpoint
from tokenmill.backends.families.config import DecoderConfig
from tokenmill.backends.families.names import in_file, shapes
from tokenmill.backends.library import pull
from tokenmill.backends.torch.backend import DenseBackend, TorchStep
from tokenmill.backends.torch.decoder import Decoder, scaled_logits
from tokenmill.backends.torch.model import TorchModel
from tokenmill.backends.torch.weights import DecoderWeights, Linear
from tokenmill.bench import bench_parser
from tokenmill.config import DEFAULT_MODEL
from tokenmill.contract import Backend, BackendLimits, Batch, BatchBuilder, Mask, Output, Sampled
from tokenmill.contract.backend import SampleRows
from tokenmill.errors import ConfigError, ForwardFailed, InvalidBatch, InvalidOperation, OutOfKV, Unsupported
from tokenmill.kv.paged import PagedKV

TIMEOUT = timedelta(seconds=120)
"""Longest wait for another rank in a collective; a rank that dies is noticed at once."""
CPU = torch.device("cpu")

# -- who has what ------------------------------------------------------------------------------------------------------


def share(count: int, rank: int, ranks: int) -> slice:
    """A rank's part of so many things; the first ranks have one more where they do not divide."""
    each, more = divmod(count, ranks)
    begin = rank * each + min(rank, more)
    return slice(begin, begin + each + (rank < more))


@dataclass(frozen=True)
class Shard:
    """What one rank has of a decoder. Query heads stay with the KV head that they read."""

    config: DecoderConfig
    """Of the whole model."""
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks > self.config.num_kv_heads:
            raise ConfigError(
                f"{self.ranks} ranks need {self.ranks} KV heads; the model has {self.config.num_kv_heads}"
            )
        if any(layer.qk_norm == "projection" for layer in self.config.layers):
            raise ConfigError(f"{self.config.family}: norms over all heads together are not split")

    @property
    def kv_heads(self) -> slice:
        return share(self.config.num_kv_heads, self.rank, self.ranks)

    @property
    def heads(self) -> slice:
        group = self.config.num_heads // self.config.num_kv_heads
        return slice(group * self.kv_heads.start, group * self.kv_heads.stop)

    @property
    def inner(self) -> slice:
        return share(self.config.intermediate_size, self.rank, self.ranks)

    @property
    def vocabulary(self) -> slice:
        return share(self.config.vocab_size, self.rank, self.ranks)

    @property
    def local(self) -> DecoderConfig:
        """The decoder that this rank runs: fewer heads and a narrower MLP, over the same vocabulary."""
        return replace(
            self.config,
            num_heads=_length(self.heads),
            num_kv_heads=_length(self.kv_heads),
            intermediate_size=_length(self.inner),
        )

    def part(self, own: str, values: np.ndarray) -> np.ndarray:
        """The rank's part of a tensor, by the decoder's own name of it."""
        kind, dim = own.partition(".")[0], self.config.head_dim
        query, kv = (slice(dim * one.start, dim * one.stop) for one in (self.heads, self.kv_heads))
        if kind in ("embed", "head"):
            return values[self.vocabulary]
        if kind in ("q", "q_bias"):
            return values[query]
        if kind in ("k", "k_bias", "v", "v_bias"):
            return values[kv]
        if kind in ("gate", "up", "gate_bias", "up_bias"):
            return values[self.inner]
        if kind == "qkv":
            ends = (self.config.query_size, self.config.query_size + self.config.kv_size)
            q, k, v = np.split(values, ends)
            return np.concatenate([q[query], k[kv], v[kv]])
        if kind == "gate_up":
            return np.concatenate([half[self.inner] for half in np.split(values, 2)])
        if kind == "o":
            return values[:, query]
        if kind == "down":
            return values[:, self.inner]
        if kind in ("o_bias", "down_bias") and self.rank:
            return np.zeros_like(values)  # added once, by rank 0
        return values


def _length(part: slice) -> int:
    return int(part.stop - part.start)


class ShardSource:
    """A checkpoint of which only one rank's part is kept."""

    def __init__(self, files: Checkpoint, shard: Shard) -> None:
        self.where, self.is_quantised = files.source.where, files.source.is_quantised
        self._source: TensorSource = files.source
        self._shard = shard
        self._own = {in_file(own, files.names): own for own in shapes(files.config)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._source.shapes())

    def dtype_of(self, name: str) -> str:
        return self._source.dtype_of(name)

    def load(self, name: str) -> StoredTensor:
        values = self._shard.part(self._own[name], self._source.load(name).values(self.where, name))
        return StoredTensor("F32", values.shape, np.ascontiguousarray(values))


# -- collectives -------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Collectives and their payload: what each rank contributes."""

    all_reduces: int = 0
    all_reduce_bytes: int = 0
    all_gathers: int = 0
    all_gather_bytes: int = 0
    seconds: float = 0.0
    """In them, waiting for slower ranks included."""

    @property
    def num_bytes(self) -> int:
        return self.all_reduce_bytes + self.all_gather_bytes


def planned(config: DecoderConfig, num_tokens: int, num_logits: int, ranks: int, itemsize: int) -> Traffic:
    """Of one step. Attention and MLP of each layer end in an all-reduce, and so does the embedding."""
    all_reduces = 2 * config.num_layers + 1
    widest = -(-config.vocab_size // ranks)
    return Traffic(
        all_reduces,
        all_reduces * num_tokens * config.hidden_size * itemsize,
        int(num_logits > 0),
        num_logits * widest * 4,
    )


class Ranks:
    """The processes that run one model together, seen from one of them."""

    def __init__(self, rank: int, ranks: int, meeting_point: Path) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=ranks, timeout=TIMEOUT
        )
        self.rank, self.ranks = rank, ranks
        self.traffic = Traffic()
        self.is_broken = False
        """Has a rank died?"""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        self.traffic.all_reduces += 1
        self.traffic.all_reduce_bytes += x.numel() * x.element_size()
        with self._together(), self._timed():
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """[rows, sum(widths)]: the columns of all ranks side by side."""
        padded = F.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        self.traffic.all_gathers += 1
        self.traffic.all_gather_bytes += padded.numel() * padded.element_size()
        parts = [torch.empty_like(padded) for _ in widths]
        with self._together(), self._timed():
            dist.all_gather(parts, padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def send(self, call: Call, *arrays: np.ndarray) -> None:
        """From rank 0: a call and its arguments, as integers."""
        flat = [np.asarray(one, dtype=np.int64).ravel() for one in arrays]
        head = [int(call), len(flat), *(len(one) for one in flat)]
        message = torch.from_numpy(np.concatenate([np.array(head, dtype=np.int64), *flat]))
        with self._together():
            dist.broadcast(torch.tensor([len(message)]), 0)
            dist.broadcast(message, 0)

    def receive(self) -> tuple[Call, list[np.ndarray]]:
        length = torch.zeros(1, dtype=torch.int64)
        with self._together():
            dist.broadcast(length, 0)
            message = torch.zeros(int(length), dtype=torch.int64)
            dist.broadcast(message, 0)
        numbers = message.numpy()
        num_arrays = int(numbers[1])
        ends = np.cumsum(numbers[2 : 2 + num_arrays])
        return Call(int(numbers[0])), np.split(numbers[2 + num_arrays :], ends)[:num_arrays]

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A collective: it fails on every rank that is left when one dies."""
        try:
            yield
        except RuntimeError as error:
            self.is_broken = True
            raise ForwardFailed(f"a rank has died: {error}", fatal=True) from error

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.traffic.seconds += time.perf_counter() - began

    def close(self) -> None:
        dist.destroy_process_group()


# -- one rank's decoder ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowParallel(Linear):
    """A matrix of which this rank has some columns: the products of all ranks are added up."""

    ranks: Ranks | None = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self.ranks is not None
        return self.ranks.all_reduce(super().__call__(x))


class ShardedDecoder(Decoder):
    """The generic decoder on one rank's part of the weights. Between two all-reduces it is the decoder as it is."""

    def __init__(self, shard: Shard, weights: DecoderWeights, ranks: Ranks) -> None:
        weights.layers = [
            replace(
                one,
                o=RowParallel(one.o.weight, one.o.bias, ranks),
                down=RowParallel(one.down.weight, one.down.bias, ranks),
            )
            for one in weights.layers
        ]
        super().__init__(shard.local, weights)
        self._shard, self._ranks = shard, ranks
        self._widths = [_length(replace(shard, rank=one).vocabulary) for one in range(shard.ranks)]

    def _embedded(self, token: Tensor) -> Tensor:
        """Each row comes from the rank that has it; the others add zeros."""
        row = token - self._shard.vocabulary.start
        is_here = (row >= 0) & (row < len(self.weights.embed))
        x = F.embedding(torch.where(is_here, row, 0), self.weights.embed)
        return self._ranks.all_reduce(torch.where(is_here[:, None], x, 0))

    def logits(self, normed: Tensor) -> Tensor:
        parts = self._ranks.all_gather(self.weights.head(normed).float(), self._widths)
        return scaled_logits(self.config, parts)


def load_shard(path: Path, ranks: Ranks) -> tuple[Checkpoint, ShardedDecoder]:
    """One rank's decoder, from a checkpoint of the whole model."""
    files = open_checkpoint(path)
    if files is None:
        raise ConfigError(f"{path} is not a model of our own families")
    check_tensors(files.source, files.config, files.names)
    shard = Shard(files.config, ranks.rank, ranks.ranks)
    with torch.inference_mode():
        weights = DecoderWeights(replace(shard.local, vocab_size=_length(shard.vocabulary)), torch.float32, CPU)
        weights.load(ShardSource(files, shard), files.names, lambda *_: None)
        return files, ShardedDecoder(shard, weights, ranks)


# -- lockstep ----------------------------------------------------------------------------------------------------------


class Call(IntEnum):
    """What rank 0 tells the others to do as well."""

    OPEN = 0
    FORWARD = 1
    SAMPLE = 2
    SEQ_RM = 3
    SEQ_CP = 4
    SEQ_KEEP = 5
    SEQ_ADD = 6
    CLEAR = 7
    UPDATE = 8
    CLOSE = 9
    END = 10


class RelayedKV:
    """The KV memory as the engine sees it on rank 0: calls that change it reach every rank, the others are local.

    All ranks have the same block tables, since they get the same calls in the same order: nothing is asked for.
    """

    def __init__(self, kv: PagedKV, ranks: Ranks) -> None:
        self._kv, self._ranks = kv, ranks

    def __getattr__(self, name: str) -> Any:
        """Calls of `PagedKV`."""
        found = getattr(self._kv, name)
        if name.upper() not in Call.__members__:
            return found

        def relayed(*arguments: int) -> Any:
            self._ranks.send(Call[name.upper()], np.array(arguments))
            return found(*arguments)

        return relayed


class LeadBackend(DenseBackend):
    """Rank 0: the engine's backend."""

    ranks: Ranks

    @property
    def kv(self) -> Any:
        return RelayedKV(self._kv, self.ranks)

    def _submit(self, batch: Batch) -> TorchStep:
        try:
            self.ranks.send(Call.FORWARD, batch.token, batch.pos, batch.seq_ids, batch.output)
        except ForwardFailed as failure:
            self._lost = failure
            raise
        return super()._submit(batch)

    def _sample(self, step: TorchStep, rows: SampleRows, mask: Mask | None) -> Sampled:
        """Drawn here alone, since the logits are; the others need the ids as input of the next step."""
        sampled = super()._sample(step, rows, mask)
        count = len(rows.table_row)
        self.ranks.send(Call.SAMPLE, rows.logits_row[:count], rows.table_row, np.asarray(sampled.ids)[:count])
        return sampled

    def close(self) -> None:
        if not self._closed and not self.ranks.is_broken:
            self.ranks.send(Call.CLOSE)
        super().close()


class ShardedModel(TorchModel):
    """A `ModelHandle` whose backends run on all ranks. One backend at a time."""

    def __init__(self, path: Path, ranks: Ranks, followers: Sequence[BaseProcess]) -> None:
        files, decoder = load_shard(path, ranks)
        super().__init__(path.name, decoder, files.names, path)
        self.whole = files.config
        self.ranks, self.followers = ranks, followers

    def new_backend(self, limits: BackendLimits) -> LeadBackend:
        sizes = np.array([limits.num_cells, limits.max_seqs, limits.ubatch_size, limits.num_threads or 1])
        self.ranks.send(Call.OPEN, sizes)
        kv, storage = self._new_memory(limits)
        backend = LeadBackend(
            self.decoder, kv, storage, self._gate, ubatch_size=limits.ubatch_size, num_threads=limits.num_threads or 1
        )
        backend.ranks = self.ranks
        return backend

    def replace_weight(self, name: str, value: Any) -> None:  # noqa: ARG002
        raise Unsupported(f"{name} is on {self.ranks.ranks} ranks: weights of a sharded model cannot be replaced")


class Follower:
    """Any other rank: does what rank 0 does."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        files, decoder = load_shard(path, ranks)
        self._model = TorchModel(path.name, decoder, files.names, path)
        self._backend: Backend | None = None
        self._step: Any = None

    def obey(self, call: Call, arrays: Sequence[np.ndarray]) -> None:
        """Repeat a call. What rank 0 was refused is refused here as well, before anything is computed."""
        if call is Call.OPEN:
            num_cells, max_seqs, ubatch_size, num_threads = map(int, arrays[0])
            limits = BackendLimits(num_cells, max_seqs, ubatch_size, num_threads=num_threads)
            self._backend, self._step = self._model.new_backend(limits), None
            return
        backend = self._backend
        assert backend is not None, "the first call is OPEN"
        if call is Call.CLOSE:
            backend.close()
        elif call is Call.FORWARD:
            self._forward(backend, arrays)
        elif call is Call.SAMPLE:
            logits_row, table_row, ids = (one.astype(np.int32) for one in arrays)
            backend.sample(self._step, SampleRows(logits_row, table_row, lambda *_: Sampled(ids)))
        else:
            with suppress(InvalidOperation):
                getattr(backend.kv, call.name.lower())(*map(int, arrays[0]))

    def _forward(self, backend: Backend, arrays: Sequence[np.ndarray]) -> None:
        if self._step is not None:
            backend.collect(self._step)
        token, pos, seq_ids, output = arrays
        batch = Batch(
            token=token.astype(np.int32),
            pos=pos.astype(np.int32),
            seq_ids=seq_ids.astype(np.int32).reshape(len(token), -1),
            output=output.astype(np.uint8),
        )
        self._step = None
        with suppress(InvalidBatch, OutOfKV):
            self._step = backend.forward(batch)


def follow(path: Path, rank: int, ranks: int, meeting_point: Path) -> None:
    """The main function of another rank: until rank 0 says `END` or dies."""
    together = Ranks(rank, ranks, meeting_point)
    follower = Follower(path, together)
    with suppress(ForwardFailed):
        while (told := together.receive())[0] is not Call.END:
            follower.obey(*told)
    together.close()


@contextmanager
def sharded(path: Path, ranks: int) -> Iterator[ShardedModel]:
    """A model on so many ranks: this process and children."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-ranks-") as folder:
        meeting_point = Path(folder) / "store"
        spawn = multiprocessing.get_context("spawn")
        followers = [
            spawn.Process(target=follow, args=(path, rank, ranks, meeting_point), daemon=True)
            for rank in range(1, ranks)
        ]
        for one in followers:
            one.start()
        together = Ranks(0, ranks, meeting_point)
        try:
            yield ShardedModel(path, together, followers)
            if not together.is_broken:
                together.send(Call.END)
                for one in followers:
                    one.join(TIMEOUT.total_seconds())
        finally:
            for one in followers:
                one.kill()
                one.join()
            together.close()


# -- measuring ---------------------------------------------------------------------------------------------------------

PROMPT, STEPS, BATCH = 128, 32, 8
LIMITS = BackendLimits(num_cells=4096, max_seqs=BATCH, num_threads=1)


@dataclass(frozen=True)
class Measured:
    """Logits of a prompt and of decode steps, and what they took."""

    logits: list[np.ndarray]
    prefill_s: float
    decode_s: list[float]


def measure(backend: Backend, vocab_size: int) -> Measured:
    """`BATCH` sequences with a prompt each, then greedy steps of all of them; the ids of a fixed generator."""
    numbers = np.random.default_rng(0)
    batch = BatchBuilder()
    for seq in range(BATCH):
        batch.add_run(numbers.integers(0, vocab_size, PROMPT).tolist(), 0, seq)
    began = time.perf_counter()
    logits = [backend.decode(batch.build()).logits]
    prefill_s, taken = time.perf_counter() - began, []
    for pos in range(PROMPT, PROMPT + STEPS):
        step = BatchBuilder()
        for seq, token in enumerate(numbers.integers(0, vocab_size, BATCH).tolist()):
            step.add(token, pos, seq, Output.LOGITS)
        began = time.perf_counter()
        logits.append(backend.decode(step.build()).logits)
        taken.append(time.perf_counter() - began)
    return Measured(logits, prefill_s, taken)


def compare(path: Path, ranks: int) -> dict[str, Any]:
    """So many ranks beside one, one thread each."""
    from tokenmill import open_model

    whole = open_model(str(path), backend="torch", dtype="float32")
    with whole.new_backend(LIMITS) as backend:
        one = measure(backend, whole.info.vocab_size)
    whole.close()
    with sharded(path, ranks) as model:
        with model.new_backend(LIMITS) as backend:
            several = measure(backend, model.info.vocab_size)
        traffic = asdict(model.ranks.traffic)
        heads = [Shard(model.whole, rank, ranks).local for rank in range(ranks)]
    difference = max(float(np.abs(a - b).max()) for a, b in zip(one.logits, several.logits, strict=True))
    return {
        "ranks": ranks,
        "heads": [f"{local.num_heads} + {local.num_kv_heads} KV" for local in heads],
        "largest_logit": max(float(np.abs(a).max()) for a in one.logits),
        "largest_difference": difference,
        "same_greedy_ids": all(
            bool((a.argmax(1) == b.argmax(1)).all()) for a, b in zip(one.logits, several.logits, strict=True)
        ),
        "prefill_s": {"1": one.prefill_s, str(ranks): several.prefill_s},
        "decode_step_ms": {
            "1": 1000 * statistics.median(one.decode_s),
            str(ranks): 1000 * statistics.median(several.decode_s),
        },
        "traffic": traffic,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.parallel", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--ranks", type=int, default=2, help="processes, at most one per KV head")
    options = parser.parse_args(arguments)
    print(json.dumps(compare(pull(options.model), options.ranks), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
