"""A model as transformers runs it, with its own attention: what `tokenmill check` compares with. Needs the extra."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tokenmill.backends.checkpoints import GGUFSource, config_of
from tokenmill.backends.families import family_of
from tokenmill.backends.families.config import DecoderConfig
from tokenmill.backends.families.names import GGUF_NAMES, in_file, is_norm, shapes
from tokenmill.backends.families.rope import Rope, frequencies
from tokenmill.backends.gguf_file import OWN_ARCHITECTURES, GGUFFile
from tokenmill.backends.torch.weights import as_tensor
from tokenmill.contract.backend import FloatArray
from tokenmill.errors import ConfigError


def files_of(path: Path) -> dict[str, Any]:
    """Arguments of transformers' `from_pretrained` for a directory or a GGUF file: no downloads, no code of others."""
    where = {"pretrained_model_name_or_path": path if path.is_dir() else path.parent}
    gguf = {} if path.is_dir() else {"gguf_file": path.name}
    return {**where, **gguf, "local_files_only": True, "trust_remote_code": False}


def load_reference(path: Path, dtype: str, device: str) -> Callable[[list[int]], FloatArray]:
    """Token ids to the logits of each, [tokens, vocab]."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = getattr(torch, dtype)
    if path.is_dir():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **files_of(path), dtype=kind, attn_implementation="eager", use_safetensors=True
        )
    else:
        model = from_gguf(path, kind)
    model = model.to(device).eval()

    @torch.inference_mode()
    def logits_of(ids: list[int]) -> FloatArray:
        found: FloatArray = model(torch.tensor([ids], device=device), use_cache=False).logits[0].float().cpu().numpy()
        return found

    return logits_of


def from_gguf(path: Path, dtype: Any) -> Any:
    """The model and metadata as transformers reads them, the tensors as we do: its own reader needs accelerate."""
    file = GGUFFile(path)
    if file.get("general.architecture") not in OWN_ARCHITECTURES:
        return transformers.AutoModelForCausalLM.from_pretrained(**files_of(path), dtype=dtype)
    config = config_of(file)
    source = GGUFSource(file, config)
    parsed = transformers.AutoConfig.from_pretrained(**files_of(path))
    # The sizes that only the tensors say, and a token that matters in training alone.
    parsed.update({"vocab_size": config.vocab_size, "tie_word_embeddings": config.tied, "pad_token_id": None})
    family = family_of(parsed.to_dict())
    as_parsed = family.read(parsed.to_dict())
    different = _different_settings(config, as_parsed)
    if different:
        raise ConfigError(f"it does not read these settings of the file: {', '.join(different)}")
    model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=dtype, attn_implementation="eager")
    tensors = {
        in_file(own, family.names): as_tensor(source.load(in_file(own, GGUF_NAMES)), source.where, own)
        - as_parsed.norm_offset * is_norm(own)
        for own in shapes(config)
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {family.names["head"]}:
        raise ConfigError(f"other tensors than transformers': {[*missing, *unexpected][:3]}")
    return model


def _different_settings(config: DecoderConfig, other: DecoderConfig) -> list[str]:
    """Names of the settings in which two readings of a model differ."""
    names = {name for name in ("embed_scale", "logit_scale", "logit_softcap") if _differs(config, other, name)}
    for one, two in zip(config.layers, other.layers, strict=True):
        names |= {name for name in vars(one) if name != "rope" and _differs(one, two, name)}
        if not _are_same_rotations(one.rope, two.rope):
            names.add("rope")
    return sorted(names)


def _are_same_rotations(one: Rope | None, other: Rope | None) -> bool:
    if one is None or other is None:
        return one is other
    (first, scale), (second, other_scale) = frequencies(one), frequencies(other)
    return first.shape == second.shape and np.allclose(first, second) and math.isclose(scale, other_scale)


def _differs(one: Any, other: Any, name: str) -> bool:
    first, second = getattr(one, name), getattr(other, name)
    both_real = isinstance(first, float) and isinstance(second, float)
    return not math.isclose(first, second, rel_tol=1e-6) if both_real else bool(first != second)


# -- beside our own engine, in benchmarks -----------------------------------------------------------------------------


class TransformersContender:
    """transformers' forward pass with its own cache; the checkpoint is the same file, dequantised."""

    def __init__(
        self, model: str, num_threads: int, prompt: Callable[[int, int, int], list[int]], warm_up: int
    ) -> None:
        """`prompt`: a number, a length and a vocabulary to ids; so many steps of a decode are not timed."""
        torch.set_num_threads(num_threads)
        path = Path(model)
        where = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
        self._model = loaded.eval()
        self._number, self._prompt, self._warm_up = 0, prompt, warm_up

    def prefill(self, num_tokens: int) -> float:
        with torch.inference_mode():
            tokens = self._prompts(1, num_tokens)
            began = time.perf_counter()
            self._model(tokens, logits_to_keep=1)
            return time.perf_counter() - began

    def decode(self, num_seqs: int, context: int, num_steps: int) -> float:
        with torch.inference_mode():
            state = self._model(self._prompts(num_seqs, context), use_cache=True, logits_to_keep=1)
            began = 0.0
            for step in range(self._warm_up + num_steps):
                if step == self._warm_up:
                    began = time.perf_counter()
                token = state.logits[:, -1].argmax(dim=-1, keepdim=True)
                state = self._model(token, past_key_values=state.past_key_values, use_cache=True)
            return time.perf_counter() - began

    def _prompts(self, count: int, length: int) -> Any:
        self._number += count
        size = self._model.config.vocab_size
        return torch.tensor([self._prompt(self._number - i, length, size) for i in range(count)])
