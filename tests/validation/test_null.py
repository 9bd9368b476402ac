"""The judge's null: honest runs lie inside, what lies outside in any one figure is at fault, and figures add up."""

import math
import zlib
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from at_length import MORE_JUDGE, rest

from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OP_NAMES
from haarkv.validation import bounds
from haarkv.validation.faults.base import DRIVES, instead, table_with
from haarkv.validation.faults.ops import keeping, quantized_parts, steeper
from haarkv.validation.layers import null
from haarkv.validation.layers.null import (
    RUNS,
    Figure,
    Null,
    by_ties,
    collect_sums,
    excess,
    honest,
    number_figures,
    value,
)  # fmt: skip
from haarkv.validation.layers.runner import validate
from haarkv.validation.layers.self_test import first_layers

DTYPES = ("float32", "bfloat16")
AT = 1


@cache
def tiny(dtype):
    """The first layers of `tiny`, tokens of code, and what honest runs gave so far."""
    model = first_layers(load_model("tiny", dtype), 2)
    ids = load_tokenizer("tiny", model.config).encode(Path(reference.__file__).read_text(encoding="utf-8"))
    return model, [ids[100:230], ids[300:340]], {}


def validate_candidate(dtype, candidate, steps=1, modes=("teacher-forced",)):
    model, prompts, honest_cache = tiny(dtype)
    plan = KVSpec("tq4").plan(model.config.num_layers)
    return validate(ReferenceExecutor(model), candidate, model, prompts, steps, plan, modes=modes, honest_cache=honest_cache)


def device(dtype, seed):
    """The reference as one more device computes it, with seeds that no null draws: the same input gives the same noise."""

    def noisy(name):
        def run(x, *args):
            content = zlib.crc32(x.contiguous().view(torch.uint8).numpy().tobytes(), seed)
            return getattr(honest(reference, 10**9 + seed % 2 + 2 * content), name)(x, *args)

        return run

    return ReferenceExecutor(tiny(dtype)[0], table_with({name: noisy(name) for name in OP_NAMES}))


# -- What is right passes ----------------------------------------------------------------------------------------------------
# The rest runs with `make test-judge`.
@pytest.mark.parametrize(
    ("seed", "dtype", "drive"), rest(MORE_JUDGE, product(range(2, 22), DTYPES, DRIVES), lambda _, case: case[0] < 4)
)
def test_an_honest_device_passes(seed, dtype, drive):
    """Prefill, decode, a verify and the step behind it; each layer given the reference's input, and left to itself."""
    report = validate_candidate(dtype, DRIVES[drive](device(dtype, seed)), modes=("teacher-forced", "free-running"))
    assert report.passed, report.first_divergence
    assert {row.phase for row in report.rows} == {"prefill", "decode", "verify"}
    assert report.first_divergence.reason in ("rounding", "tie")
    assert 0.01 < max(figure.share for figure in report.tests) < 1


