"""Ray Serve in front of several replicas: two nodes on one machine, real processes, killed. All tests share it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.cluster.database import Database
from tests.cluster.raycluster import RayCluster, until
from tests.cluster.serving import Heard, Stream, begin, resume
from tests.cluster.test_servers import Load, judge, recovers
from tests.server.serving import Reply

REPLICA = "x-tokenmill-replica"
CONTROLLER, PROXY = "ray::ServeController", "ray::ProxyActor"


def ask(cluster: RayCluster, session: str, text: str) -> tuple[str, int]:
    """The replica that has answered, and how many tokens of the prompt were in its KV."""
    reply = cluster.proxy.ask(session, text)
    assert reply.status == 200, reply.body
    return reply.headers[REPLICA], reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def chat(cluster: RayCluster, *texts: str, **more: Any) -> Reply:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return cluster.proxy.request("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 4, **more})


# -- where requests go ------------------------------------------------------------------------------------------------


def test_a5_turns_and_forks_find_their_kv_and_move_only_to_new_replicas(cluster: RayCluster) -> None:
    sessions = {cluster.proxy.create(): "" for _ in range(40)}
    cached, seen = [], Counter[str]()
    for session in sessions:
        sessions[session], _ = ask(cluster, session, "first")
        for text in ("second", "third", "fourth"):
            replica, num_cached = ask(cluster, session, text)
            assert replica == sessions[session], "a session stays where it is"
            cached.append(num_cached > 0)
        seen[sessions[session]] += 1
    assert sum(cached) >= 0.95 * len(cached)
    assert len(seen) == 2, "both replicas work"
    for session in list(sessions)[:5]:
        (fork,) = cluster.proxy.request("POST", f"/v1/sessions/{session}/fork", {}).json()["data"]
        replica, num_cached = ask(cluster, fork["id"], "of a fork")
        assert replica == sessions[session], "a fork stays with its parent"
        assert num_cached > 0
    cluster.deploy(3)
    now = {session: ask(cluster, session, "after scaling")[0] for session in sessions}
    moved = [session for session in sessions if now[session] != sessions[session]]
    assert {now[session] for session in moved} <= set(now.values()) - seen.keys(), "only to the new replica"
    assert 0 < len(moved) <= (1 / 3 + 0.25) * len(sessions)
    for session in moved:
        assert ask(cluster, session, "and on")[1] > 0


def test_chats_with_the_same_opening_share_a_replica(cluster: RayCluster) -> None:
    texts, replicas = ["tell me of the sea"], set()
    for i in range(4):
        reply = chat(cluster, *texts)
        assert reply.status == 200
        replicas.add(reply.headers[REPLICA])
        if i:
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        texts += [reply.json()["choices"][0]["message"]["content"], f"go on {i}"]
    assert len(replicas) == 1
    others = {chat(cluster, f"opening {i}").headers[REPLICA] for i in range(16)}
    assert len(others) > 1


def test_metrics_name_the_replica(cluster: RayCluster) -> None:
    reply = cluster.proxy.request("GET", "/metrics")
    lines = [line for line in reply.body.decode().splitlines() if not line.startswith("#")]
    assert lines
    assert all(f'replica="{reply.headers[REPLICA]}"' in line for line in lines)


# -- A7: what dies ----------------------------------------------------------------------------------------------------


def test_a7_a_replica_is_killed_in_the_middle_of_an_answer(cluster: RayCluster, store: Database) -> None:
    drawn = {"temperature": 1.0, "seed": 11}
    whole, heard, session = Heard(), Heard(), cluster.proxy.create(**drawn)
    begin(cluster.proxy, cluster.proxy.create(**drawn), "a question").read(whole)
    assert whole.finish_reason == "length"
    before = cluster.replicas()
    stream = begin(cluster.proxy, session, "a question")
    stream.read(heard, 1)
    victim = stream.response.getheader(REPLICA)
    assert victim is not None
    os.kill(before[victim], signal.SIGKILL)
    stream.read(heard)
    assert heard.finish_reason is None, "the connection breaks"
    resume(cluster.proxy, session, heard)
    assert heard.token_ids == whole.token_ids
    assert heard.durable is True
    until(lambda: len(cluster.replicas().keys() - {victim}) == len(before), "a replica takes its place")


def test_a7_the_controller_is_killed(cluster: RayCluster, store: Database) -> None:
    with Load([cluster.proxy], num_clients=3, num_sessions=40, seed=20) as load:
        recovers(load, 60)
        killed = cluster.kill(CONTROLLER)
        until(lambda: any(pid != killed for pid in cluster.processes(CONTROLLER)), "Ray starts another one")
        recovers(load, 60)
    assert [text for talk in load.all for text in talk.unsure] == []
    judge(store, load.all)


def test_a7_a_proxy_is_killed(cluster: RayCluster, store: Database) -> None:
    """There is one on each node. Connections that it had are lost, new ones go to the other."""
    with Load([cluster.proxy], num_clients=3, num_sessions=40, seed=30) as load:
        recovers(load, 60)
        killed = cluster.kill(PROXY)
        recovers(load, 60)
        until(lambda: len(set(cluster.processes(PROXY)) - {killed}) == 2, "Serve starts another one")
        recovers(load, 60)
    unsure = [text for talk in load.all for text in talk.unsure]
    print(f"{len(unsure)} of {load.num_acked + len(unsure)} requests failed")
    assert len(unsure) <= max(3, 0.01 * load.num_acked), "one for each client that was connected"
    judge(store, load.all)


# -- A8: full, and clients that leave ---------------------------------------------------------------------------------


def test_a8_what_is_too_much_is_refused_and_a_client_that_leaves_frees_its_slot(cluster: RayCluster) -> None:
    cluster.deploy(1, {"max_num_seqs": 1, "max_queue": 1})
    question = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, "ignore_eos": True}
    first = Stream(cluster.proxy, "POST", "/v1/chat/completions", {**question, "stream": True})
    first.response.readline()
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda i: chat(cluster, f"question {i}", max_tokens=300, ignore_eos=True), range(16)))
    counts = Counter(reply.status for reply in replies)
    assert set(counts) == {200, 429}, [reply.body for reply in replies]
    for reply in replies:
        if reply.status == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "rate_limit_exceeded"
        else:
            assert reply.json()["usage"]["completion_tokens"] == 300, "nothing is lost"
    stream = Stream(cluster.proxy, "POST", "/v1/chat/completions", {**question, "stream": True})
    stream.response.readline()
    stream.response.close()
    stream.connection.close()
    state = lambda: cluster.proxy.request("GET", "/v1/scheduler").json()["models"][0]["cores"][0]["slots"]  # noqa: E731
    until(lambda: all(slot["state"] == "idle" for slot in state()), "the slot is free")
