"""Options that several commands share, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.backends.library import DEFAULT_MODEL

if TYPE_CHECKING:
    from tokenmill.engine.llm import LLM
    from tokenmill.params import SamplingParams

Model = Annotated[str, typer.Option("--model", "-m", help="A name, a Hugging Face directory or a .gguf file.")]
MaxTokens = Annotated[int, typer.Option(help="The longest answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the likeliest token. Default: the model's own.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this share.")]
TopK = Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens.")]
MinP = Annotated[float | None, typer.Option(help="Draw from tokens of at least this share of the likeliest one's.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text. May be given several times.")]
System = Annotated[str | None, typer.Option("--system", "-s", help="The system prompt.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Arithmetic that no neighbour can change.")]
Context = Annotated[int | None, typer.Option("--context", help="Prompt and answer together, in tokens.")]

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

    def params(self, llm: LLM) -> SamplingParams:
        given = {name: value for name, value in vars(self).items() if value is not None}
        return llm.get_default_sampling_params(**given)


def open_llm(model: str, **options: Any) -> LLM:
    """The model; torch and what it needs are imported only now, so that `--help` is quick."""
    from tokenmill.engine.llm import LLM

    return LLM(model, seed=None, **options)
