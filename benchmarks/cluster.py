"""What Ray Serve costs: `python -m benchmarks.cluster --url http://127.0.0.1:8000 --postgres postgresql://...`.

Against a running cluster (docs/guides/cluster.md). Streamed turns of sessions through the proxy and directly to the
same replica, alternately, in one run: time to the first token and time per further token, medians of each. Then
conversations through the proxy: in how many turns the replica had the KV of the turns before.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_FIRST_MS, MAX_TOKEN_MS, MIN_HITS = 8.0, 3.0, 0.95
REPLICA = "x-tokenmill-replica"


class Client:
    """One connection that is kept."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)

    def send(self, method: str, path: str, body: Any) -> http.client.HTTPResponse:
        self._connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        if response.status >= 300:
            raise RuntimeError(f"{path}: {response.status} {response.read()!r}")
        return response

    def json(self, method: str, path: str, body: Any) -> Any:
        return json.loads(self.send(method, path, body).read())


@dataclass(frozen=True)
class Turn:
    first_ms: float
    token_ms: float


def stream(client: Client, session: str, num_tokens: int) -> Turn:
    """A streamed turn, as its client sees it."""
    began = time.perf_counter()
    body = {"input": "and then?", "max_tokens": num_tokens, "ignore_eos": True}
    response = client.send("POST", f"/v1/sessions/{session}/generate", body)
    events = (line for line in response if line.startswith(b"data: {"))
    times = [(time.perf_counter(), len(json.loads(line[6:])["token_ids"])) for line in events]
    (first, count), (last, _) = times[0], times[-1]
    told = sum(number for _, number in times)
    return Turn(1000 * (first - began), 1000 * (last - first) / max(1, told - count))


def overhead(url: str, direct: dict[str, str], rounds: int, num_tokens: int) -> dict[str, float]:
    """Medians of what the proxy adds, over pairs of turns that follow each other."""
    proxy = Client(url)
    session = str(proxy.json("POST", "/v1/sessions", {"temperature": 0})["id"])
    response = proxy.send("POST", f"/v1/sessions/{session}/generate", {"input": "hi", "max_tokens": 2, "stream": False})
    response.read()
    replica = Client(direct[response.headers[REPLICA]])
    found: dict[str, list[Turn]] = {"proxy": [], "direct": []}
    for i in range(rounds):
        pair = (("proxy", proxy), ("direct", replica))
        for name, client in pair if i % 2 else pair[::-1]:
            fork = client.json("POST", f"/v1/sessions/{session}/fork", {})["data"][0]["id"]
            found[name].append(stream(client, fork, num_tokens))
            client.send("DELETE", f"/v1/sessions/{fork}", {}).read()
    result: dict[str, float] = {}
    for figure in ("first_ms", "token_ms"):
        values = {name: [getattr(turn, figure) for turn in turns] for name, turns in found.items()}
        result |= {f"{name}_{figure}": statistics.median(some) for name, some in values.items()}
        added = [one - other for one, other in zip(values["proxy"], values["direct"], strict=True)]
        result[f"added_{figure}"] = statistics.median(added)
    return result


def hit_rate(url: str, num_sessions: int, num_turns: int) -> float:
    """The fraction of later turns that found cached tokens."""
    client = Client(url)
    names = [client.json("POST", "/v1/sessions", {})["id"] for _ in range(num_sessions)]
    hits: list[bool] = []
    for number in range(num_turns):
        for name in names:
            body = {"input": f"question {number}", "max_tokens": 4, "stream": False}
            usage = client.json("POST", f"/v1/sessions/{name}/generate", body)["usage"]
            if number:
                hits.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
    return sum(hits) / len(hits)


def servers(postgres: str) -> dict[str, str]:
    """Where each replica is reached directly."""
    import psycopg

    with psycopg.connect(postgres) as connection:
        rows = connection.execute("SELECT id, address FROM servers WHERE lease_until > now()").fetchall()
    return dict(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="URL of the proxies")
    parser.add_argument("--postgres", required=True, help="the replicas' store")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of streamed turns")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a streamed turn")
    parser.add_argument("--sessions", type=int, default=40, help="conversations for the hit rate")
    parser.add_argument("--turns", type=int, default=5, help="turns of each")
    given = parser.parse_args()
    result = overhead(given.url, servers(given.postgres), given.rounds, given.tokens)
    result["hit_rate"] = hit_rate(given.url, given.sessions, given.turns)
    print(json.dumps({name: round(value, 3) for name, value in result.items()}, indent=2))
    within = result["added_first_ms"] <= MAX_FIRST_MS and result["added_token_ms"] <= MAX_TOKEN_MS
    raise SystemExit(0 if within and result["hit_rate"] >= MIN_HITS else 1)


if __name__ == "__main__":
    main()
