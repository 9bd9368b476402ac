"""Layers whose state cannot be cut at a token, through all that takes tokens back, reuses them or runs them twice.

Each way is a function that fails where the state is wrong: on the reference within FP32, on the executor whose numbers depend
on no batch to the bit.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from small_models import small_model

from haarkv.engine.plans import memory_need, shape_signature
from haarkv.executors.base import verify
from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel, new_cache
from haarkv.models.checkpoint import random_weights
from haarkv.models.config import Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope
from haarkv.models.layer import DeltaNet
from haarkv.models.weights import WeightBytes
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
def delta_model(mlp=DENSE, by_key_head=False):
    """Layers as Qwen3.5 or Qwen3-Next has them: three of DeltaNet, one of attention, twice, once with a window."""
    delta = DeltaNet(2, 4, 48, 32, by_key_head=by_key_head, versions=6)
    layers = tuple(Layer(mixer, mlp, NORM) for last in (ATTENTION, WINDOW) for mixer in (delta, delta, delta, last))
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

    def __init__(self, name="reference"):
        executor, model = MODELS[name]
        self.executor = executor(model())
        # On the reference sums follow the batch, and levels would follow them.
        self.plan = KVSpec("fp32" if name == "reference" else "tq4", tail=5, sink=2).plan(self.executor.config.num_layers)
        self.cache, self.paging = new_cache(self.executor.config, self.plan, sequences=2, tokens=256, ring_chunk=32)
        self.sequence = self.paging.add()

    def read(self, tokens):
        return verify(self.executor, torch.tensor(tokens), self.paging.batch([self.sequence], [len(tokens)]), self.cache)


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


def chunks(name):
    run = Run(name)
    close(name, torch.cat([run.read(TEXT[:30]), run.read(TEXT[30:31]), run.read(TEXT[31:50])]), whole(TEXT[:50], name))


def another_sequence_in_the_row(name):
    run = Run(name)
    run.read(TEXT[:9])
    run.paging.free(run.sequence)
    run.sequence = run.paging.add()
    close(name, run.read(TEXT[20:30]), whole(TEXT[20:30], name))


def rollback(name):
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


def run_again(name="reference"):
    """A forward that is run again from its first layer, as one is that the kernels refuse half way."""
    run = Run(name)
    run.read(TEXT[:11])
    batch = run.paging.batch([run.sequence], [5])
    for _ in range(3):
        logits = verify(run.executor, torch.tensor(TEXT[11:16]), batch, run.cache)
    close(name, logits, whole(TEXT[:16], name)[11:])
    close(name, run.read(TEXT[16:20]), whole(TEXT[:20], name)[16:])


@pytest.mark.parametrize("way", [chunks, another_sequence_in_the_row, rollback, run_again], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_the_state_is_that_of_the_tokens_alone(name, way):
    way(name)


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


# -- What is refused ------------------------------------------------------------------------------------------------------


def test_a_state_that_is_not_of_the_stored_tokens_is_refused(tmp_path):
    run = Run()
    run.read(TEXT[:5])
    origin = cache_file.sequence_origin(run.plan, shape_signature(run.executor.config), "weights")
    sequence = take(run.cache, run.paging, run.sequence, TEXT[:5])
    sequence.tensors["layers.1.seen"][-1] = 4
    with pytest.raises(InputError, match="the state of layer 1 is not that of 5 tokens"):
        origin.require_fits(sequence, run.plan, "it")
