"""What single numbers excuse, sums do not: ties by rate, bias, distance; what differs from itself; why a layer is wrong."""

import math
import random
from pathlib import Path

import pytest
import torch
from at_length import MORE_JUDGE, thinned
from clean_runs import clean_run
from small_models import SMALL, random_tokens, small_model

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation import bounds, validate
from haarkv.validation.faults.base import DRIVES, reordered, table_with
from haarkv.validation.faults.layer import planted, slips
from haarkv.validation.layers.chance import expected, log10_of_so_many, one_sided, student_limit
from haarkv.validation.layers.ledger import Ledger, _bias, _digests, _Tokens
from haarkv.validation.layers.self_test import WholeLayers, first_layers, self_test, sensitivity
from haarkv.validation.layers.three_way import errors, uneven_errors

LAYERS, AT = 2, 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CODE = Path(reference.__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tiny():
    """The first layers of `tiny` in both dtypes, and 160 tokens of code."""
    models = {dtype: first_layers(load_model("tiny", dtype), LAYERS) for dtype in DTYPES}
    return models, [load_tokenizer("tiny", models["float32"].config).encode(CODE)[:160]]


def of_small(dtype="float32"):
    return small_model(SMALL, dtype=DTYPES[dtype]), [random_tokens(SMALL, 12), random_tokens(SMALL, 5, seed=1)]


def compared(model, prompts, candidate, **kwargs):
    kwargs.setdefault("modes", ("teacher-forced",))
    plan = KVSpec("tq4").plan(model.config.num_layers)
    return validate(ReferenceExecutor(model), candidate, model, prompts, kwargs.pop("steps", 0), plan, **kwargs)


def slip(model, name, at=AT):
    return next(fault for fault in (*slips(model, at), *planted(model, at)) if fault.name == name)


# -- Faults of which every number is excused -------------------------------------------------------------------------------
FAINT = {
    "every V scale one FP16 step too large": None,
    "every K scale one FP16 step too small": None,
    "attention 1 % too large": None,
    "attention of the last KV head 1 % too large": 1,
    "softmax scale 0.1 % too large": None,
    "k_proj's result rounded to BF16": None,
    "V 0.1 % too long": None,
}


# The rest runs with `make test-judge`.
@pytest.mark.parametrize(
    ("faint", "drive"),
    thinned(MORE_JUDGE, [*(("bfloat16", name) for name in FAINT), ("float32", next(iter(FAINT)))], list(DRIVES)),
)
def test_a_faint_fault_is_found_where_it_is(tiny, faint, drive):
    (dtype, name), (models, prompts) = faint, tiny
    fault = slip(models[dtype], name)
    report = compared(models[dtype], prompts, fault.executor(models[dtype], drive))
    first = report.first_divergence
    assert not report.passed
    assert (first.layer, first.stage, first.reason) == (AT, fault.stages(drive)[0], "fault")
    assert first.head == FAINT[name]


def test_without_the_sums_these_would_pass(tiny, monkeypatch):
    """What keeps the test above honest: no number by itself is outside its bounds."""
    monkeypatch.setattr(Ledger, "stored", lambda *_: {})
    monkeypatch.setattr(Ledger, "numbers", lambda *_: None)
    models, prompts = tiny
    model = models["bfloat16"]
    for name in ("every V scale one FP16 step too large", "softmax scale 0.1 % too large"):
        assert compared(model, prompts, slip(model, name).executor(model)).passed, name
    faint = slip(model, "k_proj's result rounded to BF16")
    assert compared(model, prompts, faint.executor(model, "layers")).passed


@pytest.mark.parametrize("drive", DRIVES)
def test_both_drives_name_a_slow_rope_that_every_tie_excuses(tiny, drive):
    """A RoPE base 1 % off: op by op the ops are given the reference's tables, and the layer is wrong all the same."""
    models, prompts = tiny
    model = models["bfloat16"]
    fault = next(fault for fault in slips(model, AT) if fault.name.startswith("RoPE base 1.01"))
    first = compared(model, prompts, fault.executor(model, drive)).first_divergence
    assert (first.layer, first.stage, first.reason) == (0, "store_kv.k", "fault")


def test_rounding_towards_zero_has_a_direction(tiny):
    def truncated(*given):
        exact = reference.paged_attention(given[0].float(), *given[1:])
        return (exact.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)

    def unrounded(*given):
        return reference.paged_attention(given[0].float(), *given[1:]).to(torch.bfloat16)

    models, prompts = tiny
    model = models["bfloat16"]
    report = compared(model, prompts, ReferenceExecutor(model, table_with({"paged_attention": truncated})))
    assert report.first_divergence.stage == "paged_attention"
    assert "too small on average" in report.first_divergence.detail
    report = compared(model, prompts, ReferenceExecutor(model, table_with({"paged_attention": unrounded})))
    assert report.passed
    farther = [row.value for row in report.tests if row.name == "farther" and row.stage == "paged_attention"]
    assert farther
    assert max(farther) < 1  # nearer to the truth than the reference


# -- What is right passes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [2, 9, 20, 227])
def test_clean_runs_are_not_red(number):
    what, report = clean_run(number)
    assert report.passed, (what, report.first_divergence)


def test_ties_of_an_honest_order_of_sums_are_as_many_as_expected(tiny):
    models, prompts = tiny
    report = compared(models["bfloat16"], prompts, WholeLayers(ReferenceExecutor(models["bfloat16"], reordered())))
    ties = [row for row in report.tests if row.name == "ties"]
    assert report.passed
    assert len(ties) == 2 * LAYERS
    assert all(row.value <= 3 + 4 * row.bound for row in ties)


# -- Chances ---------------------------------------------------------------------------------------------------------------
def test_the_chance_of_a_mean_is_students():
    for samples, of in ((1, lambda x: 2 / math.pi * math.atan(1 / x)), (2, lambda x: 1 - x / math.hypot(x, math.sqrt(2)))):
        limit = student_limit(samples)
        # The limits of one and two samples are so large that only their order can be told in float64.
        assert limit > 1e5
        assert of(1e5) > bounds.CHANCE
    assert student_limit(10**6) == pytest.approx(math.sqrt(2 * math.log(1 / bounds.CHANCE)), rel=1e-4)
    assert student_limit(20) > student_limit(40) > student_limit(400)
    assert student_limit(0) == math.inf


def test_rounding_along_a_direction_of_one_vector_is_judged_by_all():
    """The reference's own error at the one that counts may be small by chance; an executor's then looks large beside it."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(40, 32, generator=generator) * torch.tensor([1.0] + 39 * [1e-3]).unsqueeze(-1)
    shares, usual = [], []
    for _ in range(1000):
        exact, a, b = torch.randn(3, 40, 32, generator=generator, dtype=torch.float64)
        ours, theirs = exact + 0.01 * a, exact + 0.01 * b
        shares.append(uneven_errors(ours, theirs, exact, direction, 0.0).share)
        usual.append(errors(ours, theirs, exact, direction, 0.0).share)
    assert max(shares) < 1
    assert sum(share > 1 for share in usual) > 10
    wrong = uneven_errors(ours, theirs + direction, exact, direction, 0.0)
    assert wrong.share > 1
    assert wrong.gain == pytest.approx(1, abs=0.05)


def test_tokens_of_one_vector_are_no_more_evidence_than_one():
    """A vector that is stored too short is so each time it comes; eighty vectors that are all too short are no rounding."""
    generator = torch.Generator().manual_seed(0)
    for distinct, chance in ((1, -0.3), (80, -15)):
        vectors = torch.randn(distinct, 1, 64, generator=generator).bfloat16().repeat(80 // distinct, 1, 1)
        none = torch.zeros(80, 1, dtype=torch.bool)
        kept = _Tokens(none, none, torch.full((80, 1), -1e-4, dtype=torch.float64), _digests({"data": vectors}))
        log10, words = _bias(kept, slice(None), "V")
        assert "too short" in words
        assert log10 > chance if distinct == 1 else log10 < chance


def test_steps_of_x_along_a_direction_of_few_vectors_are_excused_and_no_more():
    """Nothing rounds but the executor's x: what draws move vectors by says how much of that lies along the direction."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(40, 32, generator=generator) * torch.tensor([1.0] + 39 * [1e-3]).unsqueeze(-1)
    shares, unexcused = [], []
    for _ in range(1000):
        ours, *moved = torch.randn(4, 40, 32, generator=generator, dtype=torch.float64)
        moved = [0.01 * by for by in moved]
        theirs = ours + 0.01 / math.sqrt(3) * torch.randn(40, 32, generator=generator, dtype=torch.float64)
        shares.append(uneven_errors(ours, theirs, None, direction, 0.0, moved).share)
        unexcused.append(uneven_errors(ours, theirs, None, direction, 0.0).share)
    assert max(shares) < 1
    assert min(unexcused) > 1
    wrong = uneven_errors(ours, theirs + direction, None, direction, 0.0, moved)
    assert wrong.share > 1
    assert wrong.gain == pytest.approx(1, abs=0.05)


def test_one_direction_is_less_likely_than_it_says():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(0, 3, 40)
    drawn = [one_sided(sizes * torch.randn(40, generator=generator)) for _ in range(2000)]
    for tail in (-1, -2):
        assert sum(value < tail for value in drawn) / 2000 <= 10**tail
    assert one_sided(torch.full((80,), 1e-9)) < -15
    # Eighty tokens of one vector err once.
    assert one_sided(torch.full((80,), 1e-9), torch.zeros(80, dtype=torch.int64)) > -0.3
    assert one_sided(torch.full((80,), 1e-9), torch.arange(80)) < -15
    assert one_sided(torch.zeros(5)) == 0


def test_so_many_ties_are_less_likely_than_it_says():
    """Tokens that fall, each with all of its vectors, as often as a noisy run says: Monte Carlo stays below the bound."""
    noise = torch.tensor(bounds.AMPLIFIED)
    chances = torch.full((len(noise), 50, 4), 0.5, dtype=torch.float64)
    rate = float((1 / noise).mean())
    generator = torch.Generator().manual_seed(0)
    fallen = torch.rand(20_000, 50, generator=generator) < rate
    drawn = torch.poisson(2.0 * fallen, generator=generator).sum(-1)
    assert expected(chances) == pytest.approx(float(drawn.mean()), rel=0.05)
    for count in (10, 20):
        assert float((drawn >= count).double().mean()) <= 10 ** log10_of_so_many(count, chances)
    assert log10_of_so_many(0, chances) == 0
    assert log10_of_so_many(150, chances) < -12


# -- What differs from itself ----------------------------------------------------------------------------------------------
# The rest runs with `make test-judge`.
@pytest.mark.parametrize(("seed", "drive"), thinned(MORE_JUDGE, range(3), list(DRIVES)))
def test_a_fault_in_one_of_fifty_calls_is_said_to_be_unstable(drive, seed):
    model, prompts = of_small()
    draw, name, fired = random.Random(seed), "linear" if seed % 2 else "paged_attention", []

    def flaky(*given):
        out = getattr(reference, name)(*given)
        if draw.random() >= 1 / 50:
            return out
        fired.append(name)
        return out * 1.2

    candidate = DRIVES[drive](ReferenceExecutor(model, table_with({name: flaky})))
    report = compared(model, prompts, candidate, steps=6, modes=("teacher-forced", "free-running"))
    first = report.first_divergence
    assert report.passed == (not fired)
    if fired:
        assert first.reason == "unstable"
        assert "differs from itself" in first.detail
        assert first.layer is not None or first.stage in ("forward", "head")


def test_who_differs_from_itself_within_the_bounds_is_found_where_it_is_asked_for():
    model, prompts = of_small()
    draw = random.Random(0)

    def restless(q, cache, layer, batch, scale):
        out = reference.paged_attention(q, cache, layer, batch, scale)
        return out * (1 + 1e-7 * draw.random()) if layer == 1 else out

    candidate = WholeLayers(ReferenceExecutor(model, table_with({"paged_attention": restless})))
    assert compared(model, prompts, candidate).passed
    report = compared(model, prompts, candidate, repeats=3)
    found = report.first_divergence
    assert (found.layer, found.stage, found.reason) == (1, "attention_mlp", "unstable")
    assert "of 4 runs" in report.first_divergence.detail
    assert "within rounding" in report.first_divergence.detail


# -- Causes ----------------------------------------------------------------------------------------------------------------
CAUSES = {
    "RoPE base 1e+06 for 10000": ("q_rope", "k_rope"),
    "norms' eps 1e-05 for 1e-06": ("input_norm", "q_norm", "k_norm", "post_norm"),
    "GELU in place of SiLU": ("silu_mul",),
    "no causal mask": ("paged_attention",),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named_where_a_layer_is_one_program(name):
    model, prompts = of_small()
    fault = slip(model, name)
    report = compared(model, prompts, fault.executor(model, "layers"), explains=1)
    first = report.first_divergence
    assert not report.passed
    assert first.causes[0] == name
    assert set(first.stages) == set(CAUSES[name])


def test_what_no_cause_explains_leaves_the_stages_that_it_depends_on():
    model, prompts = of_small()

    def odd(q, cache, layer, batch, scale):
        return reference.paged_attention(q, cache, layer, batch, scale).sin()

    def late(q, cache, layer, batch, scale):
        # The first token attends to itself alone, whatever its query is.
        return reference.paged_attention(q * q.sign().cumsum(-1) / 30, cache, layer, batch, scale)

    for op, stages in ((odd, 10), (late, 4)):
        report = compared(
            model, prompts, WholeLayers(ReferenceExecutor(model, table_with({"paged_attention": op}))), explains=1
        )
        first = report.first_divergence
        assert first.causes == ()
        assert len(first.stages) == stages
        assert "paged_attention" in first.stages


# The rest runs with `make test-judge`.
@pytest.mark.parametrize(
    ("name", "drive"),
    thinned(MORE_JUDGE, ["K of the last KV head negated", "V of the last KV head not rotated"], list(DRIVES)),
)
def test_the_guilty_kv_head_is_named(name, drive):
    model, prompts = of_small()
    fault = slip(model, name)
    first = compared(model, prompts, fault.executor(model, drive)).first_divergence
    assert (first.stage, first.head) == (fault.stage, SMALL.heads.num_kv_heads - 1)


# -- The self-test and the sensitivity -------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", range(4, 86, 14))
def test_a_part_of_the_slips_is_found_where_it_is(tiny, number):
    """All of them: `make test-judge`."""
    models, prompts = tiny
    model = models["bfloat16"]
    fault = slips(model, AT)[number]
    candidate = fault.executor(model, "layers")
    first = compared(model, [prompts[0][:80]], candidate).first_divergence
    assert (first.layer, first.reason) == (fault.layer, "fault")
    assert first.stage in fault.stages("layers")


@pytest.mark.judge_long
@pytest.mark.parametrize("kv", ["tq4", "tq4_seed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_test_finds_every_fault(dtype, kv):
    model = first_layers(load_model("tiny", dtype), 3)
    ids = load_tokenizer("tiny", model.config).encode(CODE)
    assert not [row for row in self_test([model], [ids[:120], ids[:100]], kv=kv) if not row.caught]


@pytest.mark.judge_long
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_clean_runs_are_not_red(hundred):
    for number in range(100 * hundred, 100 * hundred + 100):
        what, report = clean_run(number)
        assert report.passed, (what, report.first_divergence)


def test_sensitivity_is_a_table_of_stages(monkeypatch):
    import haarkv.validation.layers.self_test as module

    model, prompts = of_small("bfloat16")
    stage, planted_by = "paged_attention", module.scaled_stages(module.Layer(model, AT))["paged_attention"]
    monkeypatch.setattr(module, "scaled_stages", lambda _: {stage: planted_by})
    rows = sensitivity(model, prompts)
    assert [(row.driven, row.stage) for row in rows] == [("ops", stage), ("layers", stage)]
    # Less than any single figure may be off.
    assert rows[0].error < bounds.LAYER_BF16.attention
    assert rows[0].found == f"layer {AT} {stage}"


def test_a_format_without_levels_has_rates_too():
    """BF16 numbers: V rounded twice differs from V rounded once in more numbers than sums in another order make differ."""
    model, _ = of_small("bfloat16")

    def store_kv(k, v, cache, layer, batch):
        reference.store_kv(k, v * (1 + 2.0**-14), cache, layer, batch)

    plan = KVSpec("bf16").plan(SMALL.num_layers)
    assert formats.get("bf16").levels(formats.get("bf16").quantize(torch.ones(1, 1, 128), 0)) is None
    candidate = WholeLayers(ReferenceExecutor(model, table_with({"store_kv": store_kv})))
    report = validate(ReferenceExecutor(model), candidate, model, [random_tokens(SMALL, 60)], 0, plan)
    assert (report.first_divergence.layer, report.first_divergence.stage) == (0, "store_kv.v")
    assert not report.passed
