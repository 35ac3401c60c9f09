"""S02: paths, hosts and headers that look like others get nobody around a key."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.refusals import BODIES, CHAT
from tests.server.serving import Running, raw_request

TARGETS = [
    "/v1/models",
    "//v1/models",
    "/v1//models",
    "/V1/models",
    "/v1/models/",
    "/v1/%2e%2e/v1/models",
    "/v1/../health",
    "/v1/%2e%2e/health",
    "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/health%2f..%2fv1%2fmodels",
    "/health/..;/v1/models",
    "/health;/v1/models",
    "/health%00/v1/models",
    "/health%3f/v1/models",
    "/health%23",
    "/health/",
    "/Health",
    "//health",
    "/./health",
    "/%2fhealth",
    "/v1/models%20",
    "/v1/models?/health",
    "/v1/models#/health",
    "/v1/models;/health",
    "/v1%5cmodels",
    "/%76%31/models",
    "/tokenize",
    "/openapi.json",
    "http://x/v1/models",
    "http://x/health/../v1/models",
    "http://health/v1/models",
    "http://x:1/health@y/v1/models",
    "HTTP://127.0.0.1/openapi.json",
]
HOSTS = [
    "x/v1/../health?",
    "x/health",
    "x/health?",
    "x/health#",
    "health",
    "a@b",
    "a:b@c/health",
    "[::1]/health",
    "x:0",
]
HOSTS += ["x\\health", "evil.example", "127.0.0.1", "", "*", "/health", "?", "#", "%2fhealth", "x%2fhealth%3f"]


def raw(server: Running, content: bytes) -> bytes:
    """All that is answered."""
    with server.connect() as connection:
        connection.sendall(content)
        return connection.makefile("rb").read()


def check_raw(answer: bytes, statuses: tuple[int, ...], what: Any) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    assert status in statuses, (what, answer)
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, what
    if status == 401:
        assert b"www-authenticate: Bearer" in head


@pytest.mark.parametrize("target", TARGETS)
def test_s02_paths_that_look_like_others(server: Running, target: str) -> None:
    for method, body in (("GET", ""), ("POST", json.dumps(BODIES[CHAT]))):
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        answer = raw(server, f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        check_raw(answer, (401,), target)


@pytest.mark.parametrize("host", HOSTS)
def test_s02_hosts_that_look_like_paths(server: Running, host: str) -> None:
    for target in ("/v1/models", "/openapi.json", "/v1/../health", "/nothing"):
        answer = raw(server, f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        check_raw(answer, (401, 400, 421), (host, target))


def test_s02_two_of_something(server: Running) -> None:
    for headers in (
        "Host: x\r\nHost: x/health\r\n",
        "Host: x/health?\r\nHost: y\r\n",
        "",
        "Host: x\r\nAuthorization: Bearer wrong\r\nAuthorization: Bearer sk-test\r\n",
        "Host: x\r\nAuthorization: Bearer sk-test\r\nAuthorization: Bearer wrong\r\n",
        "Host: x\r\nAuthorization: Bearer\r\nAuthorization: sk-test\r\n",
        "Host: x\r\nAuthorization : Bearer sk-test\r\n",
        "Host: x\r\nAuthorization: Bearer\r\n sk-test\r\n",
    ):
        answer = raw(server, f"GET /v1/models HTTP/1.1\r\n{headers}Connection: close\r\n\r\n".encode())
        check_raw(answer, (401, 400), headers)


def test_s02_a_connection_that_was_let_in_is_asked_again(server: Running) -> None:
    first, then = raw_request("/v1/models", b"", method="GET"), raw_request("/v1/models", b"", key=None, method="GET")
    answers = raw(server, first + then + first.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close"))
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"401", b"200"]
