"""I06, I07, I10, I12, N12: bodies that are no JSON, no text or no prompt: refused at once with nothing run."""

from __future__ import annotations

import base64
import gzip
import json
import pickle
import socket
import time
import zlib
from typing import Any

import pytest

from tests.server.refusals import (
    BODIES,
    CHAT,
    COMPLETIONS,
    DEEP,
    DETOKENIZE,
    EMBEDDINGS,
    LEFT_OUT,
    NO_BODIES,
    PART,
    PROMPTS,
    QUICK_S,
    RESPONSES,
    TOKENIZE,
    both,
    changed,
    check_refusal,
    nothing_runs,
    post,
    refuse,
)
from tests.server.serving import Running, request

# -- I06: text --------------------------------------------------------------------------------------------------------

TEXT_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a message": (CHAT, {"messages": [{"role": "user", "content": "HERE"}]}),
    "a part": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "HERE"}]}]}),
    "a name": (CHAT, {"messages": [{"role": "user", "content": "a", "name": "HERE"}]}),
    "a stop": (CHAT, {"stop": ["HERE"]}),
    "a model": (CHAT, {"model": "HERE"}),
    "a salt": (CHAT, {"cache_salt": "HERE"}),
    "an unknown field": (CHAT, {"HERE": 1}),
    "a prompt": (COMPLETIONS, {"prompt": "HERE"}),
    "one of some prompts": (COMPLETIONS, {"prompt": ["a", "HERE"]}),
    "an input": (RESPONSES, {"input": "HERE"}),
    "instructions": (RESPONSES, {"instructions": "HERE"}),
    "metadata": (RESPONSES, {"metadata": {"a": "HERE"}}),
    "an input of embeddings": (EMBEDDINGS, {"input": "HERE"}),
    "a text": (TOKENIZE, {"prompt": "HERE"}),
}
NO_TEXT = [rb"\ud800", rb"a\udc00b", rb"\udc00\ud800", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xff"]
NO_TEXT += [b"\xf5\x80\x80\x80", b"\x00", b"\x1f", b"\n", rb"\x41", rb"\u12", rb"\U0001f600"]
TEXTS = ["\0", "\ufeff", "\u202e", "\u2028", "\u2029", "\x85", "\x7f", "😀", "e\u0301", "\uffff", "\U0010ffff", "\r\n"]


@pytest.mark.parametrize("what", TEXT_FIELDS)
def test_i06_text_that_is_none(server: Running, what: str) -> None:
    path, change = TEXT_FIELDS[what]
    with nothing_runs(server):
        for wrong in NO_TEXT:
            for body in both(path, changed(path, **change)):
                reply = post(server, path, json.dumps(body).encode().replace(b"HERE", wrong))
                check_refusal(reply, 400, None, wrong)


def test_i06_bodies_in_other_encodings(server: Running) -> None:
    for path, body in BODIES.items():
        with nothing_runs(server):
            for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"):
                content = json.dumps(body).encode(encoding)
                if content != json.dumps(body).encode():
                    check_refusal(post(server, path, content), 400, None, encoding)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_i06_all_other_text_comes_back_as_it_went(server: Running, text: str) -> None:
    prompt = f"a{text}b"
    body = {"model": "fake", "prompt": prompt, "echo": True, "max_tokens": 0}
    assert post(server, COMPLETIONS, body).json()["choices"][0]["text"] == prompt
    events = post(server, COMPLETIONS, {**body, "stream": True}).events()
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == prompt
    ids = post(server, TOKENIZE, {"prompt": prompt}).json()["tokens"]
    assert ids == list(prompt.encode())
    assert post(server, DETOKENIZE, {"tokens": ids}).json() == {"prompt": prompt}
    said = changed(RESPONSES, instructions=prompt, metadata={prompt: prompt})
    answer = post(server, RESPONSES, said).json()
    assert (answer["instructions"], answer["metadata"]) == (prompt, {prompt: prompt})
    last = post(server, RESPONSES, {**said, "stream": True}).events()[-1]["response"]
    assert (last["instructions"], last["metadata"]) == (prompt, {prompt: prompt})
    assert server.chat(messages=[{"role": "user", "content": prompt}], stop=[text], cache_salt=text).status == 200


# -- I07: bodies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_i07_bodies_that_are_none(server: Running, path: str) -> None:
    with nothing_runs(server):
        for content in NO_BODIES:
            check_refusal(post(server, path, content), 400, None, content[:40])
        reply = request(server.port, "POST", path)
        check_refusal(reply, 400, None, "no body at all")


@pytest.mark.parametrize("path", BODIES)
def test_i07_bodies_that_go_deep_in_one_field(server: Running, path: str) -> None:
    content = json.dumps(changed(path, deep="HERE")).encode()
    with nothing_runs(server):
        lists, objects = b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP
        for inside in (lists, objects, b"9" * 5000, b"-" + b"9" * 5000):
            check_refusal(post(server, path, content.replace(b'"HERE"', inside)), 400, None, inside[:20])
        for end in range(1, len(content), 7):  # cut off
            check_refusal(post(server, path, content[:end]), 400, None, content[:end])


def test_21_8_json_beyond_the_parsers_limits_is_not_called_invalid(server: Running) -> None:
    content = json.dumps(changed(CHAT, max_tokens="HERE")).encode()
    for inside, words in (
        (b"9" * 5000, "an integer in the body has more than 4300 digits: see line 1 column "),
        (b"-" + b"9" * 5000, "an integer in the body has more than 4300 digits: see line 1 column "),
        (b"[" * 300 + b"]" * 300, "the body is nested more than 200 levels deep: see line 1 column "),
    ):
        json.loads(content.replace(b'"HERE"', inside), parse_int=str)  # it is JSON
        error = check_refusal(post(server, CHAT, content.replace(b'"HERE"', inside)), 400, None)
        assert error["message"].startswith(words)
    reply = post(server, CHAT, content.replace(b'"HERE"', b"9" * 4300))
    assert reply.error["param"] == "max_tokens"  # the longest integer that is read
    assert post(server, CHAT, b"{").error["message"] == "the body is not valid JSON: see line 1 column 1"


def test_i07_many_keys_and_the_same_twice(server: Running) -> None:
    """Unknown fields are ignored, however many; of a field that is there twice the last one counts."""
    began = time.monotonic()
    assert server.chat(**{f"x{i:x}": 1 for i in range(100_000)}).status == 200
    assert time.monotonic() - began < 2 * QUICK_S
    body = json.dumps(changed(CHAT, n=LEFT_OUT))[:-1]
    assert len(post(server, CHAT, body + ', "n": 1000000, "n": 1}').json()["choices"]) == 1
    with nothing_runs(server):
        check_refusal(post(server, CHAT, body + ', "n": 1, "n": 1000000}'), 400, "n")


OTHER_TYPES = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/html"]
OTHER_TYPES += ["application/octet-stream", "application/xml", "application/x-ndjson", "json", "", "application/jsonx"]


@pytest.mark.parametrize("path", BODIES)
def test_i07_bodies_that_are_said_to_be_something_else(server: Running, path: str) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nfake\r\n--x--\r\n'
    sent = [(kind, json.dumps(BODIES[path]).encode()) for kind in OTHER_TYPES]
    with nothing_runs(server):
        for kind, content in [*sent, (OTHER_TYPES[1], b"model=fake&prompt=hi"), (OTHER_TYPES[2], form)]:
            reply = post(server, path, content, headers={"Content-Type": kind})
            check_refusal(reply, 415 if reply.status == 415 else 400, None, kind)
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/json;charset=UTF-8"):
        assert post(server, path, BODIES[path], headers={"Content-Type": kind}).status == 200


# -- I10, I12, N12: what is not text ----------------------------------------------------------------------------------


def test_i10_nothing_is_fetched(server: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        urls = [
            f"http://{host}/a.png",
            f"https://{host}/a.png",
            f"http://good\\@{host}/",
            f"//{host}/",
            f"ftp://{host}/",
        ]
        urls += ["file:///etc/passwd", "data:image/png;base64,AAAA", f"http://[::ffff:127.0.0.1]:{host[10:]}/"]
        for url in urls:
            parts: list[dict[str, Any]] = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "image_url", "image_url": url},
                {"type": "input_image", "image_url": url},
                {"type": "input_file", "file_url": url},
                {"type": "file", "file": {"file_data": url}},
                {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
                {"type": "video_url", "video_url": {"url": url}},
            ]
            refuse(server, CHAT, *({"messages": [{"role": "user", "content": [PART, part]}]} for part in parts))
            refuse(server, RESPONSES, *({"input": [{"role": "user", "content": [part]}]} for part in parts))
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_i12_no_tensors(server: Running) -> None:
    text = base64.b64encode(bytes(64)).decode()
    for path in (CHAT, COMPLETIONS):
        refuse(server, path, *({"prompt_embeds": value} for value in (text, [text], [[0.5] * 8], {"data": text})))
    refuse(server, COMPLETIONS, {"prompt_embeds": text, "prompt": LEFT_OUT})


def test_i12_nothing_else_for_a_prompt(server: Running) -> None:
    packed = pickle.dumps({"a": 1})
    text = base64.b64encode(packed).decode()
    for path, param in PROMPTS:
        values = [{"b64": text}, {"prompt_embeds": text}, [{"data": text}], [[0.5, 0.5]], [0.5, 0.5]]
        refuse(server, path, *({param: value} for value in values))
    with nothing_runs(server):
        for path in BODIES:
            check_refusal(post(server, path, packed), 400, None, "a pickle")


@pytest.mark.parametrize("path", BODIES)
def test_n12_packed_bodies_are_not_unpacked(server: Running, path: str) -> None:
    content = json.dumps(BODIES[path]).encode()
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed_zeros = b"".join(bomb.compress(b"\0" * (1 << 20)) for _ in range(64)) + bomb.flush()
    codings = [
        ("gzip", gzip.compress(content)),
        ("gzip", packed_zeros),
        ("GZIP", gzip.compress(content)),
        ("deflate", zlib.compress(content)),
        ("br", content),
        ("zstd", content),
        ("gzip, gzip", gzip.compress(gzip.compress(content))),
        ("identity, gzip", gzip.compress(content)),
        ("unknown", content),
    ]
    with nothing_runs(server):
        for coding, packed in codings:
            check_refusal(post(server, path, packed, headers={"Content-Encoding": coding}), 415, None, coding)
    assert post(server, path, content, headers={"Content-Encoding": "identity"}).status == 200
