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
        self.now, self.synchronized, self.current = 0.0, 0, None

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

    def synchronize(self, _):
        self.synchronized += 1

    def module(self):
        return SimpleNamespace(Event=self.event, device=self.device, synchronize=self.synchronize)


NPU = SimpleNamespace(type="npu", index=0)


@pytest.fixture
def npu(monkeypatch):
    """torch-npu, mocked: `torch.npu`, and tensors of that device on the host."""
    device = Device()
    monkeypatch.setattr(torch, "npu", device.module(), raising=False)
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 2**10)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **more: zeros(*size, **more))
    return device


def test_a_call_on_an_npu_takes_what_its_own_events_say(npu):
    npu.queue(70.0)  # what ran before
    assert timing.clock(NPU)(lambda: npu.queue(2.5)) == pytest.approx(2.5e-3)


def test_a_flush_on_an_npu_waits_for_the_device(npu):
    flush = timing.flusher(NPU)
    flush()
    assert npu.synchronized == 1


def test_the_first_call_is_reported_apart_and_counts_in_no_figure(npu):
    calls = []

    def run():
        calls.append(None)
        npu.queue(60_000.0 if len(calls) == 1 else 2.0)

    result = timing.take_turns({"npu tq4": run}, NPU, repeats=3)["npu tq4"]
    assert (result.ms, result.low, result.high) == pytest.approx((2.0, 2.0, 2.0))
    assert len(calls) == 5


def test_on_a_gpu_a_turn_is_many_captured_runs_and_what_no_graph_holds_is_left_out(monkeypatch):
    seen = []

    def captured(run, runs, _device):
        if run is print:
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: [run(number) for number in range(runs)]

    monkeypatch.setattr(timing, "captured", captured)
    monkeypatch.setattr(timing, "clock", lambda _: lambda run: (run(), 0.128)[1])
    result = timing.take_rested_turns({"a": seen.append, "b": print}, torch.device("cuda"), repeats=2)
    assert result == {"a": timing.Spread(2.0, 2.0, 2.0)}
    assert seen == 4 * list(range(timing.MOST_COPIES))  # two turns warm up


def test_the_first_call_is_wall_time(monkeypatch):
    times = iter([0.0, 9.0, 10.0, 11.0, 20.0, 21.0])
    monkeypatch.setattr(timing, "clock", lambda _: lambda run: 1.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(times))
    runs = {"a": lambda: None}
    assert timing.take_turns(runs, torch.device("cpu"), repeats=1, warm_up=2, cold=False)["a"].first_ms == 9000.0


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_every_device_beside_the_host_has_one_path(monkeypatch, name):
    module = SimpleNamespace()
    monkeypatch.setattr(torch, name, module, raising=False)
    assert timing.accelerator(SimpleNamespace(type=name)) is module
    assert timing.accelerator(torch.device("cpu")) is None


@pytest.mark.long
def test_compilation_is_named_and_counts_in_no_figure(capsys, monkeypatch):
    class Compiling(ReferenceExecutor):
        compiled = MappingProxyType({"decode_layer": 31.0, "head": 4.0})

    entry = replace(catalog.ENTRIES["reference"], open=lambda model, _: Compiling(model))
    monkeypatch.setitem(catalog.ENTRIES, "reference", entry)
    monkeypatch.setattr(timing, "_COPY_BYTES", 2**16)
    args = ["--model", "tiny", "--executor", "reference", "--kv", "tq4", "--contexts", "8", "--no-peers", "--only", "layer"]
    assert main(["bench", "decode", *args, "--repeats", "1"]) == 0
    said = "reference tq4: compiled decode_layer in 31.0 s, head in 4.0 s, counted in no figure"
    assert said in capsys.readouterr().out
    assert main(["bench", "decode", *args, "--repeats", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["compiled"] == {"decode_layer": 31.0, "head": 4.0}
    assert row["ms"] < 31_000


@pytest.mark.npu_long
@needs_pypto[0]
@needs_pypto[1]
def test_a_simulated_device_gives_no_times(capsys, monkeypatch):
    monkeypatch.setattr(timing, "_COPY_BYTES", 2**16)
    args = "--model tiny --executor npu --device sim --kv tq4 --contexts 40 --no-peers --json"
    assert main(["bench", "decode", *args.split(" ")]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["kind"] for row in rows} == {"attention", "layer", "step"}
    assert all("ms" not in row and "first_ms" not in row for row in rows)
    assert all("times mean nothing" in row["note"] for row in rows if row["kind"] != "attention")
