"""Gated DeltaNet between layers of attention, on the executor whose numbers depend on no batch: to the bit, all that takes
tokens back, reuses them or runs them in pieces gives what one run over the whole text gives."""

import random

import pytest
import torch
from said_again import Often, always_drafting
from small_models import small_model

from haarkv.engine.generation import generate
from haarkv.engine.plans import needed, shape_of
from haarkv.executors.base import verify
from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.caches import new_cache
from haarkv.models.checkpoint import random_weights
from haarkv.models.config import Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope
from haarkv.models.footprint import WeightBytes
from haarkv.models.layer import DeltaNet
from haarkv.tq_ops.kv import cache_file
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.recurrent import Recurrent
from haarkv.tq_ops.kv.stored import Advance, put, reusable, take

NORM = Norm(1e-6, plus_one=True)
ATTENTION = Attention(4, 2, 64, Rope(1e4, 16), 0.125, head_norms=True, gated=True)
DENSE, EXPERTS = Dense(80), Experts(6, 2, 40, normalized=True, shared=56)
TEXT = random.Random(0).choices(range(61), k=90)


def hybrid(mlp=DENSE, by_key_head=False):
    """Layers as Qwen3.5 or Qwen3-Next has them: three of DeltaNet, one of attention, twice."""
    delta = DeltaNet(2, 4, 48, 32, by_key_head=by_key_head, versions=6)
    layers = tuple(Layer(ATTENTION if index % 4 == 3 else delta, mlp, NORM) for index in range(8))
    model = small_model(ModelConfig("qwen3_5", layers, 48, 61, NORM, max_position_embeddings=512))
    for index, weights in enumerate(model.weights.layers):
        if "a_log" in weights:  # some heads forget within a token, some remember all
            weights["a_log"].copy_(torch.linspace(-5.0, 1.0, 4).roll(index))
    return model


MODELS = {"dense": hybrid(), "experts": hybrid(EXPERTS), "by_key_head": hybrid(EXPERTS, by_key_head=True)}


class Run:
    """A model with a cache of two sequences."""

    def __init__(self, name="dense", kind=CpuExecutor, kv="tq4"):
        self.executor = kind(MODELS[name])
        self.plan = KVSpec(kv, tail=5, sink=2).plan(self.executor.config.num_layers)
        self.cache, self.paging = new_cache(self.executor.config, self.plan, sequences=3, tokens=256)
        self.sequence = self.paging.add()

    def read(self, tokens):
        return verify(self.executor, torch.tensor(tokens), self.paging.batch([self.sequence], [len(tokens)]), self.cache)

    def stored(self, tokens):
        return take(self.cache, self.paging, self.sequence, tokens)


def whole(tokens, name="dense"):
    """Logits after each token, read at once."""
    return Run(name).read(tokens)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 3, 7, 33])
def test_a_prompt_in_pieces_is_the_whole_prompt_to_the_bit(name, chunk):
    run = Run(name)
    pieces = [run.read(TEXT[begin : min(60, begin + chunk)]) for begin in range(0, 60, chunk)]
    assert torch.equal(torch.cat(pieces), whole(TEXT[:60], name))


@pytest.mark.parametrize("name", MODELS)
def test_sequences_of_other_lengths_beside_it_change_no_bit(name):
    run, found = Run(name), [[], [], []]
    texts = [TEXT, TEXT[20:], TEXT[41:]]
    ids = [run.sequence, run.paging.add(), run.paging.add()]
    for counts in ((5, 0, 17), (1, 1, 1), (0, 30, 2), (1, 1, 1), (40, 3, 9)):
        rows = [row for row, count in enumerate(counts) if count]
        begins = [run.paging.length(ids[row]) for row in rows]
        batch = run.paging.batch([ids[row] for row in rows], [counts[row] for row in rows])
        tokens = [t for row, begin in zip(rows, begins, strict=True) for t in texts[row][begin : begin + counts[row]]]
        logits = verify(run.executor, torch.tensor(tokens), batch, run.cache).split([counts[row] for row in rows])
        for row, of_row in zip(rows, logits, strict=True):
            found[row].append(of_row)
    for row, text in enumerate(texts):
        ours = torch.cat(found[row])
        assert torch.equal(ours, whole(text[: len(ours)], name))


