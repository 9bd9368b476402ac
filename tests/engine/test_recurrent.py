"""A layer whose state cannot be cut at a token, through all that takes tokens back, reuses them or runs them twice.

Each way is a function that fails where the state is wrong. Every protection of `kv.recurrent` is then taken out, and at least
one way must fail.
"""

import random
from contextlib import contextmanager

import pytest
import torch
from recurrent_toy import Toy, hybrid, toy_mixer
from said_again import Often, always_drafting

from haarkv.engine.generation import generate
from haarkv.engine.plans import shape_of
from haarkv.executors.base import verify
from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.cuda_graph import DecodeStep
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.caches import new_cache
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import cache_file
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.recurrent import Recurrent
from haarkv.tq_ops.kv.stored import Advance, put, reusable, take

PLAN = KVSpec("tq4", tail=5, sink=2)
TEXT = random.Random(0).choices(range(61), k=80)


@pytest.fixture(autouse=True, scope="module")
def toy():
    with toy_mixer():
        yield


class Run:
    """One model with a cache of two sequences."""

    def __init__(self, kind=ReferenceExecutor, block_size=16, **model):
        self.executor = kind(hybrid(**model))
        self.plan = PLAN.plan(self.executor.config.num_layers)
        self.cache, self.paging = new_cache(
            self.executor.config, self.plan, sequences=2, tokens=256, block_size=block_size, ring_chunk=32
        )
        self.sequence = self.paging.add()

    def read(self, tokens):
        return verify(self.executor, torch.tensor(tokens), self.paging.batch([self.sequence], [len(tokens)]), self.cache)

    def stored(self, tokens):
        return take(self.cache, self.paging, self.sequence, tokens)


def whole(tokens, kind=ReferenceExecutor):
    """Logits after each token, read one after the other."""
    run = Run(kind)
    return torch.cat([run.read([token]) for token in tokens])


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# -- The ways ----------------------------------------------------------------------------------------------------------------


def chunks():
    run = Run()
    close(torch.cat([run.read(TEXT[:30]), run.read(TEXT[30:31]), run.read(TEXT[31:50])]), whole(TEXT[:50]))


def another_sequence_in_the_row():
    run = Run()
    run.read(TEXT[:9])
    run.paging.free(run.sequence)
    run.sequence = run.paging.add()
    close(run.read(TEXT[20:30]), whole(TEXT[20:30]))


def drafts():
    texts, states = [], []
    for draft in (None, "often"):
        run = Run()
        run.paging.free(run.sequence)
        said = [*TEXT[:12], *texts[0].token_ids] if draft else []
        kept = []
        with always_drafting():
            (done,), timing = generate(
                run.executor, run.cache, run.paging, [TEXT[:12]], max_new_tokens=40, max_context=200,
                draft=Often(said) if draft else None, draft_tokens=4, on_end=lambda _, stored, kept=kept: kept.append(stored),
            )  # fmt: skip
        texts.append(done)
        states.append({name: tensor for name, tensor in kept[0].tensors.items() if ".sum" in name})
    assert texts[0].token_ids == texts[1].token_ids
    assert 0 < timing.drafts.accepted < timing.drafts.proposed
    for name, tensor in states[0].items():
        close(states[1][name][-1], tensor[-1])


def rollback():
    run = Run()
    run.read(TEXT[:20])
    for kept in (2, 0, 1, 4):
        begin = run.paging.length(run.sequence)
        advance = Advance(run.cache, run.paging, [run.sequence], [4])
        right = TEXT[begin : begin + kept]
        verify(run.executor, torch.tensor([*right, *[3] * (4 - kept)]), advance.batch, run.cache)
        advance.keep([kept])
    end = run.paging.length(run.sequence)
    close(run.read(TEXT[end : end + 6]), whole(TEXT[: end + 6])[end:])


def prefix_reuse():
    first = Run()
    first.read(TEXT[:31])
    stored = first.stored(TEXT[:31])
    for common, reused in ((31, 31), (30, 30), (20, 0)):
        prompt = [*TEXT[:common], 1, 2, 3]
        run = Run()
        length = reusable(stored, prompt, run.cache)
        assert length == reused, length
        run.paging.free(run.sequence)
        run.sequence = put(stored, run.cache, run.paging, length) if length else run.paging.add()
        close(run.read(prompt[length:]), whole(prompt)[length:])


def cache_files(folder):
    run = Run(block_size=128)
    run.read(TEXT[:20])
    run.read(TEXT[20:40])
    run.read(TEXT[40:41])
    shape = shape_of(run.executor.config)
    origin = cache_file.origin_of(run.plan, shape, "weights")
    file = folder / "c"
    cache_file.save(file, run.stored(TEXT[:41]), origin)
    other = Run(block_size=128)
    other.paging.free(other.sequence)
    stored = cache_file.load_for(file, origin, other.plan)
    assert ModelShape.read(shape.as_json()) == shape
    other.sequence = put(stored, other.cache, other.paging)
    close(other.read(TEXT[41:50]), whole(TEXT[:50])[41:])


def padded_rows():
    """A captured step of four rows, of which one is a sequence: the others belong to nobody, whatever row they name."""
    model = hybrid(attention=False)
    executor = ReferenceExecutor(model)
    cache, paging = new_cache(model.config, KVSpec("tq4").plan(2), sequences=1, tokens=64, block_size=16)
    sequence, expected = paging.add(), []
    step = DecodeStep(4, cache, 64, lambda ids, batch: model.forward(ids, batch, cache, reference), None)
    for token in TEXT[:9]:
        hidden = step(torch.tensor([token]), paging.batch([sequence], [1]))
        expected.append(executor.head(hidden))
    alone, book = new_cache(model.config, KVSpec("tq4").plan(2), sequences=1, tokens=64, block_size=16)
    sequence = book.add()
    close(torch.cat(expected), verify(executor, torch.tensor(TEXT[:9]), book.batch([sequence], [9]), alone))


