"""`tokenmill serve ORGANIZATION/MODEL`: from an empty cache to the first token, offline, and on a client's request."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clients.checkpoint import make_checkpoint
from tests.hub import Fault, Hub, place, use
from tests.server.serving import TOKENMILL, WAIT_S, Reply, child, request
from tokenmill.backends.loading import describe_model, open_model
from tokenmill.cli.main import main
from tokenmill.errors import ModelLoadError
from tokenmill.server.models import short_name

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Which one?"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For the processes that are started: an empty cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def hub(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub().running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        hub.add("org/tiny", tiny)
        yield hub


class Terminal:
    """What a process writes to a terminal, as it comes."""

    def __init__(self, end: int) -> None:
        self._end = end
        self.said = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        while (found := re.search(pattern, self.said)) is None:
            self.said += os.read(self._end, 1 << 16).decode()  # an error once the process has ended
        return found


@contextmanager
def serve_on_a_terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([TOKENMILL, "serve", *arguments, "--port", "0"], stdout=theirs, stderr=theirs)
    os.close(theirs)
    stuck = threading.Timer(WAIT_S, process.kill)
    stuck.start()
    try:
        yield Terminal(ours)
    finally:
        stuck.cancel()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        os.close(ours)


@pytest.mark.req("R40")
def test_from_an_empty_cache_to_the_first_token_and_then_offline(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(50_000, threading.Event(), threading.Event())
    hub.faults.append(fault)
    assert fault.release is not None
    with serve_on_a_terminal("org/tiny") as terminal:
        terminal.wait_for(r"downloading org/tiny \|#+ +\| \d+/\d+ KiB, \d+\.\d MiB/s")
        fault.release.set()
        port = int(terminal.wait_for(r"org/tiny on http://[^:]+:(\d+)/v1")[1])
        first = request(port, "POST", CHAT, {**ASK, "model": "org/tiny", "stream": True}, key=None)
        assert first.status == 200
        assert any(event["choices"][0]["delta"].get("content") for event in first.events() if event["choices"])
        whole = request(port, "POST", CHAT, {**ASK, "model": "org/tiny"}, key=None).json()
    assert len(hub.transfers()) == 1

    before = len(hub.seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with child(tmp_path / "log", "org/tiny") as served:
        again = request(served.port, "POST", CHAT, {**ASK, "model": "org/tiny"}, key=None).json()
        assert again["choices"] == whole["choices"]
    assert len(hub.seen) == before


def test_an_admin_loads_a_downloaded_model(tiny: Path, cache: Path, tmp_path: Path) -> None:
    place(cache, "org/tiny", tiny)
    weights = place(cache, "org/broken", tiny) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with child(tmp_path / "log", "fake", "--api-key", "user", "--admin-key", "admin") as served:

        def listed(path: str = "/v1/models/cached") -> list[str]:
            return [one["id"] for one in request(served.port, "GET", path, key="admin").json()["data"]]

        def load(model: str, key: str = "admin") -> Reply:
            return request(served.port, "POST", "/v1/models/load", {"model": model}, key=key)

        def chat() -> Reply:
            return request(served.port, "POST", CHAT, {**ASK, "model": "org/tiny"}, key="user")

        assert request(served.port, "GET", "/v1/models/cached", key="user").status == 403
        assert load("org/tiny", "user").status == 403
        assert chat().status == 404
        assert listed() == ["org/broken", "org/tiny"]
        for other in ("org/gone", str(tiny), "smollm2-135m", "../tiny"):
            assert load(other).status == 404, "nothing is downloaded, and no path is opened"
        assert load("org/broken").error["code"] == "model_load_failed"
        assert listed("/v1/models") == ["fake"], "what failed to load is not offered to others"
        assert load("org/tiny").json()["status"] == "loaded"
        assert chat().status == 200
        assert (listed(), listed("/v1/models")) == (["org/broken"], ["fake", "org/tiny"])


def test_an_admin_pulls_and_deletes_a_model_with_ollama_s_api(hub: Hub, tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake", "--api-key", "user", "--admin-key", "admin") as served:

        def names() -> list[str]:
            return [one["name"] for one in request(served.port, "GET", "/api/tags", key="user").json()["models"]]

        reply = request(served.port, "POST", "/api/pull", {"model": "org/tiny"}, key="admin")
        assert json.loads(reply.body.splitlines()[-1]) == {"status": "success"}, reply.body
        assert names() == ["fake", "org/tiny"]
        asked = {"model": "org/tiny", "messages": ASK["messages"], "stream": False, "options": {"num_predict": 2}}
        assert request(served.port, "POST", "/api/chat", asked, key="user").json()["eval_count"] == 2
        shown = request(served.port, "POST", "/api/show", {"model": "org/tiny"}, key="user").json()
        assert shown["details"]["family"] == "llama"
        assert request(served.port, "DELETE", "/api/delete", {"model": "org/tiny"}, key="admin").status == 200
        assert names() == ["fake"]
        assert request(served.port, "DELETE", "/api/delete", {"model": "org/tiny"}, key="admin").status == 404


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/tiny", "org/tiny"),
        ("org/tiny@v1:Q4_0", "org/tiny@v1:Q4_0"),
        ("qwen3-4b", "qwen3-4b"),
        ("smollm2-135m", "smollm2-135m"),
        ("models/tiny.gguf", "tiny.gguf"),
        ("/srv/models/tiny", "tiny"),
        ("./tiny", "tiny"),
    ],
)
def test_the_name_of_a_model_in_requests(model: str, name: str) -> None:
    assert short_name(model) == name


# -- bad repositories -------------------------------------------------------------------------------------------------


LIES = {
    "hidden_size": (1 << 20, r"embed_tokens\.weight has shape \(\d+, 48\), not \(\d+, 1048576\)"),
    "vocab_size": (1 << 40, r"embed_tokens\.weight has shape \(\d+, 48\), not \(1099511627776, 48\)"),
    "num_hidden_layers": (9999, r"model\.layers\.10\..* and \d+ more are missing"),
    "intermediate_size": (1 << 50, r"mlp\.gate_proj\.weight has shape \(80, 48\), not \(1125899906842624, 48\)"),
    "num_attention_heads": (1 << 30, "is not supported|must be|has shape|not divisible"),
}


@pytest.mark.parametrize("setting", LIES)
def test_a_config_that_lies_about_shapes(
    setting: str, hub: Hub, cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(hub.url, cache, monkeypatch.setattr)
    value, says = LIES[setting]
    config = json.loads((tiny / "config.json").read_text())
    hub.repos["org/tiny"].files["config.json"] = json.dumps({**config, setting: value}).encode()
    with pytest.raises(ModelLoadError, match=says):
        open_model("org/tiny", device="cpu")
    with pytest.raises(ModelLoadError, match=says):
        describe_model("org/tiny", device="cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "evil", "auto_map": {"AutoModelForCausalLM": "evil.Evil"}}, "requires custom code (auto_map"),
        ({"model_type": "gpt99"}, "'gpt99' is not supported"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "is quantized with 'awq', which is not supported; use a GGUF",
        ),
    ],
)
def test_what_cannot_be_run_is_one_line_and_costs_no_download(
    changes: dict[str, object], says: str, hub: Hub, cache: Path, tiny: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    use(hub.url, cache, monkeypatch.setattr)
    config = json.loads((tiny / "config.json").read_text())
    hub.repos["org/tiny"].files["config.json"] = json.dumps({**config, **changes}).encode()
    for arguments in (["pull", "org/tiny"], ["generate", "hi", "-m", "org/tiny"], ["fit", "org/tiny"]):
        monkeypatch.setattr(sys, "argv", ["tokenmill", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 3
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("tokenmill: ")
        assert says in line
    assert not hub.transfers()
