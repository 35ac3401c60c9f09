"""All tests of this folder without pytest: `python -m tests.gpu [NAME ...]`, a name being part of a test's."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import tests.gpu


def main(names: list[str]) -> int:
    failed = 0
    for module_info in pkgutil.iter_modules(tests.gpu.__path__, "tests.gpu."):
        if "test_" not in module_info.name:
            continue
        for name, test in vars(importlib.import_module(module_info.name)).items():
            if not name.startswith("test_") or (names and not any(one in name for one in names)):
                continue
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    test(**({"tmp_path": Path(folder)} if inspect.signature(test).parameters else {}))
                    said = "passed"
                except Exception:
                    failed += 1
                    said = f"FAILED\n{traceback.format_exc()}"
            print(f"{name}: {said} ({time.perf_counter() - began:.1f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
