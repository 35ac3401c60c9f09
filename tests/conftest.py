"""For all tests: one thread a computation, no model hub, and an order that keeps all workers busy to the end.

Tiny models gain nothing from two threads, and lose much where others work.
"""

import gc
import importlib.util
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it once
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is; in the servers that tests start, too

import pytest

EXTRAS = {name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None}
"""Packages that the light install leaves out: tests that import them are skipped there (make test-light)."""

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


class LightModule(pytest.Module):
    """A module of tests that may import a package which is not installed."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except self.CollectError as error:
            _skip_without(error.__cause__)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return LightModule.from_parent(parent, path=module_path) if EXTRAS else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except ImportError as error:
        _skip_without(error)
        raise


def _skip_without(error: BaseException | None) -> None:
    if isinstance(error, ModuleNotFoundError) and (name := (error.name or "").partition(".")[0]) in EXTRAS:
        pytest.skip(f"needs {name}, which is not installed", allow_module_level=True)


def pytest_collection_finish() -> None:
    """Collections while tests run need not visit modules and collected tests."""
    gc.freeze()
    gc.enable()
