"""The Triton kernels' own PTX, executed on the CPU: results against the reference, and every access to memory checked.

Triton's interpreter knows no PTX, no fragments, no shared memory and no width of an address. Here a launch is compiled as a
card would be given it, and `lab/ptx` runs its threads.
"""

from __future__ import annotations

import pytest
from cuda_rows import script_rows
from places import ROOT

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
LONG = (
    "attention", "tail", "window", "learned", "store", "blocks", "delta", "experts", "executor", "planted", "contract",
)  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "group"),
    [(90, "short"), *(pytest.param(gpu, group, marks=pytest.mark.long) for group in LONG for gpu in (80, 90))],
)
def test_launches(capability, group):
    """A context of 32k beside short ones, dead sequences, blocks beyond 2**31 bytes, any order of programs.

    `planted`: faults in kernels, each of which must be found.
    """
    rows = script_rows(str(ROOT / "lab/tests/support/ptx_cases.py"), str(capability), group)
    assert {row["group"] for row in rows} == {group}
    assert [row for row in rows if row["wrong"]] == []
