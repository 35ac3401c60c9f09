"""`StopStrings`: ends a text before the first stop string in it, without ever showing a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text in pieces; gives out what can't be the beginning of a stop string.

    The stop string that is complete first ends the text; of several that end at the same character, the longest. So how
    the text is cut into pieces makes no difference.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text, if one did."""

    def push(self, text: str) -> str:
        """The text that may be shown now. Once a stop string is found, nothing more comes."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        ends = [(begin + len(stop), stop) for stop in self._stops if (begin := self._held.find(stop)) >= 0]
        if ends:
            end, self.found = min(ends, key=lambda one: (one[0], -len(one[1])))
            shown = self._held[: end if self._include else end - len(self.found)]
            self._held = ""
            return shown
        keep = self._longest_beginning()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The text is over: what was held is no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _longest_beginning(self) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        for length in range(min(len(self._held), max(map(len, self._stops)) - 1), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
