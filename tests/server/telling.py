"""What tests of telemetry share: metrics that are read as Prometheus reads them, and streams of events."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.server.serving import KEY, WAIT_S, Running
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server.config import ServerConfig, hash_key

OTHER_KEY = "sk-other"
CHAT = "/v1/chat/completions"


def make_llm(context: int = 4096, kv_cache_tokens: int = 8192, **engine: Any) -> AsyncLLM:
    model = FakeModel(FakeConfig(vocab_size=258, max_context=context, depth=1))
    config = EngineConfig(**{"max_num_seqs": 2, "max_queue": 2} | engine)
    return AsyncLLM(model, config=config, kv_cache_tokens=kv_cache_tokens)


def make_config(**settings: Any) -> ServerConfig:
    keys = (hash_key(KEY), hash_key(OTHER_KEY))
    return ServerConfig(key_hashes=keys, **{"keep_alive_s": 0.2} | settings)


class Scrape:
    """The metrics of a server at one moment."""

    def __init__(self, server: Running) -> None:
        reply = server.get("/metrics")
        assert reply.status == 200, reply.body
        assert reply.headers["content-type"].startswith("text/plain")
        families = list(text_string_to_metric_families(reply.body.decode()))
        self.kinds = {family.name: family.type for family in families}
        self.samples: list[Sample] = [sample for family in families for sample in family.samples]

    def all(self, name: str, **labels: str) -> list[Sample]:
        return [
            sample
            for sample in self.samples
            if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
        ]

    def sum(self, name: str, **labels: str) -> float:
        return float(sum(sample.value for sample in self.all(name, **labels)))


class Events:
    """A stream of the scheduler's events, read one at a time."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next event: its kind, and what it tells. Comments are left out."""
        kind = ""
        for line in self._answer:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                kind = value
            elif field == "data":
                return kind, json.loads(value)
        raise EOFError("the stream has ended")

    def until_end_of(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        """All events up to the one that ends the count-th request."""
        found, ended = [], 0
        while ended < count:
            found.append(self.next())
            kind, data = found[-1]
            ended += kind == "request" and data["phase"] == "ended"
        return found


@contextmanager
def following(server: Running, key: str = KEY) -> Iterator[Events]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.request("GET", "/v1/scheduler/events", headers={"Authorization": f"Bearer {key}"})
    answer = connection.getresponse()
    assert answer.status == 200
    try:
        yield Events(answer)
    finally:
        connection.close()
