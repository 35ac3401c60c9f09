"""`python -m benchmarks.adapter`: decode throughput of a model through transformers beside our own family.

Both run in this process, in turns of a few steps, so that whatever else the machine does hits both. A GGUF file of a
Llama is written as a Hugging Face directory first: transformers' module and our decoder read the same weights.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import save_file

from tokenmill.backends.checkpoints import GGUFSource, config_of
from tokenmill.backends.families.names import GGUF_NAMES, HF_NAMES, in_file, shapes
from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.backends.library import find_model
from tokenmill.backends.loading import open_model
from tokenmill.backends.torch.weights import as_tensor
from tokenmill.bench import bench_parser
from tokenmill.config import DEFAULT_MODEL
from tokenmill.contract import Backend, BackendLimits, BatchBuilder, ModelHandle, Output
from tokenmill.errors import ConfigError, ModelNotFound

PROMPT = 64
"""Tokens of each sequence before it is measured."""


@dataclass(frozen=True)
class Row:
    num_seqs: int
    native: float
    """Tokens a second, the median of all rounds."""
    adapter: float
    ratio: float
    """The median of the rounds' ratios: adapter to native."""
    cpu_ratio: float
    """The same by CPU time, which other processes hardly change: for one thread on a busy machine."""


def as_directory(path: Path, folder: Path) -> Path:
    """A GGUF file of a Llama as a Hugging Face directory in float32."""
    file = GGUFFile(path)
    config = config_of(file)
    rope = config.layers[0].rope
    is_plain = rope is not None and rope.kind in ("default", "linear") and rope.factor == 1.0 and not rope.divisors
    if config.family != "llama" or rope is None or not is_plain:
        raise ConfigError(f"{path} is not a plain Llama: give a Hugging Face directory instead")
    source = GGUFSource(file, config)
    tensors = {
        in_file(own, HF_NAMES): as_tensor(source.load(in_file(own, GGUF_NAMES)), source.where, own).float()
        for own in shapes(config)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "tie_word_embeddings": config.tied,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


class Decoding:
    """Some sequences of one model that go on by a token each step."""

    def __init__(self, model: ModelHandle, num_seqs: int, num_steps: int, num_threads: int | None) -> None:
        num_cells = num_seqs * (PROMPT + num_steps + model.block_size)
        limits = BackendLimits(num_cells=num_cells, max_seqs=num_seqs, num_threads=num_threads)
        self._backend: Backend = model.new_backend(limits)
        self._num_seqs, self._vocab_size = num_seqs, model.info.vocab_size
        self._length = PROMPT
        for seq in range(num_seqs):
            tokens = [self._token(seq, pos) for pos in range(PROMPT)]
            self._backend.decode(BatchBuilder().add_run(tokens, 0, seq).build())

    def _token(self, seq: int, pos: int) -> int:
        return (17 + 7919 * seq + 104_729 * pos) % self._vocab_size

    def run(self, num_steps: int) -> tuple[float, float]:
        """Tokens a second, and a second of CPU time."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            batch = BatchBuilder()
            for seq in range(self._num_seqs):
                batch.add(self._token(seq, self._length), self._length, seq, Output.LOGITS)
            self._backend.decode(batch.build())
            self._length += 1
        num_tokens = self._num_seqs * num_steps
        return num_tokens / (time.perf_counter() - begin), num_tokens / (time.process_time() - cpu_begin)

    def close(self) -> None:
        self._backend.close()


def measure(models: Sequence[ModelHandle], num_seqs: int, rounds: int, steps: int, num_threads: int | None) -> Row:
    """`models`: our own family's, and the adapter's."""
    both = [Decoding(model, num_seqs, (rounds + 1) * steps, num_threads) for model in models]
    for one in both:
        one.run(steps)  # caches and allocations
    speeds: list[list[tuple[float, float]]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            speeds[which].append(both[which].run(steps))
    for one in both:
        one.close()
    native, adapter = (statistics.median(wall for wall, _ in rounds_of) for rounds_of in speeds)
    ratio, cpu_ratio = (
        statistics.median(other[kind] / one[kind] for one, other in zip(*speeds, strict=True)) for kind in (0, 1)
    )
    return Row(num_seqs, native, adapter, ratio, cpu_ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.adapter", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16], help="sequences that decode at once")
    parser.add_argument("--rounds", type=int, default=9, help="rounds; each runs both models")
    parser.add_argument("--steps", type=int, default=16, help="steps of each model per round")
    parser.add_argument("--threads", type=int, help="CPU threads; 1 on a busy machine (default: all cores)")
    parser.add_argument("--dtype", default="float32", help="data type of the weights")
    parser.add_argument("--device", default="cpu", help="device: cpu or cuda")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    path = find_model(options.model)
    if path is None:
        raise ModelNotFound(f"no model {options.model!r}: not a directory, a .gguf file or a model name")
    with tempfile.TemporaryDirectory() as folder:
        directory = path if path.is_dir() else as_directory(path, Path(folder))
        models = [
            open_model(str(directory), dtype=options.dtype, device=options.device, model_impl=impl)
            for impl in ("native", "transformers")
        ]
        rows = [measure(models, count, options.rounds, options.steps, options.threads) for count in options.sequences]
    if options.json:
        print(json.dumps({"model": options.model, "rows": [asdict(row) for row in rows]}, indent=2))
        return 0
    print(
        "| sequences | native (tok/s) | adapter (tok/s) | ratio | by CPU time |\n| ---: | ---: | ---: | ---: | ---: |"
    )
    for row in rows:
        print(f"| {row.num_seqs} | {row.native:.1f} | {row.adapter:.1f} | {row.ratio:.2f} | {row.cpu_ratio:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
