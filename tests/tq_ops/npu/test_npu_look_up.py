"""Levels become centroids by arithmetic on the device: of every byte, and in few instructions."""

import pytest
import torch
from npu_programs import LookUp, needs_pypto

from haarkv.tq_ops.npu.reads import HEAD_DIM, READS
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator

pytestmark = needs_pypto


@pytest.fixture(scope="module")
def simulator():
    with Simulator() as simulator:
        yield simulator


def test_every_byte_gives_the_fp16_of_its_two_centroids(simulator):
    codes = torch.arange(256).view(-1, 1).add(torch.arange(64)).remainder(256).to(torch.uint8)
    book = torch.tensor(READS.built_in(HEAD_DIM).centroids)
    expected = book[torch.cat([codes & 15, codes >> 4], 1).long()].half()
    out = torch.full((256, HEAD_DIM), 7.0).half()
    simulator.run(LookUp(256), [codes.view(torch.int8), out], Mode.NUMBERS)
    assert torch.equal(out, expected)
    assert len(out.unique()) == 16


def test_nothing_goes_row_by_row(simulator):
    """A select or a comparison of tiles is a dozen instructions a row in the device's headers; arithmetic is one a tile."""
    run = simulator.run(LookUp(128), [torch.zeros(128, 64, dtype=torch.int8), torch.zeros(128, 128).half()], Mode.COMPILE)
    text = "".join(run.sources.values())
    assert "TMul<" in text
    assert not [name for name in ("TWhere", "TCompare", "TGather") if name in text]
