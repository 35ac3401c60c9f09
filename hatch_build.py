"""Builds the CPU kernels at install. Without a C compiler the install goes on, and says what is lost.

TOKENMILL_PURE=1 makes a wheel without them, for every platform.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path(__file__).parent / "src" / "tokenmill" / "backends" / "cpu"


class KernelBuild(BuildHookInterface):
    """Compiles the library beside its sources; a wheel takes it in."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        if self.target_name != "wheel" or os.environ.get("TOKENMILL_PURE"):
            return
        build = _load()
        try:
            built = build.build()
        except build.BuildFailed as failure:
            print(f"tokenmill: the CPU kernels could not be built ({failure}): {build.LOST}", file=sys.stderr)
            build.LIBRARY.unlink(missing_ok=True)  # one that is there was built from something else
            return
        build_data["artifacts"].append(str(built.relative_to(Path(self.root))))
        build_data["pure_python"] = False
        # It is no extension of Python's: any version can load it.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def _load() -> Any:
    """The build script, without importing the package: what it needs may not be installed yet."""
    spec = importlib.util.spec_from_file_location("tokenmill_kernel_build", KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
