"""A whole decoder on the C library: against the same arithmetic in numpy, and against itself in other company."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.native.test_kernels import rounded
from tests.parity import checkpoints
from tests.parity.checkpoints import LIMITS, TOKENS, all_logits, reference, save
from tests.parity.gguf_files import write
from tokenmill import LLM, SamplingParams, open_model
from tokenmill.backends.cpu.backend import CPUKV, KV_DTYPES
from tokenmill.backends.cpu.bindings import INT4, INT8, KINDS, declare, library
from tokenmill.backends.cpu.build import FLAGS, BuildFailed, build
from tokenmill.backends.cpu.model import CPUModel
from tokenmill.backends.cpu.packing import as_kind
from tokenmill.backends.torch.model import TorchModel
from tokenmill.contract import BAD_ROW, BatchBuilder, Output, Sampled, SampleRows
from tokenmill.errors import ConfigError, InvalidOperation

HEADS: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1}
checkpoints.VARIANTS |= {
    "native llama": ("Llama", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "native mistral": ("Mistral", {"head_dim": 16, "sliding_window": 7}),
    "native qwen2": ("Qwen2", {**HEADS, "tie_word_embeddings": True}),
    "native qwen3": ("Qwen3", {"head_dim": 32}),
    "native gemma2": ("Gemma2", {**checkpoints.GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0}),
    "native gemma3": ("Gemma3Text", {**checkpoints.GEMMA, "sliding_window_pattern": 3, **checkpoints.THETAS}),
    "native phi3": ("Phi3", {**checkpoints.PHI, "sliding_window": 7}),
    "native smollm3": ("SmolLM3", {**HEADS, "no_rope_layers": [1, 0, 1]}),
    "native granite": ("Granite", {**HEADS, **checkpoints.MULTIPLIERS}),
    "native olmo2": ("Olmo2", {"num_attention_heads": 3, "num_key_value_heads": 3}),
}
NATIVE = [name for name in checkpoints.VARIANTS if name.startswith("native")]
Values = NDArray[np.float64]


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if library() is None:
        pytest.skip("the kernels are not built: there is no C compiler")


def opened(variant: str, folder: Path, **options: Any) -> CPUModel:
    model = open_model(str(save(variant, folder)), device="cpu", **options)
    assert isinstance(model, CPUModel)
    return model


class Numpy:
    """The decoder as its authors describe it, with weights and activations rounded as the kernels round them."""

    def __init__(self, variant: str, bits: int, kv_cache_dtype: str = "auto") -> None:
        self.config = reference(variant).config
        self.state = {name: value.numpy() for name, value in reference(variant).state_dict().items()}
        self.bits = bits
        self.kv_cache_dtype = kv_cache_dtype

    def kept(self, heads: Values) -> Values:
        """Keys or values as they are read again: in half precision, or in 8 bits with a scale for each head."""
        if self.kv_cache_dtype == "auto":
            return heads.astype(np.float16).astype(np.float64)
        dim = heads.shape[-1]
        return rounded(heads.reshape(-1, dim).astype(np.float32), dim).reshape(heads.shape)

    def matrix(self, name: str) -> Values:
        kind = INT8 if "embed" in name or "lm_head" in name else self.bits
        return as_kind(self.state[f"{name}.weight"], kind).values().astype(np.float64)

    def product(self, name: str, x: Values) -> Values:
        y = rounded(x.astype(np.float32)) @ self.matrix(name).T
        return y + self.state.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: Values) -> Values:
        if f"{name}.weight" not in self.state:
            return x
        scale = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return x * scale * (self.state[f"{name}.weight"] + float(self.config.model_type.startswith("gemma")))

    def turned(self, x: Values, pos: NDArray[np.int64], layer: int) -> Values:
        rope = self.config.rope_parameters
        if "rope_type" not in rope:
            rope = rope[self.config.layer_types[layer]]
        half = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0)) // 2
        angle = pos[:, None, None] / rope.get("factor", 1.0) * rope["rope_theta"] ** (-np.arange(half) / half)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin, rest), axis=-1)

    def window(self, layer: int) -> int | None:
        kinds = getattr(self.config, "layer_types", None)
        is_full = kinds is not None and kinds[layer] == "full_attention"
        return None if is_full else getattr(self.config, "sliding_window", None)

    def scale(self, dim: int) -> float:
        if self.config.model_type == "granite":
            return float(self.config.attention_multiplier)
        return float(getattr(self.config, "query_pre_attn_scalar", dim)) ** -0.5

    def queries_keys_values(self, at: str, x: Values, dim: int) -> list[Values]:
        if f"{at}.qkv_proj.weight" in self.state:
            kv = self.config.num_key_value_heads * dim
            q, k, v = np.split(self.product(f"{at}.qkv_proj", x), [-2 * kv, -kv], axis=1)
        else:
            q, k, v = (self.product(f"{at}.{name}_proj", x) for name in "qkv")
        if self.config.model_type == "olmo2":
            q, k = self.norm(f"{at}.q_norm", q), self.norm(f"{at}.k_norm", k)
        return [one.reshape(len(x), -1, dim) for one in (q, k, v)]

    def attention(self, layer: int, x: Values) -> Values:
        config, pos, at = self.config, np.arange(len(x)), f"model.layers.{layer}.self_attn"
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        q, k, v = self.queries_keys_values(at, x, dim)
        if config.model_type != "olmo2":
            q, k = self.norm(f"{at}.q_norm", q), self.norm(f"{at}.k_norm", k)
        if getattr(config, "no_rope_layers", [1] * 99)[layer]:
            q, k = self.turned(q, pos, layer), self.turned(k, pos, layer)
        k, v = self.kept(k), self.kept(v)
        shared, window = q.shape[1] // k.shape[1], self.window(layer)
        sees = pos[:, None] >= pos
        if window is not None:
            sees &= pos > pos[:, None] - window
        out = np.empty_like(q)
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // shared].T * self.scale(dim)
            scores = capped(scores, getattr(config, "attn_logit_softcapping", None))
            scores = np.where(sees, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head // shared]
        return self.product(f"{at}.o_proj", out.reshape(len(x), -1))

    def mlp(self, at: str, x: Values) -> Values:
        if f"{at}.gate_up_proj.weight" in self.state:
            gate, up = np.split(self.product(f"{at}.gate_up_proj", x), 2, axis=1)
        else:
            gate, up = (self.product(f"{at}.{name}_proj", x) for name in ("gate", "up"))
        slope = gate
        if self.config.model_type.startswith("gemma"):
            slope = np.maximum(2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3), -700)  # exp does not overflow
        return self.product(f"{at}.down_proj", gate / (1 + np.exp(-slope)) * up)

    def logits(self, tokens: list[int]) -> Values:
        config = self.config
        is_gemma, is_olmo = config.model_type.startswith("gemma"), config.model_type == "olmo2"
        by = np.sqrt(config.hidden_size) if is_gemma else getattr(config, "embedding_multiplier", 1.0)
        x, share = self.matrix("model.embed_tokens")[tokens] * by, getattr(config, "residual_multiplier", 1.0)
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}"
            added = self.attention(i, self.norm(f"{layer}.input_layernorm", x))
            if is_gemma or is_olmo:
                added = self.norm(f"{layer}.post_attention_layernorm", added)
            x = x + share * added
            before = "pre_feedforward_layernorm" if is_gemma or is_olmo else "post_attention_layernorm"
            added = self.mlp(f"{layer}.mlp", self.norm(f"{layer}.{before}", x))
            x = x + share * self.norm(f"{layer}.post_feedforward_layernorm", added)
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        logits = rounded(self.norm("model.norm", x).astype(np.float32)) @ self.matrix(head).T
        logits = logits / getattr(config, "logits_scaling", 1.0)
        return capped(logits, getattr(config, "final_logit_softcapping", None))


def capped(values: Values, cap: float | None) -> Values:
    return values if cap is None else np.tanh(values / cap) * cap


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("int8", "auto"), ("int4", "auto"), ("int8", "int8")])
@pytest.mark.parametrize("variant", NATIVE)
def test_logits_are_those_of_the_same_arithmetic(
    variant: str, dtype: str, kv_cache_dtype: str, lib: Any, tmp_path: Path
) -> None:
    """A number that lies between two steps may be rounded the other way, which shows; anything else shows far more."""
    model = opened(variant, tmp_path, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    wanted = Numpy(variant, INT8 if dtype == "int8" else INT4, kv_cache_dtype).logits(TOKENS[:70])
    found = all_logits(model, TOKENS[:70], 32)
    error = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max(axis=1)
    assert error.min() < 1e-5  # the first token, as a rule: nothing was rounded otherwise yet
    assert np.median(error) < 0.015
    assert error.max() < (0.06 if kv_cache_dtype == "auto" else 0.25)  # a key's step is larger


@pytest.mark.fault("E02")
@pytest.mark.req("B1")
@pytest.mark.parametrize(
    ("variant", "kv_cache_dtype"), [*((name, "auto") for name in NATIVE), ("native qwen3", "int8")]
)
def test_logits_do_not_depend_on_chunks_blocks_or_threads(
    variant: str, kv_cache_dtype: str, lib: Any, tmp_path: Path
) -> None:
    model = opened(variant, tmp_path, dtype="int4", kv_cache_dtype=kv_cache_dtype)
    whole = all_logits(model, TOKENS, len(TOKENS))
    for chunk in (1, 7, 64):
        assert (all_logits(model, TOKENS, chunk) == whole).all()
    for block_size in (5, 32):
        other = opened(variant, tmp_path, dtype="int4", block_size=block_size, kv_cache_dtype=kv_cache_dtype)
        assert (all_logits(other, TOKENS, 50) == whole).all()


@pytest.mark.fault("E01")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_logits_do_not_depend_on_neighbours(kv_cache_dtype: str, lib: Any, tmp_path: Path) -> None:
    model = opened("native mistral", tmp_path, dtype="int8", kv_cache_dtype=kv_cache_dtype)
    alone = all_logits(model, TOKENS[:60], 60)
    with model.new_backend(LIMITS) as backend:
        batch = BatchBuilder()
        for pos in range(60):
            for seq in range(5):  # the third one is ours
                token = TOKENS[pos] if seq == 2 else TOKENS[(7 * pos + 31 * seq) % 150]
                batch.add(token, pos, seq, Output.LOGITS if seq == 2 else Output.NONE)
        assert (backend.decode(batch.build()).logits == alone).all()


def test_a_row_without_a_token_leaves_a_valid_one_for_the_next_step(tmp_path: Path) -> None:
    """At depth 1 the next step has been submitted by then: it must not read outside the embedding."""
    model = opened("native qwen3", tmp_path, dtype="int8")
    with model.new_backend(LIMITS) as backend:
        batch, row = BatchBuilder(), np.zeros(1, dtype=np.int32)
        batch.add(5, 0, 0, Output.LOGITS)
        forward = backend.forward(batch.build())
        rows = SampleRows(row, row, lambda *_: Sampled(np.array([BAD_ROW], dtype=np.int32)))
        assert backend.collect(backend.sample(forward, rows)).ids.tolist() == [BAD_ROW]
        assert 0 <= backend._last_sampled[0] < model.info.vocab_size  # type: ignore[attr-defined]


FILES = [("native qwen3", "qwen3", kind) for kind in ("Q4_0", "Q4_1", "Q8_0", "Q5_0")] + [
    ("gemma2 of a GGUF file", "gemma2", "Q4_0"),
    ("gemma3 of a GGUF file", "gemma3", "Q8_0"),
    ("phi3", "phi3", "Q8_0"),
    ("smollm3 of a GGUF file", "smollm3", "Q4_0"),
]


@pytest.mark.parametrize(("variant", "arch", "kind"), FILES)
def test_a_quantised_file_is_taken_as_it_is(variant: str, arch: str, kind: str, tmp_path: Path) -> None:
    """`auto` holds it in its own bits, and gives what float32 gives of the same numbers, as near as rounding allows."""
    path = write(variant, tmp_path / "model.gguf", arch, gguf.GGMLQuantizationType[kind])
    auto, plain = open_model(str(path), device="cpu"), open_model(str(path), device="cpu", dtype="float32")
    assert isinstance(auto, CPUModel)
    assert isinstance(plain, TorchModel)
    assert auto.decoder.weights.num_bytes < 0.4 * plain.decoder.weights.num_bytes
    found, wanted = all_logits(auto, TOKENS, 64), all_logits(plain, TOKENS, 64)
    assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.98


def test_types_without_kernels_are_named_when_a_file_is_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("native qwen3", tmp_path / "model.gguf", "qwen3", gguf.GGMLQuantizationType.Q5_0)
    open_model(str(path), device="cpu")
    monkeypatch.delitem(KINDS, "Q5_0")
    open_model(str(path), device="cpu")
    named = [f"model.gguf: matrices in {kinds} are held in 8 bits" for kinds in ("F32", "F32, Q5_0")]
    assert caplog.messages == named  # the embedding was not quantized


def test_new_weights_are_rounded_like_the_old_ones(tmp_path: Path) -> None:
    model = opened("native llama", tmp_path, dtype="int4")
    before = all_logits(model, TOKENS[:20], 20)
    state = reference("native llama").state_dict()
    for name in ("model.layers.1.self_attn.v_proj.weight", "model.layers.0.mlp.up_proj.bias", "model.norm.weight"):
        model.replace_weight(name, state[name] * 2)
        changed = all_logits(model, TOKENS[:20], 20)
        assert not np.allclose(changed, before)
        model.replace_weight(name, state[name])
        assert (all_logits(model, TOKENS[:20], 20) == before).all()
    with pytest.raises(InvalidOperation, match="shape"):
        model.replace_weight("model.norm.weight", np.zeros(5, dtype=np.float32))
    with pytest.raises(InvalidOperation, match="not finite"):
        model.replace_weight("model.norm.weight", state["model.norm.weight"] * np.nan)


@pytest.mark.parametrize("changes", [{"num_attention_heads": 6}, {"head_dim": 24}, {"intermediate_size": 50}])
def test_sizes_that_the_kernels_cannot_do_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    checkpoints.VARIANTS["odd sizes"] = ("Llama", changes)
    reference.cache_clear()
    path = str(save("odd sizes", tmp_path))
    with pytest.raises(ConfigError, match="do not support the shapes of this model; use float32"):
        open_model(path, device="cpu", dtype="int8")
    assert isinstance(open_model(path, device="cpu"), TorchModel)


def test_8_bit_kv_is_half_as_large_and_of_a_form_of_its_own(tmp_path: Path) -> None:
    """KV of one form is never read as that of another."""
    half = opened("native qwen3", tmp_path, dtype="int8")
    small = opened("native qwen3", tmp_path, dtype="int8", kv_cache_dtype="int8")
    head = 32
    assert small.info.kv_bytes_per_token == half.info.kv_bytes_per_token * (head + 4) // (2 * head)
    assert small.memory(LIMITS, 1).kv == LIMITS.num_cells * small.info.kv_bytes_per_token
    assert small.info.form != half.info.form
    with half.new_backend(LIMITS) as backend, small.new_backend(LIMITS) as other:
        backend.decode(BatchBuilder().add(1, 0, 0).build())
        other.decode(BatchBuilder().add(1, 0, 0).build())
        with pytest.raises(InvalidOperation, match="bytes"):
            other.kv.import_(1, backend.kv.export(0))
    storage = CPUKV(small.decoder.lib, small.info.layers, 1, 16, small.decoder.inv_freq, KV_DTYPES["int8"])
    cells = np.arange(2, dtype=np.int32)
    state = bytearray(storage.read(cells))
    state[-4:] = np.float32(np.nan).tobytes()  # the scale of the last head
    with pytest.raises(InvalidOperation, match="non-finite"):
        storage.write(cells, memoryview(state))


def test_only_known_types_of_kv_are_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fp8' is not supported by the cpu backend; supported: auto, int8"):
        opened("native qwen3", tmp_path, dtype="int8", kv_cache_dtype="fp8")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_cut_sequence_gives_the_same_bits_when_it_is_restored(kv_cache_dtype: str, tmp_path: Path) -> None:
    """Its first cell lies elsewhere then; what is read together goes by positions, not by cells."""
    model = opened("native qwen3", tmp_path, dtype="int8", kv_cache_dtype=kv_cache_dtype)
    with model.new_backend(LIMITS) as backend, model.new_backend(LIMITS) as other:
        batch = BatchBuilder()
        for pos in range(60):
            batch.add(TOKENS[pos], pos, 0)
        backend.decode(batch.build())
        backend.kv.seq_rm(0, 0, 3)
        other.kv.import_(0, backend.kv.export(0))
        step = BatchBuilder().add(TOKENS[60], 60, 0, Output.LOGITS).build()
        assert (backend.decode(step).logits == other.decode(step).logits).all()


def test_a_second_model_has_as_many_threads_as_the_first(tmp_path: Path) -> None:
    first = opened("native qwen3", tmp_path, dtype="int8")
    all_logits(first, TOKENS[:3], 3)
    assert opened("native qwen3", tmp_path, dtype="int8")._num_threads == first._num_threads


def test_the_kernels_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("native qwen3", tmp_path / "model.gguf", "qwen3", gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setattr("tokenmill.backends.cpu.model.library", lambda: None)
    model = open_model(str(path), device="cpu")
    assert isinstance(model, TorchModel)
    with pytest.raises(ConfigError, match="the CPU kernels are not built"):
        open_model(str(path), device="cpu", dtype="int8")


@pytest.mark.parametrize(("name", "used"), [("plain", "plain"), ("sse9", None)])
def test_a_variant_can_be_forced(name: str, used: str | None) -> None:
    own = library().tm_variant().decode()  # type: ignore[union-attr]
    said = "import logging; logging.basicConfig(); from tokenmill.backends.cpu.bindings import library as lib"
    command = [sys.executable, "-c", f"{said}; print(lib().tm_variant().decode())"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TOKENMILL_KERNELS": name})
    assert done.stdout.strip() == (used or own)
    assert ("sse9 is not a kernel variant of this build and machine" in done.stderr) == (used is None)


@pytest.mark.req("B1")
def test_the_default_model_says_the_same_alone_and_in_a_crowd() -> None:
    """As it is opened by default: in 4 bits, without `deterministic`."""
    prompts = [f"Question {i}: what is {i} times {i + 3}? Answer:" for i in range(12)]
    params = SamplingParams(max_tokens=24, seed=5, temperature=0.8)
    with LLM("smollm2-135m", max_num_seqs=8, kv_cache_tokens=4096) as llm:
        assert isinstance(llm._opened.model, CPUModel)
        crowd = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        for i in (0, 5, 11):
            assert llm.generate(prompts[i], params)[0].outputs[0].token_ids == crowd[i]


# -- building ---------------------------------------------------------------------------------------------------------

UNDER_SANITIZER = """
import sys
from pathlib import Path
from tokenmill.backends.cpu import bindings as native
native.LIBRARY = Path(sys.argv[1])
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def test_nothing_is_read_or_written_that_is_not_ours(tmp_path: Path) -> None:
    """The tests of the kernels once more, on a library that is built with address and undefined-behaviour checks."""
    sanitizer = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(sanitizer).is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    built = build(tmp_path / "libtokenmill.so", "-g1 -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined")
    here = Path(__file__).parent
    covered = "mistral or qwen2 or gemma3 or smollm3 or granite or (those_of_the_definition and avx)"  # by the others
    chosen = f"(product or rows or neighbours or blocks or no_number or sizes) and not ({covered})"
    tests = [f"{here}/test_kernels.py", f"{here}/test_decoder.py", f"{here}/test_sampler.py", "-k", chosen]
    settings = {"LD_PRELOAD": sanitizer, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    settings["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they are slow to import so
    command = [sys.executable, "-c", UNDER_SANITIZER, str(built), *tests]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, **settings}, cwd=here.parent.parent
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_a_build_for_this_machine_has_its_variant_and_the_plain_one(tmp_path: Path) -> None:
    native = declare(ctypes.CDLL(str(build(tmp_path / "libtokenmill.so", "-O0", native=True))))
    found = library()
    assert found is not None
    assert native.tm_variant() == found.tm_variant()
    assert native.tm_sources() == found.tm_sources()
    assert native.tm_use(b"plain")
    others = {"avx512vnni", "avx2", "neon"} - {found.tm_variant().decode()}
    assert not any(native.tm_use(name.encode()) for name in others)


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    with pytest.raises(BuildFailed, match="no-compiler"):
        build(tmp_path / "libtokenmill.so")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildFailed, match="there is no C compiler"):
        build(tmp_path / "libtokenmill.so")
    assert "-O3" in FLAGS
