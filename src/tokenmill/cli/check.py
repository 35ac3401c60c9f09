"""`tokenmill check`: a model against transformers on this machine: tokenizer, chat template, logits, greedy ids.

Our side computes as a server would: all prompts in one batch, in chunks. Then our model is closed, so that memory for
one copy of the weights is enough, and transformers' own model computes the same with its own attention.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import arguments as shared
from tokenmill.errors import ConfigError, InvalidRequest, ModelNotFound

if TYPE_CHECKING:
    from tokenmill.contract import ModelHandle
    from tokenmill.contract.backend import FloatArray
    from tokenmill.text.model_text import ModelText

PROMPTS = (
    "Hello",
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    "1 + 1 = 2, 12 * 12 = 144, 2 ** 10 =",
    "Die Würde des Menschen ist unantastbar. Sie zu achten",
    '{"name": "tokenmill", "tags": ["inference", "server"],\n\t"size":',
    "吾輩は猫である。名前はまだ無い。😀",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light,",
)
QUESTION = {"role": "user", "content": "What is the capital of France?"}
CHATS: tuple[list[dict[str, str]], ...] = (
    [QUESTION],
    [{"role": "system", "content": "Answer briefly."}, QUESTION],
    [QUESTION, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Spain?\n"}],
)
NUM_ROWS = 8
"""Logits are compared for the last tokens of each prompt: all of them would not fit for large vocabularies."""


@dataclass(frozen=True)
class Tolerance:
    """What may differ, relative to the standard deviation of the logits."""

    error: float
    """Root mean square of the differences of a prompt's logits."""
    margin: float
    """A greedy id may be another one where transformers' own logits of the two are closer than this."""


EXACT, ROUNDED, QUANTIZED = Tolerance(1e-4, 1e-3), Tolerance(0.05, 0.2), Tolerance(0.25, 1.0)


@dataclass(frozen=True)
class Comparison:
    """One thing that was compared."""

    what: str
    num_compared: int
    differences: list[str] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Answers:
    """What our model computed."""

    prompts: list[list[int]]
    """Ids, shortened where the context is short."""
    logits: list[FloatArray]
    """[rows, vocab] of each prompt's last tokens."""
    greedy: list[list[int]]
    """Each prompt's ids with its answer."""


