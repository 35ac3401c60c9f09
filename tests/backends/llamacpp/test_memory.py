"""One model, several contexts: what they share, what they take, who is freed when; sequences, and parked KV."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.llamacpp.files import VOCAB
from tokenmill import LLM, SamplingParams, open_model
from tokenmill.contract import BackendLimits, BatchBuilder
from tokenmill.engine.request import Hints, Limits, Request
from tokenmill.errors import BackendClosed, InvalidBatch
from tokenmill.text.tokenizer import ByteTokenizer

LIMITS = BackendLimits(num_cells=256, max_seqs=8, num_threads=1)


# -- who is freed when ------------------------------------------------------------------------------------------------


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was given back to llama.cpp, in order, with the thread that did it."""
    import llama_cpp as llama

    order: list[str] = []
    for name in ("llama_free", "llama_model_free"):
        free = getattr(llama, name)

        def noted(pointer: Any, name: str = name, free: Any = free) -> None:
            order.append(f"{name} by {threading.current_thread().name}")
            free(pointer)

        monkeypatch.setattr(llama, name, noted)
    return order


@pytest.mark.req("G17")
def test_nothing_native_is_left_to_the_garbage_collector(small: Path, freed: list[str]) -> None:
    model = open_model(str(small), backend="llamacpp", n_threads=1)
    first, second = model.new_backend(LIMITS), model.new_backend(LIMITS)
    model.close()
    first.close()
    first.close()
    assert freed == ["llama_free by MainThread"]
    second.decode(BatchBuilder().add_run([1, 2, 3], 0, 0).build())  # its weights are there
    closing = threading.Thread(target=second.close, name="its owner")
    closing.start()
    closing.join()
    assert freed[1:] == ["llama_free by its owner", "llama_model_free by its owner"]


@pytest.mark.req("G17")
def test_a_backend_that_is_forgotten_is_not_freed_behind_our_back(small: Path, freed: list[str]) -> None:
    model = open_model(str(small), backend="llamacpp", n_threads=1)
    backend = model.new_backend(LIMITS)
    context = backend._context
    del backend
    forgetting = threading.Thread(target=gc.collect)
    forgetting.start()
    forgetting.join()
    assert freed == []
    context.close()
    model.close()
    assert len(freed) == 2


def test_a_closed_memory_does_nothing(model: Any) -> None:
    backend = model.new_backend(LIMITS)
    backend.decode(BatchBuilder().add_run([1, 2, 3], 0, 0).build())
    backend.close()
    with pytest.raises(BackendClosed):
        backend.kv.export(0)
    backend.kv.seq_rm(0)
    backend.kv.clear()


# -- several contexts -------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def sizes_of_contexts(path: str, num_cells: int) -> tuple[list[int], int, int]:
    """Resident bytes after each of three contexts, the KV bytes of a token, and those of the weights."""
    limits = BackendLimits(num_cells=num_cells, max_seqs=16, num_threads=1)
    model = open_model(path, backend="llamacpp", n_ubatch=32)
    batch = BatchBuilder().add_run(list(range(500, 516)), 0, 0).build()
    backends, sizes = [], []
    for _ in range(3):
        backends.append(model.new_backend(limits))
        backends[-1].decode(batch)
        sizes.append(resident_bytes())
    found = sizes, model.info.kv_bytes_per_token, model.memory(limits, 1).weights
    for backend in backends:
        backend.close()
    model.close()
    return found


