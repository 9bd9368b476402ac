"""What the tests of emitted C++ share: its text, a compiler, and the table of kernel functions that a run ends with."""

from collections import defaultdict
from pathlib import Path

import pytest
from emitted_programs import compile_all, compile_store, shared
from executed_leaves import ROWS
from npu_calls import StridedWhere
from npu_programs import store_case

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.program import order_arguments
from haarkv.tq_ops.npu.sim.simulator import unavailable
from lab.npu.aicore.emission import Recorder, emit
from lab.npu.aicore.toolchain import find_toolchain


@pytest.fixture(scope="session")
def cpp_sources(tmp_path_factory, worker_id):
    """The C++ of tiny's programs: program -> path -> text."""
    return shared(tmp_path_factory, worker_id, "emitted-tiny", lambda: compile_all("tiny"))


@pytest.fixture(scope="session")
def emitted_strided_where(tmp_path_factory, worker_id):
    """The C++ of a store program whose `where` takes strided views."""
    return shared(tmp_path_factory, worker_id, "emitted-strided", lambda: compile_store(StridedWhere(2)))


@pytest.fixture(scope="session")
def toolchain(request):
    """The compiler and pto-isa's headers; skips by name where one is not there."""
    folder = request.config.getoption("--pto-isa")
    if folder is None:
        pytest.skip("needs a checkout of pto-isa: make lab-aicore PTO_ISA=FOLDER")
    if reason := unavailable():
        pytest.skip(reason)
    try:
        return find_toolchain(Path(folder), request.config.getoption("--clang"))
    except InputError as error:
        pytest.fail(str(error))  # a folder was named: nothing is skipped in silence


@pytest.fixture(scope="session")
def simulator(toolchain):
    with Recorder() as simulator:
        yield simulator


@pytest.fixture(scope="session")
def store_run(simulator, toolchain):
    """The store program for 16 tokens of two heads: its emission, a machine and what it should write."""
    case = store_case(16)
    emission = emit(simulator, case.program, order_arguments(case.program, case.tensors))
    return emission, emission.machine(toolchain), case.goldens


def pytest_terminal_summary(terminalreporter):
    if not ROWS:
        return
    terminalreporter.section("kernel functions, executed")
    for program, rows in ROWS.items():
        groups = defaultdict(list)
        for row in rows:
            groups[row[:2]].append(row)
        for (scope, kind), members in groups.items():
            ran = [row for row in members if row[3]]
            tasks = sum(row[3] for row in ran)
            counts = f"compiled {len(members):>2}  executed {len(ran):>2}  tasks {tasks:>4}"
            terminalreporter.write_line(f"{program:<8} {scope:<9} {kind}  {counts}  {members[0][4]}")
            for row in members:
                if not row[3]:
                    terminalreporter.write_line(f"         not executed: {row[2]}: this call has no such step")
