"""Learning from a text: streamed moments against loops over all vectors, and what learning is worth."""

import math
from dataclasses import replace

import pytest
import torch
from small_models import SMALL, random_tokens, resize_config, small_model

from haarkv.engine.plans import SINKS, TAIL
from haarkv.models.rope import inverse_frequencies
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats.stretches import STRETCH, RopeShift
from haarkv.tq_ops.table import with_ops
from haarkv.validation.planning import calibrate
from haarkv.validation.planning.calibrate import learn_model
from haarkv.validation.planning.moments import AttentionVectors, Moments, Sums, over_positions

MODEL = small_model(resize_config(SMALL, num_layers=2))
CONFIG = MODEL.config
WINDOWS = [torch.tensor(random_tokens(CONFIG, 40, seed)) for seed in range(4)]


HEADS, DIM = CONFIG.heads.num_kv_heads, CONFIG.heads.head_dim


@pytest.fixture(scope="module")
def whole():
    return learn_model(MODEL, reference, WINDOWS[:3], WINDOWS[3:])


def seen_by_attention(layer, windows=WINDOWS[:3]):
    """q, k and v of all windows that reach a layer's attention, each [T, heads, D], taken apart from the code under test."""
    vectors = {"q": [], "k": [], "v": []}

    def store_kv(k, v, at):
        if at.layer == layer:
            vectors["k"].append(k)
            vectors["v"].append(v)
        reference.store_kv(k, v, at)

    def paged_attention(q, at, scale):
        if at.layer == layer:
            vectors["q"].append(q)
        return reference.paged_attention(q, at, scale)

    ops = with_ops(reference, {"store_kv": store_kv, "paged_attention": paged_attention})
    for window in windows:
        hidden = MODEL.embed(window)
        for index in range(layer + 1):
            hidden = calibrate._run(MODEL, ops, index, hidden)
    return {name: torch.cat(parts).double() for name, parts in vectors.items()}


def attention_vectors(k, q):
    """A window of keys and queries [T, heads, D]."""
    window = AttentionVectors()
    window.add_kv(k, k)
    window.add_q(q)
    return window


@pytest.fixture
def counts_alike(monkeypatch):
    """All keys of a window count alike."""
    monkeypatch.setattr(
        AttentionVectors, "key_weights", lambda window, _: torch.ones(len(window._k[0]), window.tokens).double()
    )


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.usefixtures("counts_alike")
def test_moments_are_those_of_all_vectors_at_once(layer):
    """Window by window and in float64; means and spreads by loops over heads."""
    vectors, sums = seen_by_attention(layer), Sums(HEADS, DIM)
    for begin, end in ((0, 40), (40, 41), (41, 120)):
        sums.add(attention_vectors(vectors["k"][begin:end], vectors["q"][begin:end]))
    group = CONFIG.heads.num_heads // HEADS
    for head in range(HEADS):
        q = vectors["q"][:, head * group : (head + 1) * group].flatten(0, 1)
        torch.testing.assert_close(sums.metric[head], q.T @ q / len(q))
        k = vectors["k"][:, head]
        torch.testing.assert_close(sums.k.mean[head], k.mean(0))
        torch.testing.assert_close(sums.spread(sums.k.mean)[head], (k - k.mean(0)).T @ (k - k.mean(0)) / len(k))


