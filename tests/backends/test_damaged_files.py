"""M01 to M03: model files that lie are refused before anything is allocated, and before C code reads them."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.backends.llamacpp.files import write_attention
from tests.fuzz import Originals, fuzz
from tests.llamacpp import HAS_LLAMACPP, needs_llamacpp
from tests.server.serving import HI, child, request
from tokenmill.backends import gguf_file
from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.backends.loading import open_model
from tokenmill.errors import ModelLoadError

# -- M02: the cases of llama.cpp's tests/test-gguf.cpp, and some more -------------------------------------------------

STRING, ARRAY, UINT8, UINT32, FLOAT = 8, 9, 0, 4, 6
F32, F16, Q4_0 = 0, 1, 2


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: bytes = b"t", shape: tuple[int, ...] = (32,), kind: int = F32, offset: int = 0, dims: int = -1
) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape) if dims < 0 else dims) + sizes + struct.pack("<IQ", kind, offset)


def file(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs)
    head = magic + struct.pack("<I", version) + struct.pack("<QQ", *counts) + b"".join((*pairs, *tensors))
    return head + bytes(-len(head) % alignment + data)


ALIGN = b"general.alignment"
BAD: dict[str, tuple[bytes, str]] = {
    "bad magic": (file(magic=b"FGGU"), "is not a GGUF file"),
    "nothing": (b"", "is not a GGUF file"),
    "version 0": (file(version=0), "has GGUF version 0"),
    "version 1": (file(version=1), "has GGUF version 1"),
    "version of the future": (file(version=4), "has GGUF version 4"),
    "big-endian": (file(version=3 << 24), "has GGUF version"),
    "many tensors": (file(num_tensors=1 << 63), "is more than"),
    "more tensors than there are": (file(num_tensors=2, data=64), "is corrupt"),
    "many pairs": (file(num_pairs=(1 << 64) - 1), "is more than"),
    "more pairs than there are": (file(num_pairs=9, data=64), "is corrupt"),
    "key longer than the file": (file((struct.pack("<Q", 1 << 40) + b"key",)), "is more than"),
    "key longer than the rest": (file((struct.pack("<Q", 4000) + b"key",)), "truncated at byte"),
    "empty key": (file((pair(b"", UINT8, b"\1"),)), "a key has no name"),
    "key that is no UTF-8": (file((pair(b"\xff\xfe", UINT8, b"\1"),)), "corrupt or truncated: 'utf-8'"),
    "unknown type": (file((pair(b"k", 13, b"\1"),)), "unknown value type 13"),
    "unknown type of items": (file((pair(b"k", ARRAY, struct.pack("<IQ", 13, 1) + b"\1"),)), "unknown value type 13"),
    "duplicate key": (file((pair(b"k", UINT8, b"\1"), pair(b"k", UINT8, b"\1"))), "duplicate key 'k'"),
    "array longer than the file": (
        file((pair(b"k", ARRAY, struct.pack("<IQ", FLOAT, 1 << 20)),)),
        "corrupt or truncated at byte",
    ),
    "arrays within arrays": (file((pair(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000),)), "corrupt or truncated"),
    "alignment 0": (file((pair(ALIGN, UINT32, struct.pack("<I", 0)),)), "invalid alignment 0"),
    "alignment of no power of 2": (file((pair(ALIGN, UINT32, struct.pack("<I", 48)),)), "invalid alignment 48"),
    "alignment of another type": (file((pair(ALIGN, STRING, text(b"32")),)), "invalid alignment '32'"),
    "empty name": (file((), (tensor(b""),), 128), "a tensor has no name"),
    "long name": (file((), (tensor(b"t" * 65),), 128), "more than 64 bytes"),
    "no dimensions": (file((), (tensor(shape=()),), 128), "has 0 dimensions"),
    "five dimensions": (file((), (tensor(shape=(2,) * 5),), 128), "has 5 dimensions"),
    "dimensions without end": (file((), (tensor(dims=(1 << 32) - 1),), 128), "has 4294967295 dimensions"),
    "dimension 0": (file((), (tensor(shape=(32, 0)),), 128), "has shape (0, 32)"),
    "negative dimension": (file((), (tensor(shape=((1 << 64) - 1,)),), 128), "has shape"),
    "size that overflows": (file((), (tensor(shape=(1 << 32, 1 << 32)),), 128), "has shape"),
    "bytes that overflow": (file((), (tensor(shape=((1 << 62),)),), 128), "is truncated: t needs bytes up to"),
    "row of no whole blocks": (file((), (tensor(shape=(31,), kind=Q4_0),), 128), "block size 32"),
    "offset that is not aligned": (file((), (tensor(offset=4),), 256), "is not aligned to 32"),
    "offset beyond the file": (file((), (tensor(offset=1 << 40),), 128), "is truncated"),
    "offset that overflows": (file((), (tensor(offset=(1 << 64) - 32),), 128), "is truncated"),
    "duplicate name": (file((), (tensor(), tensor(offset=128)), 256), "duplicate tensor 't'"),
    "tensors in one place": (file((), (tensor(b"a"), tensor(b"b")), 256), "b overlaps a"),
    "tensors that overlap": (file((), (tensor(b"a"), tensor(b"b", offset=96)), 256), "b overlaps a"),
    "data cut off": (file((), (tensor(),), 127), "is truncated: t needs bytes up to"),
    "half a file": (file((), (tensor(),), 128)[:50], "corrupt or truncated"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_m02_a_gguf_file_that_lies_is_refused_before_c_code_reads_it(case: str, tmp_path: Path) -> None:
    content, saying = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as refused:
        GGUFFile(path)
    assert saying in str(refused.value)
    assert str(path) in str(refused.value)


def test_m02_a_gguf_file_that_does_not_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    pairs = (pair(b"a", UINT8, b"\1"), pair(b"list", ARRAY, struct.pack("<IQ", UINT32, 2) + struct.pack("<II", 1, 2)))
    path.write_bytes(file(pairs, (tensor(b"a"), tensor(b"b", (2, 2, 2, 2), F16, 128)), 160))
    read = GGUFFile(path)
    assert (read.metadata, list(read.tensors)) == ({"a": 1, "list": [1, 2]}, ["a", "b"])


@pytest.mark.parametrize(
    ("limit", "saying"),
    [("MOST_ITEMS", "more than 100 items in the arrays"), ("MOST_HEADER_BYTES", "header is larger than")],
)
def test_m02_memory_for_a_header_is_bounded(
    limit: str, saying: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file can be large enough to hold what it announces."""
    monkeypatch.setattr(gguf_file, limit, 100)
    path = write_attention(tmp_path / "m.gguf", tokenizer={"tokenizer.ggml.tokens": ["a"] * 101})
    with pytest.raises(ModelLoadError, match=saying):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_count", 1 << 31), ("block_count", 0), ("context_length", (1 << 32) - 1), ("context_length", 0),
     ("embedding_length", 1 << 30)],
)  # fmt: skip
@needs_llamacpp
def test_m02_sizes_that_no_model_has_are_refused_before_llama_cpp_reads_them(
    key: str, value: int, tmp_path: Path
) -> None:
    path = write_attention(tmp_path / "m.gguf")
    (part,) = gguf.GGUFReader(path, "r+").fields[f"llama.{key}"].parts[-1:]
    part[0] = value
    with pytest.raises(ModelLoadError, match=rf"llama\.{key} must be from"):
        open_model(str(path), backend="llamacpp")


