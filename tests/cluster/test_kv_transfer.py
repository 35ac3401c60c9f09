"""A session that moves brings its KV along, from one real server to another; what goes wrong costs time only."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.database import Database
from tests.cluster.serving import Node, nodes
from tokenmill.session.postgres import FETCH_S, KV_PATH, SECRET_HEADER

WORDS = "a conversation that is long enough to be worth moving. " * 8
MODEL = ("--kv-cache-tokens", "65536")


def cached(node: Node, session: str, text: str) -> tuple[int, list[int]]:
    """Of an answer's prompt, and its ids."""
    answer: dict[str, Any] = node.ask(session, text).json()
    assert answer["durable"] is True
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"]), list(answer["token_ids"])


def num_tokens(node: Node, session: str) -> int:
    return int(node.request("GET", f"/v1/sessions/{session}").json()["num_tokens"])


@pytest.mark.req("B1", "B3")
def test_a_session_brings_its_kv_to_the_server_that_takes_it(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path, 2, *MODEL) as (one, two):
        moved, said = one.create(), list[list[int]]()
        for i, node in enumerate((one, two, one, two)):
            held = num_tokens(one, moved)
            num_cached, ids = cached(node, moved, f"{WORDS} {i}")
            assert max(0, held - 1) <= num_cached <= held, "what was computed before is not computed again"
            said.append(ids)
        stays = one.create()
        assert [cached(one, stays, f"{WORDS} {i}")[1] for i in range(4)] == said


def test_kv_of_a_server_that_is_gone_is_computed_anew(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path, 2, *MODEL) as (one, two):
        twin, moved = one.create(), one.create()
        for session in (twin, moved):
            cached(one, session, WORDS)
        expected = cached(one, twin, "and then?")[1]
        one.kill()
        assert cached(two, moved, "and then?") == (0, expected)


def test_a_server_that_hangs_is_not_waited_for(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path, 2, *MODEL) as (one, two):
        session = one.create()
        cached(one, session, WORDS)
        one.signal(signal.SIGSTOP)  # its lease has not ended yet
        began = time.monotonic()
        assert cached(two, session, "and then?")[0] == 0
        assert time.monotonic() - began < FETCH_S + 5
        one.signal(signal.SIGCONT)


def test_kv_is_for_servers_that_have_claimed_the_session(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path, 1, *MODEL, "--api-key", "sk-one") as (one,):
        mine = {"Authorization": "Bearer sk-one"}
        session = one.request("POST", "/v1/sessions", {}, **mine).json()["id"]
        body = {"input": WORDS, "max_tokens": 4, "stream": False}
        assert one.request("POST", f"/v1/sessions/{session}/generate", body, **mine).status == 200
        ((epoch, secret),) = db.query("SELECT epoch, secret FROM sessions JOIN servers ON servers.id = owner")

        def status(claimed: int, name: str = session, **headers: str) -> int:
            return one.request("GET", f"{KV_PATH}?session={name}&epoch={claimed}", **headers).status

        assert status(epoch + 1) == 404, "nothing shows that it is a server"
        assert status(epoch + 1, **mine) == 404
        assert status(epoch + 1, **{SECRET_HEADER: "0" * len(str(secret))}) == 404
        server = {SECRET_HEADER: str(secret)}
        assert status(epoch, **server) == 404, "it has no later claim"
        assert status(epoch + 1, "another", **server) == 404
        assert status(epoch + 1, **server) == 200
        assert status(epoch + 1, **server) == 404, "the session was dropped here"
