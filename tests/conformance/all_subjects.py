"""The backends that take the conformance suite. A backend joins with one line here."""

from tests.conformance.subjects import FAKE
from tests.conformance.torch_subject import TORCH, TORCH_DETERMINISTIC

SUBJECTS = [FAKE, TORCH, TORCH_DETERMINISTIC]
