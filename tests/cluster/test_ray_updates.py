"""Ray Serve when replicas are updated, killed under load, or lose their node. One cluster for all tests."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tests.cluster.database import Database
from tests.cluster.raycluster import RayCluster, ray_cluster, until
from tests.cluster.serving import Heard, begin, resume
from tests.cluster.test_servers import Load, judge, recovers


def test_a6_a_rolling_update_fails_no_request(cluster: RayCluster, store: Database) -> None:
    """Streams that are longer than the drain are resumed."""
    before, wholes, is_over = cluster.replicas().keys(), list[list[int]](), threading.Event()

    def stream() -> None:
        while not is_over.is_set() or not wholes:
            heard, session = Heard(), cluster.proxy.create(seed=3)
            begin(cluster.proxy, session, "a question").read(heard)
            while heard.finish_reason != "length":
                assert heard.finish_reason == "shutdown", "it is told that it was cut off"
                resume(cluster.proxy, session, heard)
            wholes.append(heard.token_ids)

    with ThreadPoolExecutor() as pool, Load([cluster.proxy], num_clients=3, num_sessions=60, seed=40) as load:
        streaming = pool.submit(stream)
        try:
            recovers(load, 60)
            cluster.deploy(2, {"max_queue": 200})
            recovers(load, 60)
        finally:
            is_over.set()
        streaming.result()
    assert not before & cluster.replicas().keys(), "all of them are new"
    assert [text for talk in load.all for text in talk.unsure] == []
    assert all(one == wholes[0] for one in wholes)
    judge(store, load.all)


def test_a7_replicas_are_killed_under_load(cluster: RayCluster, store: Database) -> None:
    with Load([cluster.proxy], num_clients=3, num_sessions=40) as load:
        count = len(cluster.replicas())
        for _ in range(2):
            recovers(load, 60)
            victim, pid = next(iter(cluster.replicas().items()))
            os.kill(pid, signal.SIGKILL)
            until(
                lambda gone=victim: len(cluster.replicas().keys() - {gone}) == count,  # type: ignore[misc]
                "another one takes its place",
            )
        recovers(load, 60)
    judge(store, load.all)


def test_a7_a_node_is_killed(cluster: RayCluster, store: Database) -> None:
    """The one that is not the head: its replicas come up elsewhere."""
    with Load([cluster.proxy], num_clients=3, num_sessions=40, seed=50) as load:
        recovers(load, 60)
        for pid in cluster.processes(directory=cluster.directories[1]):
            os.kill(pid, signal.SIGKILL)
        recovers(load, 60)
        until(lambda: len(cluster.replicas()) == 2, "two replicas on the node that is left", 120)
        recovers(load, 60)
    judge(store, load.all)


def test_a_deployment_for_another_address_is_refused(cluster: RayCluster) -> None:
    said = cluster.try_to_deploy(2, status=2, http={"port": cluster.port + 1})
    assert f"the proxies listen on 127.0.0.1:{cluster.port}" in said
    assert len(cluster.replicas()) == 2


def test_down_ends_all_of_it(cluster: RayCluster) -> None:
    """Whoever is being answered is told before the connection breaks."""
    head, heard = ("--dir", str(cluster.directories[0])), Heard()
    cluster.deploy(1, {"extra": {"step_us": 20_000}})
    stream = begin(cluster.proxy, cluster.proxy.create(), "a question")
    stream.read(heard, 1)
    others = cluster.processes(directory=cluster.directories[1])
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(stream.read, heard)
        cluster.run("down", *head)
        assert rest.result().finish_reason == "shutdown"
    for pid in others:  # the other machine's node stays
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not cluster.processes(), "nothing of it is left")
    assert "no node runs" in cluster.run("status", *head, status=2)


def test_a_replica_without_keys_does_not_start_behind_a_public_proxy(store: Database) -> None:
    """The shell that deploys has one, the node has none."""
    with ray_cluster(store.url, num_nodes=1) as made:
        made.environment["TOKENMILL_API_KEY"] = "sk-operator"
        said = made.try_to_deploy(1, status=3, http={"host": "0.0.0.0"})
        assert "the proxies bind to 0.0.0.0, which requires API keys" in said
