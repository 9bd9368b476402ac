"""Layers whose state cannot be cut at a token, through all that takes tokens back, reuses them or runs them twice.

Each way is a function that fails where the state is wrong: on the reference within FP32, on the executor whose numbers depend
on no batch to the bit.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from repeat_drafts import Often, always_drafting
from small_models import small_model

from haarkv.engine.generation import GenerationRequest, generate
from haarkv.engine.plans import memory_need, shape_signature
from haarkv.executors.base import verify
from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.cuda import DecodeStep
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel, new_cache
from haarkv.models.checkpoint import random_weights
from haarkv.models.config import Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope
from haarkv.models.layer import DeltaNet
from haarkv.models.weights import WeightBytes
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import cache_file
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.stored import Advance, put, take

TEXT = random.Random(0).choices(range(61), k=80)
NORM = Norm(1e-6, plus_one=True)
ATTENTION = Attention(4, 2, 64, Rope(1e4, 16), 0.125, head_norms=True, gated=True)
WINDOW = replace(ATTENTION, window=20)
DENSE, EXPERTS = Dense(80), Experts(6, 2, 40, normalized=True, shared=56)


@cache
def delta_model(mlp=DENSE, by_key_head=False, versions=6, attention=(ATTENTION, WINDOW)):
    """Layers as Qwen3.5 or Qwen3-Next has them: three of DeltaNet, one of attention, twice, once with a window."""
    delta = DeltaNet(2, 4, 48, 32, by_key_head=by_key_head, versions=versions)
    mixers = [mixer for last in attention for mixer in (delta, delta, delta, last)] or [delta, delta]
    layers = tuple(Layer(mixer, mlp, NORM) for mixer in mixers)
    model = small_model(ModelConfig("qwen3_5", layers, 48, 61, NORM, max_position_embeddings=512))
    for index, weights in enumerate(model.weights.layers):
        if "a_log" in weights:  # some heads forget within a token, some remember all
            weights["a_log"].copy_(torch.linspace(-5.0, 1.0, 4).roll(index))
    return model


MODELS = {
    "reference": (ReferenceExecutor, delta_model),
    "dense": (CpuExecutor, delta_model),
    "by_key_head": (CpuExecutor, lambda: delta_model(EXPERTS, by_key_head=True)),
}


class Run:
    """One model with a cache of two sequences."""

    def __init__(self, name="reference", kind=None, kv=None, **model_args):
        executor, model = MODELS[name]
        self.executor = (kind or executor)(model(**model_args))
        # On the reference sums follow the batch, and levels would follow them.
        kv = kv or ("fp32" if name == "reference" else "tq4")
        self.plan = KVSpec(kv, tail=5, sink=2).plan(self.executor.config.num_layers)
        self.cache, self.paging = new_cache(self.executor.config, self.plan, sequences=2, tokens=256, ring_chunk=32)
        self.sequence = self.paging.add()

    def read(self, tokens):
        return verify(self.executor, torch.tensor(tokens), self.paging.batch([self.sequence], [len(tokens)]), self.cache)

    def take_sequence(self, tokens):
        return take(self.cache, self.paging, self.sequence, tokens)


def whole(tokens, name="reference"):
    """Logits after each token, read one after the other."""
    run = Run(name)
    return torch.cat([run.read([token]) for token in tokens])


def close(name, one, other):
    if name == "reference":
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(one, other)


# -- The ways ----------------------------------------------------------------------------------------------------------------


def chunks(name="reference"):
    run = Run(name)
    close(name, torch.cat([run.read(TEXT[:30]), run.read(TEXT[30:31]), run.read(TEXT[31:50])]), whole(TEXT[:50], name))


def another_sequence_in_the_row(name="reference"):
    run = Run(name)
    run.read(TEXT[:9])
    run.paging.free(run.sequence)
    run.sequence = run.paging.add()
    close(name, run.read(TEXT[20:30]), whole(TEXT[20:30], name))


def drafts(name="reference"):
    texts, states = [], []
    for draft in (None, "often"):
        run = Run(name)
        run.paging.free(run.sequence)
        text = [*TEXT[:12], *texts[0].token_ids] if draft else []
        ends = []
        with always_drafting():
            request = GenerationRequest(
                prompts=[TEXT[:12]], max_new_tokens=40, max_context=200, draft=Often(text) if draft else None,
                on_end=lambda _, stored, kept=ends: kept.append(stored),
            )  # fmt: skip
            (done,), timing = generate(run.executor, run.cache, run.paging, request)
        texts.append(done)
        state_suffixes = ("delta", "conv")
        states.append({field: tensor for field, tensor in ends[0].tensors.items() if field.endswith(state_suffixes)})
    assert texts[0].token_ids == texts[1].token_ids
    assert 0 < timing.drafts.accepted < timing.drafts.proposed
    assert states[0]
    for field, tensor in states[0].items():
        close(name, states[1][field][-1], tensor[-1])


def rollback(name="reference"):
    run = Run(name)
    run.read(TEXT[:20])
    for count in (2, 0, 1, 4):
        begin = run.paging.length(run.sequence)
        advance = Advance(run.cache, run.paging, [run.sequence], [4])
        right = TEXT[begin : begin + count]
        verify(run.executor, torch.tensor([*right, *[3] * (4 - count)]), advance.batch, run.cache)
        advance.keep([count])
    end = run.paging.length(run.sequence)
    close(name, run.read(TEXT[end : end + 6]), whole(TEXT[: end + 6], name)[end:])


def padded_rows():
    """A captured step of four rows, of which one is a sequence: the others belong to no sequence, whatever row they name."""
    model = delta_model(attention=())
    executor = ReferenceExecutor(model)
    cache, paging = new_cache(model.config, KVSpec("tq4").plan(2), sequences=1, tokens=64, block_size=16)
    sequence, expected = paging.add(), []
    step = DecodeStep(4, cache, 64, lambda ids, batch: model.forward(ids, batch, cache, reference), None)
    for token in TEXT[:9]:
        hidden = step(torch.tensor([token]), paging.batch([sequence], [1]))
        expected.append(executor.head(hidden))
    alone, book = new_cache(model.config, KVSpec("tq4").plan(2), sequences=1, tokens=64, block_size=16)
    sequence = book.add()
    close("reference", torch.cat(expected), verify(executor, torch.tensor(TEXT[:9]), book.batch([sequence], [9]), alone))


def run_again(name="reference"):
    """A forward that is run again from its first layer, as one is that the kernels refuse half way."""
    run = Run(name)
    run.read(TEXT[:11])
    batch = run.paging.batch([run.sequence], [5])
    for _ in range(3):
        logits = verify(run.executor, torch.tensor(TEXT[11:16]), batch, run.cache)
    close(name, logits, whole(TEXT[:16], name)[11:])
    close(name, run.read(TEXT[16:20]), whole(TEXT[:20], name)[16:])


WAYS = {way.__name__: way for way in (chunks, another_sequence_in_the_row, drafts, rollback, padded_rows, run_again)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_state_is_that_of_the_tokens_alone(name, way):
    if way != "padded_rows":
        WAYS[way](name)
    elif name == "reference":
        padded_rows()


@pytest.mark.parametrize("sequences", [1, 3])
def test_what_is_allocated_is_what_was_announced_with_the_state_that_pads_a_batch(sequences):
    config, plan = delta_model().config, Run("dense").plan
    cache, _ = new_cache(config, plan, sequences=sequences, tokens=200)
    states = sum(state.nbytes for layer, state in cache.states.items() if layer in config.state_shapes)
    assert states == (sequences + 1) * config.state_bytes
    assert cache.nbytes == memory_need(config, plan, 200, WeightBytes(), sequences).kv


def test_without_drafts_two_versions_are_kept_and_what_is_stored_fits_both(tmp_path):
    """A session with drafts keeps a version for each token that it may take back; a file of either goes on in the other."""
    config, run = delta_model().config, Run("dense")
    few, many = config.for_drafts(0), config.for_drafts(4)
    assert [{shape.versions for shape in one.state_shapes.values()} for one in (few, many)] == [{2}, {6}]
    assert 3 * few.state_bytes == many.state_bytes
    for source, target in ((few, many), (many, few)):
        (cache, paging), (other, places) = (new_cache(one, run.plan, sequences=1, tokens=128) for one in (source, target))
        sequence = paging.add()
        for begin, end in ((0, 20), (20, 21)):
            verify(run.executor, torch.tensor(TEXT[begin:end]), paging.batch([sequence], [end - begin]), cache)
        origins = [cache_file.sequence_origin(run.plan, shape_signature(one), "weights") for one in (source, target)]
        cache_file.save(tmp_path / "c", take(cache, paging, sequence, TEXT[:21]), origins[0])
        goes_on = put(cache_file.load_for(tmp_path / "c", origins[1], run.plan), other, places)
        logits = verify(run.executor, torch.tensor(TEXT[21:23]), places.batch([goes_on], [2]), other)
        assert torch.equal(logits, whole(TEXT[:23], "dense")[21:])


def test_what_decides_forgetting_stays_in_fp32():
    config = delta_model().config
    layer = DecoderModel.from_weights(config, random_weights(config, torch.bfloat16)).weights.layers[0]
    in_fp32 = {"a_log", "dt_bias", "conv1d", "delta_norm", "input_norm", "post_norm"}
    assert {field for field, tensor in layer.items() if tensor.dtype == torch.float32} == in_fp32


@pytest.mark.parametrize("name", MODELS)
def test_the_cpu_is_near_the_reference(name):
    runs = [Run(name, kind, kv="fp32") for kind in (ReferenceExecutor, CpuExecutor)]
    theirs, ours = (torch.cat([run.read(TEXT[:30]), *(run.read([token]) for token in TEXT[30:50])]) for run in runs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.std()))


# -- What is refused ------------------------------------------------------------------------------------------------------


def test_a_state_that_is_not_of_the_stored_tokens_is_refused(tmp_path):
    run = Run()
    run.read(TEXT[:5])
    origin = cache_file.sequence_origin(run.plan, shape_signature(run.executor.config), "weights")
    sequence = run.take_sequence(TEXT[:5])
    sequence.tensors["layers.1.seen"][-1] = 4
    with pytest.raises(InputError, match="the state of layer 1 is not that of 5 tokens"):
        origin.require_fits(sequence, run.plan, "it")


def test_more_tokens_than_versions_cannot_be_taken_back():
    run = Run(versions=3)
    run.read(TEXT[:5])
    run.read(TEXT[5:10])
    run.paging.take_back([run.sequence], [4])
    with pytest.raises(ValueError, match="too many were taken back"):
        run.read(TEXT[6:8])