@pytest.mark.parametrize("isa", library.ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_passes_with_room_to_spare(dtype, isa):
    if isa not in library.isas():
        pytest.skip(f"this CPU has no {isa}")
    drive = list(DRIVES)[library.ISAS.index(isa) % 2]
    report = validate_candidate(dtype, DRIVES[drive](CpuExecutor(tiny(dtype)[0], isa)))
    assert report.passed, report.first_divergence
    assert max(figure.share for figure in report.tests) < 0.8


# -- Every figure is needed --------------------------------------------------------------------------------------------------
def noise(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(7))


def at_layer(call):
    return call.layer == AT


def leaping(call):
    """One level of one token is three away from its own."""
    key_fields = quantized_parts(call)["k"]
    codes = key_fields["codes"]
    low = codes[0, 0, 0] & 15
    codes[0, 0, 0] = (codes[0, 0, 0] & 240) | torch.where(low > 7, low - 3, low + 3)
    return {"k": key_fields}


def rescaled(call):
    """One level of one token is the next, and the token's scale three times its own."""
    key_fields = quantized_parts(call)["k"]
    codes, scale = key_fields["codes"], key_fields["scale"]
    codes[0, 0, 0] ^= 1
    scale[0, 0] *= 3
    return {"k": key_fields}


def other_levels(call):
    """A thousandth of K's length of noise, whose scales stay."""
    right = quantized_parts(call)["k"]
    size = call.k.square().mean(-1, keepdim=True).sqrt()
    return {"k": right | {"codes": quantized_parts(call, call.k + 1e-3 * size * noise(call.k))["k"]["codes"]}}


def longer(call):
    """Every scale of V is the next FP16 number."""
    fields = quantized_parts(call)["v"]
    return {"v": fields | {"scale": (fields["scale"].contiguous().view(torch.int16) + 1).view(torch.float16)}}


def longer_and_shorter(call):
    """Every scale of V is the next FP16 number, up and down in turns."""
    fields = quantized_parts(call)["v"]
    step = torch.where(torch.arange(fields["scale"].shape[0]) % 2 > 0, 1, -1).to(torch.int16)
    scale = fields["scale"].contiguous().view(torch.int16)
    return {"v": fields | {"scale": (scale + step.view(-1, *[1] * (scale.ndim - 1))).view(torch.float16)}}


def negated(call):
    """The scale of one token's V has the other sign."""
    fields = quantized_parts(call)["v"]
    fields["scale"][0, 0] *= -1
    return {"v": fields}


def off_by_a_step(call):
    """Each number of a product is off by a step of FP32 of the largest."""
    y = call.again()
    return y + 2.0**-19 * y.abs().max() * noise(y)


def larger(call):
    return (call.again(dtype=torch.float32) * 1.0003).to(call.dtype)


WRONG = {
    "energy": ("linear", off_by_a_step, lambda _: True),
    "gain": ("silu_mul", larger, lambda _: True),
    "slip": ("paged_attention", steeper(1.0005), at_layer),
    "changed": ("store_kv", keeping(other_levels), at_layer),
    "leaps": ("store_kv", keeping(leaping), at_layer),
    "leaps, rescaled": ("store_kv", keeping(rescaled), at_layer),
    "length": ("store_kv", keeping(longer), at_layer),
    "length, both ways": ("store_kv", keeping(longer_and_shorter), at_layer),
}


def with_wrong_ops(*wrong):
    """A BF16 executor whose ops are wrong and whose layers are right."""
    executor = ReferenceExecutor(tiny("bfloat16")[0])
    names = ("name", "config", "device", "supports", "layers", "decode_step", "blocks")
    return SimpleNamespace(**{name: getattr(executor, name) for name in names}, ops=table_with(instead(*wrong)))


def test_a_scale_of_the_other_sign_is_a_fault():
    first = validate_candidate("bfloat16", with_wrong_ops("store_kv", keeping(negated), at_layer), 0).first_divergence
    assert (first.layer, first.stage, first.reason) == (AT, "store_kv.v", "fault")


@pytest.mark.parametrize("kind", WRONG)
def test_each_figure_finds_what_no_other_does(kind, monkeypatch):
    """One figure alone can tell; without it the run passes."""
    dtype = "bfloat16"
    lying = with_wrong_ops(*WRONG[kind])
    first = validate_candidate(dtype, lying, 0).first_divergence
    assert first.reason == "fault", first
    right, name = null.excess, kind.partition(",")[0]
    monkeypatch.setattr(null, "excess", lambda figure, *given: 0.0 if name in figure.kind else right(figure, *given))
    report = validate_candidate(dtype, lying, 0)
    assert report.passed, report.first_divergence


@pytest.mark.parametrize("kind", ["energy", "gain", "slip", "changed", "leaps", "length", "slip by a name"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_a_fault(kind, bad):
    assert excess(Figure("o_proj", -1, kind), bad, [0.1 * run for run in range(RUNS)], rounds=True) == math.inf


@pytest.mark.parametrize("kind", ["gain", "slip a name", "length"])
def test_what_is_nearer_to_the_reference_than_honest_runs_is_right(kind):
    """All of them may be off in one direction; nothing between them and the reference is a fault, and beyond them it is."""
    runs = [10.0 + 1e-3 * run for run in range(RUNS)]
    figure = Figure("attention_mlp", -1, kind)
    assert [excess(figure, candidate, runs, rounds=False) for candidate in (0.0, 5.0)] == [0, 0]
    assert min(excess(figure, candidate, runs, rounds=False) for candidate in (-5.0, 15.0)) > 1


def test_a_figure_of_nothing_is_zero_and_of_something_beside_nothing_infinite():
    for kind in ("gain", "slip a name"):
        assert value(Figure("o_proj", -1, kind), torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])).tolist() == [0, math.inf]


def test_one_number_on_the_other_side_of_a_rounding_point_is_no_gain():
    """Not even the largest of few numbers, where no honest run's falls there; twice as far is one."""
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    gain = Figure("window.k", -1, "gain")
    off = torch.zeros_like(x)
    off.flatten()[x.abs().argmax()] = bounds.STEP[x.dtype] * x.abs().max()
    for factor, out in ((1, False), (-1, False), (3, True)):
        sums = collect_sums(number_figures("window.k", x, x.float() + factor * off))[gain]
        assert (excess(gain, value(gain, sums), [0.0] * RUNS, rounds=True, ties=by_ties(sums)) > 1) == out


# -- Over forwards -----------------------------------------------------------------------------------------------------------
def test_what_no_forward_shows_alone_all_of_them_show():
    """A gain of half of what is allowed in each forward, where honest runs have none on the average."""
    figure, generator = Figure("o_proj", -1, "gain"), torch.Generator().manual_seed(0)
    null = Null()
    for _ in range(100):
        draws = torch.randn(RUNS, 1, generator=generator)
        null.runs = {figure: torch.cat([draws, torch.ones(RUNS, 1), torch.zeros(RUNS, 1)], 1)}
        candidate = {figure: torch.tensor([5.0, 1, 0])}
        assert null.excesses(candidate, rounds=False)[figure] < 1
        null.add(candidate)
    assert null.total_excesses(rounds=False)[figure] > 2


def test_honest_runs_are_another_each():
    """None is the reference's to the last bit, and no two are alike."""
    q = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    runs = honest(reference, 0, RUNS).rms_norm(q, torch.ones(64), 1e-6).view(3, RUNS, 64).transpose(0, 1)
    every = torch.cat([reference.rms_norm(q, torch.ones(64), 1e-6)[None], runs])
    assert len({tuple(run.flatten().tolist()) for run in every}) == len(every)
    torch.testing.assert_close(runs, every[:1].expand(RUNS, -1, -1), rtol=1e-5, atol=0)
