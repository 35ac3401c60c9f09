"""Third-party routers in front of several servers: what they ask of a server, and a rolling restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.clients.environments import InstallFailed, python_with
from tests.cluster.database import Database
from tests.cluster.serving import Heard, Node, begin, nodes, resume
from tests.cluster.test_servers import Load, judge, recovers

VLLM_ROUTER, SMG = ("vllm-router", "vllm-router==0.1.16"), ("smg", "smg==1.13.0")
ROUTER_S = 60.0


class Router(Node):
    """A router, which clients talk to as to a server."""

    def __init__(self, port: int) -> None:
        self.port, self.streams = port, []


@contextmanager
def routed(package: tuple[str, str], folder: Path, *arguments: str) -> Iterator[Router]:
    """A router of this package, from when it answers."""
    name, requirement = package
    try:
        python = python_with(f"router-{name}", (requirement,))
    except InstallFailed as error:
        if os.environ.get("TOKENMILL_REQUIRE_POSTGRES"):
            raise
        pytest.skip(f"{requirement} cannot be installed: {error}")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, metrics = one.getsockname()[1], two.getsockname()[1]
    command = [str(python.with_name(name)), *arguments, "--host", "127.0.0.1", "--port", str(port)]
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--prometheus-port", str(metrics)], stdout=file, stderr=file)
    router = Router(port)
    try:
        deadline = time.monotonic() + ROUTER_S
        while not _answers(router):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        yield router
    finally:
        for connection in router.streams:
            connection.close()
        process.kill()
        process.wait()


def _answers(router: Router) -> bool:
    try:
        return router.request("GET", "/v1/models").status == 200
    except OSError:
        return False


def urls(servers: list[Node]) -> list[str]:
    return [f"http://127.0.0.1:{server.port}" for server in servers]


HEALTH = ("--health-check-interval-secs", "1", "--health-check-timeout-secs", "1", "--health-failure-threshold", "1")


def test_a_rolling_restart_behind_vllm_router_fails_no_request(db: Database, tmp_path: Path) -> None:
    """Streams longer than the drain are resumed, on any server."""
    with nodes(db, tmp_path, 2, "--drain", "0.2", "--drain-delay", "4") as servers:
        arguments = (
            "--worker-urls",
            *urls(servers),
            "--policy",
            "round_robin",
            *HEALTH,
            "--health-success-threshold",
            "1",
        )
        whole = Heard()
        begin(servers[0], servers[0].create(seed=3), "a question").read(whole)
        with routed(VLLM_ROUTER, tmp_path, *arguments) as router:
            session, heard, resumed = router.create(seed=3), Heard(), 0
            with Load([router], num_clients=3, num_sessions=30) as load:
                for server in servers:
                    recovers(load)
                    if not heard.token_ids:
                        begin(router, session, "a question").read(heard, 1)
                    server.signal(signal.SIGTERM)
                    assert server.process is not None
                    assert server.process.wait(30) == 0
                    server.start()
                    time.sleep(2)  # the router looks every second who is there
            while heard.finish_reason in (None, "shutdown"):
                resumed += 1
                assert resumed < 5
                resume(servers[0], session, heard)  # the router drops Last-Event-ID
            failed = [text for talk in load.all for text in talk.unsure]
            assert failed == []
            judge(db, load.all)
            assert heard.token_ids == whole.token_ids


def test_vllm_router_keeps_a_session_on_one_server(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as servers:
        arguments = ("--worker-urls", *urls(servers), "--policy", "consistent_hash")
        with routed(VLLM_ROUTER, tmp_path, *arguments) as router:
            for _ in range(4):
                session = router.create()
                for i in range(3):
                    body = {"input": f"q{i}", "max_tokens": 3, "stream": False}
                    path = f"/v1/sessions/{session}/generate"
                    assert router.request("POST", path, body, **{"x-session-id": session}).status == 200
                ((epoch,),) = db.query("SELECT epoch FROM sessions WHERE id = %s", session)
                assert isinstance(epoch, int)
                assert epoch <= 2, "it moved at most once, to where its id belongs"


def test_smg_serves_chats(db: Database, tmp_path: Path) -> None:
    policy = ("--policy", "round_robin")
    with nodes(db, tmp_path) as servers:
        launch = ("launch", "--worker-urls", *urls(servers), *policy)
        with routed(SMG, tmp_path, *launch) as router:
            body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            deadline = time.monotonic() + ROUTER_S
            while (reply := router.request("POST", "/v1/chat/completions", body)).status != 200:
                assert time.monotonic() < deadline, reply.body
                time.sleep(0.2)
            assert reply.json()["usage"]["completion_tokens"] == 4


def test_metrics_have_what_an_inference_gateway_reads(db: Database, tmp_path: Path) -> None:
    """The metrics that the endpoint picker of Kubernetes' inference gateway takes from vLLM."""
    with nodes(db, tmp_path, 1, "--metrics-alias", "vllm") as (server,):
        server.tokens(server.create(), "hi")
        text = server.request("GET", "/metrics").body.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
            (sample,) = families[name].samples
            assert sample.labels == {"model_name": "fake"}
        assert 0 <= families["tokenmill_kv_cache_usage"].samples[0].value <= 1
        (sample,) = families["vllm:cache_config_info"].samples
        assert int(sample.labels["block_size"]) * int(sample.labels["num_gpu_blocks"]) > 0
        loads = server.request("GET", "/v1/loads").json()
        assert loads["loads"][0]["max_total_num_tokens"] > 0
        assert server.request("GET", "/server_info").json()["served_model_name"] == "fake"
