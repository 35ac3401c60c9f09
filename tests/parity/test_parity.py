"""The torch backend against transformers: logits, greedy ids, windows, hidden states, for every family and variant."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tests.parity.checkpoints import LIMITS, TOKENS, TOLERANCE, VARIANTS, all_logits, logits_of, reference, save
from tests.planting import PlantedBug, plant
from tokenmill import open_model
from tokenmill.backends.cpu.model import CPUModel
from tokenmill.backends.families import gemma, phi3, rope, smollm3
from tokenmill.backends.torch import decoder, weights
from tokenmill.backends.torch.model import TorchModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, BatchBuilder, Output
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import Phase, RequestEvent
from tokenmill.engine.request import Limits, Request


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: save(name, root / str(i)) for i, name in enumerate(VARIANTS)}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(variant: str, folders: dict[str, Path]) -> Iterator[TorchModel]:
    opened = open_model(str(folders[variant]), device="cpu")
    assert isinstance(opened, TorchModel)
    yield opened
    opened.close()


@pytest.mark.fault("E04")
@pytest.mark.req("R21", "R47")
@pytest.mark.parametrize("chunk", [150, 31, 1])
def test_logits_are_those_of_transformers(variant: str, model: TorchModel, chunk: int) -> None:
    tokens = TOKENS if chunk > 1 else TOKENS[:40]
    wanted = logits_of(variant, tokens).numpy()
    worst = np.abs(all_logits(model, tokens, chunk) - wanted).max()
    assert worst < TOLERANCE, f"{variant}: {worst}"
    assert wanted.std() > 0.5  # the weights are wide enough for a mistake to show


@pytest.mark.fault("E04")
@pytest.mark.req("R21")
def test_greedy_ids_are_those_of_transformers_in_one_batch(variant: str, model: TorchModel) -> None:
    """With chunked prompts, and too little KV for all of them at once."""
    rng = random.Random(2)
    prompts = [[rng.randrange(160) for _ in range(n)] for n in (1, 3, 7, 12, 20, 33, 50, 64)]
    config = EngineConfig(max_num_seqs=8, prefill_chunk=16, prefix_caching=False)
    too_few = BackendLimits(num_cells=384, max_seqs=8)  # for all prompts with their answers
    engine = EngineCore(model.new_backend(too_few), model.info, config)
    preempted: list[object] = []
    engine.events.subscribe(lambda event: preempted.append(event) if is_preemption(event) else None)
    requests = [Request(f"r{i}", prompt, Limits(max_new_tokens=64)) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    engine.close()
    assert preempted
    for request, prompt in zip(requests, prompts, strict=True):
        assert len(request.tokens) == len(prompt) + 64
        wanted = logits_of(variant, request.tokens[:-1]).argmax(dim=-1).tolist()
        assert request.tokens == prompt + wanted[len(prompt) - 1 :]


def is_preemption(event: object) -> bool:
    return isinstance(event, RequestEvent) and event.phase is Phase.PREEMPTED


@pytest.mark.parametrize("variant", ["llama", "qwen3"], indirect=True)
def test_hidden_rows_are_the_last_hidden_state(variant: str, model: TorchModel) -> None:
    with torch.no_grad():
        wanted = reference(variant).model(torch.tensor([TOKENS])).last_hidden_state[0].numpy()
    batch = BatchBuilder()
    for pos, token in enumerate(TOKENS):
        batch.add(token, pos, 0, Output.HIDDEN)
    with model.new_backend(LIMITS) as backend:
        assert np.abs(backend.decode(batch.build()).hidden - wanted).max() < TOLERANCE


NEW_LAYERS = ["gemma2", "gemma3", "granite", "olmo2", "phi3, longrope", "smollm3"]


@pytest.mark.parametrize("variant", NEW_LAYERS, indirect=True)
def test_deterministic_logits_are_those_of_transformers(variant: str, folders: dict[str, Path]) -> None:
    model = open_model(str(folders[variant]), device="cpu", deterministic=True)
    assert isinstance(model, TorchModel)
    assert np.abs(all_logits(model, TOKENS, 31) - logits_of(variant, TOKENS).numpy()).max() < TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("variant", [*NEW_LAYERS, "llama, heads of their own size"], indirect=True)
def test_a_sequence_that_is_moved_goes_on_as_before(
    variant: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotations are relative, in each layer by its own: keys that are moved together give the same scores."""
    family, changes = VARIANTS[variant]
    if not variant.startswith("phi3") and "head_dim" not in changes:  # heads that the kernels can do
        changes = {**changes, "num_attention_heads": 3, "num_key_value_heads": 1}
    monkeypatch.setitem(VARIANTS, f"{variant}, moved", (family, changes))
    model = open_model(str(save(f"{variant}, moved", tmp_path)), device="cpu", dtype=dtype)
    found = []
    with model.new_backend(LIMITS) as backend:
        for seq, by in enumerate((0, 50)):
            backend.decode(BatchBuilder().add_run(TOKENS[:60], 0, seq).build())
            if by:
                backend.kv.seq_add(seq, 0, 60, by)
            batch = BatchBuilder().add(TOKENS[60], 60 + by, seq, Output.LOGITS)
            found.append(backend.decode(batch.build()).logits)
    # Keys are rounded to half precision once more there, and 8-bit activations may round the other way.
    assert np.abs(found[0] - found[1]).max() < (TOLERANCE if dtype == "float32" else 0.1 * found[0].std())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("variant", ["gemma3"], indirect=True)
