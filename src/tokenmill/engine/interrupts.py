"""Ctrl-C between steps, never inside one: an engine that is interrupted half-way through its books is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """What came in while interrupts were deferred."""

    def __init__(self) -> None:
        self.is_pending = False

    def note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (a signal handler's signature)
        self.is_pending = True


@contextmanager
def deferred_interrupts() -> Iterator[Interrupts]:
    """Inside, Ctrl-C is only noted; it is raised on leaving. The caller looks at `is_pending` where it may stop.

    Only where Ctrl-C would raise: on the main thread, with Python's own handler.
    """
    interrupts = Interrupts()
    raises = threading.current_thread() is threading.main_thread()
    if not raises or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts.is_pending:
        raise KeyboardInterrupt
