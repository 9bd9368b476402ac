"""The validator on layers that keep a recurrent state: it passes what is right, and finds a wrong state where it arises."""

import csv
from dataclasses import replace

import pytest
import torch
from at_length import MORE_JUDGE, pairwise_cases
from small_models import random_tokens
from validation_reports import validation_report

from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.faults.base import DRIVES, table_with
from haarkv.validation.faults.states import delta_faults, small_hybrid
from haarkv.validation.layers.exercise import OTHER_STATE, STATE_READ, with_extreme_scales
from haarkv.validation.layers.report import as_csv, as_json

MODELS = {dtype: small_hybrid(dtype, 61) for dtype in (torch.float32, torch.bfloat16)}
MODEL = MODELS[torch.float32]
PROMPTS = [random_tokens(MODEL.config, 11), random_tokens(MODEL.config, 5, seed=1)]
FAULTS = {fault.name: fault for fault in delta_faults(MODEL, 2)}


def run(candidate, model=MODEL, prompts=PROMPTS, steps=1, kv="tq4", **more):
    return validation_report(candidate, model, prompts, steps, kv, **more)


@pytest.mark.parametrize("drive", DRIVES)
def test_the_reference_equals_itself(drive):
    report = run(DRIVES[drive](ReferenceExecutor(MODEL)))
    assert report.passed
    assert report.first_divergence is None
    assert {row.layer for row in report.rows if row.k_match is None} == {0, 2}
    stages = {stage.stage for stage in report.tensors}
    assert stages >= {"conv_state", "delta_state"}
    assert {STATE_READ, OTHER_STATE} <= set(report.exercised)
    assert as_json(report)["rows"][0]["k_match"] is None
    header, *rows = csv.reader(as_csv(report).splitlines())
    assert rows[0][header.index("k_match")] == ""


# The rest runs with `make test-judge`.
@pytest.mark.parametrize(("dtype", "drive"), pairwise_cases(MORE_JUDGE, list(MODELS), list(DRIVES)), ids=str)
def test_the_cpu_executor_passes(dtype, drive):
    report = run(DRIVES[drive](CpuExecutor(MODELS[dtype])), MODELS[dtype])
    assert report.passed, report.first_divergence
    assert max(row.share for row in report.rows) > 0


def test_chunks_go_on_from_the_state_of_the_first(monkeypatch):
    import haarkv.validation.layers.forward as forward

    monkeypatch.setattr(forward, "PREFILL_CHUNK", 6)
    report = run(CpuExecutor(MODEL), steps=0, honest_cache={})
    assert report.passed, report.first_divergence
    assert {row.step for row in report.rows} == {0, 1}
    report = run(FAULTS["a state cut between chunks"].executor(MODEL), steps=0, honest_cache={}, modes=("teacher-forced",))
    first = report.first_divergence
    assert (first.phase, first.step, first.layer, first.stage) == ("prefill", 1, 2, "delta_state")


@pytest.mark.parametrize(
    ("field", "factor", "stage"),
    [("in_proj_qkv", 1.001, "in_proj_qkv"), ("in_proj_a", 1.01, "in_proj_a"), ("out_proj", 0.99, "out_proj")],
)
def test_its_inputs_and_outputs_are_judged(field, factor, stage):
    weight = MODEL.weights.layers[2][field]
    wrong = table_with({"linear": lambda x, w: reference.linear(x, w) * (factor if w is weight else 1.0)})
    first = run(ReferenceExecutor(MODEL, wrong)).first_divergence
    assert (first.layer, first.stage, first.reason) == (2, stage, "fault")


def changed(**changes):
    """The model, some fields of every layer being others."""

    def change(field, tensor):
        return changes[field](tensor) if field in changes else tensor

    layers = tuple(layer.map(change) for layer in MODEL.weights.layers)
    return replace(MODEL, weights=replace(MODEL.weights, layers=layers))


def test_a_state_of_zeros_proves_nothing():
    def without_values(weight):
        weight = weight.clone()
        weight[-24:] = 0  # the last head of V
        return weight

    model = changed(in_proj_qkv=without_values)
    with pytest.raises(InputError, match=r"state \(conv, head 7\) of layer 0 is zero in sequence 0 of prefill 0"):
        run(ReferenceExecutor(model), model)


def test_a_state_that_is_never_read_back_is_said():
    """One forward leaves a state that is not read: an executor that never reads one is right so far."""
    report = run(FAULTS["a state cut between chunks"].executor(MODEL), steps=0)
    assert report.passed
    assert {STATE_READ, OTHER_STATE} <= set(report.not_exercised)


def test_a_state_that_is_forgotten_at_once_is_said():
    """And a convolution of one tap."""

    def of_one_tap(conv):
        return torch.cat([torch.zeros_like(conv[..., :-1]), conv[..., -1:]], -1)

    model = changed(a_log=lambda a_log: torch.full_like(a_log, 6.0), conv1d=of_one_tap)
    report = run(ReferenceExecutor(model), model)
    assert STATE_READ in report.exercised
    assert OTHER_STATE in report.not_exercised


def test_rows_of_other_sequences_are_watched():
    def gated_delta(*args):
        out, batch = reference.gated_delta(*args), args[-1].batch
        state = args[6].state
        other = next(row for row in range(len(state.counts) - 1) if row not in batch.rows.tolist())
        state.tensors["delta"][other] += 1
        return out

    first = run(ReferenceExecutor(MODEL, table_with({"gated_delta": gated_delta}))).first_divergence
    assert (first.layer, first.stage) == (0, "untouched_state")


def test_extreme_scales_leave_states_as_they_are():
    plan = KVSpec("tq4").plan(3)
    model = with_extreme_scales(MODEL, plan, PROMPTS[0])
    assert run(CpuExecutor(model), model, PROMPTS[:1]).passed
