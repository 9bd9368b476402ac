"""A failing layer as a file: cut out, written, read and run again, it fails as it failed; what is right passes."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from at_length import MORE_JUDGE, rest
from small_models import SMALL, random_tokens, resize_config, small_model

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.rope import LinearScaling, YarnScaling
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.faults.base import WholeLayers, reordered_sum_ops, table_with
from haarkv.validation.faults.layer import LEARNED_KV, published_faults
from haarkv.validation.faults.windows import WINDOW_SPEC
from haarkv.validation.layers.replay.case import OneRun, judge_case, require_expected
from haarkv.validation.layers.replay.file import build_replay_file, load, save
from haarkv.validation.layers.runner import validate

MODEL = small_model(SMALL)
IN_BF16 = small_model(SMALL, dtype=torch.bfloat16)
VERSIONS = {"haarkv": "1", "torch": "2"}


def right(model, plan):
    return ReferenceExecutor(model)


def faulty(make_table, whole=False):
    """Makes the reference with a fault in it, of whatever model it is given."""

    def make(model, plan):
        executor = ReferenceExecutor(model, make_table(model))
        return WholeLayers(executor) if whole else executor

    return make


def failing_run(model, make, prompts, steps=0, kv="tq4", learned_calibration=None, modes=("teacher-forced",)):
    spec = KVSpec(kv, calibration=learned_calibration) if isinstance(kv, str) else kv
    plan = spec.plan(model.config.num_layers)
    report = validate(right(model, plan), make(model, plan), model, prompts, steps, plan, modes=modes)
    assert not report.passed
    return OneRun(report, model, prompts, steps, plan, learned_calibration, (right, make))


def saved_replay(run):
    return through_a_file(build_replay_file([run], VERSIONS))


def through_a_file(file):
    with TemporaryDirectory() as folder:
        save(Path(folder) / "file", file)
        return load(Path(folder) / "file")


def first_fault(case, make):
    """The stage and reason of the first fault."""
    first = judge_case(case, right, make).first_divergence
    return first.stage, first.reason


# That each is found is said by `test_faults`; the rest runs with `make test-judge`.
@pytest.mark.parametrize("number", rest(MORE_JUDGE, range(len(published_faults(MODEL, 1))), lambda number, _: number % 4 == 0))
def test_a_planted_fault_becomes_a_file_that_fails_alike(number):
    """By turns op by op in FP32, and as whole layers in BF16."""
    whole = bool(number % 2)
    make = faulty(lambda model: published_faults(model, 1)[number].table(), whole)
    run = failing_run(IN_BF16 if whole else MODEL, make, [random_tokens(SMALL, n) for n in (9, 5)])
    was = run.report.first_divergence
    file = saved_replay(run)
    assert (file.finding["stage"], file.finding["reason"]) == (was.stage, was.reason)
    assert first_fault(file.case, make) == (was.stage, was.reason)
    # It fails because of the fault: what is right passes.
    assert judge_case(file.case, right, right).first_divergence is None
    assert judge_case(file.case, right, faulty(lambda _: reordered_sum_ops(), whole)).passed
    require_expected(file.case, file.record, right)


def test_a_fault_in_decode_alone_is_cut_out_there():
    def paged_attention(q, at, scale):
        out = reference.paged_attention(q, at, scale)
        return out * (-1 if at.layer == 2 and int(at.batch.positions[0]) == 9 else 1)

    make = faulty(lambda _: table_with({"paged_attention": paged_attention}))
    file = saved_replay(failing_run(MODEL, make, [random_tokens(SMALL, 8)], steps=3))
    assert (file.case.phase, file.case.step, file.case.index) == ("decode", 1, 2)
    assert int(file.case.batch.positions[0]) == 9


KINDS = {
    "bf16": {}, "k=tq8,v=tq4_seed": {}, "k=fp32,v=tq3": {},
    "tq4": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "tq3": {"model_type": "llama", "rope_scaling": YarnScaling(4.0, 128, 1.1)},
    "tq2": {"model_type": "qwen2", "bias": True, "rope_scaling": LinearScaling(2.0)},
    "a window": {}, LEARNED_KV: {},
}  # fmt: skip


@pytest.mark.parametrize("kv", rest(MORE_JUDGE, KINDS, lambda _, kv: kv not in ("bf16", "k=tq8,v=tq4_seed", "tq2")))
def test_every_kind_of_field_family_and_window_can_be_cut_and_written(kv):
    model = small_model(resize_config(SMALL, **KINDS[kv]))
    # In decode alone, so that the layer's cache holds what the prompt left.
    make = faulty(lambda _: table_with({"paged_attention": lambda q, *at: reference.paged_attention(q, *at) * (len(q) > 1)}))
    heads = model.config.heads
    learned = calibration(model.config.num_layers, heads.num_kv_heads, heads.head_dim) if kv == LEARNED_KV else None
    run = failing_run(model, make, [random_tokens(SMALL, 6)], 1, WINDOW_SPEC if kv == "a window" else kv, learned)
    built = build_replay_file([run], VERSIONS)
    file = through_a_file(built)
    for part, fields in built.case.before.items():
        assert all(torch.equal(tensor, file.case.before[part][name]) for name, tensor in fields.items())
    assert ("window.k" in file.case.before) == (kv == "a window")
    require_expected(file.case, file.record, right)
    assert first_fault(file.case, make) == ("paged_attention", "fault")
    assert judge_case(file.case, right, right).first_divergence is None
    assert file.case.config.common.attention.rope.scaling == model.config.common.attention.rope.scaling


def test_what_is_in_no_single_layer_has_no_file():
    class WrongHead(ReferenceExecutor):
        def head(self, hidden):
            return super().head(hidden).roll(1, -1)

    run = failing_run(MODEL, lambda model, plan: WrongHead(model), [random_tokens(SMALL, 6)], modes=("free-running",))
    with pytest.raises(InputError, match="no single layer"):
        build_replay_file([run], VERSIONS)


def test_what_does_not_show_alone_has_no_file():
    """A fault in one call, and never again."""
    calls = []

    def paged_attention(q, at, scale):
        calls.append(at.layer)
        out = reference.paged_attention(q, at, scale)
        return out * 2 if len(calls) == 1 else out

    run = failing_run(MODEL, faulty(lambda _: table_with({"paged_attention": paged_attention})), [random_tokens(SMALL, 6)])
    with pytest.raises(InputError, match="alone"):
        build_replay_file([run], VERSIONS)


# -- The file --------------------------------------------------------------------------------------------------------------
@cache
def one():
    make = faulty(lambda model: published_faults(model, 1)[4].table())
    return saved_replay(failing_run(MODEL, make, [random_tokens(SMALL, 6)]))


def test_a_file_that_does_not_fit_together_is_refused():
    """Its SHA-256 is right, and what it says is not."""
    file = one()
    for case in (
        replace(file.case, hidden=file.case.hidden[:, :-1]),
        replace(file.case, counts=(0,), lengths=(1,)),
        replace(file.case, counts=(*file.case.counts, 1), lengths=(*file.case.lengths, 1)),
        replace(file.case, lengths=tuple(length + 128 for length in file.case.lengths)),
        replace(file.case, lengths=(10**9,)),
        replace(file.case, config=replace(file.case.config, hidden_size=4)),
        replace(file.case, config=resize_config(file.case.config, num_layers=1025)),
        replace(file.case, config=replace(file.case.config, vocab_size=10**12)),
        replace(file.case, kv="tq9"),
    ):
        with pytest.raises(InputError):
            through_a_file(replace(file, case=case))


def test_a_reference_that_makes_something_else_is_refused(tmp_path):
    file = one()
    other = replace(file, record=replace(file.record, hidden_out=file.record.hidden_out * 1.01))
    read = through_a_file(other)
    with pytest.raises(InputError, match="the reference makes another attention_mlp here"):
        require_expected(read.case, read.record, right)
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path / "absent")
