"""Which replica gets a request: keys, the ring, bounded load. No cluster is needed for it."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.cluster.placement import (
    LOAD_FACTOR,
    MIN_LOAD_BOUND,
    Affinity,
    HashRing,
    ReplicaLoad,
    RoutingKey,
    ScalingTargets,
    has_opening,
    key_of_body,
    key_of_path,
    load_bound,
    rank,
)

NAMES = st.sets(st.text("abcdef0123456789", min_size=4, max_size=8), min_size=1, max_size=12)
KEYS = [f"session-{i}" for i in range(1000)]


def chat(*texts: str, **more: object) -> bytes:
    roles = ["system", *["user", "assistant"] * len(texts)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return json.dumps({**more, "messages": messages}).encode()


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/sessions/ab-_1", "/sessions/ab-_1/generate", "/v1/sessions/ab-_1.x9/stream"])
def test_requests_of_a_session_and_of_its_forks_have_the_key_of_the_root(path: str) -> None:
    assert key_of_path(path) == RoutingKey(Affinity.SESSION, "ab-_1")


@pytest.mark.parametrize(
    "path", ["/v1/sessions", "/v1/sessions/restore", "/v1/files", "/v1/chat/completions", "/metrics", "/"]
)
def test_other_paths_have_none(path: str) -> None:
    assert key_of_path(path) is None


def test_the_turns_of_a_stateless_chat_have_the_key_of_its_opening() -> None:
    first, next_turn = key_of_body(chat("be brief", "hello")), key_of_body(chat("be brief", "hello", "hi", "and now?"))
    assert first == next_turn
    assert first is not None
    assert first.affinity is Affinity.PREFIX
    assert first != key_of_body(chat("be brief", "good morning"))
    assert first != key_of_body(chat("be brief", "hello", model="another"))
    assert first != key_of_body(chat("be brief", "hello"), api_key="another"), "KV is not shared between keys"


def test_a_name_given_by_the_client_comes_first() -> None:
    assert key_of_body(chat("a", "b", prompt_cache_key="mine")) == key_of_body(chat("c", prompt_cache_key="mine"))


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"model": "m"}', b"[" * 100_000, b"\xff"])
def test_a_body_without_a_prompt_has_no_key(body: bytes) -> None:
    assert key_of_body(body) is None


def test_which_requests_have_an_opening() -> None:
    assert has_opening("POST", "/v1/chat/completions")
    assert has_opening("POST", "/api/chat")
    assert not has_opening("GET", "/v1/chat/completions")
    assert not has_opening("POST", "/v1/chat/completions/chatcmpl-1")


@given(st.sampled_from(Affinity), st.text())
def test_a_key_survives_its_header(affinity: Affinity, value: str) -> None:
    key = RoutingKey(affinity, value)
    assert RoutingKey.read(key.header()) == key


def test_a_header_that_a_client_sent_names_a_session() -> None:
    assert RoutingKey.read("abc.fork") == RoutingKey(Affinity.SESSION, "abc")
    assert RoutingKey.read("") is None


# -- the ring ---------------------------------------------------------------------------------------------------------


@given(NAMES, st.text(min_size=1))
def test_a_walk_visits_every_member_once(members: set[str], key: str) -> None:
    walk = list(HashRing(members).walk(key))
    assert len(walk) == len(members)
    assert set(walk) == members


@given(NAMES, st.lists(NAMES, max_size=4), st.text(min_size=1))
def test_the_ring_depends_on_its_members_alone(members: set[str], before: list[set[str]], key: str) -> None:
    ring = HashRing()
    for some in before:
        ring.update(some)
    ring.update(members)
    assert list(ring.walk(key)) == list(HashRing(members).walk(key))


@given(NAMES, st.text(min_size=1))
def test_when_a_member_leaves_only_its_keys_move_and_to_the_next_one(members: set[str], key: str) -> None:
    first, *others = HashRing(members).walk(key)
    assert list(HashRing(set(members) - {first}).walk(key)) == others


def test_a_third_member_takes_about_a_third_of_the_keys() -> None:
    two, three = HashRing({"a", "b"}), HashRing({"a", "b", "c"})
    moved = [key for key in KEYS if two.owner(key) != three.owner(key)]
    assert {three.owner(key) for key in moved} == {"c"}
    assert 0.2 < len(moved) / len(KEYS) < 0.47


def test_keys_are_spread_evenly() -> None:
    counts = Counter(HashRing(map(str, range(10))).owner(key) for key in KEYS)
    assert max(counts.values()) < 1.5 * len(KEYS) / 10


# -- policies ---------------------------------------------------------------------------------------------------------

LOADS = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(0, 50), min_size=1, max_size=9)


@given(LOADS, st.text(min_size=1))
def test_a_session_goes_to_its_owner_whatever_the_load(loads: dict[str, int], key: str) -> None:
    ring = HashRing(loads)
    ranks = rank(RoutingKey(Affinity.SESSION, key), ring, loads)
    assert [names[0] for names in ranks] == list(ring.walk(key))[:3]


@given(LOADS, st.text(min_size=1))
def test_a_prefix_goes_to_the_first_replica_within_the_bound(loads: dict[str, int], key: str) -> None:
    ring = HashRing(loads)
    ((first,), *rest) = rank(RoutingKey(Affinity.PREFIX, key), ring, loads)
    bound = load_bound(loads.values())
    assert loads[first] < bound
    for name in ring.walk(key):
        if name == first:
            break
        assert loads[name] >= bound
    assert {first, *(name for names in rest for name in names)} == set(loads)


@given(st.integers(1, 12), st.integers(0, 300))
def test_one_hot_prefix_loads_no_replica_beyond_the_bound(num_replicas: int, num_requests: int) -> None:
    loads = {str(i): 0 for i in range(num_replicas)}
    ring, key = HashRing(loads), RoutingKey(Affinity.PREFIX, "hot")
    for _ in range(num_requests):
        loads[rank(key, ring, loads)[0][0]] += 1
    mean = num_requests / num_replicas
    assert max(loads.values()) <= max(MIN_LOAD_BOUND, LOAD_FACTOR * mean + 1)


def test_a_prefix_stays_while_its_replica_has_little_to_do() -> None:
    """A request that has just ended may still be counted."""
    ring, key = HashRing("abc"), RoutingKey(Affinity.PREFIX, "opening")
    owner = ring.owner(key.value)
    for count in range(MIN_LOAD_BOUND):
        loads = {name: count if name == owner else 0 for name in "abc"}
        assert rank(key, ring, loads)[0] == [owner]
    assert rank(key, ring, {**loads, str(owner): MIN_LOAD_BOUND})[0] != [owner]


@given(LOADS)
def test_a_request_without_a_key_has_two_replicas_to_choose_from(loads: dict[str, int]) -> None:
    ranks = rank(None, HashRing(loads), loads, chance=random.Random(1))
    assert len(ranks[0]) == min(2, len(loads))
    assert sorted(name for names in ranks for name in names) == sorted(loads)


def test_replicas_that_are_gone_are_left_out() -> None:
    ring = HashRing({"a", "b"})
    assert rank(RoutingKey(Affinity.SESSION, "x"), ring, {"b": 3}) == [["b"]]
    assert rank(None, ring, {}) == []


# -- autoscaling ------------------------------------------------------------------------------------------------------


def test_replicas_follow_the_queue_and_the_kv_memory() -> None:
    targets = ScalingTargets(prefill_queue_s=1.0, kv_usage=0.85)
    idle, busy, full = ReplicaLoad(0, 0), ReplicaLoad(2.5, 0.1), ReplicaLoad(0.1, 0.95)
    assert targets.replicas([idle, idle]) == 1
    assert targets.replicas([busy, idle]) == 3
    assert targets.replicas([full, full]) == 3
    assert targets.replicas([ReplicaLoad(0, 0.85), ReplicaLoad(0, 0.85)]) == 2, "exactly at the target is enough"
