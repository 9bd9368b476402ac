"""The text of a sequence as its tokens come, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from haarkv.models.text import TextStream
from haarkv.tq_ops.errors import InputError


class GrowingText:
    """Gives out text as soon as it is certain: no half character, and nothing that may turn out to begin a stop string.

    Args:
        stream: the tokenizer's, for this sequence alone.
        stops: the text ends before the first of them to be complete.
    Attributes:
        stopped: a stop string has come.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str] = ()) -> None:
        self._stream, self._stops = stream, stops
        self._text = ""
        self._given = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Take the next token; the text that is certain now and was not before."""
        if self.stopped:
            return ""
        looked_at = max(0, len(self._text) - max(map(len, self._stops), default=0) + 1)
        self._text += self._stream.push(token)
        found = _first(self._text, self._stops, looked_at)
        if found is not None:
            self.stopped, self._text = True, self._text[:found]
        certain = len(self._text) - (0 if self.stopped else self._held_back())
        given, self._given = self._given, max(self._given, certain)
        return self._text[given : self._given]

    def rest(self, whole: str) -> str:
        """What is left of the finished text after what `push` gave out."""
        return whole[self._given :]

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max(
            (
                n
                for stop in self._stops
                for n in range(1, min(len(stop), len(self._text) + 1))
                if self._text.endswith(stop[:n])
            ),
            default=0,
        )


def before_stop(text: str, stops: Sequence[str]) -> str:
    """A text up to the first stop string in it."""
    return text[: _first(text, stops, 0)]


def stop_list(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings as they were asked for, one or several.

    Raises:
        InputError: one of them is empty.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stops):
        raise InputError("a stop text is empty; give at least one character after --stop")
    return stops


def _first(text: str, stops: Sequence[str], begin: int) -> int | None:
    """Where the stop string begins that is complete first, or None; the longest of those that end together."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, begin)) >= 0]
    return min(found)[1] if found else None
