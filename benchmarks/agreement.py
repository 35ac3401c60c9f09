"""`python -m benchmarks.agreement`: how far logits depend on the way they are computed, and a model's perplexity.

Agreement: the logits of every token of a text, once computed by whole prompts one at a time, once token by token in a
crowd. Perplexity: of the same text as one sequence; with `--peer`, beside llama.cpp's on the same file; with
`--against`, beside the same model with its weights in another form, and how often both find the same token likeliest.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenmill.backends.loading import open_model
from tokenmill.bench import bench_parser
from tokenmill.config import DEFAULT_MODEL
from tokenmill.contract import BackendLimits, BatchBuilder, ModelHandle, Output
from tokenmill.errors import ConfigError
from tokenmill.progress import ProgressLine
from tokenmill.text.model_text import open_text

CROWD = 8
CHUNK = 128
CLEAR_MARGIN = 0.05
"""Where the two largest logits are closer than this, either may be the likeliest."""

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Agreement:
    """The same logits, computed in two ways."""

    num_tokens: int
    largest_difference: float
    top1: float
    """How often the likeliest token is the same."""
    top1_where_clear: float
    """The same, where it is the likeliest by more than `CLEAR_MARGIN`."""
    num_clear: int


@dataclass(frozen=True)
class Against:
    """The same model in another form."""

    dtype: str
    perplexity: float
    top1: float
    """How often the likeliest token is the same."""
    top1_where_clear: float
    """The same, where the other form is sure of it by more than `CLEAR_MARGIN`."""


@dataclass(frozen=True)
class Report:
    model: str
    agreement: Agreement
    perplexity: float
    peer_perplexity: float | None = None
    against: Against | None = None


def in_chunks(model: ModelHandle, tokens: Sequence[int], chunk: int = CHUNK) -> Iterator[Logits]:
    """The logits of every token of one sequence, a chunk at a time."""
    with model.new_backend(BackendLimits(num_cells=len(tokens) + 64, max_seqs=1)) as backend:
        for begin in range(0, len(tokens), chunk):
            batch = BatchBuilder()
            for pos, token in enumerate(tokens[begin : begin + chunk], begin):
                batch.add(token, pos, 0, Output.LOGITS)
            yield backend.decode(batch.build()).logits


def in_a_crowd(model: ModelHandle, texts: Sequence[Sequence[int]]) -> Iterator[Logits]:
    """[texts, vocab] for each position in turn: all texts go on by one token in one step."""
    cells = sum(len(text) + 64 for text in texts)
    with model.new_backend(BackendLimits(num_cells=cells, max_seqs=len(texts))) as backend:
        for pos in range(len(texts[0])):
            batch = BatchBuilder()
            for seq, text in enumerate(texts):
                batch.add(text[pos], pos, seq, Output.LOGITS)
            yield backend.decode(batch.build()).logits


def agreement(model: ModelHandle, tokens: Sequence[int]) -> Agreement:
    """Compare whole prompts, one at a time, with token by token in a crowd of `CROWD`."""
    length = len(tokens) // CROWD
    texts = [tokens[i * length : (i + 1) * length] for i in range(CROWD)]
    alone = [np.concatenate(list(in_chunks(model, text, length))) for text in texts]
    largest, same, same_clear, num_clear = 0.0, 0, 0, 0
    with ProgressLine("in a crowd", length) as progress:
        for pos, crowd in enumerate(in_a_crowd(model, texts)):
            whole = np.stack([one[pos] for one in alone])
            largest = max(largest, float(np.abs(crowd - whole).max()))
            second, first = np.partition(whole, -2, axis=1)[:, -2:].T
            agrees, is_clear = whole.argmax(axis=1) == crowd.argmax(axis=1), first - second > CLEAR_MARGIN
            same, num_clear = same + int(agrees.sum()), num_clear + int(is_clear.sum())
            same_clear += int((agrees & is_clear).sum())
            progress.update(pos)
    count = CROWD * length
    return Agreement(count, largest, same / count, same_clear / max(1, num_clear), num_clear)


def perplexity(logits: Iterator[Logits], tokens: Sequence[int]) -> float:
    """The exponential of what each token but the first cost on average, in nats."""
    total, at = 0.0, 1
    for rows in logits:
        targets = np.asarray(tokens[at : at + len(rows)])
        exact = rows[: len(targets)].astype(np.float64)
        exact -= exact.max(axis=1, keepdims=True)
        chosen = exact[np.arange(len(targets)), targets]
        total += float((np.log(np.exp(exact).sum(axis=1)) - chosen).sum())
        at += len(rows)
    return math.exp(total / (len(tokens) - 1))


def llama_cpp_logits(path: Path, tokens: Sequence[int]) -> Iterator[Logits]:
    """The same logits from llama.cpp, if llama-cpp-python is installed."""
    model = open_model(str(path), backend="llamacpp")
    yield from in_chunks(model, tokens)
    model.close()


def compare_forms(model: ModelHandle, other: ModelHandle, dtype: str, tokens: Sequence[int]) -> Against:
    """The likeliest tokens of both, and the other one's perplexity."""
    same, same_clear, num_clear = 0, 0, 0

    def theirs() -> Iterator[Logits]:
        nonlocal same, same_clear, num_clear
        for ours, rows in zip(in_chunks(model, tokens), in_chunks(other, tokens), strict=True):
            second, first = np.partition(rows, -2, axis=1)[:, -2:].T
            agrees, is_clear = ours.argmax(axis=1) == rows.argmax(axis=1), first - second > CLEAR_MARGIN
            same, num_clear = same + int(agrees.sum()), num_clear + int(is_clear.sum())
            same_clear += int((agrees & is_clear).sum())
            yield rows

    found = perplexity(theirs(), tokens)
    return Against(dtype, found, same / len(tokens), same_clear / max(1, num_clear))