@pytest.mark.req("R27")
def test_a_second_context_takes_its_kv_and_no_more(default_model: Path) -> None:
    """In a process of its own: this one may have memory to use again."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        sizes, kv_bytes_per_token, weights = pool.submit(sizes_of_contexts, str(default_model), 8191).result()
    kv = 8192 * kv_bytes_per_token
    for before, after in itertools.pairwise(sizes):
        assert 0.9 * kv < after - before < kv + 0.2 * weights


@pytest.mark.req("R27")
def test_contexts_compute_at_the_same_time(default_model: Path) -> None:
    """Both threads are inside llama.cpp at once: neither holds the interpreter's lock there, nor one of the model's."""
    model = open_model(str(default_model), backend="llamacpp")
    start = threading.Barrier(2)
    spans: dict[int, tuple[float, float]] = {}

    def compute(number: int) -> None:
        with model.new_backend(LIMITS) as backend:
            batch = BatchBuilder().add_run(list(range(500, 628)), 0, 0).build()
            backend.decode(BatchBuilder().add(500, 0, 1).build())
            start.wait()
            began = time.perf_counter()
            backend.decode(batch)
            spans[number] = began, time.perf_counter()

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model.close()
    (first_began, first_ended), (second_began, second_ended) = spans.values()
    together = min(first_ended, second_ended) - max(first_began, second_began)
    assert together > 0.5 * min(first_ended - first_began, second_ended - second_began)


# -- sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.req("R8")
def test_all_sequences_but_one_of_llama_cpps_can_be_used(model: Any) -> None:
    with model.new_backend(BackendLimits(num_cells=600, max_seqs=1000, num_threads=1)) as backend:
        assert backend.capabilities.max_seqs == 255
        builder = BatchBuilder()
        for seq in range(255):
            builder.add(seq, 0, seq, 1)
        backend.decode(builder.build())
        assert backend.kv.stats().num_seqs == 255
        with pytest.raises(InvalidBatch, match="must be below max_seqs 255"):
            backend.decode(BatchBuilder().add(1, 0, 255).build())


@pytest.mark.req("R4", "R8")
def test_ids_and_cells_come_back_over_and_over(small: Path) -> None:
    """A hundred requests over a memory for a few of them: ids stay bounded, nothing is cleared, nothing leaks."""
    with LLM(
        str(small),
        backend="llamacpp",
        tokenizer=ByteTokenizer(VOCAB),
        kv_cache_tokens=256,
        max_num_seqs=4,
        num_threads=1,
    ) as llm:
        backend = llm.engine._executor.backend
        cleared: list[bool] = []
        backend.kv.clear = lambda: cleared.append(True)  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=4)
        for round_ in range(20):
            prompts = [[round_, number, *range(20)] for number in range(5)]
            outs = llm.generate(prompts, params)
            assert all(len(out.outputs[0].token_ids) == 4 for out in outs)
        llm.engine.check_integrity()
        llm.engine.kv.evict_all()
        stats = backend.kv.stats()
        assert (stats.free_cells, stats.num_seqs) == (stats.num_cells, 0)
        assert [backend._context.seq_pos_max(seq) for seq in range(8)] == [-1] * 8
        assert not cleared


# -- parked KV --------------------------------------------------------------------------------------------------------


def test_parked_cells_follow_from_what_a_step_reads(default_model: Path, mamba: Path) -> None:
    for path, least, most in ((default_model, 512, 2000), (mamba, None, None)):
        opened = open_model(str(path), backend="llamacpp")
        with opened.new_backend(BackendLimits(num_cells=256)) as backend:
            found = backend.capabilities.parked_cells
        opened.close()
        assert found is least or least <= found <= most


@pytest.mark.req("R4")
def test_parked_kv_of_requests_goes_when_another_starts(small: Path) -> None:
    with LLM(
        str(small),
        backend="llamacpp",
        extra={"parked_cells": 50, "n_threads": 1},
        tokenizer=ByteTokenizer(VOCAB),
        kv_cache_tokens=2048,
    ) as llm:
        params, kv = SamplingParams(temperature=0, max_tokens=2), llm.engine.kv
        for number in range(6):
            llm.generate([[number, *range(40)]], params)
            before, free = kv.num_parked_tokens, kv.free()
            assert before <= 50 + 42
            assert kv.kv.stats().num_cells - free == kv.kv.stats().held_cells == before
        out = llm.generate([[5, *range(40), 9]], params)[0]
        assert out.usage.cached_tokens == 41  # its own is taken over, however much it is


@pytest.mark.req("R4")
def test_what_is_left_moves_down_and_says_the_same(model: Any) -> None:
    """Twenty sequences of a hundred tokens; three of them stay, two of these share a prefix."""
    limits = BackendLimits(num_cells=4096, max_seqs=32, num_threads=1)
    texts = [[(7 * seq + i) % 250 for i in range(100)] for seq in range(20)]
    with model.new_backend(limits) as backend, model.new_backend(limits) as other:
        for seq, text in enumerate(texts):
            backend.decode(BatchBuilder().add_run(text, 0, seq).build())
        backend.kv.seq_cp(3, 25, 0, 60)
        for seq in set(range(20)) - {3, 12, 19}:
            backend.kv.seq_rm(seq)
        moved: list[int] = []
        write_state = backend._context.write_state
        backend._context.write_state = lambda seq, state: (moved.append(seq), write_state(seq, state))[1]
        builder = BatchBuilder().add(1, 60, 25, 1)
        for seq in (3, 12, 19):
            builder.add(1, 100, seq, 1)
        rows = backend.decode(builder.build()).logits
        assert moved == [12, 19]
        expected = [
            other.decode(BatchBuilder().add_run([*tokens, 1], 0, seq).build()).logits[0]
            for seq, tokens in enumerate([texts[3][:60], texts[3], texts[12], texts[19]])
        ]
        assert np.abs(rows - np.stack(expected)).max() < 0.05
        backend.decode(BatchBuilder().add(2, 101, 3, 1).build())
        assert moved == [12, 19]  # once
        assert backend.kv.stats().held_cells == 100 + 100 + 100 + 4 + 1


@pytest.mark.req("R4", "R8")
@pytest.mark.parametrize("unified", [True, False])
def test_21_2_sessions_with_identical_histories_leave_the_kv_of_others(small: Path, unified: bool) -> None:
    """More turns than llama.cpp has sequences, in unified cells and in streams."""
    script = [(7 * place) % 250 for place in range(3 * 90)]
    with LLM(
        str(small),
        backend="llamacpp",
        extra={"kv_unified": unified, "n_threads": 1},
        tokenizer=ByteTokenizer(VOCAB),
        kv_cache_tokens=2048,
        max_num_seqs=2,
    ) as llm:
        engine, sessions = llm.engine, [f"unrelated {number}" for number in range(5)]
        assert engine.kv._capabilities.max_seqs == 255
        logs = [[200 + number, *range(21)] for number in range(5)]

        def turn(session: str, prompt: list[int]) -> Request:
            asked = Request(f"{session}, {len(prompt)}", prompt, Limits(max_new_tokens=1), Hints(owner=session))
            engine.add(asked)
            while engine.has_work:
                engine.step()
            return asked

        for session, log in zip(sessions, logs, strict=True):
            turn(session, log)
        for number in range(4):
            sessions.append(f"same {number}")
            for end in range(3, len(script) + 1, 3):
                assert turn(sessions[-1], script[:end]).num_cached >= end - 3
            assert sorted(view.owner or "" for view in engine.kv.parked_views()) == sorted(sessions)
        stats = engine.stats()
        assert (stats.num_evicted, stats.num_parked_tokens) == (0, 5 * 22 + len(script))
        assert stats.num_parked_tokens <= stats.kv.held_cells < stats.kv.num_cells / 2
        for session, log in zip(sessions, logs, strict=False):
            assert turn(session, [*log, 5]).num_cached == len(log)
        engine.check_integrity()
