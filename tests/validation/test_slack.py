"""What rounding nobody can see excuses: ties of restored vectors, bits that scores of thousands lose; and nothing else."""

from dataclasses import replace

import pytest
import torch
from at_length import MORE_JUDGE, thinned
from outliers import key_biases
from planted import tiny_qwen2, token_ids
from small_models import SMALL, random_tokens, resized, small_model

from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.validation import bounds, validate
from haarkv.validation.layers import slack
from haarkv.validation.layers.faults import DRIVES, table_with
from haarkv.validation.layers.record import Call
from haarkv.validation.layers.slack import as_numbers, nearer, of_op

SEED, PLAIN = formats.get("tq4_seed"), formats.get("fp32")
CONFIG = resized(SMALL, num_layers=1)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ULP = 2.0**-24


def rounded(x):
    return x.to(torch.bfloat16).float()


def restored(fields, layer, scale_off=0.0, first=rounded, second=rounded):
    """As the format restores, its scale off by a relative error, its sums in another order, its rounding points as given."""
    by = SEED.restored(fields["codes"].shape[-1])
    centroids = by.centroids[fields["codes"].long()]
    scale = (centroids.flip(-1).square().sum(-1) + by.least).rsqrt() * fields["norm"] * (1 + scale_off)
    back = by.back(layer)
    half = len(back) // 2
    product = first(centroids * scale.unsqueeze(-1))
    return second(product[..., half:] @ back[half:] + product[..., :half] @ back[:half])


def attending(**how):
    """The reference's table, but attention reads vectors that were restored otherwise."""

    def paged_attention(q, cache, layer, batch, scale):
        sides = [{"data": restored(fields, layer, **how)} for fields in (cache.k_fields(layer), cache.v_fields(layer))]
        other = PagedKVCache.over((PLAIN, PLAIN), layer, tuple(sides), cache.kept(layer), cache.shape(0).head_dim)
        return reference.paged_attention(q, other, layer, batch, scale)

    return table_with({"paged_attention": paged_attention})


def compared(table, drive, dtype="float32", seeds=range(3), **windows):
    """Reports on a table, of some small models."""
    for seed in seeds:
        model = small_model(CONFIG, seed, DTYPES[dtype])
        prompts = [random_tokens(SMALL, 40, seed), random_tokens(SMALL, 12, seed + 1)]
        plan = KVSpec("tq4_seed", **windows).plan(1)
        candidate = DRIVES[drive](ReferenceExecutor(model, table))
        yield validate(ReferenceExecutor(model), candidate, model, prompts, 1, plan)


# Of a scale that is off by 14 * 2**-24, as an approximate root and another order of sums make it at most.
NUDGED = {"scale_off": 14 * ULP}


# The rest runs with `make test-judge`.
@pytest.mark.parametrize(("drive", "dtype"), thinned(MORE_JUDGE, list(DRIVES), list(DTYPES)))
def test_ties_of_restored_vectors_are_no_fault(drive, dtype):
    reports = [
        one
        for windows in ({}, {"tail": 16, "sink": 2})
        for one in compared(attending(**NUDGED), drive, dtype, range(2), **windows)
    ]
    for report in reports:
        assert report.passed, report.first_divergence
    assert any(report.first_divergence for report in reports), "it restored the very same numbers: nothing was tried"


@pytest.mark.parametrize("drive", DRIVES)
def test_without_what_ties_are_allowed_they_would_be_one(drive, monkeypatch):
    monkeypatch.setattr(slack, "of_ties", lambda *_: None)
    assert not all(report.passed for report in compared(attending(**NUDGED), drive))


FAULTS = {
    "the second rounding left out": {"second": lambda x: x},
    "the first rounding left out": {"first": lambda x: x},
    "the second rounding towards zero": {"second": lambda x: rounded(x - x.sign() * 2.0**-9 * x.abs())},
    "a scale that is off by 1e-3": {"scale_off": 1e-3},
}