# -- a probe in a child process ---------------------------------------------------------------------------------------


def write_fatal(path: Path) -> Path:
    """A file that our reader and llama.cpp's accept, and that ends llama.cpp's process when a token is computed."""
    write_attention(path)
    (part,) = gguf.GGUFReader(path, "r+").fields["llama.attention.layer_norm_rms_epsilon"].parts[-1:]
    part[0] = -1.0
    return path


@needs_llamacpp
def test_m03_a_file_on_which_llama_cpp_aborts_is_a_load_error(tmp_path: Path) -> None:
    path = write_fatal(tmp_path / "m.gguf")
    code = "import sys; from tokenmill.backends.llamacpp.model import load_once; load_once(sys.argv[1])"
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    alone = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, env=environment, check=False)
    assert alone.returncode == -signal.SIGABRT
    with pytest.raises(ModelLoadError, match=r"llama\.cpp aborts on it: .*eps >= 0") as refused:
        open_model(str(path), backend="llamacpp")
    assert "\n" not in str(refused.value)


@needs_llamacpp
def test_m03_a_running_server_survives_a_file_on_which_llama_cpp_aborts(tmp_path: Path) -> None:
    path, config = write_fatal(tmp_path / "m.gguf"), tmp_path / "models.toml"
    config.write_text(f'[[model]]\nname = "bad"\npath = "{path}"\nbackend = "llamacpp"\nat_start = false\n')
    with child(tmp_path / "log", "fake", "--config", str(config), "--engine", "thread") as served:
        body = {"model": "bad", "messages": HI, "max_tokens": 2}
        refused = request(served.port, "POST", "/v1/chat/completions", body, key=None)
        assert refused.status == 503, refused.body
        assert request(served.port, "POST", "/v1/chat/completions", {**body, "model": "fake"}, key=None).status == 200
        assert "llama.cpp aborts on it" in served.said()


