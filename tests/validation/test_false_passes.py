"""The validator is not taken in: stale caches, zeros, one's own input, copies of a buffer, long tokens and long residuals."""

from dataclasses import replace

import pytest
import torch
from small_models import CONFIGS, KV_FORMATS, SMALL, new_cache, new_paging, small_model
from validation_reports import MODEL, PROMPTS, Whole, where
from validation_reports import validation_report as run

import haarkv.validation.layers.runner as runner
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.validation.faults.base import table_with
from haarkv.validation.layers.parts import poison


def test_a_stale_cache_does_not_match():
    """Right K and V from an earlier run are in the slots; an executor that writes nothing must not find them there."""

    def layers(hidden, span, batch, cache):
        scratch = new_cache(SMALL, num_blocks=cache.num_blocks, block_size=cache.block_size)
        return ReferenceExecutor(MODEL).layers(hidden, span, batch, scratch)

    candidate = Whole()
    candidate.layers = layers
    assert where(run(candidate, steps=0)) == (0, "store_kv.k")
    candidate.layers = lambda hidden, *_: torch.zeros_like(hidden)
    assert where(run(candidate, steps=0)) == (0, "store_kv.k")


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_poison_differs_from_the_right_values_in_every_coordinate(kv):
    cache = new_cache(SMALL, kv)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 5, SMALL.heads.num_kv_heads, SMALL.heads.head_dim, generator=generator)
    v[2, 0, :5] = 0
    v[3, 1] = 0
    paging = new_paging(cache)
    bad = poison(cache, 1, (k, v), paging.batch([paging.add()], [len(k)]))
    for kv_format, side, x in ((cache.kv[1].k.kv_format, "k", k), (cache.kv[1].v.kv_format, "v", v)):
        right = kv_format.quantize(x, 1)
        levels = kv_format.levels(right)
        if levels is None:
            assert (right["data"] != bad[side]["data"]).all()
        else:
            differs = levels != kv_format.levels(bad[side])
            assert differs[x.abs().sum(-1) > 0].float().mean() > 0.95
            assert differs.any(-1).all()


def test_a_context_of_one_token_proves_nothing():
    with pytest.raises(InputError, match="one token"):
        run(ReferenceExecutor(MODEL), prompts=[[1], [2]], steps=0)
    assert run(ReferenceExecutor(MODEL), prompts=[[1], [2]], steps=1).passed


def test_zeros_in_the_reference_prove_nothing():
    embedding = MODEL.weights.embedding.clone()
    embedding[PROMPTS[1][1]] = 0
    model = replace(MODEL, weights=replace(MODEL.weights, embedding=embedding))
    with pytest.raises(InputError, match="zero at token"):
        run(ReferenceExecutor(model), model)


def test_a_reference_whose_values_are_zero_or_nan_is_refused():
    def zeros(q, *_):
        return torch.zeros_like(q)

    silent = table_with({"silu_mul": lambda g, u, d: (g * 0).to(d)})
    # Attention and MLP switched off leave the embedding: not zero, and so it can be compared with.
    still = ReferenceExecutor(MODEL, silent)
    assert run(still, trusted=still).passed
    v_zero = table_with({"store_kv": lambda k, v, at: reference.store_kv(k, v * 0, at), "paged_attention": zeros})
    assert where(run(ReferenceExecutor(MODEL, v_zero))) == (0, "store_kv.v")
    zero_table = table_with({"linear": lambda x, w: reference.linear(x, w) * 0})
    with pytest.raises(InputError, match="K of layer 0 is zero"):
        run(ReferenceExecutor(MODEL), trusted=ReferenceExecutor(MODEL, zero_table))
    nan = table_with({"silu_mul": lambda g, u, d: (g * torch.nan).to(d)})
    with pytest.raises(InputError, match="not finite"):
        run(ReferenceExecutor(MODEL), trusted=ReferenceExecutor(MODEL, nan))


