"""What the tests of NPU programs share."""

import pytest
from emitted_programs import compile_all, compile_store, shared
from planted_programs import StridedWhere

from haarkv.tq_ops.npu.sim.simulator import Simulator


@pytest.fixture(scope="module")
def simulator():
    with Simulator() as simulator:
        yield simulator


@pytest.fixture(scope="session")
def emitted(tmp_path_factory, worker_id):
    """The C++ of tiny's programs: program -> path -> text."""
    return shared(tmp_path_factory, worker_id, "emitted-tiny", lambda: compile_all("tiny"))


@pytest.fixture(scope="session")
def emitted_strided_where(tmp_path_factory, worker_id):
    """The C++ of a store program whose `where` takes strided views."""
    return shared(tmp_path_factory, worker_id, "emitted-strided", lambda: compile_store(StridedWhere(2)))
