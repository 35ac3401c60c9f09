"""Models on the Hugging Face Hub: which files of a repository make up a model, and their way into the local cache.

The cache is that of `huggingface_hub`, so models are shared with every other program that uses it. `huggingface_hub`
also provides the API, tokens (HF_TOKEN), mirrors (HF_ENDPOINT), proxies and offline mode (HF_HUB_OFFLINE). The transfer
is our own: `huggingface_hub` starts an interrupted file over and compares no checksums. Files are fetched over plain
HTTP with ranges, which every mirror offers, on threads of their own; all else runs on the caller's thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Self

from tokenmill.errors import ModelLoadError, ModelNotFound
from tokenmill.files import WEIGHT_INDEX, exclusive, indexed_files, safetensors_files, split_parts
from tokenmill.progress import ProgressLine

log = logging.getLogger(__name__)

MAIN = "main"
LOCK = "tokenmill.lock"
SMALL_FILES = (
    "config.json", "generation_config.json", WEIGHT_INDEX,
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Configuration, tokenizer and chat template: fetched before the weights, and checked."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
QUANTIZATIONS = (
    "Q4_K_M", "Q4_K_S", "Q4_K_L", "Q4_K_XL", "Q4_0", "Q4_1", "IQ4_XS", "IQ4_NL", "MXFP4", "Q5_K_M", "Q5_K_S", "Q5_0",
    "Q5_1", "Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "BF16", "F16", "F32",
)  # fmt: skip
"""Which one is taken where the name of a model says nothing: the first of these that the repository has."""
CONNECTIONS = 4
"""Files in transfer at a time."""
RETRY_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before an attempt that follows one without progress."""
REQUEST_BYTES = 16 << 30
"""Of one request: the Hub's content servers do not send files of more than 50 GB at once."""
LOG_EVERY_S = 30.0
"""For those who read a log, not a terminal."""
LOOK_S = 0.2
"""Between two updates of the progress line."""
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>\w[\w./-]*))?(?::(?P<variant>\w[\w./-]*))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|MXFP\d)[A-Z0-9_]*|BF16|F16|FP16|F32|FP32)(?=[-._]|$)", re.I
)


@dataclass(frozen=True)
class HubName:
    """ORGANIZATION/MODEL[@REVISION][:QUANTIZATION]."""

    repo: str
    revision: str = MAIN
    variant: str | None = None
    """A quantization, or the name of a GGUF file."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None if the text is not such a name."""
        found = _NAME.fullmatch(text)
        if found is None or ".." in text or "--" in found["repo"]:
            return None
        return cls(found["repo"], found["revision"] or MAIN, found["variant"])

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo}{revision}{'' if self.variant is None else f':{self.variant}'}"

    @property
    def folder(self) -> str:
        """The repository's folder in the cache."""
        return f"models--{self.repo.replace('/', '--')}"


# -- which files make up a model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFiles:
    """The files of a repository that make up a model."""

    weights: tuple[str, ...]
    small: tuple[str, ...] = ()
    entry: str = ""
    """The GGUF file to open; empty: the directory."""


def choose(files: Collection[str], name: HubName, indexed: Callable[[], Sequence[str]]) -> ModelFiles:
    """The files of a model, from the names of all files; `indexed` reads the files that the weight index names.

    `ModelLoadError` says what is missing, and what could be named instead.
    """
    found = _choose(files, name, indexed)
    missing = [file for file in found.weights if file not in files]
    if missing:
        more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
        raise ModelLoadError(f"{name} is incomplete: {missing[0]}{more} missing; use another revision or repository")
    return found


def _choose(files: Collection[str], name: HubName, indexed: Callable[[], Sequence[str]]) -> ModelFiles:
    models = gguf_models(files)
    if name.variant is not None:
        return _named_gguf(models, name)
    top = {file for file in files if "/" not in file}
    if any(file.endswith(".safetensors") for file in top):
        return _safetensors(top, name, indexed)
    if models:
        return _default_gguf(models, name)
    pickled = sorted(file for file in top if file.endswith(PICKLES))
    if pickled:
        raise ModelLoadError(
            f"{name} has only pickled weights ({pickled[0]}), which can execute code; "
            "use a repository with safetensors or GGUF files"
        )
    raise ModelLoadError(f"{name} has no weights: no .safetensors and no .gguf file")


