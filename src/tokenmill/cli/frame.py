"""Draws what `tokenmill top` shows: from a state to lines. Knows no terminal but its size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tokenmill.cli.follow import Core, Eviction, LiveState, Tick
from tokenmill.engine.events import CoreSnapshot, SlotView
from tokenmill.server.telemetry.figures import RateView
from tokenmill.server.telemetry.live import by_session

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
