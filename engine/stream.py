"""A text that is taken piece by piece while the model writes it: `Session.stream`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from queue import SimpleQueue
from typing import Any

from haarkv.engine.generation import OnPrefill
from haarkv.engine.result import Result


class Stream(Iterator[str]):
    """The pieces of one text, as they become certain; they add up to it.

    The model runs ahead in a thread of its own. Whoever leaves the loop, or calls `close`, stops it within a token, or a chunk
    of the prompt.

    Args:
        generate: `Session.generate` with all but its callbacks.
        on_prefill: as of `Session.generate`.
    Attributes:
        result: text and cost, once the last piece was taken or the stream was closed; None before, and where it was closed
            in the prompt.
    """

    def __init__(self, generate: Callable[..., Result], on_prefill: OnPrefill | None = None) -> None:
        self._results: list[Result] = []  # of the generator's own: one that knew this object would outlive the loop
        self._pieces = _pieces(generate, on_prefill, self._results)

    @property
    def result(self) -> Result | None:
        return self._results[0] if self._results else None

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop the model; `result` has all that it has written, and with `keep` the sequence goes on from there."""
        self._pieces.close()


class _LeftError(Exception):
    """Nobody takes the pieces any more."""


def _pieces(
    generate: Callable[..., Result], on_prefill: OnPrefill | None, results: list[Result]
) -> Generator[str, None, None]:  # fmt: skip
    came: SimpleQueue[Any] = SimpleQueue()
    left = threading.Event()

    def prefilled(done: int, total: int) -> None:
        if left.is_set():
            raise _LeftError
        if on_prefill:
            on_prefill(done, total)

    def work() -> None:
        try:
            came.put(generate(on_prefill=prefilled, on_token=lambda *_: left.is_set(), on_text=lambda _, text: came.put(text)))
        except BaseException as error:  # whoever takes the pieces gets it
            came.put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while isinstance(piece := came.get(), str):
            yield piece
        if isinstance(piece, BaseException):
            raise piece
        results.append(piece)
    finally:
        left.set()
        thread.join()
        while not came.empty():
            if isinstance(piece := came.get(), Result):
                results.append(piece)
