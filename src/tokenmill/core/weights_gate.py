"""`WeightsGate`: steps compute side by side; a replacement of weights waits for them and has the weights alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokenmill.errors import StaleKV


class WeightsGate:
    """Shared by all backends of a model. Any thread."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with each replacement."""
        self._changed = threading.Condition()
        self._num_computing = 0
        self._num_replacing = 0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Hold the weights still while a step uses them. A waiting replacement goes first."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_replacing)
            self._num_computing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_computing -= 1
                self._changed.notify_all()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Wait for running steps, keep new ones out, and count the version up."""
        with self._changed:
            self._num_replacing += 1
            try:
                self._changed.wait_for(lambda: not self._num_computing)
                yield
                self.version += 1
            finally:
                self._num_replacing -= 1
                self._changed.notify_all()

    def check(self, version: int, *, is_empty: Callable[[], bool]) -> int:
        """The current version, if KV of the given one may go on with it: only an empty memory may change over."""
        if version != self.version and not is_empty():
            raise StaleKV(f"the weights were replaced: KV is of version {version}, they are of {self.version}")
        return self.version