def _safetensors(top: Collection[str], name: HubName, indexed: Callable[[], Sequence[str]]) -> ModelFiles:
    if "config.json" not in top:
        what = "an adapter, which is not supported" if "adapter_config.json" in top else "not a language model"
        raise ModelLoadError(f"{name} has no config.json: it is {what}; use the repository of a whole model")
    return ModelFiles(tuple(safetensors_files(top, indexed)), tuple(file for file in SMALL_FILES if file in top))


def gguf_models(files: Collection[str]) -> dict[str, str]:
    """The file to open of each GGUF model -> its quantization, or an empty text."""
    found = {}
    for file in files:
        stem = PurePosixPath(file).name.casefold()
        if stem.endswith(".gguf") and not stem.startswith("mmproj") and "imatrix" not in stem:
            found[split_parts(file)[0]] = quantization(file)
    return dict(sorted(found.items()))


def quantization(file: str) -> str:
    """Q4_K_M of `model-Q4_K_M.gguf`, `model.q4_k_m-00001-of-00002.gguf` and `Q4_K_M/model.gguf`; else an empty text."""
    path = PurePosixPath(file)
    for part in (path.name.removesuffix(path.suffix), *reversed(path.parts[:-1])):
        named = _QUANTIZATION.findall(part)
        if named:
            return str(named[-1]).upper().replace("FP16", "F16").replace("FP32", "F32")
    return ""


def _named_gguf(models: Mapping[str, str], name: HubName) -> ModelFiles:
    wanted = name.variant or ""
    kinds = {file: (kind, kind.removeprefix("UD-")) for file, kind in models.items()}
    meant = [file for file in models if wanted in (file, PurePosixPath(file).name, PurePosixPath(file).stem)]
    meant = meant or [file for file in models if kinds[file][0] == wanted.upper()]
    meant = meant or [file for file in models if kinds[file][1] == wanted.upper()]
    if meant:
        return _only(meant, name)
    there = ", ".join(sorted({kind or file for file, kind in models.items()})) or "no .gguf file"
    raise ModelNotFound(f"{name.repo} has no {wanted!r}; it has: {there}")


def _default_gguf(models: Mapping[str, str], name: HubName) -> ModelFiles:
    for preferred in QUANTIZATIONS:
        meant = [file for file, kind in models.items() if kind.removeprefix("UD-") == preferred]
        if meant:
            return _only(meant, name)
    return _only(list(models), name)


def _only(files: Sequence[str], name: HubName) -> ModelFiles:
    if len(files) > 1:
        raise ModelNotFound(
            f"{name} is ambiguous: {', '.join(files[:4])}{', ...' if len(files) > 4 else ''}; "
            f"name one of the files: {name.repo}:{files[0]}"
        )
    return ModelFiles(split_parts(files[0]), entry=files[0])


# -- the cache --------------------------------------------------------------------------------------------------------


def cache_root() -> Path | None:
    """The cache of `huggingface_hub`; None where the package is missing."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


@dataclass(frozen=True)
class Snapshot:
    """A revision of a repository in the cache: a folder of links to the repository's blobs."""

    folder: Path

    @property
    def files(self) -> dict[str, Path]:
        """Name in the repository -> path, of all files that are there."""
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        return {path.relative_to(self.folder).as_posix(): path for path in sorted(paths)}

    def model(self, name: HubName) -> ModelFiles | None:
        """The files of a model; None if some of them are missing."""
        with contextlib.suppress(ModelLoadError):
            return choose(self.files, name, lambda: indexed_files(self.folder))
        return None


def snapshot_of(name: HubName) -> Snapshot | None:
    """The snapshot of a revision, complete or not."""
    root = cache_root()
    if root is None:
        return None
    commit = name.revision
    ref = root / name.folder / "refs" / name.revision
    with contextlib.suppress(OSError, UnicodeDecodeError):
        commit = ref.read_text().strip()
    folder = root / name.folder / "snapshots" / commit
    return Snapshot(folder) if commit and folder.is_dir() else None


def cached(name: HubName, *, weights: bool = True) -> Path | None:
    """The files of a model that is in the cache; nothing is asked of the network. Without `weights`, its config.json
    is enough.
    """
    snapshot = snapshot_of(name)
    if snapshot is None:
        return None
    if not weights and (snapshot.folder / "config.json").is_file():
        return snapshot.folder
    found = snapshot.model(name)
    return None if found is None else snapshot.folder / found.entry