def test_norms_are_replaced_by_the_values_of_a_file(variant: str, dtype: str, folders: dict[str, Path]) -> None:
    model = open_model(str(folders[variant]), device="cpu", dtype=dtype)
    assert isinstance(model, TorchModel if dtype == "float32" else CPUModel)
    before, state = all_logits(model, TOKENS[:20], 20), reference(variant).state_dict()
    for name in ("model.layers.0.self_attn.q_norm.weight", "model.layers.1.post_feedforward_layernorm.weight"):
        model.replace_weight(name, state[name] * 3)
        assert not np.allclose(all_logits(model, TOKENS[:20], 20), before)
        model.replace_weight(name, state[name])
        assert (all_logits(model, TOKENS[:20], 20) == before).all()


def test_a_window_of_the_whole_context_is_none() -> None:
    """As in Phi-4-mini, whose window is wider than its context, which longrope limits further."""
    config = reference("phi3, longrope").config.to_dict()
    read = phi3.read({**config, "sliding_window": 2048})
    assert read.max_context == 2048
    assert set(read.windows) == {None}
    assert set(phi3.read({**config, "sliding_window": 2047}).windows) == {2047}


def test_gemma3_with_images_is_read_as_text(tmp_path: Path) -> None:
    """The image encoder is left out; published configurations of the text leave the usual sizes out."""
    text = reference("gemma3").config
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"boi_token_index": 1, "eoi_token_index": 2, "image_token_index": 3, "mm_tokens_per_image": 4}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, **tokens)
    whole = Gemma3ForConditionalGeneration(config).float().eval()
    whole.model.language_model.load_state_dict(reference("gemma3").model.state_dict())
    whole.save_pretrained(tmp_path)
    model = open_model(str(tmp_path), device="cpu")
    assert isinstance(model, TorchModel)
    with torch.no_grad():
        wanted = whole(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(all_logits(model, TOKENS, 64) - wanted).max() < TOLERANCE
    sizes = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}
    read = gemma.read_gemma3_with_images({"model_type": "gemma3", "text_config": sizes})
    assert (read.num_heads, read.num_kv_heads, read.head_dim, read.vocab_size) == (8, 4, 256, 262_208)
    assert read.windows[:6] == (1024,) * 5 + (None,)


# -- parity can fail --------------------------------------------------------------------------------------------------

BUGS = [
    ("gemma2", PlantedBug("window of one layer forgotten", gemma, "_decoder",
                          "[window if one else None for one in slides]",
                          "[window if one else None for one in slides[:-1]] + [None]")),
    ("gemma2", PlantedBug("norm weights as they are stored", weights.DecoderWeights, "_shifted",
                          "value.float() + offset", "value.float()")),
    ("gemma2", PlantedBug("usual attention scale", gemma, "_decoder",
                          'settings.real("query_pre_attn_scalar", 256.0) ** -0.5', "None")),
    ("gemma2", PlantedBug("scores not capped", gemma, "read_gemma2",
                          'optional(settings, "attn_logit_softcapping", 50.0)', "None")),
    ("gemma2", PlantedBug("logits not capped", decoder, "scaled_logits",
                          "torch.tanh(logits / config.logit_softcap) * config.logit_softcap", "logits")),
    ("gemma2", PlantedBug("embeddings not scaled", decoder.Decoder, "hidden", "x * self.config.embed_scale", "x")),
    ("gemma2", PlantedBug("another activation", decoder, "activated", 'layer.activation == "silu"', "True")),
    ("gemma3", PlantedBug("RoPE bases swapped", gemma, "read_gemma3", "local if one else full",
                          "full if one else local")),
    ("phi3", PlantedBug("all dimensions rotated", rope, "rope_from_config", "int(head_dim * partial)", "head_dim")),
    ("phi3, longrope", PlantedBug("frequencies not divided", rope, "frequencies",
                                  "plain / np.array(rope.divisors, dtype=np.float32)", "plain")),
    ("phi3, longrope", PlantedBug("no attention factor", rope, "_longrope_attention", "rope.factor > 1", "False")),
    ("smollm3", PlantedBug("all layers rotated", smollm3, "_rotated_layers", "bool(one)", "True")),
    ("granite", PlantedBug("residuals not scaled", decoder.Decoder, "_added", "layer.residual_scale == 1.0", "True")),
    ("granite", PlantedBug("logits not scaled", decoder, "scaled_logits", "logits * config.logit_scale", "logits")),
    ("olmo2", PlantedBug("no norm of queries", decoder.Decoder, "_qkv", "self._norm(parts[0], weights.q_norm)",
                         "parts[0]")),
]  # fmt: skip


@pytest.mark.req("R21")
@pytest.mark.parametrize(("variant", "bug"), BUGS, ids=lambda one: one.name if isinstance(one, PlantedBug) else one)
def test_a_planted_bug_is_caught(
    variant: str, bug: PlantedBug, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(bug, monkeypatch)
    model = open_model(str(folders[variant]), device="cpu")
    assert isinstance(model, TorchModel)
    wanted = logits_of(variant, TOKENS).numpy()
    assert np.abs(all_logits(model, TOKENS, 31) - wanted).max() > 10 * TOLERANCE
