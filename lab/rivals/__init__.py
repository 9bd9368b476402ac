"""Formats of others after their papers and code, whose bytes were compared with no original.

After `register()` their names are known wherever a format is named: `formats.get("kvarn4")`, `KVSpec("q4_0_rot")`.
"""

from __future__ import annotations

from haarkv.tq_ops import formats
from lab.rivals.kvarn import kvarn_pair
from lab.rivals.rotated_q4 import RotatedBlockQ4
from lab.rivals.vllm import EvenValues, NormCorrectedKeys

ROWS = (
    *(kvarn_pair(bits) for bits in (2, 3, 4)),
    (RotatedBlockQ4(whole=True), RotatedBlockQ4(whole=False)),
    (NormCorrectedKeys(), EvenValues()),
)
"""K's and V's format of each. `oscar2` is learned of a model, so `oscar.learn` makes it."""


def register() -> None:
    """Make their names known in this process."""
    formats.BY_NAME.update({pair[0].name: pair for pair in ROWS})
