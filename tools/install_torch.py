#!/usr/bin/env python3
"""Installs the CPU or the CUDA build of torch, at the version of constraints.txt, and reports which one is there.

On Linux the default package index serves `torch==X` as a CUDA build, with gigabytes of NVIDIA packages. The CPU build
is `X+cpu`, published on PyTorch's own index; a version with that suffix can't resolve to anything else. It is taken
from where pip is configured to look or from TORCH_INDEX, else through uv, which knows PyTorch's indexes by name.
Needs nothing but Python and pip.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
GET_STARTED = "https://pytorch.org/get-started/locally"
DOWNLOAD = {"cpu": "0.2 GB", "cuda": "2.7 GB"}
CUDA_PACKAGES = re.compile(r"(nvidia|cuda)-|triton$")
"""What a CUDA build brings along, by name."""


class InstallFailed(Exception):
    """The message says why, and what to set."""


class BuildNotFound(InstallFailed):
    """No index that pip was given has this build; the message is pip's."""


@dataclass(frozen=True)
class Installed:
    """The torch of an environment."""

    version: str
    build: str
    """cpu or cuda; of anything else (rocm6.4, xpu) the suffix of its version."""
    num_bytes: int
    """With the CUDA packages that lie beside it."""
    cuda_packages: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", choices=("cpu", "cuda"))
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment (default: this one)")
    options = parser.parse_args(argv)
    try:
        print(install(options.python, options.build))
    except InstallFailed as failure:
        sys.exit(f"TORCH={options.build}: {failure}")


def install(python: str, build: str) -> str:
    """Install this build unless it is there. Returns a line that says what is there now."""
    version = pinned_version()
    before = installed(python)
    if before is None or (before.version.partition("+")[0], before.build) != (version, build):
        if build == "cpu":
            install_cpu(python, version)
        else:
            install_cuda(python, version)
    after = installed(python)
    if after is None or after.build != build:
        found = "nothing" if after is None else f"torch {after.version}, a {after.build} build,"
        raise InstallFailed(f"{found} was installed instead. {advice(build)}")
    if build == "cpu" and after.cuda_packages:  # left by a CUDA build that was here before
        run_pip(python, "uninstall", "--yes", *after.cuda_packages)
        after = installed(python) or after
    return f"torch {after.version} ({build.upper()} build, {after.num_bytes / 1e9:.1f} GB)"


def install_cpu(python: str, version: str) -> None:
    """From pip's own sources if they have the CPU build, else through uv."""
    if sys.platform != "linux":  # the default index has CPU builds there, without a suffix
        pip_install(python, f"torch=={version}", "cpu")
        return
    try:
        pip_install(python, f"torch=={version}+cpu", "cpu")
    except BuildNotFound as missing:
        if os.environ.get("TORCH_INDEX"):
            raise InstallFailed(f"{missing}\n{advice('cpu')}") from None
        install_cpu_with_uv(python, version)


def install_cpu_with_uv(python: str, version: str) -> None:
    print("the package index has no CPU build of torch; installing it from PyTorch's index, with uv", flush=True)
    run_pip(python, "install", "uv")
    uv = ["-m", "uv", "pip", "install", "--quiet", "--python", python, "--torch-backend=cpu", f"torch=={version}+cpu"]
    done = subprocess.run([python, *uv], capture_output=True, text=True)
    if done.returncode != 0:
        raise InstallFailed(f"uv could not install torch {version}+cpu.\n{done.stderr.strip()}\n{advice('cpu')}")


def install_cuda(python: str, version: str) -> None:
    """A CUDA build, whatever CPU builds lie beside it: those would be preferred for their suffix."""
    try:
        pip_install(python, f"torch=={version},!={version}+cpu", "cuda")
    except BuildNotFound as missing:
        raise InstallFailed(f"{missing}\n{advice('cuda')}") from None


def advice(build: str) -> str:
    platform, other = {
        "cpu": ("CPU", "TORCH=cuda to take the CUDA build (5 GB)"),
        "cuda": ("your CUDA version", "TORCH=cpu to take the CPU build"),
    }[build]
    return (
        f"Set TORCH_INDEX to the index URL that {GET_STARTED} shows for Linux, Pip and {platform} "
        f"(or to a mirror of it), or {other}."
    )


def pip_install(python: str, requirement: str, build: str) -> None:
    """From the indexes that pip is configured for, and from TORCH_INDEX."""
    index = os.environ.get("TORCH_INDEX")
    print(f"installing {requirement} ({build.upper()} build, {DOWNLOAD[build]} to download)", flush=True)
    sources = ["--extra-index-url", index] if index else []
    try:
        run_pip(python, "install", *sources, requirement)
    except InstallFailed as failure:
        if "No matching distribution found for torch" in str(failure):
            raise BuildNotFound(str(failure)) from None
        raise


def run_pip(python: str, *arguments: str) -> None:
    """With this interpreter's pip, which need not be the environment's."""
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*pip, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise InstallFailed(done.stderr.strip())


def pinned_version() -> str:
    found = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(), flags=re.MULTILINE)
    assert found is not None, f"{CONSTRAINTS} pins no torch"
    return found.group(1)


def installed(python: str) -> Installed | None:
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    packages = {one.metadata["Name"].lower(): one for one in distributions(path=[folder])}
    if "torch" not in packages:
        return None
    version = packages["torch"].version
    facts = runpy.run_path(str(packages["torch"].locate_file("torch/version.py")))
    suffix = version.partition("+")[2]
    build = "cuda" if facts["cuda"] else "cpu" if suffix in ("", "cpu") else suffix
    cuda_packages = tuple(sorted(filter(CUDA_PACKAGES.match, packages)))
    num_bytes = sum(size_of(packages[name]) for name in ("torch", *cuda_packages))
    return Installed(version, build, num_bytes, cuda_packages)


def size_of(package: Distribution) -> int:
    paths = (Path(str(package.locate_file(file))) for file in package.files or ())
    return sum(path.stat().st_size for path in paths if path.is_file())


if __name__ == "__main__":
    main()
