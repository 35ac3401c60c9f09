"""The backends that take the conformance suite. A backend joins with one line here."""

from tests.conformance.adapter_subject import TRANSFORMERS
from tests.conformance.subjects import FAKE
from tests.conformance.torch_subject import TORCH, TORCH_DETERMINISTIC
from tests.llamacpp import HAS_LLAMACPP, MUST_BE_THERE

SUBJECTS = [FAKE, TORCH, TORCH_DETERMINISTIC, TRANSFORMERS]
if HAS_LLAMACPP or MUST_BE_THERE:
    from tests.conformance.llamacpp_subject import LLAMACPP, LLAMACPP_SMOLLM2, LLAMACPP_STREAMS

    SUBJECTS += [LLAMACPP, LLAMACPP_STREAMS, LLAMACPP_SMOLLM2]