def test_drafts_that_are_taken_back_were_never_there():
    run = Run()
    run.read(TEXT[:20])
    for kept in (2, 0, 1, 4, 3):
        begin = run.paging.length(run.sequence)
        advance = Advance(run.cache, run.paging, [run.sequence], [4])
        right = TEXT[begin : begin + kept]
        verify(run.executor, torch.tensor([*right, *[3] * (4 - kept)]), advance.batch, run.cache)
        advance.keep([kept])
    end = run.paging.length(run.sequence)
    assert torch.equal(run.read(TEXT[end : end + 6]), whole(TEXT[: end + 6])[end:])


def test_a_text_with_drafts_is_the_text_without_and_leaves_the_same_state():
    texts, states = [], []
    for drafted in (False, True):
        run, kept = Run(), []
        run.paging.free(run.sequence)
        said = [*TEXT[:12], *texts[0].token_ids] if drafted else []
        with always_drafting():
            (done,), timing = generate(
                run.executor, run.cache, run.paging, [TEXT[:12]], max_new_tokens=40, max_context=200, draft_tokens=4,
                draft=Often(said) if drafted else None, on_end=lambda _, stored, kept=kept: kept.append(stored),
            )  # fmt: skip
        texts.append(done)
        states.append({name: tensor[-1] for name, tensor in kept[0].tensors.items() if name.endswith(("delta", "conv"))})
    assert texts[0].token_ids == texts[1].token_ids
    assert 0 < timing.drafts.accepted < timing.drafts.proposed
    assert len(states[0]) == 12
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())


@pytest.mark.parametrize(("common", "reused"), [(31, 31), (30, 30), (27, 27), (20, 0)])
def test_a_prefix_is_reused_where_a_version_ends(common, reused):
    first = Run()
    first.read(TEXT[:31])
    stored, prompt = first.stored(TEXT[:31]), [*TEXT[:common], 1, 2, 3]
    run = Run()
    length = reusable(stored, prompt, run.cache)
    assert length == reused
    run.paging.free(run.sequence)
    run.sequence = put(stored, run.cache, run.paging, length) if length else run.paging.add()
    assert torch.equal(run.read(prompt[length:]), whole(prompt)[length:])


def test_a_cache_file_goes_on_with_the_state(tmp_path):
    run = Run("experts")
    for begin, end in ((0, 20), (20, 40), (40, 41)):
        run.read(TEXT[begin:end])
    origin = cache_file.origin_of(run.plan, shape_of(run.executor.config), "weights")
    cache_file.save(tmp_path / "c", run.stored(TEXT[:41]), origin)
    other = Run("experts")
    other.paging.free(other.sequence)
    other.sequence = put(cache_file.load_for(tmp_path / "c", origin, other.plan), other.cache, other.paging)
    assert torch.equal(other.read(TEXT[41:50]), whole(TEXT[:50], "experts")[41:])


@pytest.mark.parametrize("sequences", [1, 3])
def test_what_is_allocated_is_what_was_announced_with_the_state_that_pads_a_batch(sequences):
    config, plan = MODELS["dense"].config, Run().plan
    cache, _ = new_cache(config, plan, sequences=sequences, tokens=200)
    states = sum(state.nbytes for layer, state in cache.states.items() if layer in config.state_shapes)
    assert states == (sequences + 1) * config.state_bytes
    assert cache.nbytes == needed(config, plan, 200, WeightBytes(), sequences).kv


def test_without_drafts_two_versions_are_kept_and_what_is_stored_fits_both(tmp_path):
    """A session with drafts keeps a version for each token that it may take back; a file of either goes on in the other."""
    config = MODELS["dense"].config
    few, many = config.for_drafts(0), config.for_drafts(4)
    assert {shape.versions for shape in few.state_shapes.values()} == {2}
    assert {shape.versions for shape in many.state_shapes.values()} == {6}
    assert 3 * few.state_bytes == many.state_bytes
    plan = Run().plan
    for source, target in ((few, many), (many, few)):
        caches = [new_cache(one, plan, sequences=1, tokens=128) for one in (source, target)]
        executor, ((cache, paging), (other, places)) = Run().executor, caches
        sequence = paging.add()
        for begin, end in ((0, 20), (20, 21)):
            verify(executor, torch.tensor(TEXT[begin:end]), paging.batch([sequence], [end - begin]), cache)
        origins = [cache_file.origin_of(plan, shape_of(one), "weights") for one in (source, target)]
        cache_file.save(tmp_path / "c", take(cache, paging, sequence, TEXT[:21]), origins[0])
        goes_on = put(cache_file.load_for(tmp_path / "c", origins[1], plan), other, places)
        logits = verify(executor, torch.tensor(TEXT[21:23]), places.batch([goes_on], [2]), other)
        assert torch.equal(logits, whole(TEXT[:23])[21:])


