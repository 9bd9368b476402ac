"""Learning from a text: streamed moments against loops over all vectors, resumption, and what learning is worth."""

import math
from dataclasses import replace

import pytest
import torch
from small_models import SMALL, random_tokens, resized, small_model

from haarkv.codebooks.learned import expected_cost
from haarkv.models.rope import inverse_frequencies
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.kv.calibration_file import calibration_of
from haarkv.tq_ops.table import with_ops
from haarkv.validation.planning import calibrate
from haarkv.validation.planning.calibrate import learn_model, resumed, saved
from haarkv.validation.planning.candidates import learned_anchors, places, predicted
from haarkv.validation.planning.moments import Moments, Sums, metric_of_values, over_positions, recording

MODEL = small_model(resized(SMALL, num_layers=2))
CONFIG = MODEL.config
WINDOWS = [torch.tensor(random_tokens(CONFIG, 40, seed)) for seed in range(4)]
RUN = {"model": "m", "text": "t"}


def metric_of(layer):
    return metric_of_values(MODEL.weights.layers[layer]["o_proj"], CONFIG.heads.num_kv_heads, CONFIG.heads.head_dim)


@pytest.fixture(scope="module")
def whole():
    return learn_model(MODEL, reference, WINDOWS[:3], WINDOWS[3:])


def seen_by_attention(layer, windows=WINDOWS[:3]):
    """q, k and v of all windows that reach a layer's attention, each [T, heads, D], taken apart from the code under test."""
    found = {"q": [], "k": [], "v": []}

    def store_kv(k, v, cache, index, batch):
        if index == layer:
            found["k"].append(k)
            found["v"].append(v)
        reference.store_kv(k, v, cache, index, batch)

    def paged_attention(q, cache, index, batch, scale):
        if index == layer:
            found["q"].append(q)
        return reference.paged_attention(q, cache, index, batch, scale)

    ops = with_ops(reference, {"store_kv": store_kv, "paged_attention": paged_attention})
    for window in windows:
        hidden = MODEL.embed(window)
        for index in range(layer + 1):
            hidden = calibrate._run(MODEL, ops, index, hidden)
    return {name: torch.cat(parts).double() for name, parts in found.items()}


@pytest.mark.parametrize("layer", [0, 1])
def test_moments_are_those_of_all_vectors_at_once(layer):
    """In one pass and in float64, of whatever pieces; means and spreads by loops over heads."""
    seen, sums = seen_by_attention(layer), Sums(metric_of(layer))
    for begin, end in ((0, 1), (1, 50), (50, 120)):
        sums.add_kv(seen["k"][begin:end], seen["v"][begin:end])
        sums.add_q(seen["q"][begin:end])
    group = CONFIG.heads.num_heads // CONFIG.heads.num_kv_heads
    o_proj = MODEL.weights.layers[layer]["o_proj"].double()
    for head in range(CONFIG.heads.num_kv_heads):
        columns = [o_proj[:, (head * group + g) * 128 : (head * group + g + 1) * 128] for g in range(group)]
        metric_v = sum(w.T @ w for w in columns)
        torch.testing.assert_close(sums.metric_v[head], metric_v)
        q = seen["q"][:, head * group : (head + 1) * group].flatten(0, 1)
        torch.testing.assert_close(sums.metric_k[head], q.T @ q / len(q))
        k, v = seen["k"][:, head], seen["v"][:, head]
        torch.testing.assert_close(sums.k.mean[head], k.mean(0))
        torch.testing.assert_close(sums.k.spread(sums.k.mean)[head], torch.cov(k.T, correction=0))
        weight = 1 / ((v @ metric_v) * v).sum(-1)
        mean = (weight.unsqueeze(1) * v).sum(0) / weight.sum()
        torch.testing.assert_close(sums.v.mean[head], mean)
        centred = v - mean
        torch.testing.assert_close(
            sums.v.spread(sums.v.mean)[head], (centred * weight.unsqueeze(1)).T @ centred / weight.sum()
        )


def test_a_spread_around_another_mean():
    moments, x = Moments.empty(1, 4), torch.randn(1, 30, 4, dtype=torch.float64)
    moments.add(x)
    other = torch.randn(1, 4, dtype=torch.float64)
    centred = x - other.unsqueeze(1)
    torch.testing.assert_close(moments.spread(other), centred.mT @ centred / 30)


def test_recording_changes_nothing():
    hidden, sums = MODEL.embed(WINDOWS[0]), Sums(metric_of(0))
    plain, recorded = (calibrate._run(MODEL, ops, 0, hidden) for ops in (reference, recording(reference, sums)))
    assert torch.equal(plain, recorded)
    assert sums.k.weight.tolist() == [40.0] * CONFIG.heads.num_kv_heads
    assert sums.q.weight.tolist() == [40.0 * CONFIG.heads.num_heads / CONFIG.heads.num_kv_heads] * CONFIG.heads.num_kv_heads


