"""`auto`: the fastest executor that this machine has and that can run what was asked for; cheap, and honest about the rest."""

import itertools
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from machines import has_only
from small_models import SMALL, resize_config

import tq
from haarkv.executors import catalog
from haarkv.executors.catalog import AUTO, select
from haarkv.models.catalog import read_config
from haarkv.tq_ops import formats
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cuda import available
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.formats.learned import COLUMNS
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.planning.search import at, everywhere, require_candidates

TINY = read_config("tiny")
EVERYTHING = ("cuda", "npu", "cpu", "reference")


@pytest.fixture
def machine(monkeypatch):
    """A machine that has these executors."""
    return partial(has_only, monkeypatch)


def select_executor(kv="tq4", config=TINY, **options):
    spec = kv if isinstance(kv, KVSpec) else KVSpec(kv)
    return select(AUTO, config, [spec.plan(config.num_layers)], **options)


@pytest.mark.parametrize(
    ("hardware", "kv", "options", "name", "why"),
    [
        (EVERYTHING, "tq4", {}, "cuda", ""),
        (("npu", "cpu", "reference"), "tq4", {}, "npu", ""),
        (("cpu", "reference"), "tq4", {}, "cpu", ""),
        (("reference",), "tq4", {}, "reference", ""),
        (EVERYTHING, "tbq4_0", {}, "cpu", "cuda cannot run this: .*tbq4_0"),
        (("cpu", "reference"), "bf16", {}, "cpu", ""),
        (("cpu", "reference"), "kivi2", {}, "cpu", ""),
        # The fastest of those that were passed over is the one that is missed.
        (("npu", "cpu", "reference"), "q8_0", {}, "cpu", "npu cannot run this: .*q8_0"),
        (("npu", "cpu", "reference"), "bf16", {}, "npu", ""),
        (("cpu", "reference"), KVSpec("tq4", tail=8), {}, "cpu", ""),
        (("cpu", "reference"), KVSpec("tq8", layers={1: "k=tq3,v=bf16", 2: "k=bf16,v=tq5"}, tail=16, sink=4), {}, "cpu", ""),
        (("npu", "cpu", "reference"), KVSpec("tq4", sink=300), {}, "cpu", "npu cannot run this: .*sinks"),
        # The model counts, and a dtype; no kernel takes vectors of 32.
        (EVERYTHING, "tq4", {"config": resize_config(SMALL, head_dim=32)}, "reference", ".*"),
        (("npu", "cpu", "reference"), "tq4", {"dtype": "float32"}, "cpu", "npu cannot run this: it runs bfloat16 only$"),
        (("npu", "cpu", "reference"), "tq4", {"dtype": "bfloat16"}, "npu", ""),
        # A device leaves only executors that know it; whether it is there, its executor says.
        (EVERYTHING, "tq4", {"device": "cpu"}, "cpu", ""), (EVERYTHING, "tq4", {"device": "cuda:1"}, "cuda", ""),
        (EVERYTHING, "tq4", {"device": "npu:0"}, "npu", ""), (EVERYTHING, "tq4", {"device": "sim"}, "npu", ""),
        (("cpu", "reference"), "tq4", {"device": "cuda:0"}, "cuda", ""),
    ],
)  # fmt: skip
def test_the_fastest_that_reads_the_cache(machine, hardware, kv, options, name, why):
    machine(*hardware)
    selection = select_executor(kv, **options)
    assert selection.name == name
    assert re.match(why, selection.passed_over) if why else selection.passed_over == ""


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_whatever_a_planner_chooses_runs_on_the_kernels_of_the_cpu(machine, head_dim):
    """Every candidate that it takes, beside any other, with a tail, sinks and layers in BF16."""
    machine("cpu", "reference")
    config = resize_config(TINY, head_dim=head_dim)
    calibration = synthetic.calibration(config.num_layers, config.heads.num_kv_heads, head_dim)
    names = []
    for name in (*formats.names(), *(f"lr{bits}" for bits in COLUMNS)):
        with suppress(InputError):
            require_candidates([name], config, calibration)
            names.append(name)
    assert {"q8_0", "q4_0", "fp8_e4m3", "tq3_0", "manthan3", "tq4_seed", "fp32", "lr2"} < set(names)
    assert not {name for name in names if name.startswith("kivi")}
    values = at("v", names)
    for name, other in zip(names, itertools.cycle(values[1:] + values[:1])):
        layers, whole = {1: f"k={name},v={other}", 2: f"k={other},v=bf16"}, everywhere(name)
        for spec in (KVSpec(whole, layers=layers), KVSpec(whole, layers=layers, tail=32, sink=4, skip_layers=(-1,))):
            assert select_executor(replace(spec, calibration=calibration), config) == catalog.Selection("cpu"), spec


