"""The llama.cpp backend as a subject, twice.

A small random file holds the same decoder as the torch subject's, whose logits depend on nothing but the cells a token
sees; what is owed is worked out in numpy. And SmolLM2, of whose vocabulary the suite sees a few words: there, what is
owed is what a fresh prefill of the same tokens gives, which says nothing about sequences whose head was cut off.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.conformance.subjects import Cells, Subject
from tests.conformance.torch_subject import HEADS, KV_HEADS, TOLERANCE, hidden_oracle, make_decoder, oracle
from tests.parity.gguf_files import permuted
from tokenmill.backends.fake import FakeConfig, FaultKind, FaultPlan
from tokenmill.backends.families.names import GGUF_NAMES, in_file
from tokenmill.backends.library import fetch_alias
from tokenmill.backends.llamacpp.backend import LlamaBackend, LlamaStep
from tokenmill.backends.llamacpp.mirror import LlamaMemory
from tokenmill.backends.llamacpp.model import LlamaModel, open_path
from tokenmill.backends.llamacpp.native import NativeContext
from tokenmill.backends.llamacpp.streams import AnyContext, StreamedContext
from tokenmill.config import DEFAULT_MODEL
from tokenmill.contract import BackendLimits, Batch, BatchBuilder, IntArray, Output
from tokenmill.contract.backend import LoadOptions
from tokenmill.errors import ForwardFailed, OutOfKV

EXACT = LoadOptions(backend="llamacpp", extra={"type_k": "f32", "type_v": "f32", "flash_attn": False})
NUM_STREAMS = 3
"""Few, so that sequences come and go; and none of them waits before it is moved beside the others."""
AS_USUAL = LoadOptions(backend="llamacpp")


class FaultyLlamaBackend(LlamaBackend):
    """A llama.cpp backend that can be told to fail: after llama.cpp has computed, when there is most to undo."""

    def __init__(self, context: AnyContext, kv: LlamaMemory, words: IntArray) -> None:
        super().__init__(context, kv, len(words))
        self.faults = FaultPlan()
        self._words = words
        """Token of the suite -> the model's."""

    def _tokens(self, batch: Batch) -> IntArray:
        return self._words[super()._tokens(batch)]

    def _begin(self, batch: Batch, number: int) -> LlamaStep:
        step = super()._begin(batch, number)
        step.struck = self.faults.strike(np.maximum(batch.token, 0), batch)  # type: ignore[attr-defined]
        if FaultKind.OUT_OF_KV in step.struck:  # type: ignore[attr-defined]
            raise OutOfKV(len(batch), 0)
        return step

    def _launched(self, step: LlamaStep) -> None:
        super()._launched(step)
        struck = step.struck  # type: ignore[attr-defined]
        step.logits, step.call = step.logits[:, self._words], None
        if FaultKind.NAN in struck:
            step.logits[struck[FaultKind.NAN][1][step.output_ids]] = np.nan
        if FaultKind.FATAL in struck or FaultKind.FAIL in struck:
            raise ForwardFailed("told to fail", fatal=FaultKind.FATAL in struck)

    def _wait(self, step: LlamaStep) -> None:
        struck = step.struck  # type: ignore[attr-defined]
        if FaultKind.LATE_FATAL in struck or FaultKind.LATE_FAIL in struck:
            raise ForwardFailed("told to fail at collect", fatal=FaultKind.LATE_FATAL in struck)


def backend_for(model: LlamaModel, config: FakeConfig, words: IntArray | None = None) -> FaultyLlamaBackend:
    limits = BackendLimits(
        num_cells=config.num_cells, max_seqs=config.max_seqs, ubatch_size=config.ubatch_size, num_threads=1
    )
    context, memory = model.new_memory(limits)
    if model.options.kv_unified is False:
        context.close()
        context = StreamedContext(NativeContext(model._native, model._streamed(limits, NUM_STREAMS)), NUM_STREAMS, 0)
    wanted = config.capabilities
    memory = LlamaMemory(
        context,
        config.num_cells,
        config.max_context,
        replace(
            memory.capabilities, partial_rm=wanted.partial_rm, partial_cp=wanted.partial_cp, shift=wanted.shift,
            state_bytes=wanted.state_bytes,
        ),
    )  # fmt: skip
    return FaultyLlamaBackend(context, memory, np.arange(config.vocab_size, dtype=np.int32) if words is None else words)


# -- a small random file ----------------------------------------------------------------------------------------------


@cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="tokenmill-llamacpp-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def write_decoder(path: Path, config: FakeConfig) -> Path:
    """The torch subject's decoder as a GGUF file."""
    decoder = make_decoder(config.vocab_size, config.max_context, config.windows)
    sizes = decoder.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(sizes.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_block_count(sizes.num_layers)
    writer.add_context_length(sizes.max_context)
    writer.add_embedding_length(sizes.hidden_size)
    writer.add_feed_forward_length(sizes.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    writer.add_rope_dimension_count(sizes.head_dim)
    writer.add_rope_freq_base(sizes.ropes[0].theta)
    writer.add_layer_norm_rms_eps(sizes.rms_eps)
    for name, view in decoder.weights.views.items():
        kind = name.partition(".")[0]
        values = view.numpy()
        if kind in ("q", "k"):
            values = permuted(values, HEADS if kind == "q" else KV_HEADS)
        writer.add_tensor(in_file(name, GGUF_NAMES), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def small_model(vocab_size: int, max_context: int, num_layers: int, kv_unified: bool = True) -> LlamaModel:
    config = FakeConfig(vocab_size=vocab_size, max_context=max_context, windows=(None,) * num_layers)
    path = folder() / f"{vocab_size}-{max_context}-{num_layers}.gguf"
    options = replace(EXACT, extra={**EXACT.extra, "kv_unified": kv_unified})
    return open_path(write_decoder(path, config), options)


def unified(config: FakeConfig) -> FakeConfig:
    """Cells one by one, steps one by one, and no windows: the file's architecture has none."""
    return replace(config, block_size=1, depth=0, windows=(None,) * len(config.windows))


def make(config: FakeConfig) -> FaultyLlamaBackend:
    return backend_for(small_model(config.vocab_size, config.max_context, len(config.windows)), config)


def make_streamed(config: FakeConfig) -> FaultyLlamaBackend:
    return backend_for(small_model(config.vocab_size, config.max_context, len(config.windows), False), config)


LLAMACPP_STREAMS = Subject(
    "llamacpp, in streams", make_streamed, oracle, hidden_oracle, TOLERANCE, can_fail=True, adapt=unified, depths=(0,)
)
LLAMACPP = Subject("llamacpp", make, oracle, hidden_oracle, TOLERANCE, can_fail=True, adapt=unified, depths=(0,))


# -- the default model ------------------------------------------------------------------------------------------------


@cache
def smollm2() -> LlamaModel:
    return open_path(fetch_alias(DEFAULT_MODEL), AS_USUAL)


def make_smollm2(config: FakeConfig) -> FaultyLlamaBackend:
    """Its words: far apart in the vocabulary, none of them special."""
    return backend_for(smollm2(), config, 700 + 613 * np.arange(config.vocab_size, dtype=np.int32))


@cache
def fresh_prefill(tokens: tuple[int, ...], vocab_size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits and hidden state of the last token."""
    config = FakeConfig(vocab_size=vocab_size, max_context=len(tokens), num_cells=len(tokens), max_seqs=1)
    with make_smollm2(config) as backend:
        batch = BatchBuilder().add_run(tokens, 0, 0, Output.LOGITS | Output.HIDDEN).build()
        output = backend.decode(batch)
    return output.logits[0], output.hidden[0]


def prefilled(cells: Cells) -> tuple[int, ...] | None:
    """The tokens of a sequence that begins at 0."""
    in_order = sorted(cells, key=lambda cell: cell[1])
    return tuple(token for token, _ in in_order) if in_order[0][1] == 0 else None


def smollm2_oracle(config: FakeConfig, layers: list[Cells]) -> NDArray[np.float32] | None:
    tokens = prefilled(layers[0])
    return None if tokens is None else fresh_prefill(tokens, config.vocab_size)[0]


def smollm2_hidden_oracle(config: FakeConfig, layers: list[Cells]) -> NDArray[np.float32] | None:
    tokens = prefilled(layers[0])
    return None if tokens is None else fresh_prefill(tokens, config.vocab_size)[1]


def unmoved(config: FakeConfig) -> FakeConfig:
    """A sequence that was moved looks like a fresh one, and is none."""
    return replace(unified(config), shift=False)


BATCH_EFFECT = 0.5
"""More than SmolLM2's logits depend on the batch in llama.cpp (docs/llamacpp.md). A wrong cell changes them by 6."""
LLAMACPP_SMOLLM2 = Subject(
    "llamacpp, SmolLM2",
    make_smollm2,
    smollm2_oracle,
    smollm2_hidden_oracle,
    BATCH_EFFECT,
    can_fail=True,
    adapt=unmoved,
    depths=(0,),
    num_seeds=1,
)
