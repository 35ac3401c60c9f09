"""S10, S11: what the code can be made to do, what listens, and what is written to the log."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from tests.server.serving import HI, WAIT_S, Child, child, request
from tokenmill.server.config import hash_key

SOURCES = sorted(Path(tokenmill.__file__).parent.rglob("*.py"))
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": HI, "max_tokens": 2}


# -- S10: what the code does not do -----------------------------------------------------------------------------------

BANNED_IMPORTS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "os.system", "os.popen", "np.load"}
BANNED_CALLS |= {"numpy.load", "subprocess.getoutput", "subprocess.getstatusoutput"}
BANNED_CALLS |= {"yaml.full_load", "yaml.unsafe_load", "yaml.load_all"}  # `safe_load` makes plain values only
BANNED_NAMES = {"BaseHTTPMiddleware", "recv_pyobj", "send_pyobj", "Unpickler"}
BANNED_ARGUMENTS = {("shell", True), ("trust_remote_code", True), ("weights_only", False), ("allow_pickle", True)}


def banned(tree: ast.AST) -> Iterator[str]:
    """What must not be there, by what it is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] in BANNED_IMPORTS)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in BANNED_IMPORTS | {"yaml"}:  # its calls are known by their names
                yield node.module or ""
            yield from (one.name for one in node.names if one.name in BANNED_NAMES)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BANNED_CALLS:
            yield ast.unparse(node.func)
        elif isinstance(node, ast.Attribute) and node.attr in BANNED_NAMES:
            yield node.attr
        elif isinstance(node, ast.keyword) and (node.arg, getattr(node.value, "value", None)) in BANNED_ARGUMENTS:
            yield ast.unparse(node)


def test_s10_the_code_has_no_ways_to_run_what_it_is_sent() -> None:
    assert len(SOURCES) > 50
    found = {str(file): names for file in SOURCES if (names := list(banned(ast.parse(file.read_text()))))}
    assert found == {}


def test_s10_the_list_finds_what_it_is_for() -> None:
    bad = ["import pickle", "from pickle import loads", "eval('1')", "exec(x)", "torch.load(p)", "yaml.load(f)"]
    bad += [
        "run(x, shell=True)",
        "from starlette.middleware.base import BaseHTTPMiddleware",
        "f(trust_remote_code=True)",
    ]
    bad += ["socket.recv_pyobj()", "from yaml import load", "os.system('ls')", "np.load(f, allow_pickle=True)"]
    assert all(list(banned(ast.parse(line))) for line in bad)
    assert not list(banned(ast.parse("model.eval(); re.compile(x); run(x, shell=False); f(trust_remote_code=False)")))


def listening(pids: set[int]) -> set[int]:
    """The TCP ports that these processes listen on."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
                inodes |= {found.group(1)} if found else set()
    ports = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if inode in inodes and state in ("0A", "07"):  # listening; for UDP, bound
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def family(pid: int) -> set[int]:
    """A process and all that it has started."""
    children = {
        int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()
    }
    return {pid}.union(*(family(one) for one in children))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc here")
def test_s10_nothing_listens_but_the_api(tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake") as served:
        assert request(served.port, "POST", CHAT, BODY, None).status == 200
        assert listening(family(served.process.pid)) == {served.port}


# -- S11: the log -----------------------------------------------------------------------------------------------------

CANARY = re.compile(r"canary|Kanarie", re.IGNORECASE)
LOG_KEY = "sk-canary-right"
FAILS = """
from tokenmill.entrypoints.async_llm import AsyncLLM

chat_ids = AsyncLLM.chat_ids

def fail_if_told(self, messages, *args, **options):
    if "fail" in str(messages):
        raise RuntimeError("told to fail")
    return chat_ids(self, messages, *args, **options)