def check(
    model: Annotated[str, typer.Argument(help=shared.MODEL_HELP)] = shared.DEFAULT,
    num_tokens: Annotated[int, typer.Option("--tokens", min=1, help="Greedy tokens to compare for each prompt.")] = 16,
    backend: shared.Backend = "auto",
    extra: shared.Extra = None,
    dtype: Annotated[
        str, typer.Option(help="Data type of the weights.", show_default="float32; with llamacpp, the file's own")
    ] = "auto",
    device: shared.Device = "auto",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a model with transformers: tokenizer, chat template, logits, greedy ids.

    Exit code 1 on a difference.
    """
    options = {"backend": backend, "dtype": dtype, "device": device, "extra": shared.read_extra(extra) or {}}
    path, route, options = _route(model, options)
    found = list(_compare(path, options, num_tokens))
    is_equal = not any(one.differences for one in found)
    if json_output:
        report = {"model": model, "path": route, "equal": is_equal, "comparisons": [asdict(one) for one in found]}
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        _print(model, route, found)
    raise typer.Exit(0 if is_equal else 1)


def _print(model: str, route: str, found: Sequence[Comparison]) -> None:
    typer.echo(f"{model}: {route}")
    for one in found:
        state = (
            f"{one.num_compared - len(one.differences)} of {one.num_compared} equal" if one.num_compared else "skipped"
        )
        typer.echo(f"  {one.what:<16} {state}{f' ({one.note})' if one.note else ''}")
        for difference in one.differences:
            typer.echo(f"    {difference}")
    if any(one.differences for one in found):
        typer.echo("different from transformers")
    else:
        skipped = [one.what for one in found if not one.num_compared]
        typer.echo(f"equal to transformers{', without ' if skipped else ''}{' and '.join(skipped)}")


def _route(model: str, options: dict[str, Any]) -> tuple[Path, str, dict[str, Any]]:
    """Where the model is, which code runs it and why, and the options to open it with."""
    import importlib.util

    from tokenmill.backends.checkpoints import read_config
    from tokenmill.backends.families import choose_family
    from tokenmill.backends.library import find_model
    from tokenmill.backends.loading import check_directory, choose_backend
    from tokenmill.contract.backend import LoadOptions

    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        raise ConfigError("check requires torch and transformers: pip install 'tokenmill[transformers]'")
    path = find_model(model, check=check_directory)
    if path is None:
        raise ModelNotFound(f"no model {model!r}: not a directory, a .gguf file or a model name")
    if options["dtype"] == "auto" and options["backend"] != "cpu":
        options = {**options, "dtype": "float32"}
    choice = choose_backend(path, LoadOptions(**options))
    if choice.backend == "llamacpp":
        return path, f"llama.cpp ({choice.why})", options
    if not path.is_dir():
        return path, f"native family ({choice.why})", options
    family = choose_family(read_config(path), options["extra"].get("model_impl", "auto"))
    return path, f"{'transformers adapter' if family.family is None else 'native family'} ({family.why})", options


def _compare(path: Path, options: dict[str, Any], num_tokens: int) -> Iterator[Comparison]:
    from tokenmill.backends.loading import open_model
    from tokenmill.text.model_text import open_text

    handle = open_model(str(path), **options)
    try:
        text = open_text(handle)
        answers = _answers(handle, text, num_tokens)
    finally:
        handle.close()
    is_dense = options["dtype"] in ("float32", "bfloat16", "float16")
    tolerance = EXACT if options["dtype"] == "float32" else ROUNDED if is_dense else QUANTIZED
    del handle
    gc.collect()  # before there are weights once more
    yield from _compare_text(path, text)
    dtype = options["dtype"] if is_dense else "float32"
    yield from _compare_numbers(path, answers, dtype, options["device"], tolerance)


# -- our side ---------------------------------------------------------------------------------------------------------


def _answers(handle: ModelHandle, text: ModelText, num_tokens: int) -> Answers:
    import numpy as np

    from tokenmill.contract import BackendLimits, BatchBuilder, Output

    most = handle.info.max_context - num_tokens - 1
    if most < 1:
        raise ConfigError(
            f"--tokens {num_tokens} leaves no room for a prompt: the context is {handle.info.max_context}"
        )
    prompts = [ids[:most] for ids in (text.tokenizer.encode(prompt) for prompt in PROMPTS) if ids]
    num_cells = sum(len(ids) + num_tokens + 2 * handle.block_size for ids in prompts)
    limits = BackendLimits(num_cells=num_cells, max_seqs=len(prompts))
    batch = BatchBuilder()
    for seq, ids in enumerate(prompts):
        for pos, token in enumerate(ids):
            batch.add(token, pos, seq, Output.LOGITS if pos >= len(ids) - NUM_ROWS else Output.NONE)
    with handle.new_backend(limits) as backend:
        logits = backend.decode(batch.build()).logits
    rows = np.split(logits, np.cumsum([min(len(ids), NUM_ROWS) for ids in prompts])[:-1])
    return Answers(prompts, list(rows), _greedy(handle, limits, prompts, num_tokens))


def _greedy(handle: ModelHandle, limits: Any, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """All prompts through the engine at once, in chunks."""
    from tokenmill.config import EngineConfig
    from tokenmill.engine.core import EngineCore
    from tokenmill.engine.request import Limits, Request

    config = EngineConfig(max_num_seqs=len(prompts), prefill_chunk=16, prefix_caching=False)
    engine = EngineCore(handle.new_backend(limits), handle.info, config)
    try:
        requests = [Request(str(i), ids, Limits(max_new_tokens=num_tokens)) for i, ids in enumerate(prompts)]
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
        return [list(request.tokens) for request in requests]
    finally:
        engine.close()


# -- transformers' side -----------------------------------------------------------------------------------------------


def _reference(load: Callable[[], Any]) -> tuple[Any, str]:
    """What transformers loads, or why it can't: then there is nothing to compare with."""
    from tokenmill.backends.torch.transformers_adapter import quiet

    try:
        with quiet():
            return load(), ""
    except Exception as error:  # whatever is wrong with a file, or not supported there
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, f"transformers cannot load it: {reason}"


def _compare_text(path: Path, text: ModelText) -> Iterator[Comparison]:
    import transformers

    from tokenmill.backends.torch.reference import files_of

    tokenizer, why = _reference(lambda: transformers.AutoTokenizer.from_pretrained(**files_of(path)))
    with_original = _compare_with_original(path, text)
    if tokenizer is None:
        yield with_original or Comparison("tokenizer ids", 0, note=why)
        yield Comparison("chat rendering", 0, note=why)
        return
    different = [
        _first_difference(prompt, text.tokenizer.encode(prompt), wanted)
        for prompt in PROMPTS
        if text.tokenizer.encode(prompt) != (wanted := tokenizer(prompt)["input_ids"])
    ]
    yield with_original or Comparison("tokenizer ids", len(PROMPTS), different)
    if text.template is None:
        yield Comparison("chat rendering", 0, note="the model has no chat template")
        return
    try:
        rendered = [_rendered(tokenizer.apply_chat_template, messages, tokenize=False) for messages in CHATS]
    except ValueError:
        yield Comparison("chat rendering", 0, note="transformers has no chat template for it")
        return
    different = []
    for messages, wanted in zip(CHATS, rendered, strict=True):
        ours = _rendered(text.chat_template().render, messages)
        if ours != wanted:
            different.append(f"{len(messages)} messages: {ours!r}, transformers: {wanted!r}")
    yield Comparison("chat rendering", len(CHATS), different)


def _compare_with_original(path: Path, text: ModelText) -> Comparison | None:
    """Ids of the library that wrote a directory's tokenizer, if installed: transformers converts such files, too."""
    libraries: dict[str, tuple[str, Callable[[Any, str], Callable[[str], list[int]]]]] = {
        "tokenizer.model": (
            "sentencepiece",
            lambda library, file: library.SentencePieceProcessor(model_file=file).encode,
        ),
        "tekken.json": (
            "mistral_common.tokens.tokenizers.tekken",
            lambda library, file: partial(library.Tekkenizer.from_file(file).encode, bos=False, eos=False),
        ),
    }
    name = next((name for name in libraries if (path / name).is_file()), None)
    if name is None or (path / "tokenizer.json").is_file():
        return None
    module, open_original = libraries[name]
    try:
        ids_of = open_original(import_module(module), str(path / name))
    except ImportError:
        return None
    different = [
        _first_difference(prompt, ours, wanted, "the original")
        for prompt in PROMPTS
        if (ours := text.tokenizer.encode(prompt, add_special=False)) != (wanted := ids_of(prompt))
    ]
    return Comparison("tokenizer ids", len(PROMPTS), different, note=f"compared with {module.partition('.')[0]}")


def _rendered(render: Callable[..., str], messages: list[dict[str, str]], **more: Any) -> str | None:
    """None: the template rejects the messages."""
    import jinja2

    try:
        return render(messages, add_generation_prompt=True, **more)
    except (InvalidRequest, jinja2.TemplateError):
        return None


def _first_difference(prompt: str, ours: list[int], wanted: list[int], whose: str = "transformers") -> str:
    at = next((i for i, (one, other) in enumerate(zip(ours, wanted, strict=False)) if one != other), None)
    at = min(len(ours), len(wanted)) if at is None else at
    return f"{prompt[:40]!r}: from token {at} on {ours[at : at + 4]}, {whose}: {wanted[at : at + 4]}"


def _compare_numbers(
    path: Path, answers: Answers, dtype: str, device: str, tolerance: Tolerance
) -> Iterator[Comparison]:
    from tokenmill.backends.torch.reference import load_reference

    logits_of, why = _reference(lambda: load_reference(path, dtype, device))
    if logits_of is None:
        yield Comparison("logits", 0, note=why)
        yield Comparison("greedy ids", 0, note=why)
        return
    yield _compare_logits(answers, logits_of, tolerance)
    yield _compare_greedy(answers, logits_of, tolerance)


def _compare_logits(answers: Answers, logits_of: Callable[[list[int]], FloatArray], tolerance: Tolerance) -> Comparison:
    import numpy as np

    different, largest = [], 0.0
    for ids, ours in zip(answers.prompts, answers.logits, strict=True):
        wanted = logits_of(ids)[-len(ours) :]
        width = min(ours.shape[1], wanted.shape[1])  # either may be padded
        gap = ours[:, :width] - wanted[:, :width]
        error = float(np.sqrt(np.square(gap).mean()) / wanted.std())
        largest = max(largest, float(np.abs(gap).max()))
        if not error <= tolerance.error:
            different.append(f"prompt of {len(ids)} tokens: relative error {error:.2g}, allowed: {tolerance.error:g}")
    return Comparison("logits", len(answers.prompts), different, f"largest difference {largest:.2g}")


def _compare_greedy(answers: Answers, logits_of: Callable[[list[int]], FloatArray], tolerance: Tolerance) -> Comparison:
    different = []
    for ids, prompt in zip(answers.greedy, answers.prompts, strict=True):
        wanted = logits_of(ids[:-1])[len(prompt) - 1 :]
        for at, (row, token) in enumerate(zip(wanted, ids[len(prompt) :], strict=True)):
            best = int(row.argmax())
            if float(row[best] - row[token]) > tolerance.margin * float(row.std()):
                different.append(f"prompt of {len(prompt)} tokens: id {at} is {token}, transformers: {best}")
                break
    num_tokens = len(answers.greedy[0]) - len(answers.prompts[0])
    return Comparison("greedy ids", len(answers.prompts), different, f"{num_tokens} tokens each")