# The rest runs with `make test-judge`.
@pytest.mark.parametrize(("name", "drive"), thinned(MORE_JUDGE, list(FAULTS), list(DRIVES)))
def test_what_is_no_tie_is_found(name, drive):
    """All of these lay within the constant that was allowed for ties once, or near it."""
    for report in compared(attending(**FAULTS[name]), drive, seeds=range(1)):
        first = report.first_divergence
        assert not report.passed, name
        assert (first.layer, first.reason) == (0, "fault")
        assert first.stage == ("paged_attention" if drive == "ops" else "attention_mlp")


def call_with(norms):
    """One query over tokens whose K and V have such norms, [S, 2] for one KV head of 64 numbers: as it is recorded."""
    dim, tokens = 64, len(norms)
    cache = PagedKVCache(KVSpec("tq4_seed").plan(1), KVShape(1, dim), num_blocks=1)
    paging = PagedSequences(1, cache.block_size)
    paging.add()
    paging.batch([0], [tokens - 1])
    batch = paging.batch([0], [1])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 1, tokens, dim, generator=generator)
    for side, fields in enumerate((cache.k_fields(0), cache.v_fields(0))):
        for name, values in SEED.quantize(x[:, side], 0).items():
            fields[name][:, :, :tokens] = values
        fields["norm"][0, 0, :tokens] = torch.tensor(norms)[:, side]
    q = torch.randn(1, 2, dim, generator=generator)
    args = (q, cache, 0, batch, dim**-0.5)
    return Call("paged_attention", "paged_attention", args, reference.paged_attention(*args))


def beside_a_rounding_point(fields, token):
    """A norm near 8 with which the numbers of the outermost level lie halfway between two BF16 neighbours."""
    by = SEED.restored(64)
    centroids = by.centroids[fields["codes"][0, 0, token].long()]
    largest = (centroids * (centroids.square().sum() + by.least).rsqrt()).abs().max()
    step = torch.ldexp(torch.ones(()), torch.frexp(8 * largest).exponent - 8)
    return float((torch.floor(8 * largest / step) + 0.5) * step / largest)


def test_a_tie_of_the_scale_is_allowed_what_it_does_and_no_vector_else():
    call = call_with([(8.0, 8.0)] * 5)
    _, cache, *_ = call.args
    fields = cache.v_fields(0)
    token = 2
    norm = beside_a_rounding_point(fields, token)
    fields["norm"][0, 0, token] = norm
    ours = reference.paged_attention(*call.args)
    allowed = of_op(Call(call.op, call.stage, call.args, ours), reference)
    moved = []
    for way in (1, -1):
        fields["norm"][0, 0, token] = norm * (1 + way * 8 * ULP)
        moved.append((reference.paged_attention(*call.args) - ours).norm(dim=-1).double())
    done = torch.maximum(*moved)
    assert (done > bounds.LAYER_FP32.attention * ours.norm(dim=-1)).all(), "no tie was made"
    assert (allowed >= done).all()
    assert (allowed <= 2 * done).all()


def test_no_other_format_and_no_other_op_is_allowed_anything():
    call = call_with([(8.0, 8.0)] * 3)
    q, _, layer, batch, scale = call.args
    for kv in ("tq4", "bf16", "q8_0"):
        cache = PagedKVCache(KVSpec(kv).plan(1), KVShape(1, 64), num_blocks=1)
        assert of_op(Call("paged_attention", "paged_attention", (q, cache, layer, batch, scale), q), reference) is None
    assert of_op(Call("rope", "q_rope", (q, q, q), q), reference) is None


def test_what_is_allowed_is_taken_off_the_distance_and_hides_no_nan():
    ours = torch.zeros(3, 4)
    theirs = torch.tensor([[3.0, 4.0, 0, 0], [0, 0, 0, 0.5], [torch.nan, 0, 0, 0]])
    left = nearer(ours, theirs, torch.tensor([1.0, 1.0, torch.inf], dtype=torch.float64))
    assert torch.allclose(left[:2], torch.tensor([[2.4, 3.2, 0, 0], [0, 0, 0, 0]], dtype=torch.float64))
    assert left[2].isnan().any()


