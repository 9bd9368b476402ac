"""The simulator's worker: crashes, interruptions and leftovers."""

import signal
import threading
from pathlib import Path

import pytest
import torch
from npu_files import Listing
from npu_programs import Broken, needs_pypto

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.scopes import AttentionProgram
from haarkv.tq_ops.npu.sim import quiet
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator, SimulatorError, pipe_shares

pytestmark = needs_pypto
GOOD = AttentionProgram.tuned("bf16", 2, 1, 128)


def numbers(simulator):
    arguments = GOOD.blank_call(1, 100)
    arguments[3].fill_(1.5)
    simulator.run(GOOD, arguments, Mode.NUMBERS)
    return arguments[-1]


def test_a_compilers_complaint_is_passed_on_and_the_next_program_runs():
    with Simulator() as simulator:
        with pytest.raises(SimulatorError, match="broken: RuntimeError: the compiler's own words"):
            simulator.run(Broken("raises"), [], Mode.NUMBERS)
        assert (numbers(simulator)[:2] == 1.5).all()


def test_a_worker_that_dies_is_an_error_and_the_next_call_starts_another():
    with Simulator() as simulator:
        with pytest.raises(SimulatorError, match="process died"):
            simulator.run(Broken("dies"), [], Mode.NUMBERS)
        assert (numbers(simulator)[:2] == 1.5).all()


@pytest.fixture
def interruptible():
    """As in a terminal; what a shell starts in the background is told to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_leaves_no_answer_for_the_next():
    with Simulator() as simulator:
        numbers(simulator)
        main = threading.main_thread().ident
        threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            simulator.run(Broken("hangs"), [], Mode.NUMBERS)
        assert (numbers(simulator)[:2] == 1.5).all()


def test_nothing_is_left_behind():
    simulator = Simulator()
    folder = Path(simulator._folder)
    numbers(simulator)
    # Of a call's own tensors nothing stays; what is constant does, once.
    assert not list(folder.glob("*.bin"))
    constant = torch.ones(3)
    assert simulator.constant(constant) is simulator.constant(constant)
    assert len(list(folder.glob("*.bin"))) == 1
    process = simulator._process
    simulator.close()
    assert not folder.exists()
    assert process.poll() is not None


def test_a_compilers_complaint_is_something_a_user_can_read():
    assert issubclass(SimulatorError, InputError)


def test_a_graph_is_written_as_json_only_where_it_is_read():
    with Listing() as simulator:
        for mode, written in ((Mode.NUMBERS, False), (Mode.COST, True), (Mode.NUMBERS, False)):
            files = simulator.run(GOOD, GOOD.blank_call(1, 100), mode).sources
            assert files
            assert ("program.json" in files) is written


def test_tensors_that_cannot_be_handed_over_are_refused():
    with Simulator() as simulator, pytest.raises(ValueError, match="contiguous"):
        simulator.run(GOOD, [torch.zeros(4, 4).T], Mode.NUMBERS)


def test_pipe_shares_are_read_off_the_report():
    report = "Average Cube Usage...............................:    325.55    0.11%\nAverage MTE_IN Usage....: 1.0  26.07%\n"
    assert pipe_shares(report) == {"cube": 0.11, "load": 26.07}


def test_without_a_compiler_graphs_are_written_and_nothing_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(quiet, "cache_folder", lambda _: tmp_path)
    monkeypatch.setattr(quiet, "_loaded", [])
    monkeypatch.setenv("PATH", "")
    quiet.load()
    assert quiet._loaded == []
    with quiet.graphs_written(tmp_path, True):
        pass
