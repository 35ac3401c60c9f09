"""Compiles the C library: `python -m tokenmill.backends.cpu.build`, and once by every install.

It needs a C compiler and nothing else, so this file must not import tokenmill. Each variant is compiled for its kind of
machine; which one is used is found out when the library is loaded. With `--native` only the plain one and the one for
this machine are compiled, in half the time.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libtokenmill.so"
FLAGS = (
    "-O3 -std=gnu11 -fPIC -Wno-psabi -Werror=implicit-function-declaration "
    "-fno-math-errno -fno-trapping-math -ffp-contract=fast"
)
UNFUSED = "-ffp-contract=off"
VARIANTS = {
    "avx512vnni": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c -mprefer-vector-width=512",
    "avx2": "-mavx2 -mfma -mf16c",
    "neon": "-march=armv8.2-a+dotprod",
    "plain": UNFUSED,  # what is fused must not depend on the size of a batch
}
"""The fastest first."""
SHOWN_BY = {"avx512vnni": "__AVX512VNNI__", "avx2": "__AVX2__", "neon": "__ARM_FEATURE_DOTPROD"}
"""What compilers define for machines that have a variant's instructions."""
LOST = "quantized models will need torch and be several times slower; install a C compiler and try again"
ONLY_ON = {"avx2": "x86_64", "avx512vnni": "x86_64", "neon": "aarch64"}


class BuildFailed(Exception):
    """There is no compiler, or it has complained."""


def build(target: Path = LIBRARY, more_flags: str = "", *, native: bool = False) -> Path:
    """Compile everything into one shared library; `native`: for this machine."""
    given = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if given is None:
        raise BuildFailed("there is no C compiler (cc, gcc or clang)")
    compiler = shlex.split(given)
    machine = _run([*compiler, "-dumpmachine"]).partition("-")[0]
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    sources_flag = f'-DTM_SOURCES="{fingerprint()}"'
    variants = [variant for variant in VARIANTS if ONLY_ON.get(variant, machine) == machine]
    if native:
        defined = _run([*compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull])
        fastest = next((one for one in variants if f" {SHOWN_BY.get(one)} " in defined), "plain")
        variants = list(dict.fromkeys([fastest, "plain"]))
    table = "".join(f"X({variant})" for variant in variants)
    sources = [("pool.c", ""), ("kernels.c", f"-DTM_VARIANTS(X)={table}"), ("packing.c", "")]
    for variant in variants:
        # The sampler rounds after every operation: it draws the same ids on all machines.
        flags = VARIANTS[variant]
        sources += [(f"variant_{variant}.c", flags), ("sampler.c", f"{flags} {UNFUSED} -DTM_VARIANT={variant}")]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [str(Path(folder) / f"{i}.o") for i in range(len(sources))]
        commands = [
            [*compiler, *f"{FLAGS} {flags} {more_flags}".split(), sources_flag, "-c", str(FOLDER / name), "-o", made]
            for (name, flags), made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            list(compilers.map(_run, commands))
        linked = Path(folder) / target.name
        _run([*compiler, "-shared", *more_flags.split(), "-o", str(linked), *objects, "-lm", "-lpthread"])
        linked.replace(target)  # whoever has the old one open keeps it
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
        print(build(native="--native" in sys.argv))
    except BuildFailed as failure:
        sys.exit(f"tokenmill: the CPU kernels could not be built ({failure}): {LOST}")