def run_again():
    """A forward that is run again from its first layer, as one is that the kernels refuse half way."""
    run = Run()
    run.read(TEXT[:11])
    batch = run.paging.batch([run.sequence], [5])
    for _ in range(3):
        logits = verify(run.executor, torch.tensor(TEXT[11:16]), batch, run.cache)
    close(logits, whole(TEXT[:16])[11:])
    close(run.read(TEXT[16:20]), whole(TEXT[:20])[16:])


WAYS = {
    way.__name__: way for way in (chunks, another_sequence_in_the_row, drafts, rollback, prefix_reuse, padded_rows, run_again)
}


@pytest.mark.parametrize("way", WAYS)
def test_the_state_is_that_of_the_tokens_alone(way):
    WAYS[way]()


def test_a_cache_file_goes_on_with_the_state(tmp_path):
    cache_files(tmp_path)


def test_layers_that_the_cpu_knows_and_a_layer_that_it_does_not():
    """The fast path and the op table take turns within one forward."""
    tokens = TEXT[:60]
    run = Run(CpuExecutor)
    ours = torch.cat([run.read(tokens[:25]), *(run.read([token]) for token in tokens[25:])])
    torch.testing.assert_close(ours, whole(tokens), rtol=2e-3, atol=2e-3)


# -- Taken out, one by one ---------------------------------------------------------------------------------------------------


@contextmanager
def replaced(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def newest_version(self, batch):
    """Reads what was written last, whatever tokens it has seen."""
    rows, begin = self._rows(batch)
    version = self.seen[rows].argmax(1)
    fresh = (begin == 0).unsqueeze(1)
    return {name: tensor[rows, version].masked_fill(fresh, 0) for name, tensor in self.tensors.items()}


def not_reset(self, batch):
    """Reads zeros only where a row was never written."""
    rows, begin = self._rows(batch)
    begin = torch.where(begin == 0, self.seen[rows].amax(1), begin)
    version = (self.seen[rows] == begin.unsqueeze(1)).int().argmax(1)
    return {name: tensor[rows, version] for name, tensor in self.tensors.items()}


def in_their_own_rows(self, batch):
    """Padding reads and writes the row that it names."""
    return batch.rows, batch.positions[batch.query_start_loc[:-1].long()]


def over_what_was_read(self, after, tokens, batch):
    """Keeps one version, in the place of the one that was read."""
    rows, _ = self._rows(batch)
    last = batch.query_start_loc[1:].long() - 1
    place = torch.searchsorted(tokens, last)
    self.seen[rows] = -1
    self.seen[rows, 0] = batch.positions[last] + 1
    for name, tensor in self.tensors.items():
        tensor[rows, 0] = after[name][place]


def any_prefix(self, tensors, stored_length, length):
    return length


def newest_alone(self, place, length, whole=True):
    """Takes the state that was written last as that of `length` tokens, and drops what it has seen."""
    version = int(self.seen[place.row].argmax())
    tensors = {name: tensor[place.row, version : version + 1] for name, tensor in self.tensors.items()}
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()} | {"seen": torch.tensor([length])}


TAKEN_OUT = {
    "versions are told apart": ("read", newest_version, {"rollback", "drafts", "run_again"}),
    "a new sequence begins with zeros": ("read", not_reset, {"another_sequence_in_the_row"}),
    "padding has a row of its own": ("_rows", in_their_own_rows, {"padded_rows"}),
    "what was read is not overwritten": ("write", over_what_was_read, {"run_again", "rollback"}),
    "a prefix ends where a version does": ("reusable", any_prefix, {"prefix_reuse"}),
}


@pytest.mark.parametrize("protection", TAKEN_OUT)
def test_each_protection_is_needed(protection):
    name, broken, seen_by = TAKEN_OUT[protection]
    red = set()
    with replaced(Recurrent, name, broken):
        for way, check in WAYS.items():
            try:
                check()
            except (AssertionError, ValueError):
                red.add(way)
    assert seen_by <= red, red


def test_a_file_without_the_state_fails(tmp_path):
    with replaced(Recurrent, "take", newest_alone), pytest.raises(AssertionError):
        cache_files(tmp_path)


def test_a_state_that_is_not_of_the_stored_tokens_is_refused(tmp_path):
    run = Run()
    run.read(TEXT[:5])
    origin = cache_file.origin_of(run.plan, shape_of(run.executor.config), "weights")
    stored = run.stored(TEXT[:5])
    stored.tensors["layers.1.seen"][-1] = 4
    with pytest.raises(InputError, match="the state of layer 1 is not that of 5 tokens"):
        origin.require_fits(stored, run.plan, "it")


def test_more_tokens_than_versions_cannot_be_taken_back():
    run = Run(versions=3)
    run.read(TEXT[:5])
    run.read(TEXT[5:10])
    run.paging.take_back([run.sequence], [4])
    with pytest.raises(ValueError, match="too many were taken back"):
        run.read(TEXT[6:8])


def test_other_executors_refuse_a_state_by_name():
    from haarkv.executors.cuda import CudaExecutor
    from haarkv.executors.npu import NpuExecutor

    config = hybrid().config
    plan = KVSpec("tq4").plan(4)
    assert "mixes tokens by Toy" in CudaExecutor.supports(config, plan)
    assert "mixes tokens by Toy" in NpuExecutor.supports(config, plan)
    assert Toy().kv_shape is None
