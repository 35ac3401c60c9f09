"""`tokenmill top`: what a running server's engines are doing, live."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Another screen without a cursor, and back."""
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
TALL = 10_000
"""Where there is no terminal, nothing is cut off below."""


def top(
    url: Annotated[str, typer.Option(help="URL of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="TOKENMILL_API_KEY", help="API key of the server.", show_default="none")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between refreshes.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame as plain text and exit.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Show all servers that share the server's database.")
    ] = False,
) -> None:
    """Show the slots, steps, queue and KV cache of a running server, live. Quit with q or Ctrl-C."""
    from tokenmill.cli.follow import Address, ClusterState, Follower, LiveState, frame, read_once

    address = Address(url, api_key)
    state = LiveState(address.url)
    is_live = sys.stdout.isatty() and not once
    servers = ClusterState(address, is_followed=is_live) if cluster else None
    width, height = _size()

    def read() -> str:
        if servers is None:
            read_once(address, state)
            return "\n".join(frame(state, width, TALL, colour=False))
        servers.look()
        return "\n".join(servers.frame(width, TALL, colour=False))

    if once:
        print(read())
        return
    if not is_live:
        with suppress(KeyboardInterrupt):
            while True:
                print(read(), end="\n\n", flush=True)
                time.sleep(interval)
        return
    if servers is not None:
        servers.start()
    follower = Follower(address, state) if servers is None else servers
    with suppress(KeyboardInterrupt), _screen() as keys:
        while not keys.is_quit(interval):
            width, height = _size()
            colour = not os.environ.get("NO_COLOR")
            if servers is None:
                lines = frame(state, width, height, colour=colour)
            else:
                lines = servers.frame(width, height, colour=colour)[:height]
            sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\r\n" for line in lines[:-1]))
            sys.stdout.write(f"{lines[-1]}{CLEAR_LINE}{CLEAR_REST}")
            sys.stdout.flush()
    follower.stop()


class Keys:
    """What is typed meanwhile."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._waits_s = 0.0
        """The first picture comes at once."""

    def is_quit(self, interval_s: float) -> bool:
        """Wait for the time of the next picture; True as soon as q is pressed."""
        waits_s, self._waits_s = self._waits_s, interval_s
        if self._descriptor is None:
            time.sleep(waits_s)
            return False
        ready, _, _ = select.select([self._descriptor], [], [], waits_s)
        if not ready:
            return False
        typed = os.read(self._descriptor, 64)
        if not typed:  # nobody can type any more
            self._descriptor = None
        return b"q" in typed.lower() or b"\x03" in typed


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size((100, 40))
    return max(size.columns, 20), max(size.lines, 5)


@contextmanager
def _screen() -> Iterator[Keys]:
    """A screen of our own, and keys as they are pressed; as it was before, however this ends."""
    import termios
    import tty

    descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = termios.tcgetattr(descriptor) if descriptor is not None else None
    sys.stdout.write(ENTER)
    try:
        if descriptor is not None:
            tty.setcbreak(descriptor)
        yield Keys(descriptor)
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        if descriptor is not None and before is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
