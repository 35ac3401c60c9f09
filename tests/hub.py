"""A small Hugging Face Hub on loopback: the API's routes, files behind redirects to a second server, and faults.

Large files are redirected to the content server as on the public Hub, which does not learn the client's token.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

from tokenmill.backends import huggingface

LARGE = (".safetensors", ".gguf", ".bin")


def git_sum(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def use(endpoint: str, cache: Path, patch: Callable[[Any, str, Any], None]) -> None:
    """Point huggingface_hub, which reads its environment when it is imported, to a hub and a cache."""
    patch(constants, "ENDPOINT", endpoint)
    patch(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    patch(constants, "HF_HUB_CACHE", str(cache))
    patch(constants, "HF_TOKEN_PATH", str(cache / "token"))
    patch(constants, "HF_HUB_OFFLINE", False)
    patch(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 10)
    patch(huggingface, "RETRY_WAITS_S", (0.0,) * 3)


def place(cache: Path, name: str, folder: Path) -> Path:
    """Put the files of a directory into a cache, as if they had been downloaded."""
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(folder, repo / "snapshots" / ("0" * 40)))


@dataclass
class Repository:
    files: dict[str, bytes]
    revision: str = "main"
    token: str | None = None
    """Required to read it; an empty one: no token suffices, since its terms were not accepted."""
    listed: dict[str, Any] = field(default_factory=dict)
    """What the listing says of a file, in place of the truth."""

    @property
    def commit(self) -> str:
        everything = repr(sorted((name, sha256(content)) for name, content in self.files.items()))
        return hashlib.sha1(everything.encode(), usedforsecurity=False).hexdigest()

    def siblings(self) -> list[dict[str, Any]]:
        found = []
        for name, content in self.files.items():
            about: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_sum(content)}
            if name.endswith(LARGE):
                about["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 130}
            found.append({**about, **self.listed.get(name, {})})
        return found


@dataclass(frozen=True)
class Seen:
    """A request that reached the hub or its content server."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class Fault:
    """What happens to the body of the next file: it stops after so many bytes."""

    after: int
    reached: threading.Event | None = None
    """Set there; then the server waits until the client leaves or `release` is set. Without: the connection closes."""
    release: threading.Event | None = None


