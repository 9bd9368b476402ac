"""What `Session.generate` gives back: texts, and what they cost; and one text that is taken piece by piece as it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from reprlib import Repr
from typing import Any

from haarkv.engine.draft_pace import DraftReport
from haarkv.engine.generation import Completion, OnPrefill, Timing
from haarkv.engine.ranks import RankMemory
from haarkv.engine.sampling import Sampling
from haarkv.tq_ops.kv.stored import StoredSequence
from haarkv.tq_ops.words import counted

_SHOWN = Repr()
_SHOWN.maxstring = 60
"""Characters of a text in a line that shows a result."""


@dataclass(frozen=True)
class KVUsage:
    """What the KV cache of a run cost, on all ranks together.

    Attributes:
        format: the KV plan in words; of a plain one as `--kv` takes it.
        bytes_per_token: what one more token takes: K and V of all layers and heads with their scales; tokens kept in BF16
            are not counted.
        bf16_bytes: what the same slots would take in bf16.
    """

    format: str
    bytes_per_token: float
    bytes: int
    bf16_bytes: int


@dataclass(frozen=True, repr=False)
class Result:
    """Texts and cost of one `Session.generate`.

    Attributes:
        ranks: what each rank holds, on rank 0; elsewhere nothing.
        stored: the sequences as they are stored, prompt and text, if they were to be kept.
    """

    texts: list[str]
    completions: list[Completion]
    timing: Timing
    kv: KVUsage
    sampling: Sampling
    ranks: tuple[RankMemory, ...] = ()
    stored: tuple[StoredSequence, ...] = ()
    drafting: DraftReport | None = None

    def __repr__(self) -> str:
        texts = ", ".join(map(_SHOWN.repr, self.texts[:2])) + ", …" * (len(self.texts) > 2)
        tokens = counted(sum(len(done.token_ids) for done in self.completions), "new token")
        return f"Result([{texts}], {tokens}, {self.kv.format}: {self.kv.bytes:,} bytes of KV cache)"


# -- Text as it comes ----------------------------------------------------------------------------------------------------
class Stream(Iterator[str]):
    """The pieces of one text, as they become certain; they add up to it.

    The model runs ahead in a thread of its own. Leaving the loop, or `close`, stops it within a token, or a chunk
    of the prompt.

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
    """No more pieces will be taken."""


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
        except BaseException as error:  # raised again where the pieces are taken
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
