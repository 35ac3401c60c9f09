"""`Fingerprint`: which model a log or KV is of. The same files give the same one on any machine.

A log belongs to a model's weights and to how it turns text into ids. KV bytes belong, beyond that, to the form in
which it computes. Files up to `WHOLE_BYTES` are read whole; of larger ones the beginning, the end and pieces all over,
so that a model of any size is known in a moment. (Large files of one size that differ only between these pieces are
taken for the same.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenmill.contract import ModelHandle
from tokenmill.text.model_text import ModelText

WHOLE_BYTES = 512 << 20
PIECE_BYTES = 64 << 10
NUM_PIECES = 256
SPOKEN = "Straße 東京 🙂 I'm 1,234.5\n\tdef f(x): return x"
"""How a text is cut into tokens shows in this one."""


@dataclass(frozen=True)
class Fingerprint:
    """Hexadecimal digests."""

    weights: str
    """Architecture and weights."""
    text: str
    """Tokenizer and chat template."""
    form: str
    """What KV bytes are of use to: weights, and how they are held and computed with."""

    @property
    def of_log(self) -> str:
        """What a log is of."""
        return f"{self.weights}-{self.text}"

    @property
    def of_answers(self) -> str:
        """What answers depend on: weights, how they are computed with, tokenizer and chat template. Short."""
        return _digest(self.text.encode(), self.form.encode())[:12]

    def why_not(self, other: str) -> str | None:
        """Why a log of another fingerprint is not this model's; None if it is."""
        weights, _, text = other.partition("-")
        if weights != self.weights:
            return f"it is of another model (weights {weights[:12]}, not {self.weights[:12]})"
        if text != self.text:
            return "it is of the same weights with another tokenizer or chat template"
        return None


def fingerprint(model: ModelHandle, text: ModelText) -> Fingerprint:
    """Reads the model's files: not for an event loop."""
    info = model.info
    shape = [info.name, info.vocab_size, info.hidden_size, [list(vars(layer).values()) for layer in info.layers]]
    architecture = [info.vocab_size, info.hidden_size, len(info.layers)] if model.path is not None else shape
    weights = _digest(json.dumps(architecture).encode(), *_weights(model.path))
    return Fingerprint(weights, _text(text), _digest(weights.encode(), json.dumps([*shape, info.form]).encode()))


def _weights(path: Path | None) -> Iterator[bytes]:
    """Digests of the files that hold weights; their names do not matter."""
    if path is None:
        return
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        yield _file(file).encode()


def _file(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while piece := file.read(1 << 20):
                digest.update(piece)
        else:
            for i in range(NUM_PIECES):
                file.seek(i * (size - PIECE_BYTES) // (NUM_PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def _text(text: ModelText) -> str:
    tokenizer = text.tokenizer
    vocabulary = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        spelled = tokenizer.token_bytes(token)
        vocabulary.update(len(spelled).to_bytes(4, "little") + spelled)
    try:
        cut = tokenizer.encode(SPOKEN)
    except ValueError:  # a vocabulary that does not hold all of it
        cut = []
    told = [sorted(tokenizer.eos_ids), sorted(tokenizer.special_tokens.items()), cut]
    template = "" if text.template is None else text.template.source
    return _digest(vocabulary.digest(), json.dumps(told).encode(), template.encode())


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]
