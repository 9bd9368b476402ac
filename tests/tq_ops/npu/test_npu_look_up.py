"""Levels become centroids by arithmetic on the device: of every byte, and in few instructions."""

import re

import pytest
import torch
from npu_programs import Levels, Restored, needs_pypto

from haarkv.codebooks import cubic
from haarkv.tq_ops.formats.columns import unpack_columns
from haarkv.tq_ops.formats.learned import COLUMNS
from haarkv.tq_ops.npu.emitted.text import parse
from haarkv.tq_ops.npu.first_programs import LookUpProgram
from haarkv.tq_ops.npu.learned import Layout, cubic_of
from haarkv.tq_ops.npu.reads import HEAD_DIM, READS
from haarkv.tq_ops.npu.sim.simulator import Mode

pytestmark = needs_pypto


OTHERS = [pytest.param(*case, marks=pytest.mark.npu_long) for case in ((64, 4), (256, 1), (HEAD_DIM, 1))]


@pytest.mark.parametrize(("head_dim", "blocks"), [(HEAD_DIM, 2), *OTHERS])
def test_every_byte_gives_the_fp16_of_its_two_centroids(head_dim, blocks, simulator):
    """At any head_dim those of 128: they differ by a factor, which is in the scale."""
    rows = blocks * 128
    codes = torch.arange(rows).view(-1, 1).mul(3).add(torch.arange(head_dim // 2)).remainder(256).to(torch.uint8)
    book = torch.tensor(READS.built_in(HEAD_DIM).centroids)
    expected = book[torch.cat([codes & 15, codes >> 4], 1).long()].half()
    out = torch.full((rows, head_dim), 7.0).half()
    simulator.run(LookUpProgram(rows, head_dim), [codes.view(torch.int8), out], Mode.NUMBERS)
    assert len(codes.unique()) == 256
    assert torch.equal(out, expected)


def test_numbers_beside_a_boundary_are_on_their_side_of_it(simulator):
    """The next FP32 numbers, both zeros, the least number there is, and numbers whose product is beyond FP32."""
    boundaries = torch.tensor(READS.built_in(HEAD_DIM).boundaries)
    beside = torch.cat([boundaries, *(boundaries.nextafter(torch.tensor(way * torch.inf)) for way in (-1, 1))])
    ends = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 1e30, -1e30, 3e38, -3e38])
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([beside, ends, torch.randn(16 * 128 - len(beside) - len(ends), generator=generator) / 8]).view(16, 128)
    out = torch.full_like(x, -1.0)
    simulator.run(Levels(), [x, out], Mode.NUMBERS)
    assert torch.equal(out, torch.bucketize(x, boundaries, right=True).float())
    assert len(out.unique()) == 16


@pytest.mark.parametrize("blocks", [1, 2])
def test_nothing_goes_row_by_row(blocks, simulator):
    """A select or a comparison of tiles is a dozen instructions a row in the device's headers; arithmetic is one a tile."""
    rows = 128 * blocks
    run = simulator.run(
        LookUpProgram(rows), [torch.zeros(rows, 64, dtype=torch.int8), torch.zeros(rows, 128).half()], Mode.COMPILE
    )
    text = "".join(run.sources.values())
    assert "TMul<" in text
    # A load a block, a store for each half, and each operation once for the whole tile; between them nothing is copied.
    calls = re.findall(r"^(T[A-Z]\w*).*\);$", text, re.MULTILINE)
    assert (calls.count("TLoad"), calls.count("TStore")) == (blocks, 2)
    assert not [name for name in ("TWhere", "TCompare", "TGather") if name in text]
    # Casts of a block, and 29 operations of arithmetic, of half a line a vector.
    assert counted(run) == (29 + blocks, 64 * (29 * blocks + blocks))


# -- Learned keys ------------------------------------------------------------------------------------------------------------
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


# The rest runs with `make test-npu`.
SOME = [bits if bits in (3, 4) else pytest.param(bits, marks=pytest.mark.npu_long) for bits in COLUMNS]


@pytest.mark.parametrize("bits", SOME)
def test_every_byte_of_learned_keys_gives_the_centroids_of_its_levels(simulator, bits):
    """Within 2**-10: three roundings to FP16, where the reference has FP32. Rows between hold anything finite."""
    layout = Layout(COLUMNS[bits])
    # Each byte of a vector runs through all values, the two of a unit by different steps.
    step = torch.arange(layout.nbytes(HEAD_DIM)) % 2 * 36 + 1
    for half in (0, 128):
        codes = ((torch.arange(128).unsqueeze(1) + half) * step + torch.arange(len(step))).to(torch.uint8)
        out = torch.full((layout.width(HEAD_DIM), 128), float("nan")).half()
        simulator.run(Restored(layout), [codes.view(torch.int8), out], Mode.NUMBERS)
        levels = unpack_columns(codes, layout.columns).long().chunk(8, -1)
        expected = torch.cat([cubic.centroids(width)[part] for width, part in zip(layout.widths, levels, strict=True)], -1)
        factor = torch.tensor([cubic_of(width).factor for width in layout.widths]).repeat_interleave(16)
        ours = out.float()[layout.rows(HEAD_DIM)].T * factor
        assert ((ours - expected).abs() <= 2.0**-10 * expected.abs()).all()
        assert out.isfinite().all()


@pytest.mark.parametrize("bits", SOME)
def test_learned_keys_are_restored_by_one_task_without_copies(simulator, bits):
    """One load, a store for each part, and as much arithmetic as was counted; nothing goes row by row or spills."""
    layout = Layout(COLUMNS[bits])
    arguments = [torch.zeros(128, layout.nbytes(HEAD_DIM), dtype=torch.int8), torch.zeros(layout.width(HEAD_DIM), 128).half()]
    run = simulator.run(Restored(layout), arguments, Mode.COMPILE)
    calls = re.findall(r"^(T[A-Z]\w*).*\);$", "".join(run.sources.values()), re.MULTILINE)
    assert set(calls) == {"TLoad", "TCast", "TTrans", "TMulS", "TAddS", "TSubS", "TSub", "TMul", "TStore"} | (
        {"TAdd"} if layout.lower_pieces else set()
    )
    assert (calls.count("TLoad"), calls.count("TStore")) == (1, len(layout.parts(HEAD_DIM)))
    assert counted(run) == COUNTED[bits]
