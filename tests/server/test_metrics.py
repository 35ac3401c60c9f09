"""What the server counts adds up, whatever becomes of requests; and says nothing that it must not."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts

from tests.server.queueing import read
from tests.server.serving import HI, KEY, Running, child, request, running
from tests.server.telling import CHAT, OTHER_KEY, Scrape, make_config, make_llm
from tests.server.wire import Wire, chat_body, chat_request, held, wait_for_inbox
from tokenmill.backends.fake import FaultKind
from tokenmill.engine.events import VerifiedEvent, WaitingView
from tokenmill.errors import ConfigError
from tokenmill.outputs import FinishReason
from tokenmill.server.app import create_app
from tokenmill.server.config import ServerConfig
from tokenmill.server.middleware import configure_logs
from tokenmill.server.served import Served
from tokenmill.server.telemetry.figures import OTHER, CoreFigures, Endpoints, Outcome, Tally, Traffic
from tokenmill.server.telemetry.hub import Telemetry
from tokenmill.server.telemetry.metrics import Metrics
from tokenmill.server.telemetry.metrics import _engine as engine_metrics

DOCS = Path(__file__).parent.parent.parent / "docs"
OUTCOMES = {one.value for one in Outcome}
ROUTES = create_app(Served(ServerConfig())).routes
ENDPOINTS = Endpoints(context.path for context in iter_route_contexts(ROUTES) if context.path is not None)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(make_llm(), make_config()) as one:
        yield one


class Mix:
    """Requests that end in every way there is, and what they should have been counted as."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self.usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        """Of those that were answered."""

    def run(self) -> None:
        self._answered()
        self._wrong()
        self._left()
        self._too_many()
        self._failed()
        self._server.wait_until_idle()

    def _answered(self) -> None:
        """Three chats, the last one as a stream, and an embedding."""
        for body in (chat_body(), chat_body("something longer"), chat_body(stream=True, **USAGE)):
            reply = self._server.post(CHAT, body)
            assert reply.status == 200
            told = reply.events()[-1] if body.get("stream") else reply.json()
            self._charge(told["usage"])
        reply = self._server.post("/v1/embeddings", {"model": "fake", "input": ["one", "two"]})
        assert reply.status == 200
        self._charge({**reply.json()["usage"], "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}})

    def _charge(self, usage: dict[str, Any]) -> None:
        self.usage["prompt_tokens"] += usage["prompt_tokens"]
        self.usage["completion_tokens"] += usage["completion_tokens"]
        self.usage["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]

    def _wrong(self) -> None:
        assert self._server.post(CHAT, {"model": "fake", "messages": HI, "max_tokens": -1}).status == 400
        assert self._server.post(CHAT, "{", key="wrong").status == 401
        assert self._server.get("/v1/models/no/such/model").status == 404
        assert self._server.get(f"/no/such/{KEY}/path").status == 404

    def _left(self) -> None:
        """Clients that leave: while they wait, and in the middle of a stream."""
        with held(self._server) as hold, Wire(self._server.port) as one:
            one.send(chat_request("leaves", max_tokens=400))
            hold.wait()
            one.leave("RST")
        self._server.wait_until_idle()
        with Wire(self._server.port) as one:
            one.send(chat_request("leaves later", stream=True, max_tokens=4000))
            one.read_text(3)
            one.leave("RST")
        self._server.wait_until_idle()

    def _too_many(self) -> None:
        """Two run, two wait, two are refused."""
        with held(self._server) as hold:
            clients = [Wire(self._server.port) for _ in range(6)]
            clients[0].send(chat_request("client 0"))
            hold.wait()
            for number, client in enumerate(clients[1:], 1):
                client.send(chat_request(f"client {number}"))
                wait_for_inbox(self._server, number)
            hold.release()
            replies = [read(client) for client in clients]
            for client in clients:
                client.socket.close()
        for reply in replies:
            if reply.status == 200:
                self._charge(reply.json()["usage"])
        assert sorted(reply.status for reply in replies) == [200] * 4 + [429] * 2

    def _failed(self) -> None:
        """A step that fails once hurts nobody; logits that are no numbers do, before the answer and within it."""
        self._server.inject(FaultKind.FAIL)
        reply = self._server.post(CHAT, chat_body("fails once"))
        assert reply.status == 200
        self._charge(reply.json()["usage"])
        self._server.inject(FaultKind.NAN)
        assert self._server.post(CHAT, chat_body("fails at once")).status == 500
        self._server.inject(FaultKind.NAN, after=5)
        events = self._server.post(CHAT, chat_body("fails later", stream=True, max_tokens=50)).events()
        assert events[-1]["error"]["code"] == "error"


USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
CHATS = {"finished": 3 + 4 + 1, "rejected": 1 + 1 + 2, "cancelled": 2, "failed": 2}


@pytest.mark.fault("F06")
@pytest.mark.req("R39")
def test_requests_are_counted_once_and_the_numbers_add_up(server: Running) -> None:
    mix = Mix(server)
    mix.run()
    now = Scrape(server)
    for endpoint in {sample.labels["endpoint"] for sample in now.samples if "endpoint" in sample.labels}:
        received = now.sum("tokenmill_http_requests_received_total", endpoint=endpoint)
        ended = now.sum("tokenmill_http_requests_total", endpoint=endpoint)
        assert received == ended + now.sum("tokenmill_http_requests_running", endpoint=endpoint)
    counted = {one.labels["outcome"]: one.value for one in now.all("tokenmill_http_requests_total", endpoint=CHAT)}
    assert counted == CHATS
    assert now.sum("tokenmill_http_requests_running", endpoint="/metrics") == 1, "this one"
    assert now.sum("tokenmill_http_requests_total", endpoint=OTHER, outcome="rejected") == 1
    _check_engine(now, mix.usage)
    _check_histograms(now)
    _check_labels(now)


def _check_engine(now: Scrape, usage: dict[str, int]) -> None:
    """What the engine has counted is what clients were told, and what was done for those that were told nothing."""
    ended = {one.labels["finish_reason"]: one.value for one in now.all("tokenmill_requests_total", model="fake")}
    assert ended == {
        **dict.fromkeys((one.value for one in FinishReason), 0.0),
        "length": CHATS["finished"],
        "stop": 2,  # the embeddings
        "cancelled": CHATS["cancelled"],
        "overload": 2,
        "error": CHATS["failed"],
    }
    assert now.sum("tokenmill_requests_running") == now.sum("tokenmill_requests_waiting") == 0
    assert now.sum("tokenmill_generated_tokens_total") > usage["completion_tokens"] > 0
    assert now.sum("tokenmill_prompt_tokens_total") > usage["prompt_tokens"] > 0
    assert now.sum("tokenmill_cached_prompt_tokens_total") >= usage["cached_tokens"] > 0
    assert now.sum("tokenmill_failed_steps_total") == 1
    assert now.sum("tokenmill_engine_restarts_total") == now.sum("tokenmill_preemptions_total") == 0
    cells = now.sum("tokenmill_kv_cells")
    assert cells == now.sum("tokenmill_kv_cells_used") + now.sum("tokenmill_kv_cells_free")
    assert 0 < now.sum("tokenmill_parked_tokens") <= cells


def _check_histograms(now: Scrape) -> None:
    """Buckets grow, the last one has all, the sum lies between what the buckets allow."""
    histograms = [name for name, kind in now.kinds.items() if kind == "histogram"]
    assert len(histograms) == 17
    for name in histograms:
        series: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        for one in now.all(f"{name}_bucket"):
            rest = tuple(value for label, value in sorted(one.labels.items()) if label != "le")
            series.setdefault(rest, []).append((float(one.labels["le"]), one.value))
        counts, sums = now.all(f"{name}_count"), now.all(f"{name}_sum")
        assert len(counts) == len(sums) == len(series)
        for buckets, count, total in zip(series.values(), counts, sums, strict=True):
            values = [value for _, value in buckets]
            assert values == sorted(values)
            assert values[-1] == count.value
            lows = [0.0, *(bound for bound, _ in buckets[:-1])]
            inside = [high - low for low, high in zip([0.0, *values[:-1]], values, strict=True)]
            assert total.value >= sum(low * number for low, number in zip(lows, inside, strict=True)) - 1e-9
    chats = CHATS["finished"] + CHATS["cancelled"] + CHATS["failed"]
    assert now.sum("tokenmill_request_seconds_count") == chats + 2
    steps = now.sum("tokenmill_step_seconds_count")
    assert now.sum("tokenmill_step_tokens_count") == now.sum("tokenmill_step_sequences_count") == steps > 0
    assert now.sum("tokenmill_step_tokens_sum") == now.sum("tokenmill_computed_tokens_total")
    first = now.sum("tokenmill_time_to_first_token_seconds_count")
    gaps = now.sum("tokenmill_inter_token_seconds_count")
    assert first + gaps == now.sum("tokenmill_generated_tokens_total")


def _check_labels(now: Scrape) -> None:
    known = {"endpoint": ENDPOINTS.labels, "outcome": OUTCOMES, "model": {"fake"}}
    known |= {"key": {"api-key-1", "api-key-2"}, "admitted": {"yes", "no"}, "kind": {"prompt", "cached", "completion"}}
    known["finish_reason"] = {one.value for one in FinishReason}
    for sample in now.samples:
        for label, value in sample.labels.items():
            if label not in ("le", "version"):
                assert value in known[label], f"{sample.name} has {label}={value}"


@pytest.mark.req("R39")
def test_what_runs_and_waits_is_in_the_gauges(server: Running) -> None:
    with held(server) as hold:
        clients = [Wire(server.port) for _ in range(3)]
        clients[0].send(chat_request("a"))
        hold.wait()
        for number, client in enumerate(clients[1:], 1):
            client.send(chat_request("b" * number))
            wait_for_inbox(server, number)
        hold.step()
        hold.step()
        now = Scrape(server)
        assert now.sum("tokenmill_requests_running", model="fake") == 2
        assert now.sum("tokenmill_requests_waiting", model="fake") == 1
        assert now.sum("tokenmill_http_requests_running", endpoint=CHAT) == 3
        hold.release()
        for client in clients:
            assert read(client).status == 200
            client.socket.close()


@pytest.mark.req("R39")
def test_every_metric_is_in_the_docs_and_nothing_else_is(server: Running) -> None:
    told = {name.removesuffix("_total") for name in Scrape(server).kinds}
    for page in ("observability.md", "grafana/tokenmill.json"):
        text = (DOCS / page).read_text()
        named = {re.sub("_(total|bucket|sum|count)$", "", name) for name in re.findall(r"tokenmill_[a-z_]+", text)}
        assert named <= told, f"{page} names what is not there: {named - told}"
    named = set(re.findall(r"`(tokenmill_[a-z_]+)", (DOCS / "observability.md").read_text()))
    assert told == {name.removesuffix("_total") for name in named}


def test_metrics_want_a_key(server: Running) -> None:
    assert server.get("/metrics", key=None).status == 401
    assert server.get("/metrics", key=OTHER_KEY).status == 200


def test_a_model_that_goes_takes_its_gauges_and_leaves_its_counters() -> None:
    with running(make_llm(), make_config()) as server:
        assert server.post(CHAT, chat_body()).status == 200
        telemetry = server.served.telemetry
        assert Scrape(server).sum("tokenmill_generated_tokens_total", model="fake") == 8
        telemetry.detach("fake")
        gone = Scrape(server)
        assert gone.all("tokenmill_requests_running") == []
        assert gone.sum("tokenmill_generated_tokens_total", model="fake") == 8
        telemetry.attach("fake", server.llm)
        assert server.post(CHAT, chat_body()).status == 200
        assert Scrape(server).sum("tokenmill_generated_tokens_total", model="fake") == 16


@pytest.mark.req("R33")
def test_proposals_are_counted_by_proposer_and_position() -> None:
    one, other = CoreFigures(), CoreFigures()
    one.note_other(VerifiedEvent(0.0, ("lookup", "draft"), (0, 1), (3, 2), (1, 2), (1, 2)))
    other.note_other(VerifiedEvent(0.0, ("lookup",), (0,), (1,), (0,), (0,)))
    one.merge(other)
    found = {
        (sample.name, sample.labels["proposer"], sample.labels["position"]): sample.value
        for metric in engine_metrics({"fake": one})
        for sample in metric.samples
        if "proposer" in sample.labels
    }
    proposed, accepted = "tokenmill_proposed_tokens_total", "tokenmill_accepted_tokens_total"
    assert found == {
        (proposed, "lookup", "1"): 2, (proposed, "lookup", "2"): 1, (proposed, "lookup", "3"): 1,
        (proposed, "draft", "1"): 1, (proposed, "draft", "2"): 1,
        (accepted, "lookup", "1"): 1, (accepted, "draft", "1"): 1, (accepted, "draft", "2"): 1,
    }  # fmt: skip
    assert one.num_generated == 3


# -- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.fault("F06")
def test_every_path_has_one_of_few_names(server: Running) -> None:
    document = server.get("/openapi.json").json()
    for path in document["paths"]:
        filled = re.sub(r"\{[^}]+\}", "something", path)
        label = ENDPOINTS[filled]
        assert label != OTHER, f"{path} is in no table of endpoints"
        assert ENDPOINTS[filled.removeprefix("/v1")] == label
    for path in (
        "//",
        "/v1",
        "/v1/chat",
        "/v1/requests/a/b/cancel",
        "/metrics/",
        "/v2/models",
        "/\n",
        "/health/live/x",
    ):
        assert ENDPOINTS[path] == OTHER
    assert ENDPOINTS["/v1/models/a/b"] == "/v1/models/{name}"
    assert ENDPOINTS["/web/js/a.js"] == "/web/{file}"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "finished"), (304, "finished"), (400, "rejected"), (401, "rejected"), (404, "rejected"), (429, "rejected"),
     (499, "cancelled"), (500, "failed"), (503, "rejected"), (504, "failed")],
)  # fmt: skip
def test_a_status_says_how_it_ended(status: int, outcome: str) -> None:
    traffic = Traffic()
    traffic.enter("/v1/models")
    assert traffic.leave("/v1/models", status, None, 0.1).value == outcome
    assert traffic.leave("/v1/models", status, Outcome.FAILED, 0.1) is Outcome.FAILED


def test_a_tally_puts_values_where_they_belong() -> None:
    tally, other = Tally((1.0, 2.0)), Tally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        tally.add(value)
    other.add(2.0, 3)
    tally.merge(other)
    assert tally.cumulative() == [("1.0", 2), ("2.0", 6), ("+Inf", 7)]
    assert (tally.count, tally.total) == (7, 11.5)


def test_servers_share_nothing() -> None:
    one, other = Telemetry(), Telemetry()
    one.traffic.enter("/metrics")
    assert b'endpoint="/metrics"' in Metrics(one).text()
    assert b'endpoint="/metrics"' not in Metrics(other).text()


# -- the request log --------------------------------------------------------------------------------------------------


@contextmanager
def json_logs() -> Iterator[None]:
    """Logs as a server has them; after that, as tests do."""
    loggers = [logging.getLogger(name) for name in ("tokenmill", "uvicorn.error")]
    before = [(one.handlers, one.propagate, one.level) for one in loggers]
    configure_logs("info", "json")
    try:
        yield
    finally:
        for one, (handlers, propagate, level) in zip(loggers, before, strict=True):
            one.handlers, one.propagate = handlers, propagate
            one.setLevel(level)


@pytest.mark.req("R39")
def test_the_log_as_json_has_one_object_a_request(server: Running, capfd: pytest.CaptureFixture[str]) -> None:
    with json_logs():
        reply = server.post(CHAT, chat_body("hello canary"), headers={"x-request-id": "mine"})
        server.inject(FaultKind.NAN, after=3)
        server.post(CHAT, chat_body("fails canary", stream=True, max_tokens=50))
        server.wait_until_idle()
    said = capfd.readouterr().err
    assert "canary" not in said
    lines = [json.loads(line) for line in said.splitlines()]
    finished, failed = [line for line in lines if line["logger"] == "tokenmill.access"]
    usage = reply.json()["usage"]
    assert finished["id"] == "mine"
    assert finished["call_id"] == reply.json()["id"]
    assert (finished["method"], finished["path"], finished["status"]) == ("POST", CHAT, 200)
    assert (finished["outcome"], finished["model"]) == ("finished", "fake")
    assert finished["prompt_tokens"] == usage["prompt_tokens"]
    assert finished["completion_tokens"] == usage["completion_tokens"]
    assert finished["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < finished["ttft_ms"] <= finished["ms"]
    assert re.fullmatch("[0-9a-f]{8}", finished["key"])
    assert (failed["status"], failed["outcome"]) == (200, "failed")


def test_a_log_format_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="supported: text, json"):
        configure_logs("info", "xml")


@pytest.mark.req("R39")
def test_a_server_process_has_metrics(tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake") as served:
        body = {"model": "fake", "messages": HI, "max_tokens": 4}
        assert request(served.port, "POST", CHAT, body, key=None).status == 200
        text = request(served.port, "GET", "/metrics", key=None).body.decode()
        assert 'tokenmill_requests_total{finish_reason="length",model="fake"} 1.0' in text
        assert served.stop() == 0


def test_metrics_of_a_replica_name_it() -> None:
    lines = [line for line in Metrics(Telemetry(), replica="one").text().decode().splitlines() if line[0] != "#"]
    assert lines
    assert all('replica="one"' in line for line in lines)


def test_the_prefill_queue_takes_what_its_tokens_took_so_far() -> None:
    with running(make_llm(), ServerConfig()) as server:
        server.chat(max_tokens=2)
        server.wait_until_idle()
        telemetry = Telemetry()
        telemetry.attach("fake", server.llm)
        (watch,) = telemetry.watches["fake"]
        assert watch.prefill_queue_s() == 0, "nothing waits"
        watch._figures.num_prefill, watch._figures.prefill_s = 100, 0.5
        watch.view._waiting["a"] = WaitingView("a", 40, is_preempted=False)
        assert watch.prefill_queue_s() == pytest.approx(0.2)
        telemetry.detach("fake")
