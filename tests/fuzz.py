"""M03: mutated model files. Every one of them opens, or is refused with an error of ours.

    python -m tests.fuzz --count 1000 --seed 0

Half of the files are GGUF, the others are the files of a Hugging Face directory. Each is opened in this process as
`LLM` does it: no crash, no exception of another kind, no more than SLOW_S, no more than MOST_BYTES of memory. GGUF
files are opened by llama.cpp as well, after our own reader and a probe in a child process have accepted them. A failure
is printed with the seed that reproduces it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.backends.llamacpp.files import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, write_attention
from tests.llamacpp import HAS_LLAMACPP
from tokenmill import LLM, SamplingParams
from tokenmill.errors import TokenmillError

SLOW_S = 5.0
"""No file may keep a loader for longer. It counts the CPU time of this process: others may load the machine."""
HANG_S = 60.0
MOST_BYTES = 256 << 20
"""By which the largest size of this process may grow over all files; the files are smaller than a MiB."""
EXTREME = [0, 1, 2, 0x7F, 0xFF, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40,
           (1 << 63) - 1, 1 << 63, (1 << 64) - 1]  # fmt: skip
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

# -- files that are right ---------------------------------------------------------------------------------------------


def _tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=264,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["to be or not to be"] * 9, trainer)
    return tokenizer


def write_gguf(path: Path) -> Path:
    """A small llama with a tokenizer and a template."""
    content = json.loads(_tokenizer().to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    return write_attention(
        path,
        tokenizer={
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in content["merges"]],
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.chat_template": CHAT,
        },
    )


def write_directory(folder: Path) -> Path:
    """The same shapes as a Hugging Face directory."""
    folder.mkdir()
    tokenizer = _tokenizer()
    random_values = np.random.default_rng(3)

    def values(*shape: int) -> torch.Tensor:
        return torch.from_numpy(0.4 * random_values.standard_normal(shape)).to(torch.float32)

    vocab_size, kv_size = tokenizer.get_vocab_size(), HIDDEN // HEADS * KV_HEADS
    tensors = {"model.embed_tokens.weight": values(vocab_size, HIDDEN), "lm_head.weight": values(vocab_size, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(HIDDEN)
        for name, rows in (("q", HIDDEN), ("k", kv_size), ("v", kv_size), ("o", HIDDEN)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = values(rows, HIDDEN)
        tensors[f"{layer}.mlp.gate_proj.weight"] = values(INNER, HIDDEN)
        tensors[f"{layer}.mlp.up_proj.weight"] = values(INNER, HIDDEN)
        tensors[f"{layer}.mlp.down_proj.weight"] = values(HIDDEN, INNER)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": "float32",
    }
    of_tokenizer = {"eos_token": "<|end|>", "chat_template": CHAT, "added_tokens_decoder": {}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "temperature": 0.7, "top_k": 20}))
    return folder


# -- mutations --------------------------------------------------------------------------------------------------------


def flip_bits(choose: random.Random, data: bytes, within: int) -> bytes:
    changed = bytearray(data)
    for _ in range(choose.choice([1, 1, 2, 8])):
        changed[choose.randrange(min(within, len(data)))] ^= 1 << choose.randrange(8)
    return bytes(changed)


def truncate(choose: random.Random, data: bytes, within: int) -> bytes:
    return data[: choose.randrange(choose.choice([min(within, len(data)), len(data)]))]


def lie(choose: random.Random, data: bytes, within: int) -> bytes:
    """An extreme number somewhere, in 4 or 8 bytes."""
    form = choose.choice(["<I", "<Q"])
    value = choose.choice(EXTREME) & ((1 << 8 * struct.calcsize(form)) - 1)
    at = choose.randrange(max(1, min(within, len(data)) - 8))
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


def splice(choose: random.Random, data: bytes, within: int) -> bytes:
    """A piece of the file in another place: put in, or in place of what was there."""
    start, at = (choose.randrange(min(within, len(data))) for _ in range(2))
    piece = data[start : start + choose.choice([1, 4, 8, 64, 1024])]
    return data[:at] + piece + data[at + choose.choice([0, len(piece)]) :]


BYTES: Sequence[Callable[[random.Random, bytes, int], bytes]] = (flip_bits, truncate, lie, splice)


def mutate_gguf(choose: random.Random, data: bytes) -> tuple[str, bytes]:
    """Bytes of the header at random, or one field of it: a length, a count, a type, a dimension, an offset."""
    fields = gguf_fields(data)
    within = max(at for _, at, _ in fields) + 8
    if choose.random() < 0.3:
        change = choose.choice(BYTES)
        return change.__name__, change(choose, data, choose.choice([within, len(data)]))
    # Half of them are settings of the model, with which the file stays a GGUF file.
    what = "value" if choose.random() < 0.5 else choose.choice(sorted({kind for kind, _, _ in fields}))
    at, form = choose.choice([(at, form) for kind, at, form in fields if kind == what])
    size = struct.calcsize(form)
    (old,) = struct.unpack_from(form, data, at)
    near = [old + 1, max(0, old - 1), old * 2, old + 32] if isinstance(old, int) else [0.0, -1.0, 1e30, float("nan")]
    value = choose.choice([*near, *(EXTREME if isinstance(old, int) else ())])
    packed = (
        struct.pack(form, value) if not isinstance(value, int) else (value % (1 << 8 * size)).to_bytes(size, "little")
    )
    return f"{what} = {value}", data[:at] + packed + data[at + size :]


_FORMS = {0: "<B", 1: "<B", 2: "<H", 3: "<H", 4: "<I", 5: "<I", 6: "<f", 7: "<B", 10: "<Q", 11: "<Q", 12: "<d"}


def gguf_fields(data: bytes) -> list[tuple[str, int, str]]:
    """(what it is, where, its form) of each number in the header of a GGUF file that is right."""
    found: list[tuple[str, int, str]] = [("version", 4, "<I"), ("num_tensors", 8, "<Q"), ("num_pairs", 16, "<Q")]
    at = 24

    def take(what: str, form: str) -> int:
        nonlocal at
        found.append((what, at, form))
        (value,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return int(value) if form != "<f" else 0

    def text(what: str) -> None:
        nonlocal at
        length = take(what, "<Q")
        at += length

    def value(kind: int) -> None:
        if kind == 8:
            text("string length")
        elif kind == 9:
            item, count = take("item type", "<I"), take("array length", "<Q")
            for _ in range(count):
                take("item", _FORMS[item]) if item in _FORMS else value(item)
        else:
            take("value", _FORMS[kind])

    num_tensors, num_pairs = struct.unpack_from("<QQ", data, 8)
    for _ in range(num_pairs):
        text("key length")
        value(take("value type", "<I"))
    for _ in range(num_tensors):
        text("name length")
        for _ in range(take("dimensions", "<I")):
            take("dimension", "<Q")
        take("tensor type", "<I")
        take("offset", "<Q")
    return found


def mutate_safetensors(choose: random.Random, data: bytes) -> tuple[str, bytes]:
    """Bytes of the header at random, its length, or a value in its JSON."""
    (length,) = struct.unpack_from("<Q", data)
    if choose.random() < 0.3:
        change = choose.choice(BYTES)
        return change.__name__, change(choose, data, 8 + length)
    if choose.random() < 0.2:
        value = choose.choice([*EXTREME, length - 1, length + 1, len(data)])
        return f"header length = {value}", struct.pack("<Q", value) + data[8:]
    what, header = mutate_json(choose, data[8 : 8 + length])
    header = header.ljust(length) if choose.random() < 0.8 else header
    return f"header: {what}", struct.pack("<Q", len(header)) + header + data[8 + length :]


ODD_VALUES: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 3, 1 << 31, 1 << 63, 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\x00", "F64", "I8", "BOOL", "../../etc/passwd", "a" * 10_000, [], [1], [[0]], {}, {"a": 1}),
)


def mutate_json(choose: random.Random, data: bytes) -> tuple[str, bytes]:
    """A value of another type or size, a key away or twice, depth, or bytes at random."""
    if choose.random() < 0.15:
        change = choose.choice(BYTES)
        return change.__name__, change(choose, data, len(data))
    if choose.random() < 0.05:
        return "depth", b'{"a":' * 100_000
    content = json.loads(data)
    places = list(_places(content))
    inside, key = choose.choice([choose.choice(places), choose.choice(places[: max(1, len(places) // 20)])])
    if choose.random() < 0.2:
        del inside[key]
        return f"without {key!r}", json.dumps(content).encode()
    if choose.random() < 0.3:
        other, other_key = choose.choice(places)
        value = copy.deepcopy(other[other_key])
    else:
        value = choose.choice(ODD_VALUES)
    if isinstance(inside[key], int) and choose.random() < 0.5:
        value = choose.choice([inside[key] + 1, inside[key] - 1, -inside[key], *EXTREME])
    inside[key] = value
    return f"{key!r} = {str(value)[:40]}", json.dumps(content).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a JSON value that has a value, outer ones first."""
    level = [value]
    while level:
        below = []
        for one in level:
            for key in list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ():
                yield one, key
                if isinstance(one[key], (dict, list)):
                    below.append(one[key])
        level = below


