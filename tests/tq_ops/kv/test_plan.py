"""Formats by layer, tokens that stay in BF16, keys that are stored in groups: one cache holds them all."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import (
    CONFIGS,
    SMALL,
    cache_tensors,
    decode,
    new_cache,
    new_paging,
    prefill,
    random_tokens,
    resize_config,
    small_model,
)

from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats import NonFiniteVectorError
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.batch import CacheFullError, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache, cache_bytes, tokens_that_fit
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import WINDOW_ROOM, KVShape
from haarkv.validation.layers.runner import validate

MODEL = small_model()
HEADS, KV_HEADS, DIM, LAYER = 4, 2, 64, 1
SPECS = {
    "tail": KVSpec("tq4", tail=5),
    "tail and sinks": KVSpec("k=q8_0,v=tq4", tail=9, sink=3),
    "sinks alone": KVSpec("tq2", sink=4),
    "one token": KVSpec("tq3", tail=1),
    "keys in groups": KVSpec("kivi2"),
    "keys in groups, a longer tail and sinks": KVSpec("k=kivi4,v=kivi2_g64", tail=40, sink=2),
    "values in BF16": KVSpec("k=tq2,v=bf16", tail=7),
}
SHAPE = ModelShape.uniform(3, 2, 128, 48, 61)


# -- The rule, one query and one key at a time -------------------------------------------------------------------------------
def packed_tokens(group, tail, tokens):
    """Tokens that the newest of so many sees packed, counted as they come."""
    packed = 0
    while tokens - packed > tail:
        packed += group
    return packed


def as_seen(plan, kv_format, x, query):
    """Vectors [query + 1, D] float64 of one head as a query sees them; x [n, D] fp32."""
    if not kv_format.lossy:
        return kv_format.dequantize(kv_format.quantize(x[: query + 1], LAYER), LAYER).double()
    visible_rows = x[: query + 1].bfloat16().double()
    group, sink = kv_format.group_tokens, plan.sink
    packed = packed_tokens(group, plan.tail(kv_format), query + 1)
    for begin in range(0, packed, group):
        # What waits for its group to be full waits in BF16.
        vectors = x[begin] if group == 1 else x[begin : begin + group].bfloat16()
        dequantized = kv_format.dequantize(kv_format.quantize(vectors.unsqueeze(0), LAYER), LAYER)[0].double()
        for offset, vector in enumerate(dequantized.view(group, -1)):
            if begin + offset >= sink:
                visible_rows[begin + offset] = vector
    return visible_rows


def expected_attention(plan, q, k, v, queries=slice(None)):
    """One sequence, every query by itself: [n, Hq, D] float64."""
    out = np.empty(q.shape)
    for token in range(len(q))[queries]:
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            keys = as_seen(plan, plan.k(LAYER), k[:, group], token)
            values = as_seen(plan, plan.v(LAYER), v[:, group], token)
            scores = (keys @ q[token, head].double()) * q.shape[-1] ** -0.5
            out[token, head] = torch.softmax(scores, 0) @ values
    return out[queries]


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_attention(plan, lengths, chunk, order=(4, 0, 5, 2, 1, 3), leftovers=False, dim=DIM, block=64):
    """Every sequence of the batch in chunks, side by side: attention [n, Hq, D] of each, its q, k and v."""
    cache = PagedKVCache(plan, KVShape(KV_HEADS, dim), num_blocks=6, num_rows=3, chunk=16, block_size=block)
    paging = PagedSequences(6, block, order, num_rows=3)
    if leftovers:
        for window in (w for w in cache.kv[LAYER].windows if w):
            window.vectors.fill_(torch.inf)
    sequences = [paging.add() for _ in lengths]
    qkv = [[normal(n, heads, dim, seed=10 * s + i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
             for s, n in enumerate(lengths)]  # fmt: skip
    out = [[] for _ in lengths]
    for begin in range(0, max(lengths), chunk):
        rows = [row for row, n in enumerate(lengths) if begin < n]
        parts = [[x[begin : begin + chunk] for x in qkv[row]] for row in rows]
        batch = paging.batch([sequences[row] for row in rows], [len(part[0]) for part in parts])
        q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
        reference.store_kv(k, v, cache.view(LAYER, batch))
        outputs = reference.paged_attention(q, cache.view(LAYER, batch), dim**-0.5)
        for row, piece in zip(rows, outputs.split([len(part[0]) for part in parts]), strict=True):
            out[row].append(piece)
    return [torch.cat(pieces) for pieces in out], qkv


def of_every_format():
    """A tail and sinks, and three groups and a half of keys: so each format is seen packed, in BF16, and as a sink."""
    for name in formats.names():
        group = formats.get(name).group_tokens
        length = max(24, 3 * group + group // 2)
        # The last query alone, whose keys and values the oracle restores one by one.
        yield pytest.param(KVSpec(name, tail=group + 2, sink=2), [length], -length, {"dim": 128, "block": 128}, id=name)


@pytest.mark.parametrize(
    ("spec", "lengths", "step", "sizes"),
    # Every ninth query, back from the last: each stands elsewhere in its chunk and its group.
    [*(pytest.param(spec, [75, 33], -9, {}, id=name) for name, spec in SPECS.items()), *of_every_format()],
)
def test_each_query_sees_what_the_rule_says(spec, lengths, step, sizes):
    plan, queries = spec.plan(LAYER + 1), slice(None, None, step)
    outputs, qkv = run_attention(plan, lengths, 16, **sizes)
    for out, (q, k, v) in zip(outputs, qkv, strict=True):
        np.testing.assert_allclose(out.numpy()[queries], expected_attention(plan, q, k, v, queries), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["tail and sinks", "keys in groups, a longer tail and sinks"])
def test_chunks_blocks_and_leftovers_change_nothing(name):
    plan = SPECS[name].plan(LAYER + 1)
    (expected, other), _ = run_attention(plan, [75, 33], 16)
    for kwargs in ({"chunk": 1}, {"chunk": 5}, {"chunk": 16, "order": (0, 1, 2, 3, 4, 5)}, {"chunk": 16, "leftovers": True}):
        (out, second), _ = run_attention(plan, [75, 33], **kwargs)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(second, other, rtol=0, atol=2e-6)
    (alone,), _ = run_attention(plan, [75], 16)
    torch.testing.assert_close(alone, expected, rtol=0, atol=2e-6)


# -- Whole forwards ----------------------------------------------------------------------------------------------------------
def spec_logits(spec, tokens, steps, chunk=64):
    cache = new_cache(SMALL, spec, num_blocks=3, block_size=32)
    paging, executor = new_paging(cache), ReferenceExecutor(MODEL)
    sequence = paging.add()
    prompt = tokens[: len(tokens) - steps]
    for begin in range(0, len(prompt), chunk):
        out = [prefill(executor, cache, paging, [sequence], [prompt[begin : begin + chunk]])]
    out += [decode(executor, cache, paging, [sequence], [token]) for token in tokens[len(prompt) :]]
    return torch.cat(out)


def test_a_tail_as_long_as_the_text_is_a_bf16_cache():
    tokens = random_tokens(SMALL, 50, 1)
    expected = spec_logits("bf16", tokens, 3)
    assert torch.equal(spec_logits(KVSpec("tq2", tail=50), tokens, 3), expected)
    assert torch.equal(spec_logits(KVSpec("tq2", sink=50), tokens, 3), expected)
    assert torch.equal(spec_logits(KVSpec("tq2", skip_layers=(0, 1, -1)), tokens, 3), expected)
    shorter = spec_logits(KVSpec("tq2", tail=40), tokens, 3)
    assert not torch.allclose(shorter, expected, atol=1e-3)


def test_layers_have_formats_of_their_own():
    spec = KVSpec("tq4", layers={0: "k=tq8,v=tq3"}, skip_layers=(-1,))
    cache = new_cache(SMALL, spec)
    assert [f.name for pair in cache.plan.layers for f in pair] == ["tq8", "tq3", "tq4", "tq4", "bf16", "bf16"]
    tokens = random_tokens(SMALL, 20, 2)
    mixed_logits = spec_logits(spec, tokens, 2)
    assert not torch.allclose(mixed_logits, spec_logits("tq4", tokens, 2), atol=1e-4)
    assert torch.equal(mixed_logits, spec_logits(KVSpec("bf16", layers={0: "k=tq8,v=tq3", 1: "tq4"}), tokens, 2))
    report = validate(ReferenceExecutor(MODEL), ReferenceExecutor(MODEL), MODEL, [tokens], 1, cache.plan)
    assert report.passed
    assert report.kv == "k=tq8,v=tq3; layer 1: tq4; layer 2: bf16"


# -- What it takes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("config", CONFIGS)
def test_bytes_are_what_is_allocated(name, config):
    config = CONFIGS[config]
    plan = replace(SPECS[name], skip_layers=(0,)).plan(config.num_layers)
    cache = PagedKVCache(plan, config.kv_shapes, num_blocks=5, num_rows=2, room=WINDOW_ROOM)
    shapes = config.kv_shapes
    one = PagedKVCache(plan, shapes, num_blocks=3, num_rows=1, room=WINDOW_ROOM).nbytes
    assert cache_bytes(plan, 300, shapes) == one
    assert cache_bytes(plan, 384, shapes, sequences=2) == 2 * one
    assert [tokens_that_fit(plan, room, shapes) for room in (one, one - 1)] == [384, 256]
    assert tokens_that_fit(plan, -5, shapes) == 0
    windows = [w.vectors for layer in range(config.num_layers) for w in cache.kv[layer].windows if w]
    assert cache.nbytes == sum(t.nbytes for t in windows) + sum(tensor.nbytes for *_, tensor in cache_tensors(cache))
    assert all(window is None for window in cache.kv[0].windows)  # a layer in bf16 keeps nothing twice


def test_what_is_described_can_be_read():
    described = KVSpec("k=tq4,v=tq3", tail=4, sink=2, skip_layers=(0, 2)).plan(5).describe()
    assert described == "k=tq4,v=tq3; layers 0, 2: bf16; tail 4; sink 2"


# -- What is refused --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda: KVSpec(tail=-1), "tail and sink count tokens and cannot be negative; they are -1 and 0"),
        (lambda: KVSpec(sink=-2), "tail and sink count tokens and cannot be negative; they are None and -2"),
        (lambda: KVSpec(skip_layers=(3,)).plan(3), "there is no layer 3; the model has 3, counted from 0"),
        (lambda: KVSpec(skip_layers=(2, -1)).plan(3), "layer 2 is named twice in skip_layers and plan"),
        (lambda: KVSpec("kivi2", tail=30).plan(3), "kivi2 quantizes 32 tokens together and needs tail=31 or more, not 30"),
        (
            lambda: new_cache(SMALL, "kivi2", block_size=48),
            "kivi2 quantizes 32 tokens together, which blocks of 48 cut apart",
        ),
        (
            lambda: new_cache(resize_config(SMALL, head_dim=96), "tbq4_0"),
            "tbq4_0 stores blocks of 128 values and cannot hold head_dim 96",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused(spec, message):
    with pytest.raises(InputError) as excinfo:
        spec()
    assert str(excinfo.value) == message


def test_more_new_tokens_than_the_ring_takes_are_refused():
    cache = new_cache(SMALL, KVSpec("tq4", tail=4), num_blocks=20)
    paging = new_paging(cache)
    batch = paging.batch([paging.add()], [65])
    assert cache.most_new_tokens == 64
    assert new_cache(SMALL, KVSpec("tq4", sink=4)).most_new_tokens is None
    with pytest.raises(ValueError, match="at most 64 new tokens"):
        cache.view(0, batch).write(torch.ones(65, 2, 128), torch.ones(65, 2, 128))


def test_more_sequences_than_rows_are_refused():
    paging = PagedSequences(8, 8, num_rows=2)
    first = paging.add()
    paging.add()
    with pytest.raises(CacheFullError, match="2 sequences at a time"):
        paging.add()
    assert paging.batch([first], [1]).rows.tolist() == [0]
    paging.free(first)
    assert paging.batch([paging.add()], [1]).rows.tolist() == [0]


@pytest.mark.parametrize("side", ["K", "V"])
@pytest.mark.parametrize("kv", ["kivi2", "tq4", "tq4_seed"])
def test_a_vector_that_is_not_finite_is_named_and_nothing_is_written(kv, side):
    cache = new_cache(SMALL, KVSpec(kv, tail=40), block_size=32)
    paging = new_paging(cache, [2, 1, 0, *range(3, 12)])
    batch = paging.batch([paging.add()], [40])
    k, v = normal(2, 40, 2, 128, seed=1)
    (k if side == "K" else v)[35, 1, 7] = -torch.inf if side == "V" else torch.nan
    before = [t.clone() for *_, t in cache_tensors(cache)] + [w.vectors.clone() for w in cache.kv[1].windows]
    place = rf"layer 1: {side} of token 35 of the batch \(slot 35\), KV head 1 is not finite or too large for {kv}"
    with pytest.raises(NonFiniteError, match=place):
        cache.view(1, batch).write(k, v)
    after = [t for *_, t in cache_tensors(cache)] + [w.vectors for w in cache.kv[1].windows]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_group_whose_range_overflows_is_named_by_the_token_that_fills_it():
    cache = new_cache(SMALL, "kivi2", block_size=32)
    paging = new_paging(cache)
    batch = paging.batch([paging.add()], [34])
    k = torch.ones(34, 2, 128)
    k[4, 1, 9], k[8, 1, 9] = 3e38, -3e38
    with pytest.raises(
        NonFiniteError, match=r"layer 2: K of token 31 of the batch \(slot 31\), KV head 1 is not finite or too"
    ):
        cache.view(2, batch).write(k, k)
    assert issubclass(NonFiniteVectorError, InputError)


# -- As a file --------------------------------------------------------------------------------------------------------------
def test_a_plan_file_says_all():
    plan = KVSpec("tq4", tail=33, sink=2, layers={1: "k=kivi2,v=tq3"}, skip_layers=(0,)).plan(3)
    text = plan_file.dumps(plan, SHAPE, {"kl": 0.01})
    assert json.loads(text)["layers"] == ["bf16", "k=kivi2,v=tq3", "tq4"]
    spec = plan_file.loads(text, "p.json")
    assert spec.plan(3, SHAPE) == plan
    other = replace(SHAPE, hidden_size=64)
    with pytest.raises(
        InputError, match=r"made for another model: 3 layers of 2 KV heads of 128, hidden 48.*; this one has .*64"
    ):
        spec.plan(3, other)


def declared_shape(**entries):
    return replace(SHAPE, declaration=json.dumps(entries, sort_keys=True))


@pytest.mark.parametrize(
    ("file_entries", "model_entries", "words"),
    [
        ({"tied": True}, {"tied": False}, "tied true; this model has false"),
        ({"scale": 1.0}, {"scale": 1.0, "layers": {"0 1 2": {"norm": {"eps": 1e-6}}}}, "layers none; this model has"),
        (
            {"layers": {"0 2": {"norm": {"eps": 1e-6}}, "1": {"norm": {"eps": 1e-5}}}},
            {"layers": {"0 1 2": {"norm": {"eps": 1e-6}}}},
            "norm.eps 1e-05 of layer 1; this model has 1e-06",
        ),
        ({"layers": {"0 1 2": {"a": "x" * 999}}}, {"layers": {"0 1 2": {"a": 1}}}, 'a "xxx'),
        ({"layers": 3}, {"layers": {"0 1 2": {"a": 1}}}, "layers 3; this model has"),
    ],
)
def test_a_file_names_the_first_field_that_is_declared_otherwise(file_entries, model_entries, words):
    """It comes back from a file as it was written, and what is off is as good as not there."""
    shape = ModelShape.read(json.loads(json.dumps(declared_shape(**file_entries).as_json())))
    assert shape == declared_shape(**file_entries)
    shape.require_same(declared_shape(**file_entries, more=False, factor=0, kind=None), "it", "again")
    for other in (SHAPE, declared_shape(**file_entries)):
        shape.require_same(other, "it", "again")
    with pytest.raises(InputError) as excinfo:
        shape.require_same(declared_shape(**model_entries), "it", "again")
    assert str(excinfo.value).startswith(f"it was made with {words}")
    assert str(excinfo.value).endswith(": again")
    assert len(str(excinfo.value)) < 400


def test_a_file_without_a_declaration_says_so():
    with pytest.warns(UserWarning, match=r"the plan does not say .* if config.json has changed since, run `tq plan`"):
        KVSpec(made_for=SHAPE).plan(3, declared_shape(tied=True))


def mutate(**changes):
    content = json.loads(plan_file.dumps(KVSpec().plan(3), SHAPE)) | changes
    return json.dumps({key: value for key, value in content.items() if value != "gone"})


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", "3", mutate(layers="gone"), mutate(haarkv_plan=2), mutate(layers=["tq4"]), mutate(layers=[1, 2, 3]),
        mutate(layers=["tq4", "tq4", "tq9"]), mutate(tail="many"), mutate(sink=-1), mutate(sink=None),
        mutate(model={"layers": 3}), mutate(model={**SHAPE.as_json(), "num_layers": "x"}), mutate(model=[]),
        *(mutate(model={**SHAPE.as_json(), "declaration": wrong}) for wrong in (3, [], "text")),
    ],
)  # fmt: skip
def test_a_file_that_is_no_plan_is_refused_in_one_line(text):
    with pytest.raises(InputError) as excinfo:
        plan_file.loads(text, "p.json")
    assert "\n" not in str(excinfo.value)
