"""Options that several commands share, and what becomes of them."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.params import SamplingParams

MODEL_HELP = "Model: ORGANIZATION/MODEL[:QUANTIZATION], a short name, a directory or a .gguf file."
Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens to generate.")]
Temperature = Annotated[
    float | None,
    typer.Option(help="Sampling temperature; 0 for greedy decoding.", show_default="recommended by the model, else 1"),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the smallest set of tokens with this total probability.",
        show_default="recommended by the model, else 1",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Sample from this many most probable tokens; 0 for all.",
        show_default="recommended by the model, else 0",
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Minimum probability of a token, relative to the most probable one.",
        show_default="recommended by the model, else 0",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Random seed; the same seed repeats an answer (bit-identical with --deterministic).", show_default="random"
    ),
]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string: the answer ends before this text (repeatable).")]
System = Annotated[str | None, typer.Option("--system", "-s", help="System prompt.", show_default="none")]
Backend = Annotated[str, typer.Option(help="Backend: cpu, torch, llamacpp, or auto (by model format and device).")]
Extra = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Backend option; see docs/kernels.md and docs/llamacpp.md (repeatable)."),
]
Dtype = Annotated[
    str, typer.Option(help="Data type of the weights: auto, float32, bfloat16, float16; on the CPU also int8, int4.")
]
Device = Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")]
Engine = Annotated[
    str,
    typer.Option(help="Where the engine runs: thread, process, or auto (process if the model is on a GPU)."),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Batch-invariant results: bit-identical answers in any batch; slower.")
]
LoadFormat = Annotated[
    str, typer.Option(help="Weights: auto, or dummy for random weights from config.json alone (for benchmarks).")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="Number of CPU threads; use fewer on a busy machine.", show_default="all cores"),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="Smaller model with the same vocabulary that drafts tokens for speculation (name or path).",
        show_default="none",
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        min=1,
        help="Engine cores on one set of weights; KV cache, threads and request limits are divided (CPU only).",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        help="Context length: maximum tokens of prompt and answer together.",
        show_default="the model's maximum",
    ),
]

DEFAULT: str = DEFAULT_MODEL


@dataclass(frozen=True)
class SamplingOptions:
    """What the user said about sampling; the rest is the model's own."""

    max_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: list[str] | None

    def check(self) -> None:
        """Raise `InvalidRequest` for a wrong value, before a model is loaded."""
        from tokenmill.params import SamplingParams

        SamplingParams(**self._given())

    def params(self, llm: LLM) -> SamplingParams:
        return llm.get_default_sampling_params(**self._given())

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


def read_extra(given: list[str] | None) -> dict[str, bool | int | str] | None:
    """NAME=VALUE, where a value is true, false, a whole number or a word."""
    if not given:
        return None
    found: dict[str, bool | int | str] = {}
    for one in given:
        name, is_pair, value = one.partition("=")
        if not is_pair or not name or not value:
            raise typer.BadParameter(f"--extra must be NAME=VALUE, not {one!r}")
        found[name] = {"true": True, "false": False}.get(value, value)
        with suppress(ValueError):
            found[name] = int(value)
    return found


def open_llm(model: str, **options: Any) -> LLM:
    """The model; torch and what it needs are imported only now, so that `--help` is quick."""
    from tokenmill.entrypoints.llm import LLM

    log, told = logging.getLogger("tokenmill.backends.loading"), _Told()
    level = log.level
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        llm = LLM(model, seed=None, **options)
    finally:
        log.removeHandler(told)
        log.setLevel(level)
    # Not at once: of a model that can't be opened only the reason is told. And where answers are not.
    for line in told.lines:
        print(f"tokenmill: {line}", file=sys.stderr)
    return llm


class _Told(logging.Handler):
    """Keeps what is told while a model is opened: which backend its files go to, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
