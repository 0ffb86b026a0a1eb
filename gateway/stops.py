"""Stop strings over a stream of text pieces. Pure.

Owns the search across piece borders. Does not know tokens. Invariants: a stop string is never emitted, not even in
part; what is emitted does not depend on where the pieces were cut; at most ``longest stop - 1`` characters are held
back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Feed pieces, get what is safe to show. The stop that *ends* first wins; of those, the longest."""

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Text that can be shown after this piece; nothing any more once a stop string was met."""
        if self.stopped or not piece:
            return ""
        text = self._held + piece
        cut = self._first_stop(text)
        if cut is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        keep = self._unfinished(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return "" if self.stopped else held

    def _first_stop(self, text: str) -> int | None:
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        return min(found)[1] if found else None

    def _unfinished(self, text: str) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
