"""The NPU executor: what goes into its programs, and whom it refuses."""

import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from npu_layers import CONFIG, CONFIGS, TQ4_SPEC
from npu_programs import with_pypto
from small_models import new_cache, resize_config, small_model

from haarkv.engine import loading
from haarkv.executors import catalog, npu
from haarkv.executors.base import prefill
from haarkv.executors.npu import NpuExecutor
from haarkv.models.catalog import load_model, read_config
from haarkv.models.qwen3_14b.npu import inputs, programs
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.npu import device
from haarkv.tq_ops.npu.program import order_arguments
from haarkv.tq_ops.npu.sides import fixed_sides
from haarkv.tq_ops.npu.sim import simulator
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator
from haarkv.tq_ops.npu.versions import SIM_PYPTO, find_installation

TQ4 = TQ4_SPEC.plan(CONFIG.num_layers)


def make_batch(new_tokens, stored_tokens=()):
    paging = PagedSequences(32, 128, order=[5, 2, 9, 0, *range(10, 32), 1, 3, 4, 6, 7, 8])
    sequences = [paging.add() for _ in new_tokens]
    for sequence, count in zip(sequences, stored_tokens, strict=False):
        if count:
            paging.batch([sequence], [count])
    return paging.batch(sequences, new_tokens)


@with_pypto
def test_a_vocabulary_in_slices_is_padded_and_pieces_overlap():
    """4,096 rows in slices of at most 1,500: three of 1,408, the last padded, each in pieces of 1,024 that overlap."""
    model = load_model("tiny", "bfloat16")
    program = replace(programs.head_program(model.config, 1500), piece=1024)
    parts = inputs.head_constants(model, program)
    assert (program.vocab_size, len(parts)) == (1408, 3)
    hidden = torch.randn(16, model.config.hidden_size, generator=torch.Generator().manual_seed(4)).bfloat16()
    slices = []
    with Simulator() as simulator:
        for constants in parts:
            arguments, logits = inputs.head_call(program, constants, hidden)
            simulator.run(program, arguments, Mode.NUMBERS)
            slices.append(logits)
    logits = torch.cat(slices, dim=1)
    normed_hidden = reference.rms_norm(hidden, model.weights.final_norm, model.config.final_norm.eps)
    assert torch.allclose(logits[:, :4096], reference.linear(normed_hidden, model.weights.lm_head), atol=1e-3)
    assert not logits[:, 4096:].any()


# -- Refusals ------------------------------------------------------------------------------------------------------------
OTHER = "its programs are those of dense layers with attention, and layer 0 of this {} model is another than it knows: it {}"


@pytest.mark.parametrize(
    ("config", "spec", "message"),
    [
        (resize_config(CONFIG, head_dim=96), TQ4_SPEC, "a head_dim of 64, 128 or 256, not 96"),
        (replace(CONFIG, hidden_size=48), TQ4_SPEC, "hidden_size that is a multiple of 64, not 48"),
        (resize_config(CONFIG, intermediate_size=200), TQ4_SPEC, "intermediate_size that is a multiple of 64, not 200"),
        (read_config("random:qwen3.5-27b"), TQ4_SPEC, OTHER.format("qwen3_5", "mixes tokens by DeltaNet")),
        (read_config("random:30b-a3b"), TQ4_SPEC, OTHER.format("qwen3_moe", "has experts")),
        (CONFIG, KVSpec("k=tq4,v=q8_0"), "its programs read tq4, tq4_seed and bf16, not q8_0"),
        (CONFIG, KVSpec("k=bf16,v=tq4", tail=8), "beside both K and V, and bf16 or tq4 is stored as it is"),
        (CONFIG, KVSpec("tq4", sink=257), "keep up to 256 sinks"),
        (CONFIG, KVSpec("tq4", tail=2000), "and 1,984 tokens with the tail"),
    ],
)
def test_what_no_program_runs_is_refused_by_name(config, spec, message):
    assert message in NpuExecutor.supports(config, spec.plan(config.num_layers))


def test_fp32_is_refused():
    with pytest.raises(InputError, match="bfloat16 only"):
        catalog.create("npu", small_model(CONFIG), TQ4, "sim")


@with_pypto
def test_another_block_size_is_refused():
    executor = catalog.create("npu", small_model(CONFIG, dtype=torch.bfloat16), TQ4, "sim")
    with pytest.raises(InputError, match="128-token blocks, not 8"):
        executor.layers(torch.zeros(1, 128, dtype=torch.bfloat16), range(1), make_batch([1]), new_cache(CONFIG))


