"""Learned nibbles on the NPU programs, in the interpreter: layers, a validation, and faults planted in the coordinates."""

from dataclasses import replace

import pytest
import torch
from npu_checked import CONFIG, DECODE, PREFILL, check_layer, filled
from npu_learned import learned_spec, made_up
from npu_programs import needs_pypto, with_pypto
from small_models import random_tokens, resized, small_model

from haarkv.executors import catalog, npu
from haarkv.executors.npu import NpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.qwen3_14b.npu import inputs
from haarkv.tq_ops.npu import learned
from haarkv.tq_ops.npu.device import SimRunner
from haarkv.tq_ops.npu.sides import sides_of
from haarkv.validation.layers.runner import validate

CPU = torch.device("cpu")
ONE_LAYER = resized(CONFIG, num_layers=1)


def heads_of(case):
    return resized(CONFIG, num_heads=case[0][0], num_kv_heads=case[0][1])


# -- What the host hands over ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("nibbles", [64, 128, 256])
def test_levels_by_their_places_are_the_bytes_of_the_format(nibbles):
    """What the cube adds up: every nibble in its half of its byte, for each head by its own owners."""
    kv_format = made_up().format("k", nibbles)
    of = kv_format.description(128).transform.coordinates(0)
    stages = learned.stages_of(of)
    level = torch.randint(0, 16, (2, 9, stages * 128), generator=torch.Generator().manual_seed(0))
    chosen = level.gather(-1, of.owners.unsqueeze(1).expand(-1, 9, -1))
    places = learned.domain_tensors(kv_format, 128, 0, CPU)["places"].view(2, stages * 128, nibbles // 2)
    half = nibbles // 2
    assert torch.equal(level.float() @ places.float(), (chosen[..., :half] + 16 * chosen[..., half:]).float())


def test_lifts_keep_queries_by_rows_no_longer_than_the_queries():
    """Otherwise FP16 might not hold them; a power of two changes no number."""
    kv_format = made_up().format("k", 128)
    of = kv_format.description(128).transform.coordinates(1)
    tensors = learned.domain_tensors(kv_format, 128, 1, CPU)
    rows, lift = tensors["rows"].view(2, 128, 128), tensors["numbers"][2 * learned.LIFT :][:2, :1].unsqueeze(-1)
    assert (rows.norm(dim=-1) <= 1).all()
    assert (rows.norm(dim=-1).amax(1) > 0.5).all()
    assert (of.rows.norm(dim=-1) > 2).any()
    assert torch.equal(rows * lift, of.rows)


def test_a_layer_takes_the_stages_that_it_owns():
    spec = learned_spec(CONFIG, "k=lr5,v=tq3")
    k, v = sides_of(spec.plan(2), 0)
    assert (k.width, k.stages, k.vectors.width) == (256, 3, 128)
    assert (v.width, v.stages, v.vectors.width) == (64, 1, 32)


@pytest.mark.parametrize("kv", ["k=lr3,v=tq3", "lr32", "lr320"])
def test_nibbles_that_no_tile_takes_are_refused_by_name(kv):
    count = kv.removeprefix("k=").removeprefix("lr").split(",")[0]
    said = f"its programs take 64 to 256 learned nibbles in steps of 64, not {count}"
    assert NpuExecutor.supports(CONFIG, learned_spec(CONFIG, kv).plan(2)) == said


def test_coordinates_are_handed_over_once(monkeypatch):
    """They never change: each layer's are the same tensors in every call, and a fixed format has rows that nothing reads."""
    promised, called = [], []

    class Runner(SimRunner):
        def __init__(self):
            pass

        def constant(self, tensor):
            promised.append(tensor)
            return tensor

        def call(self, program, tensors):
            names = [argument.name for argument in program.arguments]
            called.append({name: tensors[names.index(name)] for name in names if name[2:] in ("forward", "rows")})

    monkeypatch.setattr(npu, "open_runner", lambda _: Runner())
    spec = replace(learned_spec(CONFIG), layers={1: "tq4"})
    executor = catalog.create("npu", small_model(CONFIG, dtype=torch.bfloat16), spec.plan(2), "sim")
    for _ in range(2):
        cache, paging, sequences = filled(CONFIG, spec, [3], seed=1)
        executor.layers(torch.zeros(1, 128, dtype=torch.bfloat16), range(2), paging.batch(sequences, [1]), cache)
    assert [len(named["k_forward"]) for named in called] == [256, 1, 256, 1]
    for first, second in zip(called[:2], called[2:], strict=True):
        assert all(first[name] is second[name] for name in first)
        assert all(any(tensor is one for one in promised) for tensor in first.values())


# -- Layers in the interpreter -----------------------------------------------------------------------------------------------
@with_pypto
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_layer_stores_the_same_bytes_and_gives_the_same_hidden_state(case):
    check_layer(*case, learned_spec(heads_of(case)))


@needs_pypto[1]
@pytest.mark.npu_long
@pytest.mark.parametrize("kv", ["k=lr5,v=tq5", "k=lr4,v=tq4", "k=bf16,v=tq3"])
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_layer_of_other_widths_or_of_a_fixed_format_does_so_too(kv, case):
    check_layer(*case, learned_spec(heads_of(case), kv))


def validated(spec, modes=("teacher-forced",), steps=0):
    model = small_model(ONE_LAYER, dtype=torch.bfloat16)
    plan = spec.plan(1)
    candidate = catalog.create("npu", model, plan, "sim")
    return validate(ReferenceExecutor(model), candidate, model, [random_tokens(ONE_LAYER, 20, 1)], steps, plan, modes=modes)


@with_pypto
@pytest.mark.npu_long
def test_a_validation_passes():
    report = validated(learned_spec(ONE_LAYER), ("teacher-forced", "free-running"), steps=1)
    assert report.passed, report.first_divergence
    forced = [row for row in report.rows if row.mode == "teacher-forced"]
    assert {row.phase for row in forced} == {"prefill", "decode", "verify"}
    assert sum(row.unexplained for row in forced) == 0
    assert min(row.hidden_cos for row in forced) > 0.9999


def exchange(tensor, rows):
    """The parts of the two heads exchanged."""
    return tensor.view(2, rows, -1).flip(0).reshape(tensor.shape)


def transpose(tensor):
    return tensor.view(2, 128, 128).mT.reshape(tensor.shape)


def without_mean(numbers):
    """Heads' means are the first rows."""
    return torch.cat([torch.zeros_like(numbers[:2]), numbers[2:]])


FAULTS = {
    "two heads' matrices exchanged": ("k_forward", lambda tensor: exchange(tensor, 128), "store_kv.k"),
    "a transposed matrix": ("v_forward", transpose, "store_kv.v"),
    "a missing mean": ("v_numbers", without_mean, "store_kv.v"),
    "two heads' rows exchanged": ("v_rows", lambda tensor: exchange(tensor, 64), "attention_mlp"),
    "nibbles at each other's places": ("k_places", lambda tensor: tensor.flip(1), "store_kv.k"),
    "K's rows as if all were first nibbles": ("k_rows", lambda t: t / t.norm(dim=1, keepdim=True), "attention_mlp"),
}


@needs_pypto[1]
@pytest.mark.npu_long
@pytest.mark.parametrize(("name", "spoil", "stage"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_the_coordinates_is_found_at_its_stage(monkeypatch, name, spoil, stage):
    honest = inputs.domain_arguments

    def spoiled(plan, layer, device):
        found = honest(plan, layer, device)
        assert not torch.equal(found[name], spoil(found[name]))
        return found | {name: spoil(found[name]).contiguous()}

    monkeypatch.setattr(inputs, "domain_arguments", spoiled)
    report = validated(learned_spec(ONE_LAYER))
    assert not report.passed
    assert (report.first_divergence.stage, report.first_divergence.reason) == (stage, "fault")
