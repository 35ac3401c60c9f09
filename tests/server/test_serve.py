"""`tokenmill serve` as a process: it says where it is, drains, and ends with 0; what can't start says why."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TOKENMILL = str(Path(sys.executable).with_name("tokenmill"))


def test_it_starts_answers_and_drains() -> None:
    process = subprocess.Popen([TOKENMILL, "serve", "fake", "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"fake on http://127\.0\.0\.1:(\d+)/v1", line)
        assert found is not None, line
        connection = http.client.HTTPConnection("127.0.0.1", int(found.group(1)), timeout=60)
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000, "stream": True,
                "ignore_eos": True}  # fmt: skip
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read1(100)
        process.send_signal(signal.SIGTERM)
        rest = answer.read()  # what runs may end by itself
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in rest
        connection.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_what_can_not_start_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([TOKENMILL, "serve", "fake", "--port", port], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert re.fullmatch(r"tokenmill: can't listen on 127\.0\.0\.1:\d+: Address already in use\n", done.stderr)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_it_does_not_listen_wider_without_a_key(host: str) -> None:
    done = subprocess.run([TOKENMILL, "serve", "fake", "--host", host], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "give --api-key, or --insecure" in done.stderr