@dataclass(frozen=True)
class CachedModel:
    """A model that was downloaded."""

    name: str
    """What opens it."""
    path: Path | None
    """The directory or file to open; None: the download is not complete."""
    files: tuple[Path, ...]
    num_bytes: int
    """On disk; files of equal content are stored once."""
    last_used: float
    """Unix time of the last access."""

    @classmethod
    def of(cls, name: str, path: Path | None, files: tuple[Path, ...]) -> Self:
        about = {file.resolve(): file.stat() for file in files}
        num_bytes = sum(one.st_size for one in about.values())
        return cls(name, path, files, num_bytes, max(one.st_atime for one in about.values()))


def note_use(path: Path) -> None:
    """Set the access time of a model's files, which not every file system does when they are read."""
    file = path / "config.json" if path.is_dir() else path
    with contextlib.suppress(OSError):
        os.utime(file, (time.time(), file.stat().st_mtime))


def cached_models() -> Iterator[CachedModel]:
    """All models in the cache: each revision, and each GGUF model of a repository; incomplete downloads, too."""
    root = cache_root()
    for folder in sorted(root.glob("models--*--*")) if root is not None else ():
        with contextlib.suppress(FileNotFoundError):  # another process is removing it
            yield from _models_in(folder)


def _models_in(folder: Path) -> list[CachedModel]:
    """The models of a repository's folder in the cache."""
    repo = folder.name.removeprefix("models--").replace("--", "/", 1)
    found = [model for revision, snapshot in _revisions(folder) for model in _models_of(repo, revision, snapshot)]
    unfinished = tuple(folder.glob("blobs/*.incomplete"))
    return found or ([CachedModel.of(repo, None, unfinished)] if unfinished else [])


