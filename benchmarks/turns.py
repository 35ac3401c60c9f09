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
ATTENTION_WINDOW = 256
"""Keeps the backend's work constant: the data it drives out of the CPU caches would be charged to the host."""
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


class Talk:
    """A session with `tokens` in and `tokens` out each turn."""

    def __init__(self, service: SessionService, name: str, tokens: int) -> None:
        self._service, self._name, self._tokens = service, name, tokens
        self.costs = Costs()

    @classmethod
    async def begin(cls, service: SessionService, tokens: int) -> Talk:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
        return cls(service, await service.create_session(sampling_params=params, seed=0), tokens)

    async def turns(self, count: int) -> None:
        for _ in range(count):
            question = f"{len(self.costs.host_s)} {WORDS * self._tokens}"[: self._tokens]
            host, backend = time.process_time(), TimedBackend.spent_s
            async for _ in (await self._service.answer(self._name, given=question)).read():
                pass
            spent = TimedBackend.spent_s - backend
            self.costs.host_s.append(time.process_time() - host - spent)
            self.costs.backend_s.append(spent)


async def run(options: argparse.Namespace, template: str, store: Path | None) -> tuple[Costs, Costs]:
    """The costs of a young and of an old session, whose last turns alternate: the machine is the same for both."""
    context = options.turns * (2 * options.tokens + TEMPLATE_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        vocabulary = write_text_files(Path(directory), template)
        model = TimedModel(
            FakeConfig(vocab_size=vocabulary, max_context=context, windows=(ATTENTION_WINDOW,)), Path(directory)
        )
        async with SessionService(model, kv_cache_tokens=3 * context, store=store) as service:
            old = await Talk.begin(service, options.tokens)
            await old.turns(options.turns - options.window)
            young = await Talk.begin(service, options.tokens)
            await young.turns(options.early - options.window // 2)
            for _ in range(options.window):
                await young.turns(1)
                await old.turns(1)
            return young.costs, old.costs


def parser() -> argparse.ArgumentParser:
    made = bench_parser("python -m benchmarks.turns", __doc__)
    made.add_argument("--turns", type=int, default=1000, help="turns of the session")
    made.add_argument("--tokens", type=int, default=20, help="tokens of each question and of each answer")
    made.add_argument("--early", type=int, default=10, help="turn of a young session to compare the last one with")
    made.add_argument("--window", type=int, default=10, help="alternating turns of both that medians are taken over")
    made.add_argument("--template", type=Path, help="file with another chat template (default: that of SmolLM2)")
    made.add_argument("--store", action="store_true", help="keep the session in a store on disk")
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    template = CHATML if options.template is None else options.template.read_text()
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store" if options.store else None
        young, old = asyncio.run(run(options, template, store))
    latest = slice(-options.window, None)
    for costs in (young, old):
        backend, num_turns = 1000 * statistics.median(costs.backend_s[latest]), len(costs.host_s)
        turns = f"turns {num_turns - options.window + 1:4}-{num_turns:4}"
        print(f"{turns}: {costs.median_ms(latest):6.2f} ms host CPU, {backend:.2f} ms backend")
    ratio = old.median_ms(latest) / young.median_ms(latest)
    print(f"ratio: {ratio:.2f}")
    if options.json is not None:
        figures = {"early_ms": young.median_ms(latest), "late_ms": old.median_ms(latest), "ratio": ratio}
        options.json.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
