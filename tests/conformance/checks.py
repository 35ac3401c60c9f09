"""What a backend must do, one small story each: all of them, in order.

They need no test framework: `python -m tests.conformance` runs them where there is none.
"""

from tests.conformance.stories import batches, failures, resources, sequences, steps
from tests.conformance.story import CHECKS, Check

STORIES = (batches, sequences, resources, failures, steps)
"""Importing a module registers its stories."""

__all__ = ["CHECKS", "STORIES", "Check"]
