"""Levels become centroids by arithmetic on the device: of every byte, and in few instructions."""

import re

import torch
from npu_programs import Levels, LookUp, needs_pypto

from haarkv.tq_ops.npu.reads import HEAD_DIM, READS
from haarkv.tq_ops.npu.sim.simulator import Mode

pytestmark = needs_pypto


def test_every_byte_gives_the_fp16_of_its_two_centroids(simulator):
    codes = torch.arange(256).view(-1, 1).add(torch.arange(64)).remainder(256).to(torch.uint8)
    book = torch.tensor(READS.built_in(HEAD_DIM).centroids)
    expected = book[torch.cat([codes & 15, codes >> 4], 1).long()].half()
    out = torch.full((256, HEAD_DIM), 7.0).half()
    simulator.run(LookUp(256), [codes.view(torch.int8), out], Mode.NUMBERS)
    assert torch.equal(out, expected)
    assert len(out.unique()) == 16


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


def test_nothing_goes_row_by_row(simulator):
    """A select or a comparison of tiles is a dozen instructions a row in the device's headers; arithmetic is one a tile."""
    run = simulator.run(LookUp(128), [torch.zeros(128, 64, dtype=torch.int8), torch.zeros(128, 128).half()], Mode.COMPILE)
    text = "".join(run.sources.values())
    assert "TMul<" in text
    # A cast and 19 operations of arithmetic, a load and a store, each once for the whole tile.
    calls = re.findall(r"^(T[A-Z]\w*).*\);$", text, re.MULTILINE)
    assert len(calls) == 22, calls
    assert not [name for name in ("TWhere", "TCompare", "TGather") if name in text]
