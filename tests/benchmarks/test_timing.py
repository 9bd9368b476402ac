"""The clock: a device's own events, first calls apart, no times from a simulator."""

import json
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from npu_programs import needs_pypto

from haarkv.benchmarks import timing
from haarkv.executors import catalog
from haarkv.executors.reference import ReferenceExecutor
from tq.cli import main


class Device:
    """A device as torch-npu shows it: a queue that runs beside the host, with a clock of its own in milliseconds."""

    def __init__(self):
        self.now, self.current = 0.0, None

    def queue(self, ms):
        self.now += ms

    def event(self, *, enable_timing):
        def record():
            assert self.current is not None, "recorded on whatever device is current"
            event.at = self.now

        event = SimpleNamespace(record=record, synchronize=lambda: event.at, elapsed_time=lambda end: end.at - event.at)
        return event

    @contextmanager
    def device(self, device):
        self.current = device
        yield
        self.current = None

    def module(self):
        return SimpleNamespace(Event=self.event, device=self.device)


NPU = SimpleNamespace(type="npu", index=0)


@pytest.fixture
def npu(monkeypatch):
    """torch-npu, mocked: `torch.npu`."""
    device = Device()
    monkeypatch.setattr(torch, "npu", device.module(), raising=False)
    monkeypatch.setattr(timing, "_REST_S", 0.0)
    return device


def test_the_first_call_on_an_npu_counts_in_no_figure_and_the_others_take_what_its_events_say(npu):
    calls = []
    npu.queue(70.0)  # what ran before

    def run(number):
        calls.append(number)
        npu.queue(60_000.0 if len(calls) == 1 else 2.0)

    result = timing.take_turns({"npu tq4": run}, NPU, repeats=3)["npu tq4"]
    assert (result.ms, result.low, result.high, result.runs) == pytest.approx((2.0, 2.0, 2.0, 3))
    assert len(calls) == 4


def test_variants_take_turns_with_other_numbers_and_only_later_turns_count(monkeypatch):
    events = []
    monkeypatch.setattr(timing.time, "sleep", lambda _: events.append("rest"))
    monkeypatch.setattr(timing, "clock", lambda _: lambda run: (run(), 1e-3 * len(events))[1])
    runs = {"a": events.append, "b": lambda number: events.append(-number)}
    result = timing.take_turns(runs, torch.device("cpu"), repeats=1, counted_runs=2)
    # A turn: rest, a run that is not counted, two that are. Of two turns the first only warms up.
    assert events == ["rest", 0, 1, 2, "rest", 0, -1, -2, "rest", 3, 4, 5, "rest", -3, -4, -5]
    assert result == {"a": timing.Spread(11.5, 11.0, 12.0), "b": timing.Spread(15.5, 15.0, 16.0)}


def test_turns_end_when_they_took_a_minute_together(monkeypatch):
    monkeypatch.setattr(timing, "_REST_S", 0.0)
    runs = {"a": lambda _: 40.0, "b": lambda _: 19.0}  # by a clock of their own
    result = timing.take_turns(runs, torch.device("cpu"), repeats=7)
    assert {name: (t.ms, t.runs) for name, t in result.items()} == {"a": (40_000.0, 2), "b": (19_000.0, 2)}


def test_on_a_gpu_a_turn_is_many_captured_runs_and_what_no_graph_holds_is_left_out(monkeypatch):
    numbers = []

    def capture_graph(run, runs, _device):
        if run is print:
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda _: [run(number) for number in range(runs)]

    monkeypatch.setattr(timing, "capture_graph", capture_graph)
    monkeypatch.setattr(timing, "clock", lambda _: lambda run: (run(), 0.128)[1])
    spreads = timing.take_turns(
        {"a": numbers.append, "b": print}, torch.device("cuda"), repeats=2, counted_runs=5, capture=True
    )
    assert spreads == {"a": timing.Spread(2.0, 2.0, 2.0)}
    assert numbers == 3 * list(range(timing.MOST_COPIES))  # one turn warms up


def test_limits_are_the_best_of_tries_between_turns_and_a_machine_that_moved_is_named(monkeypatch):
    """Three calls that do not count, then copy, FP32 and BF16 a try: the machine is twice as slow before the last turn."""
    seconds = iter([9.0] * 3 + [0.1, 0.02, 0.01] * 3 + [0.2, 0.04, 0.0105])
    monkeypatch.setattr(timing, "clock", lambda _: lambda _run: next(seconds))
    monkeypatch.setattr(timing, "_COPY_BYTES", 4096)
    limits = timing.Limits(torch.device("cpu"))
    for _ in range(4):
        limits.measure()
    machine = limits.machine
    assert (machine.copy_gbps, machine.bf16_gflops) == pytest.approx((2 * 4096 / 0.1 / 1e9, 2 * 1024**3 / 0.01 / 1e9))
    assert machine.slowest["fp32_gflops"] == machine.fp32_gflops / 2
    assert machine.unsteady() == (
        "the machine did not hold still: copy 0.0 to 0.0 GB/s, FP32 54 to 107 GFLOP/s; floors take the best"
    )
    assert replace(machine, slowest={}).unsteady() == ""


def test_limits_are_measured_before_every_variants_turn(monkeypatch):
    monkeypatch.setattr(timing, "_REST_S", 0.0)
    events = []
    runs = {"a": lambda _: events.append("a"), "b": lambda _: events.append("b")}
    timing.take_turns(runs, torch.device("cpu"), repeats=1, before_turn=lambda: events.append("limits"))
    assert events == ["limits", "a", "limits", "b"] * 2


@pytest.mark.long
def test_compilation_is_named_and_counts_in_no_figure(capsys, monkeypatch):
    class Compiling(ReferenceExecutor):
        compiled = MappingProxyType({"decode_layer": 31.0, "head": 4.0})

    entry = replace(catalog.EXECUTORS["reference"], open=lambda model, _: Compiling(model))
    monkeypatch.setitem(catalog.EXECUTORS, "reference", entry)
    monkeypatch.setattr(timing, "_COPY_BYTES", 2**16)
    args = ["--model", "tiny", "--executor", "reference", "--kv", "tq4", "--contexts", "8", "--only", "step"]
    assert main(["bench", "decode", *args, "--repeats", "1"]) == 0
    note = "reference tq4: compiled decode_layer in 31.0 s, head in 4.0 s, counted in no figure"
    assert note in capsys.readouterr().out
    assert main(["bench", "decode", *args, "--repeats", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["compiled"] == {"decode_layer": 31.0, "head": 4.0}
    assert row["ms"] < 31_000


@pytest.mark.npu_long
@needs_pypto[0]
@needs_pypto[1]
def test_a_simulated_device_gives_no_times(capsys, monkeypatch):
    monkeypatch.setattr(timing, "_COPY_BYTES", 2**16)
    args = "--model tiny --executor npu --device sim --kv tq4 --contexts 40 --json"
    assert main(["bench", "decode", *args.split(" ")]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["kind"] for row in rows} == {"attention", "step"}
    assert all("ms" not in row and "first_ms" not in row for row in rows)
    assert all("times mean nothing" in row["note"] for row in rows if row["kind"] != "attention")
