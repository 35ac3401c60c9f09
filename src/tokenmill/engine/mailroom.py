"""`Mailroom`: one thread owns a zmq socket; everybody else hands it messages. For both ends of an engine process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator

import zmq


class Mailroom:
    """A PAIR socket with an outbox that any thread may fill. `receive` is for the one thread that owns it."""

    def __init__(self, address: str, *, bind: bool) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 1000)
        # Nothing is dropped and nobody blocks: what is in flight is bounded by the requests in flight.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        (self._socket.bind if bind else self._socket.connect)(address)
        self._outbox: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def post(self, message: bytes) -> None:
        """On any thread: send this soon."""
        with self._lock:
            if self._closed:
                return
            self._outbox.append(message)
            with contextlib.suppress(BlockingIOError):  # the pipe is full: it is awake already
                os.write(self._wake_write, b"!")

    def receive(self, timeout_ms: int) -> Iterator[bytes]:
        """Send what was posted, and give what has come, waiting for either.

        What is posted while messages are handled leaves before the next one is given: a reader that can't keep up
        must still be able to say "stop".
        """
        awake = dict(self._poller.poll(timeout_ms))
        if self._wake_read in awake:
            os.read(self._wake_read, 4096)
        self.flush()
        while self._socket.poll(0, zmq.POLLIN):
            yield self._socket.recv()
            self.flush()

    def flush(self) -> None:
        """Send what can be sent: nothing can while the other side is not there."""
        while self._outbox:
            try:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()

    def close(self) -> None:
        """On the owning thread, once. What is posted later goes nowhere."""
        with self._lock:
            self._closed = True
        self.flush()
        self._socket.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)
