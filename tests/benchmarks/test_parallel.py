"""Two ranks of one model (benchmarks/parallel.py) are one rank: same logits, same engine outputs, same refusals."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.parallel import Shard, ShardedModel, planned, sharded, share
from tests.parity.checkpoints import LIMITS, PHI, TOKENS, VARIANTS, all_logits, save
from tokenmill import LLM, SamplingParams, open_model
from tokenmill.backends.families.config import DecoderConfig, LayerConfig
from tokenmill.backends.families.names import shapes
from tokenmill.contract import Batch, BatchBuilder, Output, SampleRows, last_sampled
from tokenmill.errors import ConfigError, ForwardFailed, InvalidBatch, OutOfKV
from tokenmill.text.tokenizer import ByteTokenizer

pytestmark = pytest.mark.slow

ODD: dict[str, Any] = {
    "hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16, "vocab_size": 161,
    "intermediate_size": 81,
}  # fmt: skip
"""Nothing of it is divisible by two; heads as in the default model."""
SPLIT: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, 9 heads": ("Llama", {**ODD, "tie_word_embeddings": True}),
    "biases, 9 heads": ("Llama", {**ODD, "attention_bias": True, "mlp_bias": True}),
    "head norms, 9 heads": ("Qwen3", ODD),
    "norms after, caps": ("Gemma2", {**VARIANTS["gemma2"][1], "num_key_value_heads": 3}),
    "fused": ("Phi3", {**PHI, "num_key_value_heads": 3}),
}
ROUNDING = 2e-5
"""Of the largest logit: sums of float32 in another order."""


@pytest.fixture(autouse=True)
def _variants(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variant in SPLIT.items():
        monkeypatch.setitem(VARIANTS, name, variant)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", SPLIT)
def test_two_ranks_give_the_logits_of_one(variant: str, tmp_path: Path) -> None:
    folder = save(variant, tmp_path)
    wanted = all_logits(open_model(str(folder), backend="torch"), TOKENS, 64)
    with sharded(folder, 2) as model:
        found = all_logits(model, TOKENS, 64)
        traffic = model.ranks.traffic
    assert np.abs(found - wanted).max() <= ROUNDING * np.abs(wanted).max()
    steps = [min(64, len(TOKENS) - begin) for begin in range(0, len(TOKENS), 64)]
    plans = [planned(model.whole, count, count, 2, 4) for count in steps]
    assert traffic.all_reduces == sum(one.all_reduces for one in plans)
    assert traffic.all_reduce_bytes == sum(one.all_reduce_bytes for one in plans)
    assert traffic.all_gather_bytes == sum(one.all_gather_bytes for one in plans)


def test_three_ranks_have_one_kv_head_each(tmp_path: Path) -> None:
    folder = save("tied, 9 heads", tmp_path)
    wanted = all_logits(open_model(str(folder), backend="torch"), TOKENS, 64)
    with sharded(folder, 3) as model:
        assert model.info.layers[0].num_heads == 1
        assert np.abs(all_logits(model, TOKENS, 64) - wanted).max() <= ROUNDING * np.abs(wanted).max()


def test_the_engine_on_two_ranks_answers_as_on_one(tmp_path: Path) -> None:
    """Shared prefixes, several choices, preemption for want of cells, draws: all of it moves KV on both ranks."""
    folder = save("tied, 9 heads", tmp_path)
    numbers = random.Random(0)
    prefix = numbers.choices(range(150), k=40)
    prompts = [[*prefix, *numbers.choices(range(150), k=numbers.randint(1, 30))] for _ in range(6)]
    params = [
        SamplingParams(temperature=one % 2, seed=one, n=1 + one % 3, max_tokens=20, ignore_eos=True)
        for one in range(len(prompts))
    ]

    def answers(model: Any) -> list[list[list[int]]]:
        options: dict[str, Any] = {"tokenizer": ByteTokenizer(161), "kv_cache_tokens": 320, "max_num_seqs": 8}
        with LLM(model, **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params)
        return [[list(choice.token_ids) for choice in one.outputs] for one in outputs]

    wanted = answers(open_model(str(folder), backend="torch"))
    with sharded(folder, 2) as model:
        assert answers(model) == wanted


def test_a_batch_that_is_refused_leaves_the_ranks_in_step(tmp_path: Path) -> None:
    folder = save("tied, 9 heads", tmp_path)

    def logits(model: Any) -> np.ndarray:
        with model.new_backend(LIMITS) as backend:
            backend.decode(BatchBuilder().add_run(TOKENS[:20], 0, 0).build())
            with pytest.raises(InvalidBatch):
                backend.decode(BatchBuilder().add_run(TOKENS[:3], 7, 0).build())  # not the next position
            with pytest.raises(InvalidBatch):
                backend.decode(BatchBuilder().add_run([161], 20, 0).build())
            with pytest.raises(OutOfKV):
                backend.decode(_wide(80))
            backend.kv.seq_cp(0, 1)
            assert backend.kv.seq_rm(1, 15, -1)
            return np.asarray(backend.decode(BatchBuilder().add_run(TOKENS[40:60], 15, 1).build()).logits)

    wanted = logits(open_model(str(folder), backend="torch"))
    with sharded(folder, 2) as model:
        for _ in range(2):  # a second backend starts from nothing, on all ranks
            found = logits(model)
            assert np.abs(found - wanted).max() <= ROUNDING * np.abs(wanted).max()


def test_ids_that_were_sampled_are_known_to_every_rank(tmp_path: Path) -> None:
    folder = save("tied, 9 heads", tmp_path)

    def logits(model: Any) -> np.ndarray:
        rows = np.arange(8, dtype=np.int32)
        with model.new_backend(LIMITS) as backend:
            prompts, steps = BatchBuilder(), BatchBuilder()
            for seq in range(8):
                prompts.add_run(TOKENS[10 * seq : 10 * seq + 10], 0, seq)
                steps.add(last_sampled(seq), 10, seq, Output.LOGITS)
            step = backend.forward(prompts.build())
            ids = backend.collect(backend.sample(step, SampleRows(rows, rows))).ids
            assert min(ids) < 161 // 2 < max(ids)  # rows of the embedding that are on either rank
            return np.asarray(backend.decode(steps.build()).logits)

    wanted = logits(open_model(str(folder), backend="torch"))
    with sharded(folder, 2) as model:
        assert np.abs(logits(model) - wanted).max() <= ROUNDING * np.abs(wanted).max()


def _wide(tokens: int) -> Batch:
    """More than there are cells."""
    batch = BatchBuilder()
    for seq in range(2, 16):
        batch.add_run([1] * tokens, 0, seq)
    return batch.build()


def test_the_death_of_a_rank_is_fatal_to_the_backend(tmp_path: Path) -> None:
    folder = save("tied, 9 heads", tmp_path)
    step = BatchBuilder().add_run(TOKENS[:20], 0, 0).build()
    with sharded(folder, 2) as model:
        backend = model.new_backend(LIMITS)
        backend.decode(step)
        (other,) = model.followers
        other.kill()
        other.join()
        for _ in range(2):
            with pytest.raises(ForwardFailed) as failed:
                backend.decode(BatchBuilder().add_run([1], 20, 0).build())
            assert failed.value.fatal
        backend.close()
    with sharded(folder, 2) as model, model.new_backend(LIMITS) as again:
        again.decode(step)  # a new group of ranks takes over


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [5, 9, 64, 49152])
def test_every_thing_has_one_rank(count: int, ranks: int) -> None:
    parts = [share(count, rank, ranks) for rank in range(ranks)]
    assert [i for part in parts for i in range(count)[part]] == list(range(count))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_ranks_share_the_weights_and_nothing_is_on_two_of_them_but_norms() -> None:
    config = DecoderConfig(
        family="llama", vocab_size=161, hidden_size=48, intermediate_size=81, num_heads=9, num_kv_heads=3, head_dim=16,
        max_context=64, rms_eps=1e-6, layers=(LayerConfig(),),
    )  # fmt: skip
    shards = [Shard(config, rank, 2) for rank in range(2)]
    assert [(one.local.num_heads, one.local.num_kv_heads) for one in shards] == [(6, 2), (3, 1)]
    for own, shape in shapes(config).items():
        whole = np.arange(int(np.prod(shape))).reshape(shape)
        parts = np.concatenate([one.part(own, whole).ravel() for one in shards])
        copies = 2 if "norm" in own else 1
        assert sorted(parts) == sorted([*whole.ravel()] * copies), own


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    config = DecoderConfig(
        family="olmo2", vocab_size=161, hidden_size=48, intermediate_size=81, num_heads=4, num_kv_heads=2, head_dim=16,
        max_context=64, rms_eps=1e-6, layers=(LayerConfig(qk_norm="projection"),),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="norms over all heads"):
        Shard(config, 0, 2)
    with pytest.raises(ConfigError, match="3 ranks need 3 KV heads; the model has 2"):
        Shard(config, 0, 3)


def test_only_kv_of_its_own_heads_is_on_a_rank(tmp_path: Path) -> None:
    with sharded(save("tied, 9 heads", tmp_path), 2) as model:
        assert isinstance(model, ShardedModel)
        assert model.info.kv_bytes_per_token == 2 * model.whole.num_layers * 2 * 16 * 4  # two of three heads