class Hub:
    """Serves repositories. Attributes change what it does while it runs."""

    def __init__(self) -> None:
        self.repos: dict[str, Repository] = {}
        self.seen: list[Seen] = []
        self.faults: deque[Fault] = deque()
        """One for each of the next transfers of large files."""
        self.statuses: dict[str, deque[int]] = {}
        """Path of a request -> statuses of its next answers."""
        self.sends: dict[str, bytes] = {}
        """Name of a file -> what is sent in its place."""
        self.honors_ranges = True
        self.sends_other_ranges = False
        self.answers: dict[str, bytes] = {}
        """Path of a request -> its whole answer."""
        self._main, self._content = (ThreadingHTTPServer(("127.0.0.1", 0), self._handler(of)) for of in ("hub", "cdn"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._main.server_port}"

    @property
    def content_url(self) -> str:
        return f"http://localhost:{self._content.server_port}"

    @contextmanager
    def running(self) -> Iterator[Hub]:
        servers = (self._main, self._content)
        threads = [threading.Thread(target=one.serve_forever, args=(0.05,)) for one in servers]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            for server in servers:
                server.shutdown()
                server.server_close()
            for thread in threads:
                thread.join()

    def add(self, name: str, files: Mapping[str, bytes] | Path, **options: Any) -> Repository:
        if isinstance(files, Path):
            files = {
                path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()
            }
        self.repos[name] = Repository(dict(files), **options)
        return self.repos[name]

    def transfers(self, *, of: str = "/content/") -> list[Seen]:
        return [one for one in self.seen if one.method == "GET" and of in one.path]

    def _handler(self, of: str) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                _Exchange(hub, self).answer(of)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        return Handler


class _Exchange:
    """One request and its answer."""

    def __init__(self, hub: Hub, http: BaseHTTPRequestHandler) -> None:
        self.hub, self.http = hub, http
        self.path = unquote(urlsplit(http.path).path)
        hub.seen.append(Seen(http.command, self.path, {name.lower(): value for name, value in http.headers.items()}))

    def answer(self, of: str) -> None:
        if self.path in self.hub.answers:
            return self.send(200, self.hub.answers[self.path])
        statuses = self.hub.statuses.get(self.path)
        if statuses:
            return self.error(statuses.popleft())
        return self.content() if of == "cdn" else self.hub_route()

    def hub_route(self) -> None:
        if self.path.startswith("/api/models/"):
            name, _, rest = self.path.removeprefix("/api/models/").partition("/revision/")
            respond: Callable[[Repository], None] = self.listing
            if not rest:
                name, _, rest = name.partition("/tree/")
                respond = self.tree
        else:
            name, _, rest = self.path[1:].partition("/resolve/")
            rest, _, file = rest.partition("/")
            respond = lambda repo: self.file(repo, file)  # noqa: E731
        repo = self.hub.repos.get(name)
        if repo is None:
            return self.error(404, "RepoNotFound")
        given = self.http.headers.get("authorization", "")
        if repo.token is not None and given != f"Bearer {repo.token}":
            return self.error(403 if given else 401, "GatedRepo")
        if rest not in (repo.revision, repo.commit):
            return self.error(404, "RevisionNotFound")
        return respond(repo)

    def listing(self, repo: Repository) -> None:
        self.send(200, json.dumps({"id": "x", "sha": repo.commit, "siblings": repo.siblings()}).encode())

    def tree(self, repo: Repository) -> None:
        entries = [
            {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": one["blobId"]}
            | ({"lfs": {"oid": one["lfs"]["sha256"], "size": one["size"], "pointerSize": 130}} if "lfs" in one else {})
            for one in repo.siblings()
        ]
        self.send(200, json.dumps(entries).encode())

    def file(self, repo: Repository, name: str) -> None:
        if name not in repo.files:
            return self.error(404, "EntryNotFound")
        content, commit = repo.files[name], {"X-Repo-Commit": repo.commit}
        if not name.endswith(LARGE):
            return self.send(200, self.hub.sends.get(name, content), {**commit, "ETag": f'"{git_sum(content)}"'})
        linked = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
        where = f"{self.hub.content_url}/content/{sha256(content)}/{name}"
        return self.send(302, b"", {**commit, **linked, "Location": where})

    def content(self) -> None:
        wanted, _, name = self.path.removeprefix("/content/").partition("/")
        found = [one for repo in self.hub.repos.values() for one in repo.files.values() if sha256(one) == wanted]
        content = self.hub.sends.get(name, found[0])
        start, _, last = self.http.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
        begin, end = int(start), min(int(last or len(content)) + 1, len(content))
        if not self.hub.honors_ranges or "range" not in self.http.headers:
            return self.send(200, content)
        if self.hub.sends_other_ranges:
            begin, end = 0, len(content)
        if begin >= len(content):
            return self.error(416)
        return self.send(206, content[begin:end], {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"})

    def send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        http = self.http
        http.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            http.send_header(name, value)
        http.end_headers()
        if http.command == "HEAD":
            return
        fault = self.hub.faults.popleft() if self.hub.faults and self.path.startswith("/content/") else None
        if fault is None or fault.after >= len(body):
            http.wfile.write(body)
            return
        http.wfile.write(body[: fault.after])
        if fault.reached is not None:
            fault.reached.set()
        if fault.release is not None:
            assert fault.release.wait(30)
            http.wfile.write(body[fault.after :])
        elif fault.reached is not None:
            http.rfile.read(1)  # until the client leaves
            http.close_connection = True
        else:
            http.close_connection = True

    def error(self, status: int, code: str = "") -> None:
        self.send(status, b"{}", {"X-Error-Code": code} if code else {})
