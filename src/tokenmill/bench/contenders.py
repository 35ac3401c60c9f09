"""Those who are compared: each in a process of its own, which does what it is told on standard input.

`python -m tokenmill.bench.contenders NAME MODEL THREADS`; a line "prefill TOKENS", "decode SEQUENCES CONTEXT STEPS" or
"requests COUNT PROMPT NEW" is answered with a line that says how many seconds it took. Whoever is not asked sleeps.
`--clock cpu` before NAME counts CPU seconds of the process instead.
`contenders.py --serve-llama MODEL SETTINGS` runs llama.cpp's server over HTTP instead.
Importing this file needs nothing but Python, so a contender may run in an environment that has only its own packages.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

WARM_UP = 2
"""Steps before the clock starts."""
SLOT_CONTEXT = 512
"""Tokens of a request to a server, in and out."""


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Contender(Protocol):
    def prefill(self, num_tokens: int) -> float:
        """Seconds from a prompt to the logits of its last token."""
        ...

    def decode(self, num_seqs: int, context: int, num_steps: int) -> float:
        """Seconds for so many steps of so many sequences."""
        ...


def prompt(number: int, length: int, vocab_size: int) -> list[int]:
    """Tokens that no other number has."""
    low = min(500, vocab_size // 4)
    return [7919 * (number * length + i + 1) % (vocab_size - 2 * low) + low for i in range(length)]


class Tokenmill:
    """The engine with everything that belongs to a step: scheduling, KV bookkeeping, sampling, text."""

    clock = staticmethod(CLOCKS["wall"])

    def __init__(
        self, model: str, num_threads: int, dtype: str = "auto", backend: str = "auto", slots: str = ""
    ) -> None:
        """With `slots`, as many requests at a time as a server has, of the same context."""
        from tokenmill.entrypoints.llm import LLM

        # The others do not speculate, and a small model's greedy text repeats itself.
        options: dict[str, Any] = {"num_threads": num_threads, "dtype": dtype, "backend": backend, "speculation": "off"}
        options |= {"max_num_seqs": int(slots), "max_model_len": SLOT_CONTEXT} if slots else {"max_num_seqs": 64}
        self._llm = LLM(model, max_num_batched_tokens=4096, prefill_chunk=4096, **options)
        self._vocab_size = self._llm.get_tokenizer().vocab_size
        self._number = 0

    def prefill(self, num_tokens: int) -> float:
        from tokenmill.params import SamplingParams

        tokens = self._prompt(num_tokens)
        began = self.clock()
        self._llm.generate(tokens, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        return self.clock() - began

    def decode(self, num_seqs: int, context: int, num_steps: int) -> float:
        from tokenmill.params import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_steps + WARM_UP + 1, ignore_eos=True)
        generations = [self._llm._intake.generation(self._prompt(context), params) for _ in range(num_seqs)]
        for generation in generations:
            self._llm._start(generation)

        def has(count: int) -> bool:
            return all(one.num_generated >= count for one in generations)

        self._llm._client.run(lambda: has(WARM_UP + 1))
        self.started()
        began = self.clock()
        self._llm._client.run(lambda: has(WARM_UP + 1 + num_steps))
        took = self.clock() - began
        self.ended()
        self._llm._client.run(lambda: all(one.is_finished for one in generations))
        return took

    def started(self) -> None:
        """The clock runs."""

    def ended(self) -> None:
        """The clock has stopped."""

    def requests(self, count: int, prompt_tokens: int, new_tokens: int) -> float:
        """Seconds from so many prompts to all their answers."""
        from tokenmill.params import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        prompts = [self._prompt(prompt_tokens) for _ in range(count)]
        began = self.clock()
        self._llm.generate(prompts, params, use_tqdm=False)
        return self.clock() - began

    def _prompt(self, length: int) -> list[int]:
        self._number += 1
        return prompt(self._number, length, self._vocab_size)


class LlamaCpp:
    """llama.cpp's own `llama_decode`, with nothing around it: no sampling, no text."""

    clock = staticmethod(CLOCKS["wall"])

    def __init__(self, model: str, num_threads: int) -> None:
        import ctypes

        import llama_cpp as llama

        self._llama, self._ctypes = llama, ctypes
        self._silence = llama.llama_log_callback(lambda *_: None)  # C keeps no reference
        llama.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        # Kernels for AMX end the process on machines that announce AMX and do not keep its state.
        params.use_extra_bufts = b"AMX_INT8 = 1" not in llama.llama_print_system_info()
        self._model = llama.llama_model_load_from_file(model.encode(), params)
        settings = llama.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 32_768, 4096, 512, 64
        settings.n_threads = settings.n_threads_batch = num_threads
        settings.kv_unified = True
        self._context = llama.llama_init_from_model(self._model, settings)
        self._memory = llama.llama_get_memory(self._context)
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(4096, 0, 1)
        self._number = 0

    def prefill(self, num_tokens: int) -> float:
        self._llama.llama_memory_clear(self._memory, True)
        tokens = self._prompt(num_tokens)
        began = self.clock()
        self._decode([(token, pos, 0, pos == num_tokens - 1) for pos, token in enumerate(tokens)])
        return self.clock() - began

    def decode(self, num_seqs: int, context: int, num_steps: int) -> float:
        self._llama.llama_memory_clear(self._memory, True)
        for seq in range(num_seqs):
            self._decode([(token, pos, seq, False) for pos, token in enumerate(self._prompt(context))])
        began = 0.0
        for step in range(WARM_UP + num_steps):
            if step == WARM_UP:
                began = self.clock()
            self._decode([(500 + 7 * step + seq, context + step, seq, True) for seq in range(num_seqs)])
        return self.clock() - began

    def _prompt(self, length: int) -> list[int]:
        self._number += 1
        return prompt(self._number, length, self._vocab_size)

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, pos, seq, wants_logits) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos, 1, wants_logits
            batch.seq_id[i][0] = seq
        if self._llama.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self._llama.llama_synchronize(self._context)


