"""The simulator's worker: crashes, interruptions and leftovers."""

import signal
import threading
from pathlib import Path

import pytest
import torch
from npu_programs import FailingProgram, needs_pypto, store_case

from haarkv.tq_ops.npu.program import order_arguments
from haarkv.tq_ops.npu.sim import simulator as simulators
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator, SimulatorError

pytestmark = needs_pypto


def right(simulator):
    """Whether a program runs and gives its numbers."""
    case = store_case(2)
    simulator.run(case.program, order_arguments(case.program, case.tensors), Mode.NUMBERS)
    return all(torch.equal(case.tensors[name], golden) for name, golden in case.goldens.items())


@pytest.mark.parametrize(
    ("how", "message"), [("raises", "broken: RuntimeError: the compiler's own words"), ("dies", "process died")]
)
def test_what_breaks_is_said_and_the_next_program_runs(how, message):
    with Simulator() as simulator:
        with pytest.raises(SimulatorError, match=message):
            simulator.run(FailingProgram(how), [], Mode.NUMBERS)
        assert right(simulator)


@pytest.fixture
def interruptible():
    """As in a terminal; what a shell starts in the background is told to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_leaves_no_answer_for_the_next():
    with Simulator() as simulator:
        assert right(simulator)
        main = threading.main_thread().ident
        threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            simulator.run(FailingProgram("hangs"), [], Mode.NUMBERS)
        assert right(simulator)


def test_nothing_is_left_behind():
    simulator = Simulator()
    folder = Path(simulator._folder)
    assert right(simulator)
    # Of a call's own tensors nothing stays; what is constant does, once.
    assert not list(folder.glob("*.bin"))
    constant = torch.ones(3)
    assert simulator.constant(constant) is simulator.constant(constant)
    assert len(list(folder.glob("*.bin"))) == 1
    process = simulator._process
    simulator.close()
    assert not folder.exists()
    assert process.poll() is not None


def test_tensors_that_cannot_be_handed_over_are_refused():
    with Simulator() as simulator, pytest.raises(ValueError, match="contiguous"):
        simulator.run(store_case(2).program, [torch.zeros(4, 4).T], Mode.NUMBERS)


def test_without_a_compiler_graphs_are_written_and_nothing_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(simulators, "cache_folder", lambda _: tmp_path)
    monkeypatch.setenv("PATH", "")
    simulators.skip_graph_files()
    assert list(tmp_path.iterdir()) == []
