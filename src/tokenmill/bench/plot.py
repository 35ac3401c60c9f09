"""A line chart as SVG: enough for a benchmark's picture, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 200, 40, 48
COLOURS = ("#2563eb", "#16a34a", "#dc2626", "#9333ea")
NUM_LINES = 5


def line_chart(
    path: Path, title: str, x: Sequence[float], series: Mapping[str, Sequence[float]], *, x_label: str, y_label: str
) -> None:
    """One line for each series, over the same x; both axes begin where they should: y at zero."""
    most = max((value for values in series.values() for value in values), default=1.0) or 1.0
    low, high = min(x), max(max(x), min(x) + 1e-9)

    def place(one: float, value: float) -> str:
        across = LEFT + (one - low) / (high - low) * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{_up(value, most):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 10}">{escape(x_label)}</text>',
        f'<text x="14" y="{HEIGHT // 2}" transform="rotate(-90 14 {HEIGHT // 2})">{escape(y_label)}</text>',
    ]
    for i in range(NUM_LINES + 1):
        value = most * i / NUM_LINES
        y = _up(value, most)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for one in x:
        at = place(one, 0.0).partition(",")[0]
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{one:g}</text>')
    for number, (name, values) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(place(one, value) for one, value in zip(x, values, strict=True))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 20 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 32}" y="{y + 10}">{escape(name)}</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]))


def _up(value: float, most: float) -> float:
    return HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM)