def _transformers(model: str, num_threads: int) -> Contender:
    from tokenmill.backends.torch.reference import TransformersContender

    return TransformersContender(model, num_threads, prompt, WARM_UP)


def start_llama_server(model: str, settings: dict[str, int]) -> tuple[Any, str]:
    """llama.cpp's own server, which listens until it is deleted, and its build."""
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = model
    params.port = settings["port"]
    params.n_parallel, params.n_ctx = settings["slots"], settings["slots"] * settings["slot_context"]
    params.n_batch = settings["batch"]
    params.cont_batching = True
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads, cpu.poll = settings["threads"], settings["poll"]
    params.verbosity = 0
    return llama.Server(params), f"xllamacpp {llama.__version__}; {llama.get_system_info()}"


def serve_llama(model: str, settings: str) -> None:
    """Run llama.cpp's server until standard input is closed. Settings are JSON: `LlamaSettings` and a port."""
    given = json.loads(settings)
    server, build = start_llama_server(model, given)
    print(build)
    print(f"llama.cpp on http://127.0.0.1:{given['port']}", flush=True)
    sys.stdin.read()
    del server


class LlamaServer:
    """llama.cpp's own server, called in its process: its scheduling, sampling and text, and no HTTP."""

    def __init__(self, model: str, num_threads: int, poll: str, slots: str = "16") -> None:
        settings = {"port": 0, "slots": int(slots), "slot_context": SLOT_CONTEXT, "batch": 2048}
        self._server, _ = start_llama_server(model, {**settings, "threads": num_threads, "poll": int(poll)})
        self._number = 0

    def requests(self, count: int, prompt_tokens: int, new_tokens: int) -> float:
        """Each call waits for its answer, so each has a thread."""
        from concurrent.futures import ThreadPoolExecutor

        self._number += count
        bodies = [
            {
                "prompt": prompt(self._number - i, prompt_tokens, 49_152),
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            for i in range(count)
        ]
        with ThreadPoolExecutor(count) as threads:
            began = time.perf_counter()
            answers = list(threads.map(self._server.handle_completions, bodies))
            took = time.perf_counter() - began
        for answer in answers:
            if answer["usage"]["completion_tokens"] != new_tokens:
                raise RuntimeError(f"llama.cpp's server gave {answer['usage']}")
        return took


CONTENDERS: dict[str, Callable[..., Any]] = {
    "tokenmill": Tokenmill,
    "llama.cpp": LlamaCpp,
    "llama.cpp-server": LlamaServer,
    "transformers": _transformers,
}


def main(name: str, model: str, num_threads: str, *more: str, clock: str = "wall") -> None:
    contender: Any = CONTENDERS[name](model, int(num_threads), *more)
    contender.clock = CLOCKS[clock]
    print("ready", flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        print(getattr(contender, what)(*map(int, numbers)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--serve-llama":
        serve_llama(*sys.argv[2:])
    elif sys.argv[1] == "--clock":
        main(*sys.argv[3:], clock=sys.argv[2])
    else:
        main(*sys.argv[1:])
