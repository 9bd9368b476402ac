"""How few instructions restore packed keys: each operation once for a whole tile, nothing row by row."""

import re

import pytest
import torch
from npu_programs import needs_pypto

from haarkv.tq_ops.formats.learned import COLUMNS
from haarkv.tq_ops.npu.learned import Layout
from haarkv.tq_ops.npu.reads import HEAD_DIM
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator
from lab.npu.text import parse

pytest.importorskip("pypto", reason="PyPTO is not installed")
from look_up_kernel import LookUp, Restored

pytestmark = needs_pypto


@pytest.fixture(scope="module")
def plain():
    with Simulator() as simulator:
        yield simulator


COUNTED = {2: (55, 1280), 3: (49, 1280), 4: (54, 1920), 5: (53, 2272)}
"""Operations of a block of 128 tokens, and their rows of 256 bytes. With `tq4` it is 15.5 and 1,920, of two blocks at once."""


def counted(run):
    """Operations of the vector core, but for loads and stores, and the rows of 256 bytes that their results take."""
    work = [
        operation.operands
        for path, text in run.sources.items() if "aiv" in path
        for operation in parse(path, text).operations if operation.name not in ("TLoad", "TStore")
    ]  # fmt: skip
    # A cast has the rows of its source; the results are all by coordinate.
    rows = [operands[1 if operands[1] and operands[1].dtype == "int8_t" else 0] for operands in work]
    return len(work), sum(min(tile.rows or tile.layout[0], tile.layout[0]) for tile in rows)


@pytest.mark.parametrize("blocks", [1, 2])
def test_nothing_goes_row_by_row(blocks, plain):
    """A select or a comparison of tiles is a dozen instructions a row in the device's headers; arithmetic is one a tile."""
    rows = 128 * blocks
    run = plain.run(LookUp(rows), [torch.zeros(rows, 64, dtype=torch.int8), torch.zeros(rows, 128).half()], Mode.COMPILE)
    text = "".join(run.sources.values())
    assert "TMul<" in text
    # A load a block, a store for each half, and each operation once for the whole tile; between them nothing is copied.
    calls = re.findall(r"^(T[A-Z]\w*).*\);$", text, re.MULTILINE)
    assert (calls.count("TLoad"), calls.count("TStore")) == (blocks, 2)
    assert not [name for name in ("TWhere", "TCompare", "TGather") if name in text]
    # Casts of a block, and 29 operations of arithmetic, of half a line a vector.
    assert counted(run) == (29 + blocks, 64 * (29 * blocks + blocks))


@pytest.mark.parametrize("bits", COLUMNS)
def test_learned_keys_are_restored_by_one_task_without_copies(plain, bits):
    """One load, a store for each part, and as much arithmetic as was counted; nothing goes row by row or spills."""
    layout = Layout(COLUMNS[bits])
    arguments = [torch.zeros(128, layout.nbytes(HEAD_DIM), dtype=torch.int8), torch.zeros(layout.width(HEAD_DIM), 128).half()]
    run = plain.run(Restored(layout), arguments, Mode.COMPILE)
    calls = re.findall(r"^(T[A-Z]\w*).*\);$", "".join(run.sources.values()), re.MULTILINE)
    assert set(calls) == {"TLoad", "TCast", "TTrans", "TMulS", "TAddS", "TSubS", "TSub", "TMul", "TStore"} | (
        {"TAdd"} if layout.lower_pieces else set()
    )
    assert (calls.count("TLoad"), calls.count("TStore")) == (1, len(layout.parts(HEAD_DIM)))
    assert counted(run) == COUNTED[bits]