# -- M01: safetensors -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals.make(tmp_path_factory.mktemp("originals"))


def with_header(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    change(header)
    packed = json.dumps(header).encode()
    return struct.pack("<Q", len(packed)) + packed + data[8 + length :]


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
CORRUPT = "model.safetensors is corrupt or truncated"
LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "header of no bytes": (lambda d: struct.pack("<Q", 0) + d[8:], CORRUPT),
    "header of 2^63 bytes": (lambda d: struct.pack("<Q", 1 << 63) + d[8:], CORRUPT),
    "header longer than the file": (lambda d: struct.pack("<Q", len(d)) + d[8:], CORRUPT),
    "header that is no JSON": (lambda d: d[:8] + b"[" + d[9:], CORRUPT),
    "half a file": (lambda d: d[: len(d) // 2], CORRUPT),
    "bytes behind the end": (lambda d: d + b"x", CORRUPT),
    "overlapping tensors": (lambda d: with_header(d, lambda h: h[NORM].update(data_offsets=[0, 256])), CORRUPT),
    "a hole": (lambda d: with_header(d, lambda h: h.pop(NORM)), CORRUPT),
    "unknown type": (lambda d: with_header(d, lambda h: h[NORM].update(dtype="F7")), CORRUPT),
    "shape that overflows": (
        lambda d: with_header(d, lambda h: h[EMBED].update(shape=[1 << 62, 1 << 62])),
        CORRUPT,
    ),
    "negative size": (lambda d: with_header(d, lambda h: h[EMBED].update(shape=[-1, 64])), CORRUPT),
    "offsets turned around": (lambda d: with_header(d, lambda h: h[EMBED]["data_offsets"].reverse()), CORRUPT),
    "type of another width": (lambda d: with_header(d, lambda h: h[NORM].update(dtype="F16")), CORRUPT),
    "integers": (lambda d: with_header(d, lambda h: h[NORM].update(dtype="I32")), f"{NORM} "),
}


@pytest.mark.parametrize("case", LIES)
def test_m01_a_safetensors_file_that_lies_is_refused(case: str, originals: Originals, tmp_path: Path) -> None:
    change, saying = LIES[case]
    for name, content in originals.directory.items():
        (tmp_path / name).write_bytes(change(content) if name == "model.safetensors" else content)
    with pytest.raises(ModelLoadError) as refused:
        open_model(str(tmp_path))
    assert saying in str(refused.value)
    assert "\n" not in str(refused.value)


# -- M03: mutated files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seeds", "backends"), [(range(160), ("torch",)), (range(1000, 1012, 2), ("llamacpp",))])
def test_m03_mutated_files_open_or_are_refused(seeds: range, backends: tuple[str, ...], tmp_path: Path) -> None:
    """A part of what `python -m tests.fuzz` does."""
    if backends == ("llamacpp",) and not HAS_LLAMACPP:
        pytest.skip("llama-cpp-python is missing")
    report = fuzz(seeds, tmp_path, backends)
    assert report.failures == []
    assert report.outcomes.total() == len(seeds)
    assert backends != ("torch",) or min(report.outcomes["torch: opened"], report.outcomes["torch: refused"]) > 20
