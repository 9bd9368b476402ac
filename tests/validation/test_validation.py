"""The validator: it passes what is right, and finds what is wrong where it is."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from at_length import MORE_JUDGE, pairwise_cases
from small_models import KV_FORMATS, SMALL
from validation_reports import MODEL, Whole, where
from validation_reports import validation_report as run

from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.errors import InputError
from haarkv.validation.faults.base import DRIVES, WholeLayers, table_with
from haarkv.validation.faults.layer import published_faults
from haarkv.validation.layers.report import as_json


def candidate_with(model=MODEL, **ops):
    return ReferenceExecutor(model, table_with(ops))


# -- What is right passes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kv", "drive"), [*((kv, "ops") for kv in KV_FORMATS), ("tq4", "layers"), ("bf16", "layers")])
def test_the_reference_equals_itself_in_every_format(kv, drive):
    """Op by op each layer runs whole as well."""
    reported_rows = []
    report = run(DRIVES[drive](ReferenceExecutor(MODEL)), kv=kv, on_row=reported_rows.append)
    assert report.passed
    assert report.first_divergence is None
    assert list(report.rows) == reported_rows
    # prefill, one step, a verify and the step behind it, every layer, both modes
    assert len(report.rows) == 4 * SMALL.num_layers * 2
    for row in report.rows:
        assert (row.k_match, row.v_match, row.share, row.max_abs) == (1, 1, 0, 0)
        assert row.hidden_cos == pytest.approx(1, abs=1e-12)
    assert [(row.phase, row.step, row.predictions) for row in report.logits] == [
        ("prefill", 0, 2), ("decode", 0, 2), ("verify", 0, 5), ("decode", 1, 2)
    ]  # fmt: skip
    assert all(row.same_token == row.predictions for row in report.logits)


def test_a_tie_is_taken_over_into_what_follows():
    """In fp32 one level that falls the other way moves attention a hundred times as far as rounding does; it is a tie."""
    margins = []

    def store_kv(k, v, at):
        # The level of layer 1's K that lies nearest to its boundary, on the other side of it.
        x = k.clone()
        if at.layer == 1 and len(k) > 2:
            description = formats.get("tq4").description(k.shape[-1])
            unit = (k / k.norm(dim=-1, keepdim=True)).bfloat16().float()
            rotated = unit @ description.transform.on(at.layer, k.shape[-1], k.device)
            distance = rotated.unsqueeze(-1) - torch.tensor(description.boundaries)
            away = distance.abs().amin(-1)
            token, head, coordinate = (int(i) for i in (away == away.min()).nonzero()[0])
            distance = distance[token, head, coordinate]
            level = int((distance >= 0).sum())
            fields = at.kv.k.kv_format.quantize(x, at.layer)
            reference.store_kv(x, v, at)
            levels = formats.get("tq4").levels(fields)
            levels[token, head, coordinate] = level + (1 if distance[distance.abs().argmin()] < 0 else -1)
            low, high = levels.chunk(2, dim=-1)
            block, offset = at.batch.slot_mapping // at.cache.block_size, at.batch.slot_mapping % at.cache.block_size
            at.kv.k.fields["codes"][block, :, offset] = low | (high << 4)
            margins.append(float(away.min()))
            return
        reference.store_kv(x, v, at)

    report = run(WholeLayers(candidate_with(store_kv=store_kv)), steps=0)
    assert margins
    assert report.passed
    first = report.first_divergence
    assert (first.layer, first.stage, first.reason) == (1, "store_kv.k", "tie")
    forced_rows, free = (
        [r for r in report.rows if r.mode == mode and r.layer == 1] for mode in ("teacher-forced", "free-running")
    )
    assert forced_rows[0].rel_l2 == 0
    assert free[0].rel_l2 > 1e-4


# -- What is wrong is found ------------------------------------------------------------------------------------------------
STAGE_OF_OP = {
    "rms_norm": "input_norm", "linear": "q_proj", "rope": "q_rope", "silu_mul": "silu_mul",
    "paged_attention": "paged_attention",
}  # fmt: skip


# The rest runs with `make test-judge`.
@pytest.mark.parametrize(
    ("op", "spoil"), pairwise_cases(MORE_JUDGE, list(STAGE_OF_OP), ["one percent", "nan", "zero", "shape", "dtype", "input"])
)
def test_every_op_is_judged_by_itself(op, spoil):
    right = getattr(reference, op)

    def wrong(*args):
        out = right(*args)
        if spoil == "input":
            args[0].mul_(1.5)
            return out
        return {
            "one percent": lambda: out * 1.01, "nan": lambda: out.index_fill(0, torch.tensor(0), torch.nan),
            "zero": lambda: out * 0, "shape": lambda: out[..., :-1], "dtype": lambda: out.to(torch.float16),
        }[spoil]()  # fmt: skip

    # Its layers are right, its op table is not: what is wrong is seen in the replay alone.
    executor = ReferenceExecutor(MODEL)
    names = ("name", "config", "device", "supports", "layers", "decode_step", "blocks")
    lying = SimpleNamespace(**{name: getattr(executor, name) for name in names})
    lying.forward, lying.head, lying.ops = executor.forward, executor.head, table_with({op: wrong})
    assert where(run(lying, steps=0)) == (0, STAGE_OF_OP[op])


# The rest runs with `make test-judge`.
@pytest.mark.parametrize(("kv", "factor"), pairwise_cases(MORE_JUDGE, list(KV_FORMATS), [1.01, 0.99]))
def test_a_wrong_scale_is_found_in_every_format(kv, factor):
    def store_kv(k, v, at):
        reference.store_kv(k, v * factor, at)

    assert where(run(candidate_with(store_kv=store_kv), steps=0, kv=kv)) == (0, "store_kv.v")


# -- Fused executors, and what is wrong whatever the numbers are -------------------------------------------------------------
def bent_steps(hidden, token_ids, batch, _):
    return hidden * torch.linspace(0.9, 1.1, SMALL.hidden_size) if len(token_ids) == len(batch.rows) else hidden


def doubled_scales(hidden, _ids, _batch, cache):
    for layer in range(SMALL.num_layers):
        cache.kv[layer].v.fields["scale"].mul_(2)
    return hidden


def stray(hidden, _ids, _batch, cache):
    cache.kv[2].k.fields["codes"][0, 0, 5] ^= 1
    return hidden


def into_another_layer(out, _hidden, span, _batch, cache):
    if span[0] == 2:
        cache.kv[0].v.fields["codes"][:, 0, -1] ^= 1
    return out


def spoilt_batch(out, _hidden, _span, batch, _cache):
    batch.seq_lens.add_(1)
    return out


def changed_at(place, value, layer=None):
    """A result that holds one other number, of one layer if it is named."""

    def change(out, *args):
        out = out.clone()
        if layer is None or args[1][0] == layer:
            out[place] = value
        return out

    return change


def spoilt_scale(bad):
    def store_kv(k, v, at):
        slot = int(at.batch.slot_mapping[0])
        reference.store_kv(k, v, at)
        at.kv.v.fields["scale"][slot // at.cache.block_size, 0, slot % at.cache.block_size] = bad

    return WholeLayers(candidate_with(store_kv=store_kv))


def flipped_tokens():
    """A whole forward that is not that of its op table."""
    lying = ReferenceExecutor(MODEL)
    lying.forward = lambda token_ids, batch, cache: ReferenceExecutor(MODEL).forward(token_ids.flip(0), batch, cache)
    return lying


def in_any_block(q, at, scale):
    in_order = torch.arange(at.batch.block_table.numel(), dtype=torch.int32).view(at.batch.block_table.shape)
    return reference.paged_attention(q, replace(at, batch=replace(at.batch, block_table=in_order)), scale)


def longer_head(q, *args):
    out = reference.paged_attention(q, *args).clone()
    out[:, 3] *= 1.001
    return out


REFUSING = {"store_kv": lambda k, v, at: reference.store_kv(k * math.nan, v, at)}
WRONG = {
    "the logits of another token": (lambda: Whole(head=lambda logits, *_: logits.roll(1, -1)), 0, (None, "head")),
    "nan logits": (lambda: Whole(head=changed_at((0, 3), math.nan)), 0, (None, "head")),
    "decode steps that are bent": (lambda: Whole(forward=bent_steps), 1, (None, "head")),
    "a forward that is not its ops'": (flipped_tokens, 0, (None, "forward")),
    "a forward that stores other scales": (lambda: Whole(forward=doubled_scales), 0, (None, "head")),
    "a forward that stores elsewhere": (lambda: Whole(forward=stray), 0, (None, "untouched_slots")),
    "a layer that writes into another": (lambda: Whole(layers=into_another_layer), 0, (2, "untouched_slots")),
    "its input": (lambda: Whole(layers=lambda _, hidden, *more: hidden), 0, (0, "attention_mlp")),
    "zeros": (lambda: Whole(layers=lambda out, *_: out * 0), 0, (0, "attention_mlp")),
    "a batch that is changed": (lambda: Whole(layers=spoilt_batch), 0, (0, "call")),
    "nan": (lambda: Whole(layers=changed_at((2, 5), math.nan, 1)), 0, (1, "attention_mlp")),
    "infinity": (lambda: Whole(layers=changed_at((2, 5), math.inf, 1)), 0, (1, "attention_mlp")),
    "a scale of nan": (lambda: spoilt_scale(math.nan), 0, (0, "store_kv.v")),
    "a scale of infinity": (lambda: spoilt_scale(math.inf), 0, (0, "store_kv.v")),
    "K that is refused": (lambda: candidate_with(**REFUSING), 0, (0, "store_kv")),
    "K that is refused, of a layer": (lambda: WholeLayers(candidate_with(**REFUSING)), 0, (0, "call")),
    "a block table that is ignored": (lambda: candidate_with(paged_attention=in_any_block), 0, (0, "paged_attention")),
    "a small error of one head": (lambda: candidate_with(paged_attention=longer_head), 0, (0, "paged_attention")),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_where_it_is_and_can_be_written(name):
    make, steps, place = WRONG[name]
    report = run(make(), steps=steps)
    assert where(report) == place
    assert report.first_divergence.phase == ("decode" if steps else "prefill")
    assert place[1] != "call" or "refused" not in name or "layer 0: K of token 0" in report.first_divergence.detail
    json.dumps(as_json(report), allow_nan=False)


# -- Modes -----------------------------------------------------------------------------------------------------------------
def test_the_guilty_layer_is_bad_teacher_forced_and_the_later_ones_free_running_alone():
    fault = next(f for f in published_faults(MODEL, 1) if "Q heads" in f.name)
    report = run(WholeLayers(ReferenceExecutor(MODEL, fault.table())), steps=0)
    by = {(row.mode, row.layer): row for row in report.rows}
    assert [by["teacher-forced", layer].rel_l2 > 1e-3 for layer in range(3)] == [False, True, False]
    assert [by["free-running", layer].rel_l2 > 1e-3 for layer in range(3)] == [False, True, True]


def test_a_fused_reference_is_refused():
    with pytest.raises(InputError, match="a reference runs op by op on the host"):
        run(ReferenceExecutor(MODEL), trusted=WholeLayers(ReferenceExecutor(MODEL)))
