"""llama.cpp's log in Python's: nothing is printed, and what was said of an error is there for the exception about it.

The library has one log for the whole process and calls back from whichever thread is at work.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque

import llama_cpp as llama

log = logging.getLogger(__name__)

DEBUG, INFO, ERROR, CONTINUED = 1, 2, 4, 5
"""ggml's levels."""
LEVELS = {ERROR: logging.INFO}
"""All else is for debugging. What is wrong becomes an exception that quotes it, so no line is more than information
here. ggml's own DEBUG, thousands of lines for each context, is left out."""
KEPT_LINES = 8


class NativeLog:
    """Takes llama.cpp's lines. Any thread."""

    def __init__(self) -> None:
        self._callback = llama.llama_log_callback(self._take)  # C keeps no reference
        self._lock = threading.Lock()
        self._errors: deque[str] = deque(maxlen=KEPT_LINES)
        self._level, self._text = INFO, ""

    def install(self) -> None:
        """Take the log from whoever had it."""
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def forget_errors(self) -> None:
        """What was said until now belongs to earlier calls."""
        with self._lock:
            self._errors.clear()

    def errors(self) -> str:
        """What was said since about something that went wrong, in one line."""
        with self._lock:
            return "; ".join(dict.fromkeys(self._errors))

    def _take(self, level: int, text: bytes, _: object) -> None:
        if level == DEBUG:
            return
        with self._lock:
            if level != CONTINUED:
                self._level, self._text = level, ""
            self._text += text.decode("utf-8", errors="replace")
            if not self._text.endswith("\n"):
                return
            level, line, self._text = self._level, self._text.strip(), ""
            if level == ERROR and line:
                self._errors.append(_without_function(line))
        if line:
            log.log(LEVELS.get(level, logging.DEBUG), "%s", line)


def _without_function(line: str) -> str:
    """Lines begin with the name of the function that writes them."""
    function, colon, rest = line.partition(": ")
    return rest if colon and " " not in function else line
