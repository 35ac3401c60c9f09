"""The backends that take the conformance suite, if what they need is installed. A backend joins with one line here."""

import importlib.util

from tests.conformance.cpu_subject import CPU, CPU_INT8_KV
from tests.conformance.subjects import FAKE
from tests.llamacpp import HAS_LLAMACPP, MUST_BE_THERE
from tokenmill.backends.cpu.bindings import library

SUBJECTS = [FAKE]
if library() is not None:
    SUBJECTS += [CPU, CPU_INT8_KV]
if importlib.util.find_spec("transformers") is not None:  # and with it torch
    from tests.conformance.adapter_subject import TRANSFORMERS
    from tests.conformance.torch_subject import TORCH, TORCH_DETERMINISTIC

    SUBJECTS += [TORCH, TORCH_DETERMINISTIC, TRANSFORMERS]
if HAS_LLAMACPP or MUST_BE_THERE:
    from tests.conformance.llamacpp_subject import LLAMACPP, LLAMACPP_SMOLLM2, LLAMACPP_STREAMS

    SUBJECTS += [LLAMACPP, LLAMACPP_STREAMS, LLAMACPP_SMOLLM2]