FILES: dict[str, Callable[[random.Random, bytes], tuple[str, bytes]]] = {
    "model.safetensors": mutate_safetensors,
    "config.json": mutate_json,
    "tokenizer.json": mutate_json,
    "tokenizer_config.json": mutate_json,
    "generation_config.json": mutate_json,
}


@dataclass
class Originals:
    """Files that are right, in memory."""

    gguf: bytes
    directory: dict[str, bytes]

    @classmethod
    def make(cls, folder: Path) -> Originals:
        path, model = write_gguf(folder / "model.gguf"), write_directory(folder / "model")
        return cls(path.read_bytes(), {file.name: file.read_bytes() for file in model.iterdir()})

    def write(self, folder: Path, seed: int) -> tuple[Path, str]:
        """Mutation number `seed`: what to open, and what was changed."""
        choose = random.Random(seed)
        if seed % 2 == 0:
            what, data = mutate_gguf(choose, self.gguf)
            path = folder / f"{seed}.gguf"
            path.write_bytes(data)
            return path, f"GGUF: {what}"
        name = choose.choices(list(FILES), weights=[5, 3, 3, 1, 1])[0]
        what, data = FILES[name](choose, self.directory[name])
        path = folder / str(seed)
        path.mkdir()
        for other, content in self.directory.items():
            (path / other).write_bytes(data if other == name else content)
        return path, f"{name}: {what}"


