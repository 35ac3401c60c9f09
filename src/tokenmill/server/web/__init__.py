"""The web page: files that come with the package, at `/`, `/engine` and under `/web/`.

All are read once, at startup. They hold no secrets and need no key: without one, the page asks for it. Nothing else is
served from disk.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

FOLDER = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
"""What is served; licences and notes beside it are not."""
PAGES = {"/": "index.html", "/engine": "engine.html"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
"""Nothing from elsewhere, nothing inline, and only the sanitiser may make HTML out of text."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "Accept-Encoding",
    "Cache-Control": "no-cache",  # kept, but asked about each time: a new version is seen at once
}


@dataclass(frozen=True)
class Asset:
    """A file, as it is and compressed."""

    content: bytes
    packed: bytes
    media_type: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> Asset:
        content = path.read_bytes()
        tag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, gzip.compress(content, mtime=0), TYPES[path.suffix], tag)

    def answer(self, http: Request) -> Response:
        headers = {**HEADERS, "ETag": self.tag}
        if self.tag in http.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        is_packed = "gzip" in http.headers.get("accept-encoding", "")
        if is_packed:
            headers["Content-Encoding"] = "gzip"
        return Response(self.packed if is_packed else self.content, headers=headers, media_type=self.media_type)


@cache
def assets() -> dict[str, Asset]:
    """All of the page's files by their paths on the server."""
    files = sorted(path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    found = {f"/web/{path.relative_to(FOLDER).as_posix()}": Asset.read(path) for path in files}
    return found | {path: found.pop(f"/web/{name}") for path, name in PAGES.items()}


def page_routes() -> APIRouter:
    """A route for each file: what has none is not there."""
    api = APIRouter(include_in_schema=False)

    async def get_asset(http: Request) -> Response:
        return assets()[http.scope["path"]].answer(http)

    for path in assets():
        api.add_api_route(path, get_asset, methods=["GET", "HEAD"])
    return api