def test_learned_formats_lose_less_than_tq4_at_the_same_bytes(whole):
    """The error that counts, of attention's logits, on the vectors that were learned from."""
    calibration, seen = calibration_of(*zip(*whole.layers, strict=True)), seen_by_attention(1)
    k, q = seen["k"].float().transpose(0, 1), seen["q"]
    costs = {}
    for kv_format in (calibration.format("k", 128), formats.get("tq4")):
        error = (kv_format.dequantize(kv_format.quantize(k, 1), 1) - k).double()
        by_head = q.view(len(q), CONFIG.heads.num_kv_heads, -1, 128).transpose(0, 1).flatten(1, 2)
        costs[kv_format.name] = float((by_head @ error.mT).square().mean())
    assert costs["lr128"] < 0.6 * costs["tq4"]


def test_held_back_windows_are_judged_and_not_learned_from(whole):
    alone = learn_model(MODEL, reference, WINDOWS[:3], [])
    for (k, v), (k2, v2) in zip(whole.layers, alone.layers, strict=True):
        assert torch.equal(k.forward, k2.forward)
        assert torch.equal(v.back, v2.back)
    assert all(math.isnan(fit) for pair in alone.fits for fit in pair)
    # 120 tokens are few for 128 coordinates: what was not seen costs far more. The same windows cost the same.
    assert all(fit > 1.5 for pair in whole.fits for fit in pair)
    same = learn_model(MODEL, reference, WINDOWS[:3], WINDOWS[:3])
    assert all(fit == pytest.approx(1.0) for pair in same.fits for fit in pair)


def test_an_interrupted_calibration_goes_on_to_the_same_result(whole):
    kept = []

    def save(state):
        kept.append(saved(state, RUN))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn_model(MODEL, reference, WINDOWS[:3], WINDOWS[3:], save=save)
    steps = []
    state = resumed(kept[0], RUN)
    assert len(state.layers) == 1
    again = learn_model(MODEL, reference, WINDOWS[:3], WINDOWS[3:], learning=state, on_step=lambda *step: steps.append(step))
    assert steps == [("layer 2 of 2", 40)] * 4
    assert again.fits == whole.fits
    for pair, other in zip(again.layers, whole.layers, strict=True):
        assert all(
            torch.equal(getattr(a, name), getattr(b, name)) for a, b in zip(pair, other, strict=True) for name in vars(a)
        )


@pytest.mark.parametrize(
    ("content", "run", "words"),
    [
        (b"", RUN, "no half-done calibration"),
        (b"abcdefghijk", RUN, "no half-done calibration"),
        (None, {**RUN, "text": "other"}, "begun with another text"),
    ],
)
def test_what_cannot_be_resumed_is_refused(whole, content, run, words):
    with pytest.raises(InputError, match=f"--resume: .*{words}"):
        resumed(saved(whole, RUN) if content is None else content, run)