# -- opening them -----------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What became of the files."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def note(self, seed: int, what: str, backend: str, outcome: str, seconds: float) -> None:
        self.outcomes[f"{backend}: {outcome}"] += 1
        self.slowest_s = max(self.slowest_s, seconds)
        if outcome not in ("opened", "refused"):
            self.failures.append(f"seed {seed} ({what}), {backend}: {outcome}")
        elif seconds > SLOW_S:
            self.failures.append(f"seed {seed} ({what}), {backend}: took {seconds:.1f} s")


@contextlib.contextmanager
def _not_hanging() -> Iterator[None]:
    """An exception in a main thread that takes too long; C code that never returns ends the process."""

    def stop(*_: object) -> None:
        raise AssertionError(f"not done after {HANG_S:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(path: Path, backend: str) -> str:
    """Open a model and let it say two tokens: "opened", "refused", or what else happened."""
    try:
        with _not_hanging(), LLM(str(path), backend=backend, kv_cache_tokens=64, max_num_seqs=1, num_threads=1) as llm:
            llm.generate("to be", SamplingParams(max_tokens=2, temperature=0.0))
    except TokenmillError as error:
        return "refused" if "\n" not in str(error) else f"more than a line: {error}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {error}"
    return "opened"


def fuzz(seeds: Sequence[int], folder: Path, backends: Sequence[str] = ("torch",)) -> Report:
    """Open so many mutated files, each with these backends."""
    report = Report()
    originals = Originals.make(folder)
    assert attempt(folder / "model.gguf", "torch") == attempt(folder / "model", "torch") == "opened"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        path, what = originals.write(folder, seed)
        for backend in backends if path.is_file() else ("torch",):
            began = time.process_time()
            outcome = attempt(path, backend)
            report.note(seed, what, backend, outcome, time.process_time() - began)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > MOST_BYTES:
        report.failures.append(f"memory grew by {grown >> 20} MiB")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="number of files")
    parser.add_argument("--seed", type=int, default=0, help="first one")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + options.count)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = fuzz(seeds, Path(folder), ("torch", "llamacpp") if HAS_LLAMACPP else ("torch",))
    for outcome, count in sorted(report.outcomes.items()):
        print(f"{count:6} {outcome[:100]}")
    for failure in report.failures:
        print(f"  {failure}")
    print(
        f"{options.count} files, {len(report.failures)} failures, slowest {report.slowest_s:.2f} s, "
        f"{time.monotonic() - began:.0f} s in all"
    )
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
