"""What the tests of NPU programs share."""

import pytest

from haarkv.tq_ops.npu.sim.simulator import Simulator


@pytest.fixture(scope="module")
def simulator():
    with Simulator() as simulator:
        yield simulator