def _revisions(folder: Path) -> Iterator[tuple[str, Snapshot]]:
    """Snapshots of a repository, each with the revision that selects it: a branch or tag, else the commit."""
    names: dict[str, str] = {}
    for ref in sorted((folder / "refs").rglob("*")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            commit, name = ref.read_text().strip(), ref.relative_to(folder / "refs").as_posix()
            names[commit] = name if name == MAIN else names.get(commit, name)
    for snapshot in sorted((folder / "snapshots").glob("*")):
        yield names.get(snapshot.name, snapshot.name), Snapshot(snapshot)


def _models_of(repo: str, revision: str, snapshot: Snapshot) -> Iterator[CachedModel]:
    files = snapshot.files
    models = gguf_models(files)
    kinds = list(models.values())
    by_name = [kind if kind and kinds.count(kind) == 1 else file for file, kind in models.items()]
    for variant in (None, *by_name):
        name = HubName(repo, revision, variant)
        found = snapshot.model(name)
        if found is not None and (variant is None) == (not found.entry):
            paths = tuple(files[file] for file in (*found.small, *found.weights))
            yield CachedModel.of(str(name), snapshot.folder / found.entry, paths)


def remove(name: HubName) -> int:
    """Remove a model from the cache; bytes freed. Without revision and quantization, all of its repository."""
    root = cache_root()
    missing = ModelNotFound(f"{name} is not in the cache; `tokenmill models` lists what is")
    if root is None or not (root / name.folder).is_dir():
        raise missing
    folder, locks = root / name.folder, root / ".locks" / name.folder
    try:
        locks.mkdir(parents=True, exist_ok=True)
        with exclusive(locks / LOCK, f"waiting for a download of {name.repo}..."):
            num_bytes = _bytes_in(folder)
            if name == HubName(name.repo):
                shutil.rmtree(folder)
                return num_bytes
            doomed = [model for model in _models_in(folder) if model.name == str(name)]
            if not doomed:
                raise missing
            for file in doomed[0].files:
                file.unlink()
            _sweep(folder)
            return num_bytes - _bytes_in(folder)
    except OSError as error:
        raise ModelLoadError(f"cannot remove {name} from {root}: {error.strerror or error}") from None


def _sweep(folder: Path) -> None:
    """Remove what no revision of a repository uses any more."""
    used = {path.resolve() for path in (folder / "snapshots").rglob("*") if path.is_file()}
    for blob in (folder / "blobs").glob("*"):
        if blob.resolve() not in used:
            blob.unlink()
    for path in sorted((folder / "snapshots").rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    for ref in [path for path in (folder / "refs").rglob("*") if path.is_file()]:
        if not (folder / "snapshots" / ref.read_text().strip()).is_dir():
            ref.unlink()
    if not any((folder / "snapshots").iterdir()):
        shutil.rmtree(folder)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


# -- downloads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, as the Hub lists it."""

    name: str
    num_bytes: int
    checksum: str
    """Of its content: SHA-256, or for a file in git itself, git's SHA-1 of it."""


def fetch(
    name: HubName, *, weights: bool = True, verify: bool = False, check: Callable[[Path], None] = lambda _: None
) -> Path:
    """Download a model into the cache; the path to open. Files that are there are kept, an interrupted one is resumed.

    `check` is called with the directory of a safetensors model when its config.json is there, before the weights are
    fetched. `verify` compares the checksums of files that are there already.
    """
    root = cache_root()
    if root is None:
        raise ModelNotFound(f"{name} is on the Hugging Face Hub: pip install 'tokenmill[server]' to download it")
    with _explained(name, root):
        commit, files = _listing(name)
        folder = root / name.folder
        locks = root / ".locks" / name.folder
        locks.mkdir(parents=True, exist_ok=True)
        with exclusive(locks / LOCK, f"waiting for another download of {name.repo}..."):
            return _Download(name, folder, commit, files, verify).run(weights, check)


def _listing(name: HubName) -> tuple[str, dict[str, HubFile]]:
    """A revision's commit, and its files."""
    from huggingface_hub import HfApi, constants

    api = HfApi(library_name="tokenmill")
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    try:
        about = api.model_info(name.repo, revision=name.revision, files_metadata=True, timeout=timeout)
        if _COMMIT.fullmatch(about.sha or "") is None:
            raise ValueError(f"commit {about.sha!r}")
        return str(about.sha), {file.name: file for file in map(_file, about.siblings or ())}
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # what is not a listing breaks in many ways
        if _status(error) is not None:  # some errors of the Hub are a ValueError, too
            raise
        what = f"answered for {name.repo} with something that is not a list of files ({error}); check HF_ENDPOINT"
        raise ModelLoadError(f"{constants.ENDPOINT} {what}") from None


def _file(sibling: Any) -> HubFile:
    name, size = sibling.rfilename, sibling.size
    lfs = sibling.lfs
    checksum = sibling.blob_id if lfs is None else lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or ".." in parts or name.startswith("/") or "\\" in name or not name.isprintable():
        raise ValueError(f"a file {name!r}")
    if type(size) is not int or size < 0 or not isinstance(checksum, str) or _CHECKSUM.fullmatch(checksum) is None:
        raise ValueError(f"{name} without size and checksum")
    return HubFile(name, size, checksum)


class _Download:
    """One download of a model. Threads transfer files; the caller's thread shows progress."""

    def __init__(self, name: HubName, folder: Path, commit: str, files: Mapping[str, HubFile], verify: bool) -> None:
        from huggingface_hub.utils import build_hf_headers

        self._name = name
        self._files = files
        self._verify = verify
        self._commit = commit
        self._folder = folder
        self._blobs = folder / "blobs"
        self._snapshot = folder / "snapshots" / commit
        self._headers = build_hf_headers(library_name="tokenmill")
        self._headers["accept-encoding"] = "identity"  # ranges count the bytes of the file
        self._stopped = threading.Event()
        """Ends the transfers in progress."""
        self._received: dict[str, int] = {}
        """Bytes on disk of each blob in transfer, by checksum. Each entry has one writer."""

    def run(self, weights: bool, check: Callable[[Path], None]) -> Path:
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._snapshot.mkdir(parents=True, exist_ok=True)

        def indexed() -> Sequence[str]:
            self._fetch([WEIGHT_INDEX])
            return indexed_files(self._snapshot)

        chosen = choose(self._files, self._name, indexed)
        if not weights and chosen.entry:
            raise ModelLoadError(f"{self._name} is a GGUF file; random weights require a repository with a config.json")
        self._fetch(chosen.small)
        if not chosen.entry:
            check(self._snapshot)
        if weights:
            self._fetch(chosen.weights)
        self._set_revision()
        return self._snapshot / chosen.entry

    def _set_revision(self) -> None:
        """Last, so that a revision that was complete remains usable while a newer one is being fetched."""
        if self._name.revision != self._commit:
            ref = self._folder / "refs" / self._name.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            unfinished = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            unfinished.write_text(self._commit)
            unfinished.replace(ref)

    def _fetch(self, names: Sequence[str]) -> None:
        """Put files into the snapshot: several at a time, with a progress line."""
        files = [self._files[name] for name in names if not self._is_there(self._files[name])]
        if not files:
            return
        blobs = {file.checksum: [one for one in files if one.checksum == file.checksum] for file in files}
        first = [same[0] for same in blobs.values()]
        self._received = {file.checksum: min(max(0, _size(self._partial(file))), file.num_bytes) for file in first}
        num_bytes = sum(file.num_bytes for file in first)
        self._check_space(num_bytes - sum(self._received.values()))
        began = time.monotonic()
        log.info("downloading %s (%s)", self._name, in_words(num_bytes))
        unit, unit_name = (MIB, "MiB") if num_bytes > 10 * MIB else (KIB, "KiB")
        before = sum(self._received.values())
        with ProgressLine(f"downloading {self._name}", num_bytes // unit) as progress:
            next_log = began + LOG_EVERY_S
            for _ in self._transfers(list(blobs.values())):
                received = sum(self._received.values())
                if time.monotonic() >= next_log:
                    next_log += LOG_EVERY_S
                    log.info("downloading %s: %s of %s", self._name, in_words(received), in_words(num_bytes))
                progress.update(received // unit, partial(_rate, unit_name, received - before))
        log.info("downloaded %s in %.1f s", self._name, time.monotonic() - began)

    def _transfers(self, blobs: Sequence[Sequence[HubFile]]) -> Iterator[None]:
        """Transfer files on daemon threads, which Ctrl-C does not wait for; yields now and then."""
        todo: queue.SimpleQueue[Sequence[HubFile]] = queue.SimpleQueue()
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._stopped.clear()
        for files in blobs:
            todo.put(files)

        def work() -> None:
            with contextlib.suppress(queue.Empty):
                while not self._stopped.is_set():
                    files = todo.get_nowait()
                    try:
                        self._transfer(files)
                    except BaseException as error:
                        done.put(error)
                        return
                    done.put(None)

        count = min(CONNECTIONS, len(blobs))
        threads = [threading.Thread(target=work, name="tokenmill-download", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        left = len(blobs)
        try:
            while left:
                with contextlib.suppress(queue.Empty):
                    error = done.get(timeout=LOOK_S)
                    if error is not None:
                        raise error
                    left -= 1
                yield
        except Exception:
            self._stopped.set()
            for thread in threads:  # nothing is written any more when the lock is free
                thread.join()
            raise
        finally:
            self._stopped.set()

    def _is_there(self, file: HubFile) -> bool:
        link = self._snapshot / file.name
        if _size(link) != file.num_bytes:
            return False
        return not self._verify or _checksum(link, file.checksum) == file.checksum

    def _partial(self, file: HubFile) -> Path:
        return self._blobs / f"{file.checksum}.incomplete"

    def _check_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._blobs).free
        if num_bytes > free:
            raise ModelLoadError(
                f"{self._name} needs {in_words(num_bytes)} in {self._folder.parent}, where {in_words(free)} are free; "
                "remove models (tokenmill models remove), or set HF_HUB_CACHE to another directory"
            )

    # -- one file; on a thread of its own -----------------------------------------------------------------------------

    def _transfer(self, files: Sequence[HubFile]) -> None:
        """Files of the same content."""
        file = files[0]
        blob, unfinished = self._blobs / file.checksum, self._partial(file)
        if _size(blob) != file.num_bytes or (self._verify and _checksum(blob, file.checksum) != file.checksum):
            # What an earlier run has left may have been damaged since: then the whole file is received once more.
            is_resumed = _size(unfinished) > 0
            if (found := self._receive_all(file, unfinished)) != file.checksum and is_resumed:
                found = self._receive_all(file, unfinished)
            if found != file.checksum:
                raise ModelLoadError(
                    f"{self._name}: {file.name} has the checksum {found}, not {file.checksum}; "
                    "the download was removed; try again, or use another mirror (HF_ENDPOINT)"
                )
            unfinished.replace(blob)
        for same in files:
            self._link(same, blob)
        if not (self._snapshot / file.name).is_symlink():
            blob.unlink()

    def _link(self, file: HubFile, blob: Path) -> None:
        link = self._snapshot / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(os.path.relpath(blob, link.parent))
        except OSError:  # a file system without links
            shutil.copyfile(blob, link)

    def _receive_all(self, file: HubFile, unfinished: Path) -> str:
        """Append to the unfinished file until it is complete, over as many connections as it takes; its checksum. A
        file with a wrong one is removed.
        """
        from huggingface_hub.errors import HTTPError  # of whichever transport it uses

        num_failures = 0
        unfinished.touch()
        while (size := _size(unfinished)) != file.num_bytes:
            reason = "the connection was closed"
            try:
                self._receive(file, unfinished, size)
            except HTTPError as error:
                if not _is_temporary(error):
                    raise
                reason = _reason(error)
            if _size(unfinished) > size:
                num_failures = 0
                continue
            if num_failures == len(RETRY_WAITS_S) or self._stopped.wait(RETRY_WAITS_S[num_failures]):
                raise ModelLoadError(
                    f"the download of {self._name} failed at {file.name} ({reason}); run the command again to resume it"
                )
            num_failures += 1
        found = _checksum(unfinished, file.checksum)
        if found != file.checksum:
            unfinished.unlink()
        return found

    def _receive(self, file: HubFile, unfinished: Path, size: int) -> None:
        """One request, for what is missing."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import get_session, hf_raise_for_status

        url = hf_hub_url(self._name.repo, file.name, revision=self._commit, endpoint=constants.ENDPOINT)
        start = size if size < file.num_bytes else 0
        end = min(start + REQUEST_BYTES, file.num_bytes)
        is_part = end - start < file.num_bytes
        headers = {**self._headers, "range": f"bytes={start}-{end - 1}"} if is_part else self._headers
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            if response.status_code == 416:
                unfinished.write_bytes(b"")
                return
            if response.is_error:
                response.read()
                hf_raise_for_status(response)
            resumes = response.headers.get("content-range", "").startswith(f"bytes {size}-")
            # Unbuffered: what was received is on disk, even if the process is killed.
            with unfinished.open("r+b" if response.status_code == 206 and resumes else "wb", buffering=0) as sink:
                sink.seek(0, os.SEEK_END)
                for chunk in response.iter_bytes():
                    self._received[file.checksum] = sink.tell() + len(chunk)
                    if self._stopped.is_set():
                        return
                    if self._received[file.checksum] > file.num_bytes:
                        raise ModelLoadError(f"{self._name}: {file.name} is longer than the Hub lists; try again")
                    sink.write(chunk)


def _rate(unit: str, num_bytes: int, seconds: float) -> str:
    return f"{unit}, {num_bytes / MIB / seconds:.1f} MiB/s"


def _size(path: Path) -> int:
    """Size in bytes; -1 if the file does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _checksum(path: Path, like: str) -> str:
    """SHA-256, or git's SHA-1, whichever has as many digits."""
    with path.open("rb") as file:
        if len(like) == 64:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        while piece := file.read(MIB):
            digest.update(piece)
        return digest.hexdigest()


def in_words(num_bytes: int) -> str:
    """A size for people: 1.2 GiB."""
    unit, name = next((one for one in ((GIB, "GiB"), (MIB, "MiB")) if num_bytes >= one[0]), (KIB, "KiB"))
    return f"{num_bytes / unit:.1f} {name}"


# -- errors -----------------------------------------------------------------------------------------------------------


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error is about; None: there was no answer."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_temporary(error: BaseException) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    status = _status(error)
    return not isinstance(error, OfflineModeIsEnabled) and (status is None or status in (408, 429) or status >= 500)


def _reason(error: BaseException) -> str:
    status = _status(error)
    lines = str(error).splitlines()
    return f"status {status}" if status is not None else (lines[0] if lines else type(error).__name__)


@contextlib.contextmanager
def _explained(name: HubName, root: Path) -> Iterator[None]:
    """Errors of the Hub, the network and the disk in one line that says what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, repo = constants.ENDPOINT, name.repo
    try:
        yield
    except OfflineModeIsEnabled:
        what = f"{name} is not in {root}, and HF_HUB_OFFLINE is set; unset it to download the model"
        raise ModelNotFound(what) from None
    except GatedRepoError:
        what = f"{repo} is gated: accept its terms on {hub}/{repo}, and set HF_TOKEN to a token of that account"
        raise ModelNotFound(what) from None
    except RevisionNotFoundError:
        raise ModelNotFound(f"{repo} has no revision {name.revision!r}; see {hub}/{repo}") from None
    except RepositoryNotFoundError:
        what = f"no model {repo!r}: no such path, and no such repository on {hub}; set HF_TOKEN if it is private"
        raise ModelNotFound(what) from None
    except HfHubHTTPError as error:
        status = _status(error)
        what = "check HF_TOKEN" if status in (401, 403) else "try again later, or use another mirror (HF_ENDPOINT)"
        raise ModelNotFound(f"{hub} answered {status} for {repo}; {what}") from None
    except HTTPError as error:
        what = f"cannot reach {hub} for {name} ({_reason(error)}); check the network and HF_ENDPOINT"
        raise ModelNotFound(what) from None
    except OSError as error:
        raise ModelLoadError(f"cannot store {name} in {root}: {error.strerror or error}") from None
