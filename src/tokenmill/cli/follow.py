"""What `tokenmill top` shows: a server's live view, read once or followed with reconnects, and its frames as text.

Imported when the command runs: the views are the server's own, fed by its events.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import IO, Any
from urllib.parse import quote, urlsplit

from tokenmill.engine.events import CoreSnapshot, SlotView
from tokenmill.errors import ConfigError, EngineDead
from tokenmill.server.telemetry.figures import RateView
from tokenmill.server.telemetry.live import LiveCore, by_session

MAX_TICKS = 512
MAX_EVICTIONS = 4


@dataclass(frozen=True)
class Tick:
    """A step, as the strip of recent ones shows it."""

    num_decode: int
    num_prefill: int


@dataclass(frozen=True)
class Eviction:
    """KV of a session that was given up for a request."""

    at: float
    session: str
    num_tokens: int
    by: str | None


@dataclass
class Core:
    """One engine core."""

    live: LiveCore
    ticks: deque[Tick] = field(default_factory=lambda: deque(maxlen=MAX_TICKS))
    evictions: deque[Eviction] = field(default_factory=lambda: deque(maxlen=MAX_EVICTIONS))
    """The latest."""
    told_rates: RateView | None = None
    """As the server said; else they follow from its events."""

    @property
    def snapshot(self) -> CoreSnapshot:
        return self.live.view.snapshot()

    def rates(self, now: float) -> RateView:
        return self.live.rates.now(now) if self.told_rates is None else self.told_rates


class LiveState:
    """All cores of a server, and what is wrong with the connection. One thread feeds it, another one draws it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.cores: dict[tuple[str, int], Core] = {}
        self.problem: str | None = None
        self._ahead_s = 0.0
        """The server's clock against ours."""
        self._lock = threading.Lock()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While it is drawn nothing changes."""
        with self._lock:
            yield

    @property
    def now(self) -> float:
        """By the server's clock."""
        return time.monotonic() + self._ahead_s

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """An event of the server's stream."""
        with self._lock:
            if kind == "end":
                self.problem = str(data["reason"])
                return
            name = (data["model"], data["core"])
            if kind == "snapshot":
                self._ahead_s = data["at"] - time.monotonic()
                before = self.cores.get(name)
                self.cores[name] = Core(LiveCore(data))
                if before is not None:
                    self.cores[name].ticks, self.cores[name].evictions = before.ticks, before.evictions
            elif kind == "gone":
                self.cores.pop(name, None)
            elif name in self.cores:
                core = self.cores[name]
                core.live.take(kind, data)
                if kind == "parked" and data["change"] == "evicted" and data["session"] is not None:
                    lost = Eviction(data["at"], data["session"], data["tokens"], data.get("for"))
                    core.evictions.append(lost)
                if kind == "tick":
                    core.ticks.append(Tick(data["decode"], sum(data["tokens"]) - data["decode"]))

    def take_all(self, scheduler: dict[str, Any]) -> None:
        """The answer of /v1/scheduler: all cores at one moment."""
        with self._lock:
            for model in scheduler["models"]:
                for told in model["cores"]:
                    core = Core(LiveCore(told), told_rates=RateView(**told["rates"]))
                    self.cores[model["model"], told["core"]] = core

    def lose(self, problem: str) -> None:
        """The connection is gone: nothing is known any more."""
        with self._lock:
            self.problem = problem
            self.cores.clear()

    def begin(self) -> None:
        """There is a connection."""
        with self._lock:
            self.problem = None
            self.cores.clear()


AGAIN_S = 1.0
"""Between two attempts to reach a server."""
LIST_AGAIN_S = 2.0
"""Between two looks for which servers there are."""
MIN_FRAME = 6
"""Lines of a server."""
BROKEN = (OSError, http.client.HTTPException, KeyError, TypeError, ValueError)
"""Failures of a response that has begun."""
SILENT_S = 60.0
"""A server that sends nothing for so long, not even a comment, is gone."""