def test_any_flipped_bit_of_a_half_done_calibration_is_refused(whole):
    content = saved(whole, RUN)
    resumed(content, RUN)
    for place in range(8, len(content), len(content) // 60):
        damaged = bytearray(content)
        damaged[place] ^= 4
        with pytest.raises(InputError, match=r"^--resume: the file is (damaged|no half-done|of version)"):
            resumed(bytes(damaged), RUN)


def test_a_model_that_is_not_finite_is_named_by_its_layer():
    weights = MODEL.weights.layers[1].changed(lambda name, x: x * torch.nan if name == "q_norm" else x)
    broken = replace(MODEL, weights=replace(MODEL.weights, layers=(MODEL.weights.layers[0], weights)))
    with pytest.raises(NonFiniteError, match="layer 1: "):
        learn_model(broken, reference, WINDOWS[:1], [])


# -- What the planner predicts from a calibration -------------------------------------------------------------------------
def test_costs_of_other_numbers_of_nibbles_follow_the_measured_ones(whole):
    calibration = calibration_of(*zip(*whole.layers, strict=True))
    assert learned_anchors(128) == ("lr64", "lr128")
    assert learned_anchors(32) == ("lr16", "lr32")
    costs = {place: {"lr64": 0.5, "lr128": 0.25, "bf16": 0.0} for place in places(CONFIG)}
    found = predicted(costs, calibration)
    for (layer, side), row in found.items():
        weights = getattr(calibration, side)[layer].weights

        def ratio(a, b, weights=weights):
            return float(expected_cost(weights, a).mean() / expected_cost(weights, b).mean())

        assert row.keys() == {"bf16", *(f"lr{n}" for n in range(32, 257, 16))}
        assert (row["bf16"], row["lr64"], row["lr128"]) == (0.0, 0.5, 0.25)
        assert row["lr48"] == pytest.approx(0.5 * ratio(48, 64))
        assert row["lr256"] == pytest.approx(0.25 * ratio(256, 128))


@pytest.mark.parametrize("turned", [128, 64])
def test_moments_over_positions_are_those_of_vectors_that_stand_there(turned):
    """By turning every vector to every place; numbers that RoPE leaves alone stay."""
    x = torch.randn(2, 50, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    inv_freq, shifts, half = 1e4 ** -(torch.arange(turned // 2) / (turned // 2)), torch.tensor([0.0, 5.0, 700.0]), turned // 2
    once, everywhere = Moments.empty(2, 128), Moments.empty(2, 128)
    once.add(x)
    for shift in shifts:
        cos, sin = (shift * inv_freq.double()).cos(), (shift * inv_freq.double()).sin()
        a, b = x[..., :half], x[..., half:turned]
        everywhere.add(torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., turned:]], dim=-1))
    found = over_positions(once, inv_freq, shifts)
    torch.testing.assert_close(found.second, everywhere.second / 3)
    torch.testing.assert_close(found.mean, everywhere.mean)


def test_what_is_learned_for_a_context_serves_keys_at_its_end():
    """Windows of 40 tokens; keys of the same text 1,000 tokens later cost more, but not if that was asked for."""
    inv_freq, shift = inverse_frequencies(CONFIG.common.attention.rope), 1000
    cost = {}
    for context in (40, 1040):
        (basis, _), *_ = learn_model(MODEL, reference, WINDOWS[:3], (), context=context).layers
        late = Sums(metric_of(0))
        for part in ("q", "k"):
            late_part = getattr(late, part)
            heads, x = CONFIG.heads.num_kv_heads, seen_by_attention(0)[part]
            late_part.add(x.view(len(x), heads, -1, CONFIG.heads.head_dim).transpose(0, 1).flatten(1, 2))
            setattr(late, part, over_positions(late_part, inv_freq, torch.tensor([float(shift)])))
        spread = basis.forward.double().mT @ late.k.spread(basis.mean.double()) @ basis.forward.double()
        back = basis.back.double()
        metric = (back @ late.metric_k @ back.mT).diagonal(dim1=-2, dim2=-1)
        cost[context] = float((metric * spread.diagonal(dim1=-2, dim2=-1) / basis.weights).mean())
    assert cost[40] > 2 * cost[1040]


def at_its_place(x, inv_freq):
    """Vectors [1, T, D], each turned as RoPE turns it at its place."""
    angles = torch.arange(x.shape[1]).unsqueeze(1) * inv_freq
    z = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], dim=-1)


def test_every_place_of_a_context_counts_alike():
    """Windows of unequal length in which all keys say the same: their moments are those of that key at all places."""
    inv_freq, context = 1e4 ** -(torch.arange(8, dtype=torch.float64) / 8), 240
    key = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums, all_places = Sums(torch.eye(16).double()[None]), Moments.empty(1, 16)
    for length in (60, 24, 240):
        window, keys = Sums(sums.metric_v), at_its_place(key.expand(1, length, 16), inv_freq)
        window.add_kv(keys.transpose(0, 1), keys.transpose(0, 1))
        window.add_q(keys.transpose(0, 1))
        sums.add(window.over_context(inv_freq, context))
    all_places.add(at_its_place(key.expand(1, context, 16), inv_freq))
    assert sums.tokens == 60 + 24 + 240
    for found in (sums.q, sums.k):
        torch.testing.assert_close(found.mean, all_places.mean)
        torch.testing.assert_close(found.spread(found.mean), all_places.spread(all_places.mean))


def test_every_window_is_laid_through_the_context():
    """A model's windows, one of them shorter, each by its own length."""
    windows, context = [WINDOWS[0], WINDOWS[1][:16], WINDOWS[2]], 80
    seen, sums, begin = seen_by_attention(0, windows), Sums(metric_of(0)), 0
    for window in windows:
        own, here = Sums(metric_of(0)), slice(begin, begin := begin + len(window))
        own.add_kv(seen["k"][here], seen["v"][here])
        own.add_q(seen["q"][here])
        sums.add(own.over_context(inverse_frequencies(CONFIG.common.attention.rope), context))
    pair, *_ = learn_model(MODEL, reference, windows, (), context=context).layers
    for found, expected in zip(pair, calibrate.bases_of(sums, 0), strict=True):
        assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in vars(found))
