"""Weights in quantised blocks: the validator runs generate's products, and half a step of x is all that it excuses."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from at_length import MORE_JUDGE, pairwise_cases, rest
from block_weights import TYPES, in_blocks
from op_contract import suite
from op_contract.suite import CPU, CUDA, REFERENCE
from small_models import random_tokens, small_config, small_model
from validation_reports import validation_report

from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import with_ops
from haarkv.tq_ops.weight import Blocks, rounding_to, weight_numbers
from haarkv.validation.faults.base import DRIVES
from haarkv.validation.faults.model import block_faults
from haarkv.validation.layers.reference import Reference
from haarkv.validation.layers.replay.case import OneRun, judge_case
from haarkv.validation.layers.replay.file import build_replay_file, load, save
from haarkv.validation.layers.runner import validate

CONFIG = small_config(num_heads=4, head_dim=64, hidden_size=256, intermediate_size=512)
DTYPES = (torch.float32, torch.bfloat16)
MODELS = {dtype: in_blocks(small_model(CONFIG, dtype=dtype)) for dtype in DTYPES}
PROMPTS = [random_tokens(CONFIG, 11), random_tokens(CONFIG, 5, seed=1)]


def run(model, candidate, **more):
    return validation_report(candidate, model, PROMPTS, **more)


def rounding(bits, types=TYPES, restored=False):
    """Products by blocks whose x is rounded to this many bits, with a step for each 32 numbers."""

    def linear(x, weight):
        if isinstance(weight, Blocks) and weight.type.name in types:
            blocks = x.float().view(len(x), -1, 32)
            step = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
            x = ((blocks / step).round() * step).view(x.shape)
            weight = weight_numbers(weight) if restored else weight  # whatever the blocks ask for
        return reference.linear(x, weight)

    return with_ops(reference, {"linear": linear})


class InBlocks(ReferenceExecutor):
    blocks = TYPES


# The rest runs with `make test-judge`.
@pytest.mark.parametrize(
    ("dtype", "drive", "kv"),
    [
        *pairwise_cases(MORE_JUDGE, list(DTYPES), list(DRIVES), ["tq4"]),
        *rest(MORE_JUDGE, product(DTYPES, DRIVES, ["bf16"]), lambda i, _: i == 0),
    ],
)
def test_what_generate_multiplies_passes_and_is_said(dtype, drive, kv):
    model = MODELS[dtype]
    report = run(model, DRIVES[drive](CpuExecutor(model)), steps=2, kv=kv)
    assert report.passed, report.first_divergence
    assert set(report.blocks) == set(TYPES)


@pytest.mark.parametrize("drive", DRIVES)
def test_without_the_steps_of_x_it_would_be_red(monkeypatch, drive):
    """Honest runs then multiply what the reference does, and sums in FP32 are off by less."""
    model = MODELS[torch.float32]
    monkeypatch.setattr(Reference, "rounds_x", lambda *_: False)
    assert not run(model, DRIVES[drive](CpuExecutor(model)), honest_cache={}).passed


@pytest.mark.parametrize("drive", DRIVES)
def test_an_x_of_fewer_bits_is_found(drive):
    """16 bits are what is excused; 12 are a fault of the first product, and 8 are what others take."""
    model = MODELS[torch.float32]
    assert run(model, DRIVES[drive](InBlocks(model, rounding(16)))).passed
    for bits in (8, 12):
        report = run(model, DRIVES[drive](InBlocks(model, rounding(bits))))
        first = report.first_divergence
        assert (first.layer, first.reason) == (0, "fault")
        assert first.stage in (("q_proj",) if drive == "ops" else ("store_kv.k", "store_kv.v", "attention_mlp")), bits


@pytest.mark.parametrize(("drive", "wrong_bits"), [("ops", (7, 16)), ("layers", (6,))])
def test_8_bits_are_excused_where_the_blocks_ask_for_them(drive, wrong_bits):
    """The reference rounds to 8 bits too, then; 7 bits, and none, are faults of the first product.

    In a whole layer numbers beside a tie excuse more: 7 bits and none lie near the limit, 6 bits beyond it.
    """
    rounding_model = replace(MODELS[torch.float32], weights=MODELS[torch.float32].weights.map(partial(rounding_to, bits=8)))
    executor = CpuExecutor(rounding_model)
    assert "activations of 8 bits" in executor.description
    honest_cache = {}
    assert run(rounding_model, DRIVES[drive](executor), honest_cache=honest_cache).passed
    for bits in wrong_bits:
        candidate = InBlocks(rounding_model, rounding(bits, restored=True))
        report = run(rounding_model, DRIVES[drive](candidate), honest_cache=honest_cache)
        assert (report.first_divergence.layer, report.first_divergence.reason) == (0, "fault"), bits


def test_an_executor_that_restores_blocks_is_given_nothing():
    model = MODELS[torch.float32]
    assert run(model, ReferenceExecutor(model)).blocks == ()
    report = run(model, ReferenceExecutor(model, rounding(16)))
    assert not report.passed
    assert report.first_divergence.stage == "q_proj"


def test_each_type_has_faults_of_its_own():
    """Minima where there are some; and what is planted is other numbers in one projection alone."""
    for kind in TYPES:
        model = in_blocks(small_model(CONFIG), (kind,))
        faults = list(block_faults(model, 1, "cpu"))
        words = {fault.name for fault in faults}
        assert (f"{kind}, a minimum is the neighbour's" in words) == (kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"))
        assert f"{kind}, a scale is the neighbour's" in words
        single = faults[0].right.type.numbers == CONFIG.hidden_size  # a row of one block has no neighbour
        assert (f"{kind}, a block is the neighbour's" in words) != single
        for fault in faults:
            off = weight_numbers(fault.wrong) != weight_numbers(fault.right)
            assert 0 < off.float().mean() <= 0.5, fault.name
            others = zip(model.weights.named_tensors(), fault.model.weights.named_tensors(), strict=True)
            assert sum(one is not other for (_, one), (_, other) in others) == 1


@pytest.mark.parametrize("table", CPU, ids=lambda table: table.name)
def test_every_table_multiplies_blocks_within_half_a_step(table):
    if reason := table.missing():
        pytest.skip(reason)
    cases = list(suite.block_cases(table))
    assert {case.kind for case in cases} == set(TYPES)
    assert {1, 40} <= {case.tokens for case in cases}
    assert [str(case) for case, finding in suite.run(table, cases) if not finding.passed] == []


def test_the_contract_finds_an_x_of_fewer_bits():
    coarse = replace(REFERENCE, open=lambda: rounding(12))
    cases = [case for case in suite.block_cases(REFERENCE) if case.dtype == torch.float32]
    assert not any(finding.passed for _, finding in suite.run(coarse, cases))
    assert list(suite.block_cases(CUDA)) == []


@pytest.mark.parametrize("bits", [16, 8])
def test_a_layer_that_fails_in_its_blocks_fails_as_a_file_too(bits, tmp_path):
    """Its blocks are in the file, and the bits of what they meet; what cannot be cut at their borders is not cut."""
    plain = MODELS[torch.float32]
    model = replace(plain, weights=plain.weights.map(partial(rounding_to, bits=bits)))

    def make_faulty(any_model, plan):
        """Whatever model it is given, the MLP's last product is off where its weight lies in blocks."""
        right = any_model.weights.layers[-1].matrix("down_proj")

        def linear(x, weight):
            y = CpuExecutor(any_model).ops.linear(x, weight)
            return y * 1.1 if weight is right and isinstance(weight, Blocks) else y

        return CpuExecutor(any_model).with_ops(lambda ops: with_ops(ops, {"linear": linear}))

    pair = (lambda given, plan: ReferenceExecutor(given)), make_faulty
    two = replace(model, config=model.config.with_layers(2), weights=replace(model.weights, layers=model.weights.layers[:2]))
    plan = KVSpec("tq4").plan(2)
    report = validate(pair[0](two, plan), make_faulty(two, plan), two, PROMPTS, 0, plan)
    assert (report.first_divergence.layer, report.first_divergence.stage) == (1, "down_proj")
    save(tmp_path / "file", build_replay_file([OneRun(report, two, PROMPTS, 0, plan, None, pair)], {"torch": "1"}))
    file = load(tmp_path / "file")
    down_proj = file.case.weights.matrix("down_proj")
    assert isinstance(down_proj, Blocks)
    assert down_proj.x_bits == bits
    assert down_proj.type.name == model.weights.layers[1].matrix("down_proj").type.name
    again = judge_case(file.case, *pair)
    assert (again.first_divergence.stage, again.blocks != ()) == ("down_proj", True)
    assert judge_case(file.case, pair[0], lambda given, plan: CpuExecutor(given)).passed
