"""`ProgressLine`: one line on a terminal that is written over and over while long work goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

FIRST_AFTER_S = 1.0
"""Short work shows nothing."""
EVERY_S = 0.2
WIDTH = 24


class ProgressLine:
    """Shows how far work is: a bar, counts, and what else there is to say. Silent where nobody looks at a terminal."""

    def __init__(
        self,
        what: str,
        total: int,
        *,
        show: bool | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = total
        self._stream = stream or sys.stderr
        self._shows = self._stream.isatty() if show is None else show
        self._clock = clock
        self._began = clock()
        self._next = self._began + FIRST_AFTER_S
        self._written = False

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def update(self, done: int, note: Callable[[float], str] = lambda _: "") -> None:
        """Say how much is done, if it is time to; `note` makes a few words from the seconds since the beginning."""
        now = self._clock()
        if not self._shows or now < self._next:
            return
        self._next = now + EVERY_S
        share = done / self._total if self._total else 1.0
        bar = "#" * int(share * WIDTH)
        line = f"{self._what} |{bar:<{WIDTH}}| {done}/{self._total} {note(now - self._began)}"
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()
        self._written = True

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._written:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