OURS = torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    ("name", "torch_npu", "message"),
    [
        ("cuda:0", None, "sim or npu:N, not on 'cuda:0'"),
        ("npu:x", None, "not on 'npu:x'"),
        ("npu:0", None, "torch-npu is not installed"),
        ("npu:0", {"version": "1.11.0"}, r"torch-npu 1\.11\.0 is made for another torch"),
        ("npu:0", {"version": OURS, "broken": True}, r"cannot be loaded .*set_env\.sh"),
        ("npu:0", {"version": OURS, "available": False}, "sees no NPU"),
        ("npu:2", {"version": OURS}, "no npu:2; torch-npu sees 2 NPUs"),
    ],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, name, torch_npu, message):
    """Without torch-npu, or with one that claims to see two NPUs."""
    if torch_npu:
        npu = SimpleNamespace(is_available=lambda: torch_npu.get("available", True), device_count=lambda: 2)
        monkeypatch.setattr(device, "find_spec", lambda name: object())
        monkeypatch.setattr(device, "find_installation", lambda: replace(find_installation(), torch_npu=torch_npu["version"]))
        monkeypatch.setitem(sys.modules, "torch_npu", None if torch_npu.get("broken") else SimpleNamespace(npu=npu))
    with pytest.raises(InputError, match=message):
        device.open_runner(name)


def test_a_device_is_refused_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(InputError, match="not on 'npu:x'"):
        loading.load("tiny", executor="npu", device="npu:x")


@pytest.mark.parametrize(
    ("pypto", "missing", "message"),
    [
        (None, None, r"pip install 'haarkv\[npu\]'"),
        ("0.2.1", None, r"the simulator knows pypto 0\.2\.0 only, and 0\.2\.1 is installed"),
        (SIM_PYPTO, "cmake", "cmake not found"),
    ],
)
def test_what_the_simulator_needs_is_named(monkeypatch, pypto, missing, message):
    monkeypatch.setattr(simulator, "find_installation", lambda: replace(find_installation(), pypto=pypto))
    monkeypatch.setattr(simulator.shutil, "which", lambda tool: None if tool == missing else "/usr/bin/" + tool)
    with pytest.raises(InputError, match=message):
        device.open_runner("sim")


class KeepsPrograms(device.SimRunner):
    """The simulator, which says of itself what a device's runner says: that it compiles each program once."""

    keeps_programs = True

    def __init__(self):
        super().__init__()
        self.called = []

    def call(self, program, tensors):
        if program.name not in self.called:
            self.on_program(program.name)
        self.called.append(program.name)
        super().call(program, tensors)


@with_pypto
@pytest.mark.npu_long
def test_programs_are_compiled_before_the_first_forward(monkeypatch):
    """So that no latency holds a compilation."""
    runner, program_names = KeepsPrograms(), []
    monkeypatch.setattr(npu, "open_runner", lambda _: runner)
    config = resize_config(CONFIG, num_layers=1)
    executor = catalog.create(
        "npu", small_model(config, dtype=torch.bfloat16), KVSpec("tq4").plan(1), None, program_names.append
    )
    assert sorted(program_names) == sorted(set(runner.called)) == ["decode_layer", "head", "prefill_layer"]
    prefill(executor, torch.zeros(3, dtype=torch.int64), make_batch([3]), new_cache(config, block_size=128, num_blocks=32))
    assert len(program_names) == 3


@with_pypto
def test_the_simulator_compiles_nothing_ahead():
    program_names = []
    catalog.create("npu", small_model(CONFIG, dtype=torch.bfloat16), TQ4, "sim", program_names.append)
    assert program_names == []


def test_no_two_arguments_of_a_program_share_a_name():
    for k, v in product(fixed_sides(128).values(), repeat=2):
        names = [argument.name for argument in programs.decode_program(CONFIG, k, v).arguments]
        assert len(names) == len(set(names))


def test_zeros_stand_for_what_a_layer_lacks_and_for_nothing_else():
    """Biases and a window are there where a layer declares them, and are then not optional."""
    qwen2, gemma3 = (programs.decode_program(CONFIGS[name]) for name in ("qwen2", "gemma3"))
    unread = [{a.name for a in program.arguments if a.unread} for program in (qwen2, gemma3)]
    assert {"q_norm", "mlp_out_norm", "left_behind", "k_kept", "k_forward"} <= unread[0]
    assert unread[1] ^ unread[0] == {"q_norm", "k_norm", "mixer_out_norm", "mlp_out_norm", "left_behind"} | {
        f"{x}_bias" for x in "qkv"
    }
    tensors = {a.name: torch.ones(1) for a in qwen2.arguments if not a.unread}
    ordered = order_arguments(qwen2, tensors)
    assert [bool(t.any()) for t in ordered] == [not a.unread for a in qwen2.arguments]
    with pytest.raises(ValueError, match="q_bias"):
        order_arguments(qwen2, {name: t for name, t in tensors.items() if name != "q_bias"})
