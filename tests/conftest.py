"""For all tests: one thread a computation, no model hub, and an order that keeps all workers busy to the end.

Tiny models gain nothing from two threads, and lose much where others work.
"""

import gc
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it once
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is; in the servers that tests start, too

import pytest

gc.disable()  # until all modules are imported: nothing of them is garbage

LONGEST_FIRST = ("web", "e2e", "native", "conformance", "session", "server", "engine")
"""Directories of tests in this order, then the others, whose files are short: no worker ends much later than another.
Files of a directory stay together, and with them the servers and browsers that they share."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        directory = item.path.relative_to(here).parts[0] if here in item.path.parents else ""
        return LONGEST_FIRST.index(directory) if directory in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Collections while tests run need not visit modules and collected tests."""
    gc.freeze()
    gc.enable()
