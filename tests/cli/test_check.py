"""`tokenmill check`: a user's own model against transformers; a difference is named, and the exit code is 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.parity import checkpoints
from tests.parity.checkpoints import TOKENS, logits_of
from tests.parity.decoders import save_tiny
from tests.parity.gguf_files import write
from tests.planting import PlantedBug, plant
from tests.text.families import CHATML, byte_level
from tests.text.test_conversion import small_tekken
from tests.text.vocabularies import train
from tokenmill.backends.torch import attention, decoder
from tokenmill.backends.torch.reference import from_gguf
from tokenmill.cli.main import app
from tokenmill.errors import ConfigError, ModelNotFound
from tokenmill.text import hf, template


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two of our own families and one that runs through transformers, each with a tokenizer and a chat template."""
    root = tmp_path_factory.mktemp("models")
    found = {}
    tokenizer = byte_level()._for_templates
    for family in ("llama", "gemma3_text", "vaultgemma"):
        folder = save_tiny(family, root / family, vocab_size=tokenizer.get_vocab_size())
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        found[family] = folder
    return found


def check(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["check", str(folder), "--device", "cpu", "--tokens", "6", "--json", *options])
    if not isinstance(done.exception, SystemExit | None):
        raise done.exception
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("family", "options", "path"),
    [
        ("llama", (), "native family (model_type 'llama' is one of"),
        ("gemma3_text", (), "native family (model_type 'gemma3_text' is one of"),
        ("llama", ("--extra", "model_impl=transformers"), "transformers adapter (as asked for)"),
        ("vaultgemma", (), "transformers adapter (model_type 'vaultgemma' is not supported"),
    ],
)
def test_a_model_that_is_equal(family: str, options: tuple[str, ...], path: str, models: dict[str, Path]) -> None:
    code, report = check(models[family], *options)
    assert (code, report["equal"]) == (0, True), report
    assert report["path"].startswith(path)
    compared = {one["what"]: one["num_compared"] for one in report["comparisons"]}
    assert compared == {"tokenizer ids": 8, "chat rendering": 3, "logits": 8, "greedy ids": 8}


@pytest.mark.parametrize("form", ["tokenizer.model", "tekken.json"])
def test_a_tokenizer_in_another_format_is_compared_with_its_library(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("llama", tmp_path / "model", vocab_size=1000)
    if form == "tekken.json":
        small_tekken(folder, "v7")
    else:
        (folder / form).write_bytes(train("bpe"))
    code, report = check(folder)
    assert (code, report["equal"]) == (0, True), report
    assert report["comparisons"][0]["num_compared"] == 8
    plant(BUGS[2][1], monkeypatch)
    code, report = check(folder)
    assert code == 1
    assert report["comparisons"][0]["differences"]


BUGS = [
    ("logits", PlantedBug("rope forgotten", decoder.Decoder, "hidden", "rotate(k, *turns[rope])", "k")),
    ("greedy ids", PlantedBug(
        "answers see four tokens", attention, "_mask", "cell_pos >= tables.start[seq][:, None]",
        "cell_pos >= np.where(query_pos.shape[1] == 1, query_pos.max(axis=1) - 3, 0)[:, None]",
    )),
    ("tokenizer ids", PlantedBug(
        "last token lost", hf.HuggingFaceTokenizer, "encode", "self._encode(self._for_users, text, limit)",
        "self._encode(self._for_users, text, limit)[:-1]",
    )),
    ("chat rendering", PlantedBug(
        "generation prompt forgotten", template.ChatTemplate, "render",
        "self._checked(messages, options, add_generation_prompt)", "self._checked(messages, options, False)",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("what", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_difference_is_named(
    what: str, bug: PlantedBug, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(bug, monkeypatch)
    code, report = check(models["llama"])
    assert (code, report["equal"]) == (1, False)
    assert {one["what"]: bool(one["differences"]) for one in report["comparisons"]}[what]


@pytest.mark.parametrize("variant", ["llama", "llama tied", "qwen2", "phi3, plain", "gemma2 as published"])
def test_the_reference_for_a_gguf_file_is_transformers_own_model(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma has the settings of the published models: transformers does not read others."""
    published = {"head_dim": 256, "num_attention_heads": 1, "num_key_value_heads": 1}
    monkeypatch.setitem(checkpoints.VARIANTS, "gemma2 as published", ("Gemma2", published))
    path = write(variant, tmp_path / "model.gguf", variant.split()[0].strip(","))
    with torch.no_grad():
        found = from_gguf(path, torch.float32).eval()(torch.tensor([TOKENS[:40]])).logits[0]
    assert float((found - logits_of(variant, TOKENS[:40])).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("variant", "saying"),
    [
        ("gemma2 of a GGUF file", "attention_scale, attention_softcap, logit_softcap$"),
        ("gemma3 of a GGUF file", "attention_scale, rope$"),
        ("llama, llama3 rope", "rope$"),
        ("granite", "granite is not supported"),
    ],
)
def test_settings_of_a_gguf_file_that_transformers_does_not_read(variant: str, saying: str, tmp_path: Path) -> None:
    path = write(variant, tmp_path / "model.gguf", variant.split()[0].strip(","))
    with pytest.raises(ValueError, match=saying):
        from_gguf(path, torch.float32)


def test_the_report_is_readable(models: dict[str, Path]) -> None:
    done = CliRunner().invoke(app, ["check", str(models["llama"]), "--device", "cpu", "--tokens", "3"])
    assert done.exit_code == 0
    assert "native family" in done.stdout
    assert "greedy ids       8 of 8 equal (3 tokens each)" in done.stdout
    assert done.stdout.endswith("equal to transformers\n")


def test_what_cannot_be_checked(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    assert isinstance(runner.invoke(app, ["check", "no such model"]).exception, ModelNotFound)
    long = runner.invoke(app, ["check", str(models["llama"]), "--tokens", "512", "--device", "cpu"])
    assert isinstance(long.exception, ConfigError)
    assert "leaves no room for a prompt: the context is 512" in str(long.exception)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    without = runner.invoke(app, ["check", str(models["llama"])])
    assert "tokenmill[transformers]" in str(without.exception)