def test_a_stored_length_is_the_norm_whatever_the_levels():
    """One other level changes every number's rounding, and so the restored length by more than a scale may be off by."""
    fields = SEED.quantize(torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(0)), 0)
    other = fields | {"codes": fields["codes"].clone()}
    other["codes"][..., 0] = (other["codes"][..., 0].int() - 1).clamp(min=0).to(torch.uint8)
    assert torch.equal(SEED.lengths(fields, 0), SEED.lengths(other, 0))
    assert torch.equal(SEED.lengths(fields, 0), fields["norm"].double())
    ratio = SEED.dequantize(other, 0).norm(dim=-1) / SEED.dequantize(fields, 0).norm(dim=-1)
    assert (ratio - 1).abs().max() > 1e-3


# -- Scores of thousands -----------------------------------------------------------------------------------------------------
def flipped(q, cache, layer, batch, scale):
    """Attention whose scores are added up from the other end."""
    k = cache.k_format(layer).dequantize(cache.k_fields(layer), layer)
    v = cache.v_format(layer).dequantize(cache.v_fields(layer), layer)
    return reference.paged_attention(q.flip(-1), as_numbers(cache, layer, k.flip(-1), v), layer, batch, scale)


def of_large_scores(drive, attend, norm=20000.0):
    """Of `tiny` as a Qwen2 in FP32 with a large bias of K in layers 1 and 2."""
    model = key_biases(tiny_qwen2(), norm, [1, 2])
    candidate = DRIVES[drive](ReferenceExecutor(model, table_with({"paged_attention": attend})))
    plan = KVSpec("k=bf16,v=tq4").plan(model.config.num_layers)
    return validate(ReferenceExecutor(model), candidate, model, [token_ids(24)], 1, plan)


@pytest.mark.parametrize("drive", DRIVES)
def test_another_order_of_large_sums_is_no_fault_and_would_be_one_without_its_slack(drive, monkeypatch):
    found = of_large_scores(drive, flipped)
    assert found.passed, found.first_divergence
    monkeypatch.setattr(slack, "of_scores", lambda attend, cache, layer: torch.zeros(()))
    assert of_large_scores(drive, flipped).first_divergence.layer in (1, 2)


@pytest.mark.parametrize("drive", DRIVES)
def test_a_factor_of_attention_is_still_a_fault_where_scores_are_large(drive):
    def larger(q, cache, layer, batch, scale):
        return flipped(q, cache, layer, batch, scale) * (1.01 if layer == 1 else 1.0)

    found = of_large_scores(drive, larger)
    assert not found.passed
    assert found.first_divergence.layer == 1


# -- Layers that take rounding apart ---------------------------------------------------------------------------------------
def cancelling():
    """A layer in BF16 whose MLP adds differences of terms that are nearly alike."""
    model = small_model(CONFIG, 0, torch.bfloat16)
    half = CONFIG.layers[0].mlp.width // 2

    def change(field, x):
        if field in ("gate_proj", "up_proj"):
            return torch.cat([x[:half], x[:half] * 1.03])
        return torch.cat([20 * x[:, :half], -20 * x[:, :half]], dim=1) if field == "down_proj" else x

    layers = tuple(layer.changed(change) for layer in model.weights.layers)
    return replace(model, weights=replace(model.weights, layers=layers))


def without_rounding(factor=1.0):
    """The reference's table, but an MLP's activations stay in FP32, and attention is multiplied."""

    def paged_attention(q, *given):
        return (reference.paged_attention(q, *given) * factor).to(q.dtype)

    def silu_mul(gate, up, dtype):
        return reference.silu_mul(gate, up, torch.float32)

    return table_with({"silu_mul": silu_mul, "paged_attention": paged_attention})


def of_cancelling(table):
    model, plan = cancelling(), KVSpec("tq4").plan(1)
    candidate = DRIVES["layers"](ReferenceExecutor(model, table))
    return validate(ReferenceExecutor(model), candidate, model, [random_tokens(SMALL, 40, 1)], 1, plan)


def test_rounding_at_other_points_is_no_fault_where_the_reference_is_as_far_from_fp32(monkeypatch):
    found = of_cancelling(without_rounding())
    assert found.passed, found.first_divergence
    assert not of_cancelling(without_rounding(1.3)).passed
    monkeypatch.setattr(slack, "of_rounding", lambda exact, rounded: torch.zeros(()))
    assert of_cancelling(without_rounding()).first_divergence.reason == "fault"
