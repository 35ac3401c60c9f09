"""Where the time of a request went, for whoever made it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.queueing import read
from tests.server.serving import Running, running
from tests.server.telling import CHAT, OTHER_KEY, make_config, make_llm
from tests.server.wire import Wire, chat_body, chat_request, held
from tokenmill.engine.events import Phase
from tokenmill.engine.timeline import Span, Timeline
from tokenmill.errors import ConfigError
from tokenmill.outputs import FinishReason
from tokenmill.server.telemetry.timeline import Spans, open_spans

PHASES = ["queued", "prefill", "decode"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(make_llm(max_num_seqs=2, max_queue=8), make_config()) as one:
        yield one


def timeline(server: Running, name: str, **options: Any) -> dict[str, Any]:
    reply = server.get(f"/v1/requests/{name}/timeline", **options)
    assert reply.status == 200, reply.body
    told = reply.json()
    assert (told["id"], told["object"]) == (name, "request.timeline")
    return dict(told)


def assert_sums_up(generation: dict[str, Any]) -> None:
    """One phase begins where the one before it ends, and together they are all the time there was."""
    phases = generation["phases"]
    assert sum(one["seconds"] for one in phases) == pytest.approx(generation["seconds"], abs=1e-4)
    for one, after in itertools.pairwise(phases):
        assert one["begin"] + one["seconds"] == pytest.approx(after["begin"], abs=1e-4)


def test_kv_that_is_not_looked_for_is_no_news() -> None:
    with running(make_llm(prefix_caching=False), make_config()) as server:
        server.post(CHAT, chat_body("the same"))
        told = timeline(server, server.post(CHAT, chat_body("the same")).json()["id"])
        assert told["generations"][0]["cache"]["cause"] == "not_reused"


@pytest.mark.req("R42")
def test_phases_sum_to_the_wall_time(server: Running) -> None:
    prompt = "a prompt that is long enough to be of use to somebody else " * 2
    server.post(CHAT, chat_body(prompt))
    reply = server.post(CHAT, chat_body(prompt), headers={"x-request-id": "my-own-name"})
    usage = reply.json()["usage"]
    told = timeline(server, reply.json()["id"])
    (generation,) = told["generations"]
    assert [one["phase"] for one in generation["phases"]] == PHASES
    assert generation["phases"][0]["begin"] == 0.0
    assert_sums_up(generation)
    assert generation["finish_reason"] == "length"
    assert generation["prompt_tokens"] == usage["prompt_tokens"]
    assert generation["completion_tokens"] == usage["completion_tokens"]
    assert generation["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    computed = usage["prompt_tokens"] - generation["cached_tokens"] + usage["completion_tokens"]
    assert generation["computed_tokens"] in (computed - 1, computed), "the last token is drawn, at most a step ahead"
    assert 0 < generation["ttft_s"] < generation["seconds"]
    assert (generation["model"], generation["core"], generation["preemptions"]) == ("fake", 0, 0)
    assert timeline(server, "my-own-name")["generations"] == told["generations"]


@pytest.mark.req("R42")
def test_every_generation_of_a_call_has_its_own(server: Running) -> None:
    body = {"model": "fake", "prompt": ["one", "two"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    reply = server.post("/v1/completions", body)
    generations = timeline(server, reply.json()["id"])["generations"]
    assert len(generations) == 4
    assert len({one["id"] for one in generations}) == 4
    for one in generations:
        assert_sums_up(one)
    embedded = server.post("/v1/embeddings", {"model": "fake", "input": "text"}, headers={"x-request-id": "vector"})
    assert embedded.status == 200
    (vector,) = timeline(server, "vector")["generations"]
    assert [one["phase"] for one in vector["phases"]] == ["queued", "prefill"]
    assert vector["completion_tokens"] == 0


@pytest.mark.req("R42")
def test_answers_of_a_session_have_timelines(server: Running) -> None:
    session = server.post("/v1/sessions", {"model": "fake"}).json()["id"]
    names = []
    for turn in ("first", "second"):
        body = {"input": turn, "stream": False, "max_tokens": 4, "ignore_eos": True}
        reply = server.post(f"/v1/sessions/{session}/generate", body, headers={"x-request-id": f"turn-{turn}"})
        assert reply.status == 200, reply.body
        names.append(reply.json()["id"])
        (generation,) = timeline(server, names[-1])["generations"]
        assert_sums_up(generation)
        assert timeline(server, f"turn-{turn}")["generations"] == [generation]
    turns = timeline(server, session)["generations"]
    assert [one["id"].partition("~")[0] for one in turns] == names
    assert turns[1]["cached_tokens"] > 0
    assert server.get(f"/v1/requests/{session}/timeline", key=OTHER_KEY).status == 404


@pytest.mark.req("R42")
def test_a_request_that_runs_has_a_timeline_so_far(server: Running) -> None:
    with held(server, after=3) as hold, Wire(server.port) as client:
        client.send(chat_request(headers="x-request-id: runs\r\n", max_tokens=20))
        hold.wait()
        (generation,) = timeline(server, "runs")["generations"]
        assert generation["finish_reason"] is None
        assert [one["phase"] for one in generation["phases"]] == PHASES
        assert_sums_up(generation)
        hold.release()
        assert read(client).status == 200


@pytest.mark.req("R42")
def test_a_request_that_was_preempted_says_so() -> None:
    """Two that grow until there is no room for both."""
    with running(make_llm(context=160, kv_cache_tokens=224, admission_margin=0), make_config()) as server:
        bodies = [chat_request(letter, max_tokens=120, headers=f"x-request-id: {letter}\r\n") for letter in "ab"]
        clients = [Wire(server.port) for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            client.send(body)
        for client in clients:
            assert read(client).status == 200
            client.socket.close()
        generations = [one for name in "ab" for one in timeline(server, name)["generations"]]
        assert sum(one["preemptions"] for one in generations) > 0
        for one in generations:
            assert_sums_up(one)
            assert ("preempted" in [phase["phase"] for phase in one["phases"]]) == (one["preemptions"] > 0)


@pytest.mark.req("R42")
def test_nobody_sees_the_timeline_of_another_key(server: Running) -> None:
    reply = server.post(CHAT, chat_body(), headers={"x-request-id": "shared-name"})
    for name in (reply.json()["id"], "shared-name"):
        refused = server.get(f"/v1/requests/{name}/timeline", key=OTHER_KEY)
        assert refused.status == 404
        assert refused.error["code"] == "request_not_found"
    server.post(CHAT, chat_body("other"), key=OTHER_KEY, headers={"x-request-id": "shared-name"})
    (theirs,) = timeline(server, "shared-name", key=OTHER_KEY)["generations"]
    (mine,) = timeline(server, "shared-name")["generations"]
    assert mine["id"] != theirs["id"]
    assert server.get("/v1/requests/never-was/timeline").status == 404


# -- spans ------------------------------------------------------------------------------------------------------------

MADE = Timeline(
    "chatcmpl-1/0~async-0/0",
    [Span(Phase.QUEUED, 10.0, 10.5), Span(Phase.PREFILL, 10.5, 11.0), Span(Phase.DECODE, 11.0, 12.0)],
    num_prompt=8,
    num_cached=4,
    num_tokens=12,
    finish_reason=FinishReason.ERROR,
)


@pytest.mark.req("R42")
def test_a_timeline_becomes_a_span_with_a_child_for_each_phase() -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter, provider = memory.InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    spans = Spans(provider)
    spans.note("fake", MADE)
    spans.close()
    *phases, root = exporter.get_finished_spans()
    assert root.name == "tokenmill.request"
    assert root.attributes["gen_ai.response.id"] == "chatcmpl-1"
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    assert not root.status.is_ok
    assert [one.name for one in phases] == ["tokenmill.queued", "tokenmill.prefill", "tokenmill.decode"]
    assert all(one.parent.span_id == root.context.span_id for one in phases)
    seconds = [(one.end_time - one.start_time) / 1e9 for one in (*phases, root)]
    assert seconds == pytest.approx([0.5, 0.5, 1.0, 2.0], abs=1e-3)


def test_spans_without_their_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"tokenmill\[otel\]"):
        open_spans("http://127.0.0.1:4318/v1/traces")