def test_keys_count_by_what_attention_reads_of_them_as_they_are_stored():
    """A tenth in equal parts, the rest by attention, but not to the first tokens and a query's newest, stored in BF16."""
    generator, tokens = torch.Generator().manual_seed(0), 200
    k, q = (torch.randn(tokens, heads, 16, generator=generator, dtype=torch.float64) for heads in (2, 4))
    k[50] *= 6
    expected = torch.zeros(2, tokens, dtype=torch.float64)
    for head in range(4):
        for place in range(tokens):
            attention = ((k[: place + 1, head // 2] @ q[place, head]) * 0.3).softmax(0)
            last = place - TAIL + 1
            if last > SINKS:
                expected[head // 2, SINKS:last] += attention[SINKS:last]
    expected *= 0.9 / expected.mean(1, keepdim=True)
    expected += 0.1
    weights = attention_vectors(k, q).key_weights(0.3)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    # In a window that every query reads in BF16, all count alike.
    assert (attention_vectors(k[:100], q[:100]).key_weights(0.3) == 1).all()


def test_held_back_windows_are_judged_and_not_learned_from(whole):
    alone = learn_model(MODEL, reference, WINDOWS[:3], [])
    for ours, theirs in zip(whole.layers, alone.layers, strict=True):
        assert torch.equal(ours.forward, theirs.forward)
        assert torch.equal(ours.back, theirs.back)
    assert all(math.isnan(fit) for fit in alone.fits)
    # 120 tokens are few for 128 coordinates: what was not seen costs more. The same windows cost the same.
    assert all(fit > 1.1 for fit in whole.fits), whole.fits
    same = learn_model(MODEL, reference, WINDOWS[:3], WINDOWS[:3])
    assert all(fit == pytest.approx(1.0) for fit in same.fits)


def test_a_model_that_is_not_finite_is_named_by_its_layer():
    weights = MODEL.weights.layers[1].map(lambda name, x: x * torch.nan if name == "q_norm" else x)
    broken_model = replace(MODEL, weights=replace(MODEL.weights, layers=(MODEL.weights.layers[0], weights)))
    with pytest.raises(NonFiniteError, match="layer 1: "):
        learn_model(broken_model, reference, WINDOWS[:1], [])


@pytest.mark.parametrize("rotary_dims", [128, 64])
def test_moments_over_positions_are_those_of_vectors_that_stand_there(rotary_dims):
    """By turning every vector to every place; numbers that RoPE leaves alone stay."""
    x = torch.randn(2, 50, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    inv_freq, shifts, half = (
        1e4 ** -(torch.arange(rotary_dims // 2) / (rotary_dims // 2)),
        torch.tensor([0.0, 5.0, 700.0]),
        rotary_dims // 2,
    )
    once, everywhere = Moments.empty(2, 128), Moments.empty(2, 128)
    once.add(x)
    for shift in shifts:
        cos, sin = (shift * inv_freq.double()).cos(), (shift * inv_freq.double()).sin()
        a, b = x[..., :half], x[..., half:rotary_dims]
        everywhere.add(torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rotary_dims:]], dim=-1))
    moments = over_positions(once, inv_freq, shifts)
    torch.testing.assert_close(moments.second, everywhere.second / 3)
    torch.testing.assert_close(moments.mean, everywhere.mean)


@pytest.mark.usefixtures("counts_alike")
def test_a_window_longer_than_a_stretch_counts_stretch_by_stretch():
    """A text and the same again one stretch later: the moments of the text, and as many lengths."""
    turns = RopeShift(tuple(inverse_frequencies(CONFIG.common.attention.rope).tolist()))
    generator = torch.Generator().manual_seed(0)
    k, q = (torch.randn(STRETCH, heads, DIM, generator=generator) for heads in (HEADS, CONFIG.heads.num_heads))
    again = [torch.cat([x, turns.redo(x.transpose(0, 1), torch.full((STRETCH,), STRETCH)).transpose(0, 1)]) for x in (k, q)]
    once, twice = Sums(HEADS, DIM), Sums(HEADS, DIM)
    once.add(attention_vectors(k, q), turns)
    twice.add(attention_vectors(*again), turns)
    assert twice.tokens == 2 * once.tokens
    torch.testing.assert_close(twice.metric, once.metric, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(twice.spread(twice.k.mean), once.spread(once.k.mean), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(twice.k.mean, once.k.mean, rtol=1e-4, atol=1e-5)


def at_its_place(x, inv_freq):
    """Vectors [1, T, D], each turned as RoPE turns it at its place."""
    angles = torch.arange(x.shape[1]).unsqueeze(1) * inv_freq
    z = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], dim=-1)


@pytest.mark.usefixtures("counts_alike")
def test_every_place_of_a_stretch_counts_alike():
    """Windows of unequal length in which all keys say the same: their moments are those of that key at all places."""
    inv_freq, context = 1e4 ** -(torch.arange(8, dtype=torch.float64) / 8), 240
    key = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums, all_places = Sums(1, 16), Moments.empty(1, 16)
    for length in (60, 24, 240):
        keys = at_its_place(key.expand(1, length, 16), inv_freq).transpose(0, 1)
        sums.add(attention_vectors(keys, keys), RopeShift(tuple(inv_freq.tolist())), context)
    all_places.add(at_its_place(key.expand(1, context, 16), inv_freq))
    assert sums.tokens == 60 + 24 + 240
    for moments in (sums.q, sums.k):
        torch.testing.assert_close(moments.mean, all_places.mean)
        torch.testing.assert_close(moments.spread(moments.mean), all_places.spread(all_places.mean))


def test_every_window_is_laid_through_the_stretch():
    """A model's windows, one of them shorter, each by its own length."""
    windows, context = [WINDOWS[0], WINDOWS[1][:16], WINDOWS[2]], CONFIG.max_position_embeddings
    turns = RopeShift(tuple(inverse_frequencies(CONFIG.common.attention.rope).tolist()))
    vectors, sums, begin = seen_by_attention(1, windows), Sums(HEADS, DIM), 0
    for window in windows:
        span = slice(begin, begin := begin + len(window))
        sums.add(attention_vectors(vectors["k"][span], vectors["q"][span]), turns, context)
    _, basis = learn_model(MODEL, reference, windows, ()).layers
    expected = calibrate.learn_basis(sums, 1, turns)
    assert all(torch.equal(getattr(basis, name), getattr(expected, name)) for name in vars(basis))
