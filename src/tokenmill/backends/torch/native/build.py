"""Compiles the C library: `python -m tokenmill.backends.torch.native.build`, and once by every install.

It needs a C compiler and nothing else, so this file must not import tokenmill. Each variant is compiled for its kind of
machine; which one is used is found out when the library is loaded.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libtokenmill.so"
FLAGS = "-O3 -std=c11 -fPIC -Wno-psabi -fno-math-errno -fno-trapping-math -ffp-contract=fast -fvisibility=default"
VARIANTS = {
    "variant_plain.c": "",
    "variant_avx2.c": "-mavx2 -mfma -mf16c",
    "variant_avx512vnni.c": (
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c -mprefer-vector-width=512"
    ),
}
ONLY_X86 = ("variant_avx2.c", "variant_avx512vnni.c")


class BuildFailed(Exception):
    """There is no compiler, or it has complained."""


def build(target: Path = LIBRARY, more_flags: str = "") -> Path:
    """Compile everything into one shared library."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise BuildFailed("there is no C compiler (cc, gcc or clang)")
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    sources = {"pool.c": "", "kernels.c": "", **VARIANTS}
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        for name, flags in sources.items():
            if name in ONLY_X86 and not is_x86:
                continue
            objects.append(str(Path(folder) / f"{name}.o"))
            _run([compiler, *f"{FLAGS} {flags} {more_flags}".split(), "-c", str(FOLDER / name), "-o", objects[-1]])
        made = Path(folder) / target.name
        _run([compiler, "-shared", *more_flags.split(), "-o", str(made), *objects, "-lm", "-lpthread"])
        made.replace(target)  # whoever has the old one open keeps it
    return target


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise BuildFailed(f"{shlex.join(command[:1])} failed: {said.strip()[-2000:]}") from None


if __name__ == "__main__":
    try:
        print(build())
    except BuildFailed as failure:
        sys.exit(f"the kernels could not be built: {failure}")
