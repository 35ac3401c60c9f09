"""The CUDA backend as a subject of the conformance suite: the torch subject's decoder, moved to the card."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from tests.conformance.subjects import Subject
from tests.conformance.torch_subject import TOLERANCE, Faults, hidden_oracle, make_backend, make_decoder, oracle
from tokenmill.backends.fake import FakeConfig
from tokenmill.backends.torch.cuda.backend import CudaBackend
from tokenmill.backends.torch.cuda.layers import CudaDecoder, Switches
from tokenmill.backends.torch.weights import DecoderWeights


class FaultyCudaBackend(Faults, CudaBackend):  # type: ignore[misc]
    """A CUDA backend that can be told to fail."""


@cache
def cuda_decoder(vocab_size: int, max_context: int, windows: tuple[int | None, ...], switches: Switches) -> CudaDecoder:
    on_cpu = make_decoder(vocab_size, max_context, windows)
    weights = DecoderWeights(on_cpu.config, torch.float32, torch.device("cuda"))
    for name, view in weights.views.items():
        view.copy_(on_cpu.weights.views[name])
    return CudaDecoder(on_cpu.config, weights, switches)


def make(switches: Switches, config: FakeConfig) -> Faults:
    decoder = cuda_decoder(config.vocab_size, config.max_context, config.windows, switches)
    return make_backend(FaultyCudaBackend, decoder, config)


def subject(switches: Switches = Switches()) -> Subject:
    off = [name for name, is_on in vars(switches).items() if not is_on]
    name = f"cuda without {', '.join(off)}" if off else "cuda"
    return Subject(name, partial(make, switches), oracle, hidden_oracle, TOLERANCE, can_fail=True)


CUDA = subject()
WITHOUT = [subject(replace(Switches(), **{name: False})) for name in vars(Switches())]
"""With each optimisation off."""
