"""A tour of the contract on the fake backend: what `make serve` shows until there is a model to serve.

Everything the engine will be built from, in the order a reader meets it. Each step checks itself.
"""

from __future__ import annotations

from tokenmill import open_model
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.contract import Backend, BackendLimits, BatchBuilder, Output
from tokenmill.errors import ForwardFailed, OutOfKV

SYSTEM = [1, 2, 3, 4, 5, 6]


def show(title: str, text: str, backend: Backend) -> None:
    stats = backend.kv.stats()
    use = f"{stats.held_cells} cells in {stats.num_seqs} sequences, {stats.free_cells} of {stats.num_cells} free"
    print(f"{title}\n    {text}\n    KV: {use}\n")


def next_token(backend: Backend, tokens: list[int], seq: int) -> int:
    """Append tokens to a sequence and give the likeliest next one."""
    start = backend.kv.seq_pos_max(seq) + 1
    output = backend.decode(BatchBuilder().add_run(tokens, start, seq).build())
    return int(output.logits[0].argmax())


def generate(backend: Backend, prompts: dict[int, list[int]], count: int) -> dict[int, list[int]]:
    """Continuous batching in ten lines: each pass holds whatever each sequence still has to be told."""
    pending, written = dict(prompts), {seq: list[int]() for seq in prompts}
    for _ in range(count):
        batch = BatchBuilder()
        for seq, tokens in pending.items():
            batch.add_run(tokens, backend.kv.seq_pos_max(seq) + 1, seq)
        ids = backend.decode(batch.build()).logits.argmax(axis=1)
        pending = {seq: [int(token)] for seq, token in zip(pending, ids, strict=True)}
        for seq, (token,) in pending.items():
            written[seq].append(token)
    return written


def main() -> None:
    model = open_model("fake", block_size=4)
    with model.new_backend(BackendLimits(num_cells=64, max_seqs=8)) as backend:
        together = generate(backend, {0: [*SYSTEM, 20, 21], 1: [*SYSTEM, 30]}, count=5)
        show("Two conversations, one pass a step", f"0 says {together[0]}, 1 says {together[1]}", backend)

        backend.kv.clear()
        alone = generate(backend, {1: [*SYSTEM, 30]}, count=5)
        if alone[1] != together[1]:
            raise SystemExit("a neighbour changed the answer")
        show("The second one alone", f"says {alone[1]}: the neighbour left no trace", backend)

        backend.kv.seq_cp(1, 2, 0, len(SYSTEM))
        show("Share the system prompt", "sequence 2 begins with the same six cells; nothing was computed", backend)

        forked = generate(backend, {2: [30]}, count=5)
        if forked[2] != alone[1]:
            raise SystemExit("the shared prefix changed the answer")
        show("Go on from it", f"says {forked[2]}: only the new tokens were computed", backend)

        backend.kv.seq_rm(2, len(SYSTEM))
        again = next_token(backend, [31], 2)
        show("Rewind and ask something else", f"says {again}; sequence 1 is untouched", backend)

        try:
            next_token(backend, list(range(50)), 3)
        except OutOfKV as error:
            show("Ask for too much", f"{error}", backend)

        backend.faults.add(Fault(FaultKind.FAIL))  # type: ignore[attr-defined]
        try:
            backend.decode(BatchBuilder().add(9, backend.kv.seq_pos_max(1) + 1, 1, Output.LOGITS).build())
        except ForwardFailed as error:
            show("A step fails", f"{error}; memory is as it was", backend)

        backend.kv.clear()
        show("Clear", "everything is free again", backend)


if __name__ == "__main__":
    main()
