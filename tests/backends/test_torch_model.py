"""The torch model: shards, both spellings of a config, shared weights, weights that are replaced, options."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parity.checkpoints import LIMITS, TOKENS, TOLERANCE, VARIANTS, all_logits, logits_of, reference, save
from tokenmill import LLM, open_model
from tokenmill.backends.families import Family, family_of, register_family
from tokenmill.backends.families.config import DecoderConfig
from tokenmill.backends.families.names import HF_NAMES
from tokenmill.backends.torch.model import TorchModel
from tokenmill.contract import BackendLimits, BatchBuilder
from tokenmill.errors import ConfigError, InvalidOperation, StaleKV
from tokenmill.text.tokenizer import ByteTokenizer


def opened(folder: Path, **options: object) -> TorchModel:
    model = open_model(str(folder), **options)
    assert isinstance(model, TorchModel)
    return model


@pytest.mark.req("R27")
def test_several_files_are_one_model(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    logits = all_logits(opened(folder), TOKENS, 64)
    assert np.abs(logits - logits_of("llama", TOKENS).numpy()).max() < TOLERANCE


@pytest.mark.req("R21")
@pytest.mark.parametrize(
    "variant", ["llama, other base", "llama, linear rope", "llama, llama3 rope", "llama, yarn rope"]
)
def test_the_older_spelling_of_rope(variant: str, tmp_path: Path) -> None:
    folder = save(variant, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters["rope_type"] == "default" else {**parameters}
    if variant == "llama, linear rope":  # older still
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    (folder / "config.json").write_text(json.dumps(config))
    logits = all_logits(opened(folder), TOKENS, 64)
    assert np.abs(logits - logits_of(variant, TOKENS).numpy()).max() < TOLERANCE


@pytest.mark.req("R20")
def test_a_new_family_is_a_registration(tmp_path: Path) -> None:
    names = {own: name.replace("model.", "transformer.") for own, name in HF_NAMES.items()}
    register_family(Family("parrot", lambda config: family_of({"model_type": "llama"}).read(config), names))
    with pytest.raises(ConfigError, match="already registered"):
        register_family(Family("parrot", lambda config: family_of({"model_type": "llama"}).read(config)))
    folder = save("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "parrot"}))
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({name.replace("model.", "transformer."): value.clone() for name, value in load_file(path).items()}, path)
    logits = all_logits(opened(folder), TOKENS, 64)
    assert np.abs(logits - logits_of("llama", TOKENS).numpy()).max() < TOLERANCE


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("R27")
def test_backends_share_the_weights(tmp_path: Path) -> None:
    model = opened(save("qwen2", tmp_path))
    with model.new_backend(LIMITS) as one, model.new_backend(LIMITS) as two:
        assert one._decoder is two._decoder
        batch = BatchBuilder().add_run(TOKENS, 0, 0).build()
        assert (one.decode(batch).logits == two.decode(batch).logits).all()
        one.kv.clear()
        assert two.kv.seq_pos_max(0) == len(TOKENS) - 1
        kv_bytes = model.info.kv_bytes_per_token * one.kv.stats().num_cells
        assert one._storage.num_bytes == two._storage.num_bytes == kv_bytes


@pytest.mark.req("R45")
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3 tied, yarn"])
def test_every_tensor_can_be_replaced_under_its_name(variant: str, tmp_path: Path) -> None:
    """Turn one checkpoint into another, tensor by tensor."""
    model = opened(save(variant, tmp_path))
    other = reference(variant)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    wanted = logits_of(variant, TOKENS).numpy()
    for name in dict(other.named_parameters()):
        model.replace_weight(name, before[name] * 0.5)
    assert np.abs(all_logits(model, TOKENS, 64) - wanted).max() > 0.1
    for name in dict(other.named_parameters()):
        model.replace_weight(name, before[name].numpy())
    assert model.weights_version == 2 * len(dict(other.named_parameters()))
    assert np.abs(all_logits(model, TOKENS, 64) - wanted).max() < TOLERANCE


@pytest.mark.req("R45")
def test_replacements_are_checked_make_kv_stale_and_take_no_memory(tmp_path: Path) -> None:
    model = opened(save("llama", tmp_path))
    name = "model.layers.1.mlp.down_proj.weight"
    value = reference("llama").state_dict()[name].clone()
    with pytest.raises(InvalidOperation, match=r"no tensor 'model\.nothing'"):
        model.replace_weight("model.nothing", value)
    with pytest.raises(InvalidOperation, match=r"shape \(3, 3\), not \(48, 80\)"):
        model.replace_weight(name, torch.zeros(3, 3))
    with pytest.raises(InvalidOperation, match="non-finite"):
        model.replace_weight(name, value * torch.nan)
    assert model.weights_version == 0
    with model.new_backend(LIMITS) as backend:
        backend.decode(BatchBuilder().add_run([1, 2], 0, 0).build())
        model.replace_weight(name, value)
        with pytest.raises(StaleKV):
            backend.decode(BatchBuilder().add_run([3], 2, 0).build())
    for _ in range(50):
        model.replace_weight(name, value)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1000):
        model.replace_weight(name, value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1024  # KiB


@pytest.mark.req("R45")
def test_an_engine_goes_on_with_new_weights_as_if_they_had_always_been(tmp_path: Path) -> None:
    model = opened(save("llama", tmp_path), deterministic=True)
    tokenizer = ByteTokenizer(160)
    name, value = (
        "model.layers.0.self_attn.q_proj.weight",
        reference("llama").state_dict()["model.layers.0.self_attn.q_proj.weight"].clone(),
    )
    with LLM(model, tokenizer=tokenizer, kv_cache_tokens=512) as llm:
        engine = llm.engine
        engine.add_sequence(TOKENS[:20], max_new_tokens=12)
        for _ in range(5):
            engine.step()
        (request,) = engine.scheduler.requests.values()
        said = list(request.tokens)
        model.replace_weight(name, value * 0.5)
        (output,) = engine.run_until_complete()
    with LLM(model, tokenizer=tokenizer, kv_cache_tokens=512) as fresh:
        fresh.engine.add_sequence(said, max_new_tokens=12 - (len(said) - 20))
        assert [*said[20:], *fresh.engine.run_until_complete()[0]] == output


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        ({"dtype": "int7"}, "dtype 'int7' is not supported"),
        ({"device": "moon"}, "device 'moon'"),
        ({"device": "mps"}, "not supported; use cpu or cuda"),
        ({"deterministic": True, "dtype": "bfloat16"}, "deterministic requires float32 on the CPU"),
        ({"colour": "red"}, "unknown option colour"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype .int3. is not supported; supported: auto, fp8"),
        ({"kv_cache_dtype": "fp8"}, "requires CUDA and 16-bit weights, not torch.float32 on cpu"),
        ({"backend": "llamacpp"}, "is a directory; llama.cpp needs a .gguf file"),
    ],
)
def test_wrong_options(options: dict[str, object], saying: str, tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    with pytest.raises(ConfigError, match=saying):
        opened(folder, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_are_near(dtype: str, tmp_path: Path) -> None:
    model = opened(save("qwen3", tmp_path), dtype=dtype)
    torch._C._set_mkldnn_enabled(False)  # some virtual machines promise instructions they do not have
    try:
        logits, wanted = all_logits(model, TOKENS[:40], 40), logits_of("qwen3", TOKENS[:40]).numpy()
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert np.corrcoef(logits.ravel(), wanted.ravel())[0, 1] > 0.98
    assert model.info.kv_bytes_per_token == 3 * 2 * 2 * 16 * 2


def test_a_single_gguf_in_a_directory_is_the_model(tmp_path: Path) -> None:
    from tests.parity.gguf_files import write

    write("llama", tmp_path / "one.gguf", "llama")
    assert opened(tmp_path).info.vocab_size == 160


def test_memory_is_for_what_is_asked(tmp_path: Path) -> None:
    model = opened(save("llama", tmp_path))
    with model.new_backend(BackendLimits(num_cells=100)) as backend:
        assert backend.kv.stats().num_cells == 112  # whole blocks
    assert model.kv_budget_bytes > 1 << 20
    assert isinstance(model.decoder.config, DecoderConfig)
    assert len(VARIANTS) > 10