def test_the_cpu_is_near_the_reference():
    for name in MODELS:
        reference = Run(name, ReferenceExecutor, kv="fp32")
        expected = torch.cat([reference.read(TEXT[:50]), reference.read(TEXT[50:51])])
        run = Run(name, kv="fp32")
        ours = torch.cat([run.read(TEXT[:50]), run.read(TEXT[50:51])])
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


def test_bf16_weights_run_and_keep_what_decides_forgetting_in_fp32():
    config = MODELS["dense"].config
    model = DecoderModel.of(config, random_weights(config, torch.bfloat16))
    dtypes = {field: tensor.dtype for field, tensor in model.weights.layers[0].items()}
    in_fp32 = {"a_log", "dt_bias", "conv1d", "delta_norm", "input_norm", "post_norm"}
    assert {field for field, dtype in dtypes.items() if dtype == torch.float32} == in_fp32
    executor, plan = CpuExecutor(model), KVSpec("bf16").plan(8)
    found = []
    for chunk in (30, 7):
        cache, paging = new_cache(config, plan, sequences=1, tokens=64)
        sequence, logits = paging.add(), []
        for begin in range(0, 30, chunk):
            part = torch.tensor(TEXT[begin : min(30, begin + chunk)])
            logits.append(verify(executor, part, paging.batch([sequence], [len(part)]), cache))
        found.append(torch.cat(logits))
    assert torch.equal(*found)


# -- What the tests above would not miss -------------------------------------------------------------------------------------


def kept_one_too_few(self, snapshot, batch, dropped):
    """Rolled back one step too few: the version that is read next is the one after it."""
    self.seen[self.seen >= 0] -= 1


def never_zero(self, batch):
    """A state that is not reset between sequences."""
    rows, begin = self._rows(batch)
    version = (self.seen[rows] == begin.unsqueeze(1)).int().argmax(1)
    return {name: tensor[rows, version] for name, tensor in self.tensors.items()}


@pytest.mark.parametrize(
    ("name", "fault"), [("roll_back", kept_one_too_few), ("read", never_zero)], ids=["rolled_back_too_few", "not_reset"]
)
def test_a_fault_of_the_state_is_seen(monkeypatch, name, fault):
    """With an FP32 cache: rounding picks no level there, and eight layers of sums of 80 products are 8 * 80 * 2**-24 off."""

    def text(run, tokens):
        return torch.cat([run.read([token]) for token in tokens])

    def ways():
        run = Run(kind=ReferenceExecutor, kv="fp32")
        run.read(TEXT[:9])
        advance = Advance(run.cache, run.paging, [run.sequence], [3])
        verify(run.executor, torch.tensor([TEXT[9], 5, 5]), advance.batch, run.cache)
        if name == "roll_back":
            for state in run.cache.states.values():
                if isinstance(state, Recurrent):
                    state.roll_back(None, advance.batch, torch.tensor([False, True, True]))
        advance.keep([1])
        try:
            ours = text(run, TEXT[10:14])
        except ValueError:
            return False
        run.paging.free(run.sequence)
        run.sequence = run.paging.add()
        again = text(run, TEXT[:6])
        one = Run(kind=ReferenceExecutor, kv="fp32")
        expected = text(one, TEXT[:14])
        near = {"rtol": 1e-4, "atol": 1e-4}
        return torch.allclose(ours, expected[10:14], **near) and torch.allclose(again, expected[:6], **near)

    assert ways()
    monkeypatch.setattr(Recurrent, name, fault)
    assert not ways()