def test_an_executor_that_overwrites_its_input_fails_and_does_not_reach_the_references():
    report = run(Whole(layers=lambda out, hidden, *_: hidden.copy_(out)), steps=0)
    assert where(report) == (0, "call")
    # Its numbers are right: what it was given were copies.
    assert all(row.max_abs == 0 for row in report.rows)


def test_an_executor_that_reuses_one_buffer_is_compared_by_what_was_in_it():
    buffer = {}
    reusing = Whole(layers=lambda out, *_: buffer.setdefault(out.shape, torch.empty_like(out)).copy_(out))
    assert run(reusing).passed


def test_an_executor_that_writes_to_the_weights_fails():
    model = small_model(SMALL)
    unused = next(token for token in range(SMALL.vocab_size) if token not in {*PROMPTS[0], *PROMPTS[1]})

    def spoils(out, *_):
        model.weights.embedding[unused] += 1
        return out

    assert run(Whole(model), model, steps=0).passed
    assert where(run(Whole(model, layers=spoils), model, steps=0)) == (None, "weights")


def test_a_long_token_does_not_hide_a_short_one():
    """Massive activations: an error of 2 % in an ordinary token is nothing beside a token a thousand times as long."""
    embedding = MODEL.weights.embedding.clone()
    embedding[PROMPTS[0][0]] *= 3000
    model = replace(MODEL, weights=replace(MODEL.weights, embedding=embedding))

    def layers(out, _hidden, span, *_):
        out = out.clone()
        out[2] *= 1 + 2e-2 * (span[0] == 1)
        return out

    assert run(Whole(model), model, steps=0).passed
    report = run(Whole(model, layers=layers), model, steps=0)
    assert where(report) == (1, "attention_mlp")
    assert next(r for r in report.rows if r.layer == 1 and r.mode == "teacher-forced").rel_l2 > 1e-2


def test_a_layer_that_is_left_out_of_a_very_long_residual_is_found():
    big = replace(MODEL, weights=replace(MODEL.weights, embedding=MODEL.weights.embedding * 3e6))
    report = run(Whole(big, layers=lambda _, hidden, *more: hidden), big, steps=0)
    assert where(report)[1] == "attention_mlp"
    assert report.rows[0].rel_l2 < 1e-5


@pytest.mark.parametrize("spoil", [lambda out: out.roll(1, -1), lambda out: out * 1.001], ids=["rolled", "a little too long"])
def test_what_is_wrong_when_left_to_itself_is_named(spoil):
    """Right whenever it is fed the reference's input, wrong when left to itself, and its whole forward does the same."""
    calls, last = [], {}

    def layers(out, _hidden, span, *_):
        calls.append(span[0])
        if span[0] == SMALL.num_layers - 1 and calls.count(span[0]) >= 2:
            last["hidden"] = out = spoil(out)
        return out

    def forward(*_):
        return last["hidden"]

    report = run(Whole(layers=layers, forward=forward), steps=0)
    assert where(report) == (SMALL.num_layers - 1, "free_running")
    assert all(row.passed for row in report.rows if row.mode == "teacher-forced")


def test_nothing_compared_is_not_passed(monkeypatch):
    monkeypatch.setattr(runner.Validation, "_row", lambda *_: None)
    assert not run(ReferenceExecutor(MODEL)).passed


def test_what_cannot_be_run_is_refused():
    class Picky(ReferenceExecutor):
        def supports(self, config, plan):
            return "it knows no 4 bits" if plan.k(0).name == "tq4" else None

    with pytest.raises(InputError, match="4 bits"):
        run(Picky(MODEL))
    with pytest.raises(InputError, match="4 bits"):
        run(ReferenceExecutor(MODEL), trusted=Picky(MODEL))
    assert run(Picky(MODEL), kv="bf16").passed
    with pytest.raises(InputError, match="another model"):
        run(ReferenceExecutor(small_model(CONFIGS["mha_d64"])))
    for prompts, steps, word in ([[], 1, "token"], [[[1], []], 1, "token"], [[[1]], -1, "steps"], [[[1] * 512], 1, "context"]):
        with pytest.raises(InputError, match=word):
            run(ReferenceExecutor(MODEL), prompts=prompts, steps=steps)