AsyncLLM.chat_ids = fail_if_told
"""


def user(content: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": 40, "ignore_eos": True}


LOGGED: list[tuple[str, str, Any, dict[str, str], int]] = [
    ("POST", CHAT, user("canary-prompt"), {}, 200),
    (
        "POST",
        CHAT,
        {**user("canary-prompt"), "stream": True, "stop": ["canary-stop"], "cache_salt": "canary-salt"},
        {},
        200,
    ),
    (
        "POST",
        "/v1/completions",
        {"model": "fake", "prompt": "canary-prompt", "echo": True, "user": "canary-user"},
        {},
        200,
    ),
    (
        "POST",
        "/v1/responses",
        {"model": "fake", "input": "a", "instructions": "canary", "stream": True, "max_output_tokens": 5},
        {},
        200,
    ),
    ("POST", "/v1/embeddings", {"model": "fake", "input": ["canary-input"]}, {}, 200),
    ("POST", "/tokenize", {"prompt": "canary-text"}, {}, 200),
    ("POST", "/tokenize?prompt=canary-query", {"prompt": "a"}, {}, 200),
    ("GET", "/v1/models?key=sk-canary-query&q=canary", None, {"User-Agent": "canary-agent", "Cookie": "canary=1"}, 200),
    ("GET", "/v1/models", None, {"x-request-id": "canary with spaces", "Referer": "http://canary/"}, 200),
    ("POST", CHAT, user("canary-fail"), {}, 500),
    ("POST", CHAT, {**user("canary-fail"), "stream": True}, {}, 500),
    ("POST", CHAT, b'{"model": "fake", "messages": "canary-broken', {}, 400),
    ("POST", CHAT, b"\xff canary", {}, 400),
    ("POST", CHAT, {**user("canary-prompt"), "temperature": "canary-value"}, {}, 400),
    ("POST", CHAT, {**user("canary-prompt"), "stop": ["canary"] * 9}, {}, 400),
    ("POST", CHAT, {**user("canary-prompt"), "canary-field": 1, "n": 0}, {}, 400),
    ("POST", CHAT, user([{"type": "canary-part", "image_url": "canary"}]), {}, 400),
    ("POST", CHAT, {"model": "fake", "messages": [{"role": "canary-role", "content": "canary"}]}, {}, 400),
    ("POST", CHAT, {**user("canary"), "model": "canary-model"}, {}, 404),
    ("POST", f"{CHAT}?q=canary", b"canary " * 1_300_000, {"Content-Type": "canary"}, 413),
    ("POST", CHAT, user("canary"), {"Content-Encoding": "canary"}, 415),
    ("POST", CHAT, user("canary"), {"x-request-timeout": "canary"}, 400),
    ("GET", "/v1/models", None, {"Authorization": "Bearer sk-canary-wrong"}, 401),
    ("GET", "/v1/models", None, {"Authorization": "Basic canary"}, 401),
    ("GET", "/v1/models", None, {"Authorization": "Bearer sk-Kan\xe1rie-canary"}, 401),
    ("GET", "/v1/models", None, {"x-api-key": "sk-canary-wrong"}, 401),
    ("GET", f"/v1/models?api_key={LOG_KEY}", None, {"Authorization": ""}, 401),
    ("DELETE", "/v1/models?q=canary", None, {}, 405),
    ("GET", "/nothing?q=canary", None, {}, 404),
]


def failing_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """A server of its own, that fails when it is told to."""
    (tmp_path / "sitecustomize.py").write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return child(tmp_path / "log", "fake", *arguments)


def said_by_then(served: Child) -> str:
    """All that it has said, when it has ended."""
    assert served.stop() == 0
    return served.said()


@pytest.mark.req("R38")
def test_s11_the_log_names_requests_and_nothing_that_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, answers = [], []
    with failing_child(tmp_path, monkeypatch, "--api-key", LOG_KEY, "--api-key", "sk-canary-two") as served:
        for method, path, body, headers, status in LOGGED:
            key = None if {"Authorization", "x-api-key"} & headers.keys() else LOG_KEY
            reply = request(served.port, method, path, body, key, headers)
            assert reply.status == status, (method, path, reply.body[:200])
            names.append(reply.headers["x-request-id"])
            if status == 200 and path == CHAT and not body.get("stream"):
                answers.append(reply.json()["choices"][0]["message"]["content"])
        log = said_by_then(served)
    assert len(set(names)) == len(LOGGED)
    assert [name for name in names if name not in log] == []
    assert [line for line in log.splitlines() if CANARY.search(line)] == []
    assert not any(answer in log for answer in answers)
    assert log.count("RuntimeError: told to fail") == 2  # the reason is there, with the request's name
    assert hash_key(LOG_KEY).hex()[:8] in log


def test_s11_a_clients_own_name_is_in_the_log(tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake") as served:
        reply = request(served.port, "GET", "/v1/models", key=None, headers={"x-request-id": "my-own.name:7"})
        assert reply.headers["x-request-id"] == "my-own.name:7"
        forged = request(served.port, "GET", "/%0AERROR%20forged%0D%0A%1b[31m%E2%80%A8x", key=None)
        assert forged.status == 404
        log = said_by_then(served)
    assert "my-own.name:7" in log
    assert not any(line.startswith("ERROR forged") for line in log.splitlines())
    assert "\x1b" not in log


def test_s11_what_is_no_request_is_named_as_well(tmp_path: Path) -> None:
    names = []
    with child(tmp_path / "log", "fake") as served:
        for content in (
            b"canary\r\n\r\n",
            b"GET /canary HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\ncanary canary\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nX-Canary: " + b"canary" * 20_000 + b"\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S) as connection:
                connection.sendall(content)
                answer = connection.makefile("rb").read().decode()
            assert re.match(r"HTTP/1.1 4\d\d ", answer), answer
            names += re.findall(r"x-request-id: (\S+)", answer)
        log = said_by_then(served)
    assert len(names) == 4
    assert not CANARY.search(log)
    assert [name for name in names if name not in log] == []
