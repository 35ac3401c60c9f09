"""`python -m benchmarks.turns`: host CPU time of a session's turns as its history grows, without the backend.

One session, many short turns, on the fake backend with a byte-level tokenizer and a chat template with special tokens.
The cost of a turn should follow its new input, not its history: the ratio of late to early turns shows it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tokenmill.backends.fake import FakeBackend, FakeConfig, FakeModel
from tokenmill.bench import bench_parser
from tokenmill.contract import BackendLimits
from tokenmill.params import SamplingParams
from tokenmill.session.service import SessionService

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of SmolLM2."""
SPECIAL = ("<|im_start|>", "<|im_end|>")
WORDS = "the quick brown fox jumps over the lazy dog and runs away"
TEMPLATE_TOKENS = 64
"""Upper bound on what the template adds to a turn, in tokens."""
T = TypeVar("T")


@dataclass
class Costs:
    """CPU seconds of each turn: of the whole process, and of the backend."""

    host_s: list[float] = field(default_factory=list)
    backend_s: list[float] = field(default_factory=list)

    def median_ms(self, turns: slice) -> float:
        return 1000 * statistics.median(self.host_s[turns])


class TimedBackend(FakeBackend):
    """Adds up the CPU time of its steps."""

    spent_s = 0.0

    def forward(self, batch: Any) -> Any:
        return self._timed(lambda: super(TimedBackend, self).forward(batch))

    def sample(self, forward: Any, rows: Any, mask: Any = None) -> Any:
        return self._timed(lambda: super(TimedBackend, self).sample(forward, rows, mask))

    def collect(self, handle: Any) -> Any:
        return self._timed(lambda: super(TimedBackend, self).collect(handle))

    def _timed(self, work: Callable[[], T]) -> T:
        began = time.thread_time()
        try:
            return work()
        finally:
            TimedBackend.spent_s += time.thread_time() - began


class TimedModel(FakeModel):
    """A fake model with the tokenizer and the template of a directory."""

    def __init__(self, config: FakeConfig, path: Path) -> None:
        super().__init__(config)
        self.path = path

    def new_backend(self, limits: BackendLimits) -> FakeBackend:
        config = replace(
            self.config, num_cells=limits.num_cells, max_seqs=limits.max_seqs, ubatch_size=limits.ubatch_size
        )
        return TimedBackend(config, self._gate)


def write_text_files(directory: Path, template: str) -> int:
    """A tokenizer with one token a byte and a few special ones, and a chat template; the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": SPECIAL[-1], "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return len(alphabet) + len(SPECIAL)


async def converse(service: SessionService, num_turns: int, tokens: int) -> Costs:
    """One session: `tokens` in and `tokens` out each turn."""
    costs = Costs()
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
    name = await service.create_session(sampling_params=params, seed=0)
    for turn in range(num_turns):
        question = f"{turn} {WORDS * tokens}"[:tokens]
        host, backend = time.process_time(), TimedBackend.spent_s
        async for _ in (await service.answer(name, given=question)).read():
            pass
        spent = TimedBackend.spent_s - backend
        costs.host_s.append(time.process_time() - host - spent)
        costs.backend_s.append(spent)
    await service.end_session(name)
    return costs


async def run(num_turns: int, tokens: int, template: str, store: Path | None) -> Costs:
    context = num_turns * (2 * tokens + TEMPLATE_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        vocabulary = write_text_files(Path(directory), template)
        model = TimedModel(FakeConfig(vocab_size=vocabulary, max_context=context), Path(directory))
        async with SessionService(model, kv_cache_tokens=2 * context, store=store) as service:
            return await converse(service, num_turns, tokens)


def parser() -> argparse.ArgumentParser:
    made = bench_parser("python -m benchmarks.turns", __doc__)
    made.add_argument("--turns", type=int, default=1000, help="turns of the session")
    made.add_argument("--tokens", type=int, default=20, help="tokens of each question and of each answer")
    made.add_argument("--early", type=int, default=10, help="turn to compare the last one with")
    made.add_argument("--window", type=int, default=10, help="turns around both over which the median is taken")
    made.add_argument("--template", type=Path, help="file with another chat template (default: that of SmolLM2)")
    made.add_argument("--store", action="store_true", help="keep the session in a store on disk")
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    template = CHATML if options.template is None else options.template.read_text()
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store" if options.store else None
        costs = asyncio.run(run(options.turns, options.tokens, template, store))
    first = max(1, options.early - options.window // 2)  # the first turn compiles the template
    early, late = slice(first, first + options.window), slice(options.turns - options.window, options.turns)
    for turns in (early, *(slice(at, at + options.window) for at in (options.turns // 4, options.turns // 2)), late):
        backend = 1000 * statistics.median(costs.backend_s[turns])
        host = costs.median_ms(turns)
        print(f"turns {turns.start + 1:5}-{turns.stop:5}: {host:7.2f} ms host CPU, {backend:.2f} ms backend")
    ratio = costs.median_ms(late) / costs.median_ms(early)
    print(f"ratio of the last to the early turns: {ratio:.2f}")
    if options.json is not None:
        figures = {"early_ms": costs.median_ms(early), "late_ms": costs.median_ms(late), "ratio": ratio}
        options.json.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