def test_every_cache_must_be_read(machine):
    machine("npu", "cpu", "reference")
    plans = [KVSpec(kv).plan(TINY.num_layers) for kv in ("tq4", "kivi2")]
    assert select(AUTO, TINY, plans[:1]).name == "npu"
    assert select(AUTO, TINY, plans).name == "cpu"


@pytest.mark.parametrize(
    ("kv", "device", "says"),
    [
        ("tq4", "moon", "no executor runs on 'moon'; --device takes cpu, cuda"),
        ("q8_0", "sim", r"executor npu cannot run this: .*q8_0"),
    ],
)
def test_a_device_on_which_nothing_runs_is_refused(machine, kv, device, says):
    machine(*EVERYTHING)
    with pytest.raises(InputError, match=says):
        select_executor(kv, device=device)


def test_without_its_kernels_the_cpu_is_passed_over(machine, monkeypatch):
    def missing():
        raise library.KernelsMissingError("not built")

    machine("cpu", "reference")
    monkeypatch.setattr(library, "load", missing)
    selection = select_executor()
    assert (selection.name, selection.passed_over) == ("reference", "cpu cannot run this: not built")


@pytest.mark.parametrize("name", catalog.NAMES)
def test_a_name_stands_for_itself(machine, name):
    machine()
    assert select(name, TINY, [KVSpec("bf16").plan(TINY.num_layers)]) == catalog.Selection(name)


@pytest.mark.parametrize(
    ("executor", "options", "why"),
    [
        ("cpu", {"device": "sim"}, "executor cpu runs on the cpu"),
        ("npu", {"kv": "q8_0"}, "executor npu cannot run this: .*q8_0"),
        ("onnx", {"kv": "bf16"}, "executor onnx cannot run this: .*bf16"),
        ("onnx", {"device": "moon"}, "executor onnx runs on the cpu"),
        ("cuda", {}, "needs an NVIDIA GPU"),
        ("abacus", {}, "unknown executor 'abacus'; choose from auto, reference, cpu, cuda"),
    ],
)
def test_a_named_executor_refuses_before_the_weights_are_read(monkeypatch, executor, options, why):
    if executor == "onnx":
        pytest.importorskip("onnxruntime")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("haarkv.engine.loading.load_model", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(InputError, match=why):
        tq.load("tiny", executor=executor, **options)


def test_without_its_package_onnx_says_so_before_the_weights_are_read(monkeypatch):
    import haarkv.executors

    monkeypatch.delitem(sys.modules, "haarkv.executors.onnx", raising=False)
    monkeypatch.delattr(haarkv.executors, "onnx", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr("haarkv.engine.loading.load_model", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(InputError, match=r"needs the package onnxruntime; pip install 'haarkv\[onnx\]'"):
        tq.load("tiny", executor="onnx")


def test_looking_for_a_device_imports_neither_triton_nor_pypto():
    code = (
        "import sys\n"
        "from haarkv.executors.catalog import AUTO, select\n"
        "from haarkv.models.catalog import read_config\n"
        "from haarkv.tq_ops.kv.plan import KVSpec\n"
        "config = read_config('tiny')\n"
        "select(AUTO, config, [KVSpec(kv).plan(config.num_layers) for kv in ('tq4', 'bf16')])\n"
        "print([name for name in ('triton', 'pypto', 'torch_npu', 'onnxruntime') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("triton_version", "message"), [("3.3.1", "Triton is 3.3.1 and the kernels need 3.6"), ("3.6.0", None), ("3.10", None)]
)
def test_a_triton_that_an_older_torch_brings_is_named(monkeypatch, triton_version, message):
    monkeypatch.setattr(available, "find_spec", lambda _: object())
    monkeypatch.setattr(available, "version", lambda _: triton_version)
    reason = available.triton_missing()
    assert reason is None if message is None else message in reason
