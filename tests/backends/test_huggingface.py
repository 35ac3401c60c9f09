"""Models from the Hugging Face Hub, against a hub on loopback: what is fetched, resumed, verified and rejected."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.hub import Fault, Hub, sha256, use
from tests.server.wire import until
from tokenmill import open_model
from tokenmill.backends import huggingface, library, loading
from tokenmill.backends.huggingface import HubName, choose, quantization
from tokenmill.backends.library import find_model, pull
from tokenmill.cli.main import main
from tokenmill.errors import ModelLoadError, ModelNotFound

WEIGHTS = random.Random(1).randbytes(300_000)
PLAIN = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "generation_config.json": b"{}",
    "model.safetensors": WEIGHTS,
}
INDEX = "model.safetensors.index.json"


def shards(count: int) -> dict[str, bytes]:
    return {
        f"model-{i:05}-of-{count:05}.safetensors": random.Random(i).randbytes(5000 * i) for i in range(1, count + 1)
    }


def index_of(files: Any) -> bytes:
    return json.dumps({"weight_map": {f"tensor.{i}": file for i, file in enumerate(files)}}).encode()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with Hub().running() as hub:
        use(hub.url, cache, monkeypatch.setattr)
        hub.add("org/plain", PLAIN)
        yield hub


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.utils.close_session()


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/7", HubName("org/name", "refs/pr/7")),
        ("org/name:Q4_K_M", HubName("org/name", "main", "Q4_K_M")),
        ("org/name@v1:sub/file.gguf", HubName("org/name", "v1", "sub/file.gguf")),
        ("qwen3-4b", HubName("Qwen/Qwen3-4B")),
        ("qwen3-4b:q8_0", HubName("Qwen/Qwen3-4B-GGUF", "main", "q8_0")),
        ("name", None),
        ("org/a/b", None),
        ("./name", None),
        ("../name", None),
        ("/org/name", None),
        ("~/name", None),
        ("org/..", None),
        ("org/name@../../x", None),
        ("org/name:../x", None),
        ("org/na--me", None),
        ("org/name?x", None),
        ("org/name\n", None),
        ("", None),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert library.hub_name(text) == name
    if name is not None and "/" in text:
        assert str(name) == text


def test_short_names_are_names() -> None:
    for plain, quantized in library.SHORT_NAMES.values():
        assert HubName.parse(plain)
        assert HubName.parse(quantized)
    assert not set(library.ALIASES) & set(library.SHORT_NAMES)


# -- downloads --------------------------------------------------------------------------------------------------------


@pytest.mark.fault("M06")
def test_a_model_is_fetched_once_and_used_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = find_model("org/plain")
    assert path is not None
    assert {file.name: file.read_bytes() for file in path.iterdir()} == PLAIN
    num_requests = len(hub.seen)
    assert find_model("org/plain") == path
    assert len(hub.seen) == num_requests, "a model in the cache needs no network"
    offline(monkeypatch)
    assert find_model("org/plain") == path


def test_other_programs_find_the_model_in_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = find_model("org/plain")
    assert Path(huggingface_hub.snapshot_download("org/plain", local_files_only=True)) == path
    assert huggingface_hub.hf_hub_download("org/plain", "model.safetensors", local_files_only=True)
    (repo,) = huggingface_hub.scan_cache_dir().repos
    assert (repo.repo_id, repo.size_on_disk) == ("org/plain", sum(map(len, set(PLAIN.values()))))


def test_a_model_that_another_program_has_fetched_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = huggingface_hub.snapshot_download("org/plain")
    offline(monkeypatch)
    assert find_model("org/plain") == Path(path)


def test_only_files_of_the_model_are_fetched(hub: Hub) -> None:
    others = {
        "README.md": b"x", "evil.py": b"x", "pytorch_model.bin": b"x", "consolidated.safetensors": b"x",
        "original/model.safetensors": b"x", "onnx/model.onnx": b"x", "tf_model.h5": b"x", "training_args.bin": b"x",
    }  # fmt: skip
    hub.add("org/full", {**PLAIN, "chat_template.jinja": b"t", "tokenizer.model": b"m", **others})
    path = pull("org/full")
    assert {file.name for file in path.rglob("*")} == {*PLAIN, "chat_template.jinja", "tokenizer.model"}


def test_a_revision_and_the_newest_one(hub: Hub) -> None:
    old = hub.repos["org/plain"].commit
    first = pull("org/plain")
    hub.repos["org/plain"].files["model.safetensors"] = WEIGHTS[::-1]
    assert find_model("org/plain") == first, "nothing changes until the model is pulled again"
    second = pull("org/plain")
    assert second != first
    assert find_model("org/plain") == second
    assert find_model(f"org/plain@{old}") == first
    with pytest.raises(ModelNotFound, match="org/plain has no revision 'v9'; see http"):
        pull("org/plain@v9")


def test_a_newer_revision_that_cannot_be_completed_leaves_the_old_one_usable(hub: Hub) -> None:
    first = pull("org/plain")
    hub.repos["org/plain"].files["model.safetensors"] = WEIGHTS[::-1]
    hub.sends["model.safetensors"] = WEIGHTS
    with pytest.raises(ModelLoadError):
        pull("org/plain")
    assert find_model("org/plain") == first


def test_shards_and_files_of_equal_content(hub: Hub) -> None:
    parts = shards(3)
    hub.add("org/parts", {**PLAIN, **parts, "added_tokens.json": b"{}", INDEX: index_of(parts)} | {"empty.txt": b""})
    path = pull("org/parts")
    assert {file.name for file in path.glob("*.safetensors")} == set(parts)
    assert all((path / name).read_bytes() == content for name, content in parts.items())
    assert (path / "added_tokens.json").read_bytes() == (path / "generation_config.json").read_bytes() == b"{}"


def test_pull_replaces_a_damaged_file(hub: Hub) -> None:
    path = pull("org/plain")
    (path / "model.safetensors").resolve().write_bytes(WEIGHTS[::-1])
    assert find_model("org/plain") == path
    assert pull("org/plain") == path
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_no_weights_are_fetched_for_a_model_without_them(hub: Hub) -> None:
    path = find_model("org/plain", weights=False)
    assert path is not None
    assert not (path / "model.safetensors").exists()
    assert find_model("org/plain", weights=False) == path
    assert find_model("org/plain") == path
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_system_without_links(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", no_links)
    path = pull("org/plain")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == PLAIN
    assert find_model("org/plain") == path


# -- interruptions ----------------------------------------------------------------------------------------------------


def test_connections_that_break_are_resumed(hub: Hub) -> None:
    seed = random.Random(7)
    hub.faults.extend(Fault(seed.randrange(1, 30_000)) for _ in range(20))
    path = pull("org/plain")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    starts = [int(one.headers.get("range", "bytes=0-")[6:].split("-")[0]) for one in hub.transfers()]
    assert len(starts) > 10
    assert starts == sorted(set(starts)), "each request begins where the last one ended"


def partial_of(cache: Path, content: bytes) -> Path:
    return cache / "models--org--plain" / "blobs" / f"{sha256(content)}.incomplete"


def leave_partial(cache: Path, hub: Hub, content: bytes) -> Path:
    path = partial_of(cache, WEIGHTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _pull_in_child(endpoint: str, cache: Path) -> None:
    use(endpoint, cache, setattr)
    huggingface.fetch(HubName("org/plain"))


def test_a_process_killed_20_times_at_random_resumes_and_the_checksum_is_right(hub: Hub, cache: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.backends.test_huggingface", "huggingface_hub.hf_api"])
    weights, seed, num_sent = partial_of(cache, WEIGHTS), random.Random(11), 0
    for _ in range(20):
        fault = Fault(seed.randrange(0, 15_000), threading.Event())
        hub.faults.append(fault)
        child = context.Process(target=_pull_in_child, args=(hub.url, cache))
        child.start()
        assert fault.reached is not None
        assert fault.reached.wait(60)
        num_sent += fault.after
        until(partial(has_size, weights, num_sent))
        child.kill()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        assert weights.stat().st_size == num_sent, "nothing that was received is lost"
    assert huggingface.cached(HubName("org/plain")) is None
    before = len(hub.transfers())
    path = pull("org/plain")
    (last,) = hub.transfers()[before:]
    assert last.headers["range"] == f"bytes={num_sent}-{len(WEIGHTS) - 1}"
    assert sha256((path / "model.safetensors").read_bytes()) == sha256(WEIGHTS)
    assert not list(cache.rglob("*.incomplete"))


@pytest.mark.fault("M07")
@pytest.mark.parametrize(
    "content",
    [b"wrong" * 100, WEIGHTS[:1000] + b"x", WEIGHTS + b"more", WEIGHTS[::-1], WEIGHTS, b""],
    ids=["wrong", "wrong end", "too long", "wrong and complete", "complete", "empty"],
)
def test_a_partial_file_is_used_only_if_the_whole_is_right(content: bytes, hub: Hub, cache: Path) -> None:
    leave_partial(cache, hub, content)
    assert (pull("org/plain") / "model.safetensors").read_bytes() == WEIGHTS
    assert len(hub.transfers()) == (0 if content == WEIGHTS else len(hub.transfers()))


def test_a_file_too_large_for_one_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "REQUEST_BYTES", 100_000)
    assert (pull("org/plain") / "model.safetensors").read_bytes() == WEIGHTS
    ranges = ["bytes=0-99999", "bytes=100000-199999", "bytes=200000-299999"]
    assert [one.headers["range"] for one in hub.transfers()] == ranges


def test_the_log_follows_a_long_download(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huggingface, "LOG_EVERY_S", 0.0)
    with caplog.at_level("INFO", "tokenmill.backends.huggingface"):
        pull("org/plain")
    said = [record.getMessage() for record in caplog.records]
    assert any(re.fullmatch(r"downloading org/plain: \S+ KiB of 293\.0 KiB", line) for line in said)
    assert re.fullmatch(r"downloaded org/plain in \d+\.\d s", said[-1])


@pytest.mark.parametrize("ignores", ["honors_ranges", "sends_other_ranges"])
def test_servers_without_ranges(ignores: str, hub: Hub, cache: Path) -> None:
    setattr(hub, ignores, ignores != "honors_ranges")
    leave_partial(cache, hub, WEIGHTS[:1000])
    assert (pull("org/plain") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_server_that_is_overloaded_for_a_while(hub: Hub) -> None:
    commit = hub.repos["org/plain"].commit
    hub.statuses[f"/org/plain/resolve/{commit}/model.safetensors"] = deque([503, 429])
    assert (pull("org/plain") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_server_that_never_recovers(hub: Hub) -> None:
    hub.faults.extend(Fault(0) for _ in range(50))
    with pytest.raises(ModelLoadError, match=r"org/plain failed at model.safetensors \(.+\); run the command again"):
        pull("org/plain")
    hub.faults.clear()
    assert (pull("org/plain") / "model.safetensors").read_bytes() == WEIGHTS


def test_two_processes_fetch_a_model_once(hub: Hub, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fault = Fault(1000, threading.Event(), threading.Event())
    hub.faults.append(fault)
    paths: list[Path | None] = []
    threads = [threading.Thread(target=lambda: paths.append(find_model("org/plain"))) for _ in range(2)]
    threads[0].start()
    assert fault.reached is not None
    assert fault.release is not None
    assert fault.reached.wait(20)
    waits = threading.Event()
    plain = huggingface.exclusive

    def exclusive(lock: Path, waiting: str) -> Any:
        waits.set()
        return plain(lock, waiting)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "exclusive", exclusive)
        threads[1].start()
        assert waits.wait(20)
        fault.release.set()
        for thread in threads:
            thread.join(20)
    assert paths[0] is not None
    assert paths == [paths[0]] * 2
    assert len(hub.transfers()) == 1


# -- what is wrong ----------------------------------------------------------------------------------------------------


def test_a_wrong_checksum_is_an_error_and_not_kept(hub: Hub, cache: Path) -> None:
    hub.sends["model.safetensors"] = WEIGHTS[::-1]
    with pytest.raises(
        ModelLoadError, match=f"model.safetensors has the checksum .*, not {sha256(WEIGHTS)}; .* try ag"
    ):
        pull("org/plain")
    assert not list(cache.rglob("*.incomplete"))
    hub.sends = {"config.json": PLAIN["config.json"].replace(b"llama", b"other")}
    shutil.rmtree(cache)
    with pytest.raises(ModelLoadError, match=r"config\.json has the checksum"):
        pull("org/plain")
    hub.sends = {}
    assert (pull("org/plain") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_longer_than_listed(hub: Hub) -> None:
    hub.sends["model.safetensors"] = WEIGHTS + b"more"
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is longer than the Hub lists"):
        pull("org/plain")


class Wrong(NamedTuple):
    arrange: Callable[[Hub], object]
    says: str
    model: str = "org/plain"


def repo(files: dict[str, bytes], **options: Any) -> Callable[[Hub], object]:
    return lambda hub: hub.add("org/plain", files, **options)


def without(*names: str, **more: bytes) -> dict[str, bytes]:
    return {name: content for name, content in PLAIN.items() if name not in names} | more


def listed(**about: Any) -> Callable[[Hub], object]:
    return repo(PLAIN, listed={"model.safetensors": about})


def status(code: int) -> Callable[[Hub], object]:
    return lambda hub: hub.statuses.update({"/api/models/org/plain/revision/main": deque([code])})


NO_WEIGHTS = without("model.safetensors")
WRONG: dict[str, Wrong] = {
    "no such repository": Wrong(
        lambda _: None,
        "no model 'org/gone': no such path, and no such repository on http://.*; set HF_TOKEN",
        "org/gone",
    ),
    "gated": Wrong(
        repo(PLAIN, token=""), "org/plain is gated: accept its terms on http://.*/org/plain, and set HF_TOKEN"
    ),
    "token rejected": Wrong(status(401), "no such repository|check HF_TOKEN"),
    "forbidden": Wrong(status(403), "answered 403 for org/plain; check HF_TOKEN"),
    "hub broken": Wrong(status(500), "answered 500 for org/plain; try again later"),
    "no hub": Wrong(
        lambda hub: hub.answers.update({"/api/models/org/plain/revision/main": b"<html>"}),
        "answered for org/plain with something that is not a list of files .*; check HF_ENDPOINT",
    ),
    "listing of numbers": Wrong(
        lambda hub: hub.answers.update({"/api/models/org/plain/revision/main": b'{"id": "x", "siblings": [1]}'}),
        "is not a list of files",
    ),
    "path outside": Wrong(listed(rfilename="../../x.safetensors"), "not a list of files .a file '../../x.safetensors'"),
    "absolute path": Wrong(listed(rfilename="/etc/x.safetensors"), "not a list of files .a file '/etc/x.safetensors'"),
    "escape sequence": Wrong(listed(rfilename="\x1b[2J.safetensors"), r"not a list of files .a file '\\x1b"),
    "negative size": Wrong(listed(size=-1), "model.safetensors without size and checksum"),
    "no size": Wrong(listed(size=None), "model.safetensors without size and checksum"),
    "checksum of a path": Wrong(
        listed(lfs={"sha256": "../x", "size": 1, "pointerSize": 1}), "without size and checksum"
    ),
    "more than the disk": Wrong(
        listed(size=1 << 60), r"needs 1073741824.0 GiB in .*cache, where .* are free; remove mod"
    ),
    "only pickles": Wrong(
        repo({**NO_WEIGHTS, "pytorch_model.bin": b"x"}), r"has only pickled weights \(pytorch_model.bin\), which can"
    ),
    "no weights": Wrong(repo(NO_WEIGHTS), "org/plain has no weights: no .safetensors and no .gguf file"),
    "no config": Wrong(repo(without("config.json")), "has no config.json: it is not a language model"),
    "an adapter": Wrong(repo({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}), "it is an adapter"),
    "missing shard": Wrong(
        repo(
            {**NO_WEIGHTS, "a.safetensors": b"x", INDEX: index_of(["a.safetensors", "b.safetensors", "c.safetensors"])}
        ),
        "org/plain is incomplete: b.safetensors and 1 more files missing; use another revision",
    ),
    "missing part": Wrong(
        repo({**NO_WEIGHTS, "model-00001-of-00002.safetensors": b"x"}), "model-00002-of-00002.safetensors missing"
    ),
    "missing GGUF part": Wrong(
        repo({"m-Q4_0-00002-of-00003.gguf": b"x"}), "incomplete: m-Q4_0-00001-of-00003.gguf and 1 more files missing"
    ),
    "index that leads outside": Wrong(
        repo({**PLAIN, INDEX: index_of(["../../../secret.safetensors"])}), "names '../../../secret.safetensors'"
    ),
    "index of other files": Wrong(
        repo({**PLAIN, INDEX: index_of(["config.json"])}), "names 'config.json', which is not"
    ),
    "index of lists": Wrong(repo({**PLAIN, INDEX: index_of([["a"]])}), "is not a weight index: weight_map names"),
    "index of nothing": Wrong(repo({**PLAIN, INDEX: b"{}"}), "weight_map names no file"),
    "index that is no JSON": Wrong(repo({**PLAIN, INDEX: b"["}), "is not valid JSON"),
    "no such quantization": Wrong(
        repo({"m-Q4_0.gguf": b"x", "m-Q8_0.gguf": b"x", "n.gguf": b"x"}),
        "org/plain has no 'Q2_K'; it has: Q4_0, Q8_0, n.gguf$",
        "org/plain:Q2_K",
    ),
    "no GGUF at all": Wrong(lambda _: None, "org/plain has no 'Q2_K'; it has: no .gguf file", "org/plain:Q2_K"),
    "several models": Wrong(
        repo({"a-Q4_0.gguf": b"x", "b-Q4_0.gguf": b"x"}),
        "org/plain is ambiguous: a-Q4_0.gguf, b-Q4_0.gguf; name one of the files: org/plain:a-Q4_0.gguf",
    ),
}


@pytest.mark.fault("M05")
@pytest.mark.parametrize("case", WRONG)
def test_repositories_that_are_rejected(case: str, hub: Hub, cache: Path) -> None:
    arrange, says, model = WRONG[case]
    arrange(hub)
    with pytest.raises(ModelLoadError, match=says) as error:
        find_model(model)
    assert "\n" not in str(error.value)
    assert not hub.transfers(), "no weights are fetched of a model that is rejected"
    assert huggingface.cached(HubName("org/plain")) is None


def test_an_index_too_large_to_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.files.MOST_JSON_BYTES", 1000)
    hub.add("org/plain", {**PLAIN, INDEX: index_of(["model.safetensors"] * 1000)})
    with pytest.raises(ModelLoadError, match=f"{INDEX} has .* bytes; the maximum is 1000"):
        find_model("org/plain")
    assert not hub.transfers()


def test_a_model_that_cannot_be_run_is_rejected_before_its_weights_are_fetched(hub: Hub) -> None:
    def check(folder: Path) -> None:
        assert (folder / "config.json").read_bytes() == PLAIN["config.json"]
        raise ModelLoadError("not supported")

    with pytest.raises(ModelLoadError, match="not supported"):
        find_model("org/plain", check=check)
    assert not hub.transfers()


def test_a_missing_package_is_reported_before_weights_are_fetched(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = loading.is_installed
    monkeypatch.setattr(loading, "is_installed", lambda name: name != "torch" and found(name))
    sizes = "num_hidden_layers num_attention_heads hidden_size intermediate_size vocab_size max_position_embeddings"
    more = {"head_dim": 2, "rms_norm_eps": 1e-5}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **dict.fromkeys(sizes.split(), 64), **more}
    hub.add("org/whole", {**PLAIN, "config.json": json.dumps(config).encode()})
    with pytest.raises(ModelLoadError, match=r"'tokenmill\[torch\]', or use dtype int8 or int4"):
        open_model("org/whole", device="cpu")
    assert not hub.transfers()


@pytest.mark.fault("M06")
def test_offline_without_the_model(hub: Hub, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    offline(monkeypatch)
    with pytest.raises(ModelNotFound, match=f"org/plain is not in {cache}, and HF_HUB_OFFLINE is set; unset it"):
        find_model("org/plain")


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    use("http://127.0.0.1:9", cache, monkeypatch.setattr)
    with pytest.raises(ModelNotFound, match=r"cannot reach http://127.0.0.1:9 for org/plain \(.*\); check the network"):
        find_model("org/plain")


def test_a_cache_that_cannot_be_written(hub: Hub, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ModelLoadError, match=f"cannot store org/plain in {cache}: Not a directory"):
        find_model("org/plain")


def test_a_token_goes_to_the_hub_and_not_to_the_content_server(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/plain"].token = "hf_secret"
    with pytest.raises(ModelNotFound, match="gated"):
        find_model("org/plain")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert find_model("org/plain")
    assert [one for one in hub.transfers(of="/resolve/") if one.headers["authorization"] == "Bearer hf_secret"]
    assert hub.transfers()
    assert not [one for one in hub.transfers() if "authorization" in one.headers]


# -- GGUF -------------------------------------------------------------------------------------------------------------

QUANTIZED = {
    "Model-Q8_0.gguf": b"8",
    "Model-Q4_K_M.gguf": b"4",
    "Model-BF16-00001-of-00002.gguf": b"1",
    "Model-BF16-00002-of-00002.gguf": b"2",
    "UD-Q2_K_XL/Model-UD-Q2_K_XL.gguf": b"u",
    "mmproj-F16.gguf": b"m",
    "imatrix.gguf": b"i",
    "README.md": b"r",
}


@pytest.mark.parametrize(
    ("name", "entry", "files"),
    [
        ("org/quantized", "Model-Q4_K_M.gguf", {"Model-Q4_K_M.gguf"}),
        ("org/quantized:Q8_0", "Model-Q8_0.gguf", {"Model-Q8_0.gguf"}),
        ("org/quantized:q8_0", "Model-Q8_0.gguf", {"Model-Q8_0.gguf"}),
        ("org/quantized:Model-Q8_0.gguf", "Model-Q8_0.gguf", {"Model-Q8_0.gguf"}),
        (
            "org/quantized:BF16",
            "Model-BF16-00001-of-00002.gguf",
            {"Model-BF16-00001-of-00002.gguf", "Model-BF16-00002-of-00002.gguf"},
        ),
        ("org/quantized:Q2_K_XL", "UD-Q2_K_XL/Model-UD-Q2_K_XL.gguf", {"UD-Q2_K_XL/Model-UD-Q2_K_XL.gguf"}),
    ],
)
def test_gguf_by_quantization(name: str, entry: str, files: set[str], hub: Hub) -> None:
    hub.add("org/quantized", QUANTIZED)
    path = find_model(name)
    assert path is not None
    assert str(path).endswith(f"/{entry}")
    snapshot = Path(str(path).removesuffix(f"/{entry}"))
    assert {one.relative_to(snapshot).as_posix() for one in snapshot.rglob("*") if one.is_file()} == files
    before = len(hub.seen)
    assert find_model(name) == path
    assert len(hub.seen) == before


def test_a_second_quantization_joins_the_first(hub: Hub) -> None:
    hub.add("org/quantized", QUANTIZED)
    first, second = find_model("org/quantized:Q8_0"), find_model("org/quantized:Q4_K_M")
    assert first is not None
    assert second is not None
    assert first.parent == second.parent


def test_a_quantization_in_the_cache_is_preferred_to_a_download(hub: Hub) -> None:
    hub.add("org/quantized", QUANTIZED)
    path = find_model("org/quantized:Q8_0")
    before = len(hub.seen)
    assert find_model("org/quantized") == path
    assert len(hub.seen) == before


def test_projectors_and_importance_matrices_are_not_models() -> None:
    files = ["m-F16.gguf", "mmproj-F16.gguf", "m-F16.imatrix.gguf"]
    for name in (HubName("a/b"), HubName("a/b", variant="F16")):
        assert choose(files, name, list).weights == ("m-F16.gguf",)


def test_safetensors_come_before_gguf() -> None:
    both = choose([*PLAIN, "m-Q4_0.gguf"], HubName("a/b"), list)
    assert (both.entry, both.weights) == ("", ("model.safetensors",))


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("Qwen3-4B-Q4_K_M.gguf", "Q4_K_M"),
        ("smollm2.q8_0.gguf", "Q8_0"),
        ("model-IQ4_XS-00001-of-00003.gguf", "IQ4_XS"),
        ("Q6_K/model-00001-of-00003.gguf", "Q6_K"),
        ("phi-4-fp16.gguf", "F16"),
        ("gemma-3-1b-it-q4_0.gguf", "Q4_0"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("Q4-tuned-by-us-BF16.gguf", "BF16"),
        ("plain.gguf", ""),
    ],
)
def test_quantization_of_a_file_name(file: str, kind: str) -> None:
    assert quantization(file) == kind


# -- local directories ------------------------------------------------------------------------------------------------


def test_a_directory_of_gguf_files(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"x")
    assert find_model(str(tmp_path)) == tmp_path / "m-00001-of-00002.gguf"
    (tmp_path / "n.gguf").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"has several models \(m-00001-of-00002.gguf, n.gguf, ...\); name one"):
        find_model(str(tmp_path))
    shutil.copy(tmp_path / "n.gguf", tmp_path / "config.json")
    assert find_model(str(tmp_path)) == tmp_path


# -- the models in the cache ------------------------------------------------------------------------------------------


def listed_models() -> dict[str, int]:
    return {model.name: model.num_bytes for model in library.cached_models() if model.path is not None}


def test_models_in_the_cache_are_listed_by_the_names_that_open_them(hub: Hub) -> None:
    assert library.cached_models() == []
    hub.add("org/quantized", QUANTIZED)
    hub.add("org/twins", {"a-Q4_0.gguf": b"1", "sub/b-Q4_0.gguf": b"22"})
    old = hub.repos["org/plain"].commit
    for name in ("org/plain", "org/quantized:BF16", "org/quantized:Q4_K_M", "org/twins:a-Q4_0", "org/twins:b-Q4_0"):
        find_model(name)
    hub.repos["org/plain"].files["config.json"] += b" "
    pull("org/plain")
    size = sum(map(len, set(PLAIN.values())))
    assert listed_models() == {
        "org/plain": size + 1,
        f"org/plain@{old}": size,
        "org/quantized:BF16": 2,
        "org/quantized:Q4_K_M": 1,
        "org/twins:a-Q4_0.gguf": 1,
        "org/twins:sub/b-Q4_0.gguf": 2,
    }
    before = len(hub.seen)
    for name in listed_models():
        assert find_model(name) == library.cached_model(name).path
    assert len(hub.seen) == before


def test_last_use_is_when_a_model_was_opened(hub: Hub) -> None:
    path = find_model("org/plain")
    assert path is not None
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))
    assert library.cached_model("org/plain").last_used == 1e9
    find_model("org/plain")
    assert library.cached_model("org/plain").last_used > 1e9
    assert (path / "config.json").stat().st_mtime == 1e9


@pytest.mark.fault("M07")
def test_an_incomplete_download_is_listed_and_removed(hub: Hub, cache: Path) -> None:
    leave_partial(cache, hub, WEIGHTS[:1000])
    (model,) = library.cached_models()
    assert (model.name, model.path, model.num_bytes) == ("org/plain", None, 1000)
    assert library.remove_model("org/plain") == 1000
    assert library.cached_models() == []


def test_a_quantization_is_removed_and_the_others_stay(hub: Hub, cache: Path) -> None:
    hub.add("org/quantized", QUANTIZED)
    for kind in ("Q8_0", "BF16", "Q2_K_XL"):
        find_model(f"org/quantized:{kind}")
    assert library.remove_model("org/quantized:BF16") == 2
    assert set(listed_models()) == {"org/quantized:Q8_0", "org/quantized:UD-Q2_K_XL"}
    assert library.remove_model("org/quantized:UD-Q2_K_XL") == 1
    assert library.remove_model("org/quantized:Q8_0") == 1 + 40
    assert not list(cache.glob("models--*"))


def test_an_old_revision_is_removed_and_what_the_new_one_shares_stays(hub: Hub) -> None:
    old = hub.repos["org/plain"].commit
    pull("org/plain")
    hub.repos["org/plain"].files["config.json"] += b" "
    new = pull("org/plain")
    assert library.remove_model(f"org/plain@{old}") == len(PLAIN["config.json"])
    assert {file.name: file.read_bytes() for file in new.iterdir()} == hub.repos["org/plain"].files
    assert find_model("org/plain") == new
    assert library.remove_model("org/plain") > len(WEIGHTS)
    assert listed_models() == {}


@pytest.mark.parametrize("name", ["org/gone", "org/plain:Q4_0", "org/plain@v9", "gone", "smollm2-135m"])
def test_models_that_are_not_there_are_not_removed(name: str, hub: Hub) -> None:
    pull("org/plain")
    for act in (library.remove_model, library.cached_model):
        with pytest.raises(ModelNotFound, match="is not in the cache; `tokenmill models` lists what is"):
            act(name)
    assert set(listed_models()) == {"org/plain"}


def test_the_models_command(hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr("sys.argv", ["tokenmill", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    monkeypatch.setattr("tokenmill.backends.loading.check_directory", lambda _: None)
    code, path, _ = command("pull", "org/plain")
    assert (code, path) == (0, f"{find_model('org/plain')}\n")
    for arguments in (["models"], ["models", "list"]):
        code, out, _ = command(*arguments)
        heading, line = out.splitlines()
        assert heading.split() == ["NAME", "SIZE", "LAST", "USED"]
        assert re.fullmatch(r"org/plain +293\.0 KiB +\d{4}-\d\d-\d\d \d\d:\d\d", line)
    (about,) = json.loads(command("models", "list", "--json")[1])
    assert (about["name"], about["files"]["model.safetensors"]) == ("org/plain", len(WEIGHTS))
    assert "293.0 KiB  model.safetensors" in command("models", "show", "org/plain")[1]
    assert command("models", "remove", "org/plain") == (0, "removed org/plain: 293.0 KiB freed\n", "")
    code, out, err = command("models", "remove", "org/plain")
    assert (code, out) == (3, "")
    assert err == "tokenmill: org/plain is not in the cache; `tokenmill models` lists what is\n"
