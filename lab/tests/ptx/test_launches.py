"""The Triton kernels' own PTX, executed on the CPU: results against the reference, and every access to memory checked.

Triton's interpreter knows no PTX, no fragments, no shared memory and no width of an address. Here a launch is compiled as a
card would be given it, and `lab/ptx` runs its threads.
"""

from __future__ import annotations

import pytest
from cuda_rows import rows_of
from places import ROOT

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")


def check(capability: int, *groups: str) -> None:
    rows = rows_of(str(ROOT / "lab/ptx/cases.py"), str(capability), *groups)
    assert {row["group"] for row in rows} == set(groups)
    assert [row for row in rows if row["wrong"]] == []


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(("decode",), marks=pytest.mark.long),
        pytest.param(("prefill", "store"), marks=pytest.mark.long),
        pytest.param(("step", "short tail", "short learned", "short blackwell", "short window"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_batches_on_ampere(groups):
    """A context of 32k beside short ones, dead sequences, pages apart, blocks beyond 2**31 bytes; any order of programs."""
    check(80, *groups)


def test_attention_on_hopper():
    """Products of warp groups, whose operands lie in swizzled shared memory; blocks of a file; Gated DeltaNet; experts."""
    check(90, "hopper", "short blocks", "short delta", "short experts")


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "group",
    [
        "decode",
        "prefill",
        "store",
        "tail",
        "window",
        "learned",
        "blackwell",
        "rest",
        "planted",
        "executor",
        "contract",
        "blocks",
        "delta",
        "experts",
    ],
)
def test_at_length(capability, group):
    """`planted`: faults in kernels, each of which must be found."""
    check(capability, group)
