"""I11: what clients are told is in our own words; what went wrong inside is for the log."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.conversing import converse
from tests.server.refusals import (
    BODIES,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    GENERATING,
    LEFT_OUT,
    NO_BODIES,
    RESPONSES,
    TOKENIZE,
    both,
    changed,
    check_refusal,
    check_words,
    post,
)
from tests.server.serving import Running
from tokenmill import errors
from tokenmill.backends.fake import FaultKind
from tokenmill.server.api.chat_completions import ChatWriter
from tokenmill.server.api.completions import CompletionWriter
from tokenmill.server.api.responses import ResponseWriter

# -- I11: what is told of what goes wrong inside ----------------------------------------------------------------------

SECRET = "/srv/weights/model.safetensors 0x7f3a5c0012d0 TOKEN=hunter2"
LIBRARY_WORDS = re.compile(
    r"Input should|Field required|should have|Value error|validation error|Extra inputs|after validation|"
    r"EOF while|expected value|trailing|control character|Not Found|Method Not Allowed|Unprocessable|NoneType|<class"
)


def everything_that_is_raised() -> list[Exception]:
    """Errors of Python and of ours that are no answer to a client."""
    kinds: list[type[Exception]] = [RuntimeError, ValueError, KeyError, MemoryError, RecursionError, TimeoutError]
    kinds += [AssertionError, errors.ModelLoadError, errors.ModelNotFound, errors.IllegalTransition, errors.EngineDead]
    kinds += [errors.RequestFailed, errors.BackendError, errors.InvalidBatch, errors.InvalidOperation, errors.StaleKV]
    kinds += [errors.Unsupported, errors.BackendClosed, errors.ForwardFailed, errors.IntegrityError]
    unicode = UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET)
    return [*(kind(SECRET) for kind in kinds), OSError(2, SECRET, "/etc/shadow"), unicode, errors.OutOfKV(5, 3)]


@pytest.mark.parametrize("error", everything_that_is_raised(), ids=lambda error: type(error).__name__)
def test_i11_what_is_raised_inside_stays_inside(
    server: Running, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(server.llm, "chat_ids", fail)
    monkeypatch.setattr(server.llm, "prompt_ids", fail)
    talk = converse(server)
    monkeypatch.setattr("tokenmill.session.session.Session.append", fail)
    bodies = {path: both(path, BODIES[path]) for path in (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)}
    bodies[CHAT] += both(CHAT, {**BODIES[CHAT], "session_id": talk.id})
    bodies[f"{talk.path}/generate"] = [{"input": "hi"}, {"input": "hi", "stream": False}]
    bodies[f"{talk.path}/append"] = [{"input": "hi"}]
    for path, given in bodies.items():
        for body in given:
            caplog.clear()
            reply = post(server, path, body)
            assert reply.status in (500, 503), reply.body
            assert reply.error["type"] == "server_error"
            check_words(reply.error["message"])
            assert not any(word in reply.body.decode() for word in [*SECRET.split(), "shadow", "cells"]), reply.body
            if reply.status == 500:  # who looks for the reason finds it, by the request's name
                assert type(error).__name__ in caplog.text
    monkeypatch.undo()
    assert server.chat().status == 200


@pytest.mark.parametrize("kind", ["FAIL", "FATAL", "LATE_FATAL", "NAN"])
def test_i11_what_a_model_says_when_it_fails_is_for_the_log(server: Running, kind: str) -> None:
    for stream in (True,) if "FATAL" in kind else (False, True):  # an engine is not made anew without end
        server.inject(FaultKind[kind], times=2 if kind.endswith("FAIL") else 1)  # once more when it is tried alone
        reply = server.chat(stream=stream)
        error = reply.error if reply.status != 200 else reply.events()[-1]["error"]
        assert error["type"] == "server_error"
        check_words(error["message"])
        assert "fake backend" not in error["message"]
        assert "ForwardFailed" not in error["message"]
        server.wait_until_idle()
    assert server.chat().status == 200


def test_i11_what_fails_in_a_stream_is_logged(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError(SECRET)

    for writer in (ChatWriter, CompletionWriter, ResponseWriter):
        monkeypatch.setattr(writer, "closing", fail)
    for path in GENERATING:
        caplog.clear()
        reply = post(server, path, changed(path, stream=True))
        assert not any(word in reply.body.decode() for word in SECRET.split())
        last = reply.events()[-1]
        error = last["response"]["error"] if path == RESPONSES else last["error"]
        assert error["message"] == "internal error"
        assert "RuntimeError" in caplog.text


OWN_WORDS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": 5}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": "hi"}),
    (CHAT, {"messages": [5]}),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}),
    (CHAT, {"messages": [{"content": "a"}]}),
    (CHAT, {"n": "3"}),
    (CHAT, {"n": 1.5}),
    (CHAT, {"temperature": "hot"}),
    (CHAT, {"stream": "yes"}),
    (CHAT, {"stop": 5}),
    (CHAT, {"logit_bias": [5]}),
    (CHAT, {"logit_bias": {"5": "a"}}),
    (CHAT, {"priority": -1}),
    (CHAT, {"priority": 101}),
    (CHAT, {"timeout_s": 0}),
    (CHAT, {"cache_salt": ""}),
    (CHAT, {"cache_salt": "x" * 300}),
    (CHAT, {"stream_options": 5}),
    (COMPLETIONS, {"prompt": LEFT_OUT}),
    (COMPLETIONS, {"prompt": 5}),
    (EMBEDDINGS, {"encoding_format": "hex"}),
    (RESPONSES, {"input": LEFT_OUT}),
    (RESPONSES, {"metadata": {"a": 5}}),
    (RESPONSES, {"tools": 5}),
    (TOKENIZE, {"add_special_tokens": 1}),
    (DETOKENIZE, {"tokens": ["a"]}),
]


def test_i11_the_words_for_fields_are_our_own(server: Running) -> None:
    told = []
    for path, change in OWN_WORDS:
        reply = post(server, path, changed(path, **change))
        told.append(check_refusal(reply, 400, next(iter(change)), change)["message"])
    assert [message for message in told if LIBRARY_WORDS.search(message)] == []


def test_i11_the_words_for_bodies_and_paths_are_our_own(server: Running) -> None:
    replies = [post(server, CHAT, content) for content in NO_BODIES]
    replies += [server.get("/nothing"), server.get("/v1/completions"), post(server, "/v1/models", {})]
    told = {reply.error["message"] for reply in replies}
    assert [message for message in told if LIBRARY_WORDS.search(message)] == []
