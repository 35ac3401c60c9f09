"""Compiles the C library: `python -m tokenmill.backends.torch.native.build`, and once by every install.

It needs a C compiler and nothing else, so this file must not import tokenmill. Each variant is compiled for its kind of
machine; which one is used is found out when the library is loaded.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libtokenmill.so"
FLAGS = "-O3 -std=gnu11 -fPIC -Wno-psabi -fno-math-errno -fno-trapping-math -ffp-contract=fast"
VARIANTS = {
    "variant_plain.c": "-ffp-contract=off",  # what is fused must not depend on the size of a batch
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
    given = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if given is None:
        raise BuildFailed("there is no C compiler (cc, gcc or clang)")
    compiler = shlex.split(given)
    is_x86 = _run([*compiler, "-dumpmachine"]).startswith(("x86_64", "amd64"))
    sources_flag = f'-DTM_SOURCES="{fingerprint()}"'
    sources = {"pool.c": "", "kernels.c": "", **VARIANTS}
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        for name, flags in sources.items():
            if name in ONLY_X86 and not is_x86:
                continue
            objects.append(str(Path(folder) / f"{name}.o"))
            own = [*f"{FLAGS} {flags} {more_flags}".split(), sources_flag]
            _run([*compiler, *own, "-c", str(FOLDER / name), "-o", objects[-1]])
        made = Path(folder) / target.name
        _run([*compiler, "-shared", *more_flags.split(), "-o", str(made), *objects, "-lm", "-lpthread"])
        made.replace(target)  # whoever has the old one open keeps it
    return target


def fingerprint() -> str:
    """Of everything that the library is made from: one that was built from something else is not used."""
    files = sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h"), Path(__file__)])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise BuildFailed(f"{shlex.join(command[:1])} failed: {said.strip()[-2000:]}") from None


if __name__ == "__main__":
    try:
        print(build())
    except BuildFailed as failure:
        sys.exit(f"the kernels could not be built: {failure}")
