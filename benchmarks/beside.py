"""The place of what is measured beside ours: other attention, other steps, and others with caches of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from haarkv.models.base import DecoderModel

if TYPE_CHECKING:
    from haarkv.benchmarks.attention import Asked


class Variant(NamedTuple):
    """Another way of computing what a case asks for.

    Attributes:
        run: one call, from its number among the calls; None for the reason in `note`.
        kv_bytes: of one token's K and V in each layer, all heads; of attention alone, in the one layer.
    """

    name: str
    run: Callable[[int], object] | None
    kv_bytes: Sequence[float]
    note: str = ""


class SideError(Exception):
    """A side cannot go on; the message says why."""


class Side:
    """One with a cache of its own: name, bytes of a token's K and V by layer, and whose program it is if not ours."""

    peer = True
    """Whether it is someone else's."""

    def __init__(self, name: str, token_bytes: Sequence[float], about: str = "") -> None:
        self.name, self.token_bytes, self.about = name, token_bytes, about
        self._cache: Any = None

    def open(self, context: int) -> None:
        """Make room for so many tokens; here and below, `SideError` if it cannot."""

    def prompt(self, ids: Sequence[int]) -> float:
        """Forget everything, and compute a prompt; seconds."""
        raise NotImplementedError

    def steps(self, ids: Sequence[int]) -> list[float]:
        """A step for each token; seconds of each."""
        raise NotImplementedError

    def shut(self) -> None:
        """Give that room back."""
        self._cache = None


class Beside:
    """What a run measures beside ours: here nothing. The variants and sides of another class take turns with ours."""

    on_prompts = False
    """Whether its caches can be filled by a prompt alone, so that steps follow one on every side."""

    def attention(self, asked: Asked) -> Iterable[Variant]:
        """Of one layer, in a decode step of a case."""
        return ()

    def steps(self, asked: Asked) -> Iterable[Variant]:
        """Whole decode steps of a case."""
        return ()

    def sides(self, model: DecoderModel) -> Iterable[Side]:
        """For whole prompts and the steps after them."""
        return ()


OURS_ALONE = Beside()