class Address:
    """Where a server is, and the key that it wants."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host, self._port = "", None
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"{url!r} is not a server URL such as http://127.0.0.1:8000")
        self._is_secure = parts.scheme == "https"
        self._folder = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.url = f"{parts.scheme}://{parts.netloc}{self._folder}"

    def get(self, path: str) -> http.client.HTTPResponse:
        """An answer that is a success; `EngineDead` where there is none, `ConfigError` where the key is wrong."""
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=SILENT_S)
        try:
            connection.request("GET", self._folder + path, headers=self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                hint = "set SSL_CERT_FILE to the certificate of its authority"
                raise ConfigError(f"{self.url}: {error.verify_message}; {hint}") from None
            raise EngineDead(f"no server at {self.url}: {error}") from None
        if answer.status == 200:
            return answer
        connection.close()
        if answer.status in (401, 403):
            raise ConfigError(f"{self.url} requires an API key: use --api-key or TOKENMILL_API_KEY")
        if answer.status == 404:
            raise ConfigError(f"{self.url} has no {path}: not a tokenmill server, or an older version")
        raise EngineDead(f"{self.url} is not ready (status {answer.status})")


def read_once(address: Address, state: LiveState, query: str = "") -> None:
    """What the server is doing right now."""
    with address.get(f"/v1/scheduler{query}") as answer:
        state.take_all(json.load(answer))


class Follower:
    """A thread that keeps a state up to date."""

    def __init__(self, address: Address, state: LiveState, query: str = "") -> None:
        self._address = address
        self._state = state
        self._query = query
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenmill-follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for the connection: nobody needs it any more."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                with self._address.get(f"/v1/scheduler/events{self._query}") as answer:
                    self._state.begin()
                    self._read(answer)
                problem = self._state.problem or "the server closed the connection"
            except (EngineDead, ConfigError, OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            except (KeyError, TypeError, ValueError) as error:
                problem = f"unexpected response from the server: {type(error).__name__} {error}"
            self._state.lose(f"{problem}; trying again")
            self._is_over.wait(AGAIN_S)

    def _read(self, answer: IO[bytes]) -> None:
        kind = ""
        for line in answer:
            if self._is_over.is_set():
                return
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                kind = value
            elif field == "data":
                data: dict[str, Any] = json.loads(value)
                self._state.take(kind, data)


class ClusterState:
    """All servers of a database, through one of them; each with a follower of its own, unless it is read once."""

    def __init__(self, address: Address, *, is_followed: bool) -> None:
        self._address = address
        self._is_followed = is_followed
        self._followers: dict[str, Follower] = {}
        self.states: dict[str, LiveState] = {}
        """By the server's name. Replaced as a whole: looked at by another thread."""
        self._is_over = threading.Event()

    def look(self) -> None:
        """Which servers are there now. `EngineDead` if none answers."""
        answer = self._address.get("/v1/servers")
        try:
            with answer:
                names = [str(one["id"]) for one in json.load(answer)["data"]]
        except BROKEN as error:
            raise EngineDead(f"{self._address.url}: unexpected response: {type(error).__name__} {error}") from None
        if not names:
            raise ConfigError(f"{self._address.url} shares no database with other servers: use top without --cluster")
        for name in self._followers.keys() - names:
            self._followers.pop(name).stop()
        url = self._address.url
        states = {name: self.states.get(name) or LiveState(f"{url}  {name}") for name in names}
        for name, state in states.items():
            query = f"?server={quote(name, safe='')}"
            if not self._is_followed:
                try:
                    read_once(self._address, state, query)
                except (EngineDead, *BROKEN) as error:  # it has just gone, or is not ready
                    state.lose(str(error))
            elif name not in self._followers:
                self._followers[name] = Follower(self._address, state, query)
        self.states = states

    def start(self) -> None:
        """Keep looking, on a thread."""
        self.look()
        threading.Thread(target=self._keep_looking, name="tokenmill-servers", daemon=True).start()

    def _keep_looking(self) -> None:
        while not self._is_over.wait(LIST_AGAIN_S):
            with suppress(EngineDead, ConfigError):  # each of the followers says so
                self.look()

    def stop(self) -> None:
        """Does not wait for connections."""
        self._is_over.set()
        for follower in list(self._followers.values()):
            follower.stop()

    def frame(self, width: int, height: int, *, colour: bool) -> list[str]:
        """All servers below each other, with an equal share of the height."""
        room = max(MIN_FRAME, height // max(1, len(self.states)))
        return [line for _, state in sorted(self.states.items()) for line in frame(state, width, room, colour=colour)]


BOLD, DIM, RED, GREEN, YELLOW, BLUE, CYAN = "1", "2", "31", "32", "33", "34", "36"
BARS = "▁▂▃▄▅▆▇█"
STATE_COLOURS = {"generating": GREEN, "prefilling": YELLOW, "idle": DIM}
WIDE = 72
"""From here on there is room for all columns."""
BAR_WIDTH = 24
MOST_WAITING, MOST_SESSIONS = 8, 8


@dataclass(frozen=True)
class Piece:
    """Text of one colour."""

    text: str
    colour: str | None = None


Line = list[Piece]


def frame(state: LiveState, width: int, height: int, *, colour: bool) -> list[str]:
    """The whole picture: at most `height` lines of at most `width` characters."""
    with state.locked():
        lines: list[Line] = [[Piece(f"tokenmill top  {state.url}", BOLD)]]
        if state.problem is not None:
            lines.append([Piece(_clean(state.problem), RED)])
        elif not state.cores:
            lines.append([Piece("no model is served yet", DIM)])
        left = max(height - len(lines), 4)
        for (model, number), core in state.cores.items():
            room = left // len(state.cores)
            lines += _core(model, number, core, state.now, width, room, colour=colour)
    if len(lines) > height:
        lines = [*lines[: height - 1], [Piece("...", DIM)]]
    return [_render(line, width, colour=colour) for line in lines]


def _core(model: str, number: int, core: Core, now: float, width: int, room: int, *, colour: bool) -> list[Line]:
    snapshot, rates = core.snapshot, core.rates(now)
    busy = [slot for slot in snapshot.slots if slot.request_id is not None]
    head: list[Line] = [
        [],
        [
            Piece(f"{_clean(model)} core {number}", BOLD),
            Piece(f"  tick {snapshot.tick:,}  running {len(busy)}/{len(snapshot.slots)}  "),
            Piece(f"waiting {len(snapshot.waiting)}", YELLOW if snapshot.waiting else None),
        ],
        [Piece(f"  {_rates(rates)}")],
        _cells(snapshot, width),
    ]
    if core.ticks:
        head.append(_strip(list(core.ticks), width, colour=colour))
    below = [*_waiting(snapshot, width), *_sessions(snapshot, width), *_evictions(core.evictions, now, width)]
    return [*head, *_slots(busy, len(snapshot.slots), width, max(room - len(head) - len(below), 3)), *below]


def _rates(rates: RateView) -> str:
    hits = "-" if rates.hit_rate is None else f"{100 * rates.hit_rate:.0f} %"
    return (
        f"{rates.generated_tokens:,.1f} tok/s  {rates.prefill_tokens:,.0f} prefill tok/s  "
        f"{rates.ticks:,.1f} ticks/s  hit rate {hits}"
    )


def _cells(snapshot: CoreSnapshot, width: int) -> Line:
    """How full KV memory is: in use, parked (which can be given up), free."""
    used = snapshot.num_cells - snapshot.free_cells
    running = min(sum(slot.num_computed for slot in snapshot.slots), used)
    size = min(BAR_WIDTH, max(width - 40, 8))
    in_use, kept = (round(size * part / max(snapshot.num_cells, 1)) for part in (running, used - running))
    return [
        Piece("  KV "),
        Piece("#" * in_use, GREEN),
        Piece("=" * kept, BLUE),
        Piece("." * (size - in_use - kept), DIM),
        Piece(f" {used:,} of {snapshot.num_cells:,} cells, {snapshot.parked_tokens.total:,} tokens parked"),
    ]


def _strip(ticks: Sequence[Tick], width: int, *, colour: bool) -> Line:
    """The latest steps, one character each: how large, and whether they decode, prefill or both."""
    shown = ticks[-max(width - 8, 8) :]
    pieces = [_tick(tick, colour=colour) for tick in shown]
    runs = [(hue, "".join(one.text for one in some)) for hue, some in groupby(pieces, key=lambda one: one.colour)]
    return [Piece("  ticks "), *(Piece(text, hue) for hue, text in runs)]


def _tick(tick: Tick, *, colour: bool) -> Piece:
    kind, hue = (
        ("m", CYAN) if tick.num_decode and tick.num_prefill else ("d", GREEN) if tick.num_decode else ("p", YELLOW)
    )
    if not colour:
        return Piece(kind)
    size = (tick.num_decode + tick.num_prefill).bit_length() - 1  # a bar for each doubling, from 1 to 128 and more
    return Piece(BARS[min(size, len(BARS) - 1)], hue)


def _slots(busy: Sequence[SlotView], num_slots: int, width: int, room: int) -> list[Line]:
    if not busy:
        return [[Piece(f"  all {num_slots} slots are idle", DIM)]]
    lines: list[Line] = [[Piece(_columns(width, "slot", "state", "tokens", "computed", "session", "request"), DIM)]]
    for slot in busy[: max(room - 2, 1)]:
        row = _columns(
            width, slot.row, slot.state, f"{slot.num_tokens:,}", f"{slot.num_computed:,}",
            _clean(slot.owner or "-"), _clean(slot.request_id or "-"),
        )  # fmt: skip
        lines.append([Piece(row, STATE_COLOURS[slot.state])])
    hidden, idle = len(busy) - len(lines) + 1, num_slots - len(busy)
    rest = [f"{hidden} more" if hidden else "", f"{idle} idle" if idle else ""]
    return [*lines, [Piece("  " + ", ".join(one for one in rest if one), DIM)]] if any(rest) else lines


def _columns(width: int, slot: object, state: str, tokens: str, computed: str, session: str, request: str) -> str:
    if width < WIDE:
        return f"  {slot!s:>4} {state:<10} {tokens:>7}  {request}"
    return f"  {slot!s:>4}  {state:<10} {tokens:>8} {computed:>9}  {session:<16.16}  {request}"


def _waiting(snapshot: CoreSnapshot, width: int) -> list[Line]:
    lines: list[Line] = [[Piece("  waiting", DIM)]] if snapshot.waiting else []
    for one in snapshot.waiting[:MOST_WAITING]:
        note = "  preempted" if one.is_preempted else ""
        lines.append([Piece(f"    {one.num_tokens:>8,} tokens  {_short(one.request_id, width - 32)}{note}", YELLOW)])
    return [*lines, *_more(len(snapshot.waiting) - MOST_WAITING)]


def _sessions(snapshot: CoreSnapshot, width: int) -> list[Line]:
    tokens = by_session(snapshot)
    lines: list[Line] = [[Piece("  parked KV by session", DIM)]] if tokens else []
    for session, count in list(tokens.items())[:MOST_SESSIONS]:
        name = "(no session)" if session is None else _short(session, width - 22)
        lines.append([Piece(f"    {count:>8,} tokens  {name}", BLUE)])
    return [*lines, *_more(len(tokens) - MOST_SESSIONS)]


def _evictions(evictions: Iterable[Eviction], now: float, width: int) -> list[Line]:
    """Sessions that will have to compute again what they had, and for whom."""
    lines: list[Line] = []
    for one in evictions:
        to = "" if one.by is None else f" for {_short(one.by, width - 48)}"
        what = f"    {one.num_tokens:>8,} tokens  {_short(one.session, 16)}{to}, {max(0.0, now - one.at):.0f} s ago"
        lines.append([Piece(what, RED)])
    return [[Piece("  evicted KV of sessions", DIM)], *lines] if lines else []


def _more(count: int) -> list[Line]:
    return [[Piece(f"    {count} more", DIM)]] if count > 0 else []


def _short(name: str, most: int) -> str:
    return _clean(name)[: max(most, 8)]


def _clean(text: str) -> str:
    """Nothing that a terminal would take for a command."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _render(line: Iterable[Piece], width: int, *, colour: bool) -> str:
    """Cut to the width, and coloured."""
    made, room = [], width
    for piece in line:
        text = piece.text[:room]
        room -= len(text)
        made.append(f"\x1b[{piece.colour}m{text}\x1b[0m" if colour and piece.colour and text else text)
    return "".join(made)