def measure(
    name: str,
    text: str,
    num_tokens: int,
    *,
    backend: str = "auto",
    dtype: str = "auto",
    peer: bool = False,
    against: str | None = None,
) -> Report:
    model = open_model(name, backend=backend, dtype=dtype)
    tokens = open_text(model).tokenizer.encode(text)[:num_tokens]
    if not 2 * CROWD <= num_tokens <= len(tokens):
        raise ConfigError(f"the text has {len(tokens)} tokens; compare {2 * CROWD} to that many, not {num_tokens}")
    ours = perplexity(in_chunks(model, tokens), tokens)
    theirs = perplexity(llama_cpp_logits(model.path, tokens), tokens) if peer and model.path else None
    other = None if against is None else compare_forms(model, open_model(name, dtype=against), against, tokens)
    report = Report(name, agreement(model, tokens), ours, theirs, other)
    model.close()
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.agreement", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--text", type=Path, required=True, help="text file to score")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the text to score")
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "torch", "llamacpp"], help="backend")
    parser.add_argument("--dtype", default="auto", help="data type of the weights")
    parser.add_argument("--peer", action="store_true", help="also measure llama.cpp's perplexity on the text")
    parser.add_argument(
        "--against", metavar="DTYPE", help="also compare with the model in this data type (default: no comparison)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        text = options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{options.text} can't be read: {error}")
    report = measure(
        options.model,
        text,
        options.tokens,
        backend=options.backend,
        dtype=options.dtype,
        peer=options.peer,
        against=options.against,
    )
    if options.json:
        print(json.dumps(asdict(report), indent=2))
        return 0
    found = report.agreement
    print(
        f"{report.model}, {found.num_tokens} tokens: alone by whole prompts, and token by token in a crowd of {CROWD}"
    )
    print(f"  largest difference of a logit   {found.largest_difference:.2e}")
    print(f"  same likeliest token            {found.top1:.2%}")
    print(f"  where it is so by {CLEAR_MARGIN}          {found.top1_where_clear:.2%} of {found.num_clear}")
    print(f"  perplexity                      {report.perplexity:.4f}")
    if report.peer_perplexity is not None:
        ratio = report.perplexity / report.peer_perplexity
        print(f"  llama.cpp's perplexity          {report.peer_perplexity:.4f} (ratio {ratio:.4f})")
    if report.against is not None:
        other = report.against
        ratio = report.perplexity / other.perplexity
        print(f"  {other.dtype + chr(39) + 's perplexity':<31} {other.perplexity:.4f} (ratio {ratio:.4f})")
        print(f"  same likeliest token as that    {other.top1:.2%}, where it is clear {other.top1_where_clear:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
