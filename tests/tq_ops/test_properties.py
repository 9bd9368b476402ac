"""What must hold for any tokens, blocks and vectors: of forwards through a paged cache, of paging and of round trips.

Hypothesis draws the cases, the same ones on every run.
"""

from __future__ import annotations

from itertools import pairwise

import bounds
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from small_models import KV_FORMATS, SMALL, cache_tensors, new_cache, new_paging, random_tokens, small_model
from torch import Tensor

from haarkv.executors.base import prefill
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import formats
from haarkv.tq_ops.kv.batch import Batch, CacheFullError, PagedSequences, pack_bytes, unpack_bytes
from haarkv.tq_ops.kv.cache import PagedKVCache


def cases(count: int, shrink: bool = False):
    """So many examples, always the same, with no clock and no database; a smaller one is only sought where that is quick."""
    phases = [Phase.explicit, Phase.generate] + [Phase.shrink] * shrink
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, phases=phases, suppress_health_check=slow
    )


# -- Forwards through a cache ----------------------------------------------------------------------------------------------
MODELS = {dtype: small_model(SMALL, dtype=getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}
BLOCK = 8
lengths = st.integers(1, 20)
seeds = st.integers(0, 10_000)


class Run:
    """Named sequences through the reference's forwards, and the slots of their tokens."""

    def __init__(self, kv, num_blocks=12, order=None, dtype="float32"):
        self.executor, self.cache = ReferenceExecutor(MODELS[dtype]), new_cache(SMALL, kv, num_blocks, BLOCK)
        self.paging, self.ids, self.slots = new_paging(self.cache, order), {}, []

    def __call__(self, **tokens: list[int]) -> dict[str, Tensor]:
        """The next tokens of some sequences: logits by name."""
        self.ids |= {name: self.paging.add() for name in tokens if name not in self.ids}
        batch = self.paging.batch([self.ids[name] for name in tokens], [len(new) for new in tokens.values()])
        self.slots += batch.slot_mapping.tolist()
        ids = torch.tensor([token for new in tokens.values() for token in new])
        return dict(zip(tokens, prefill(self.executor, ids, batch, self.cache), strict=True))


def tokens_from_seed(count: int, seed: int) -> list[int]:
    return random_tokens(SMALL, count, seed)


@given(
    count=st.integers(2, 24), seed=seeds, cuts=st.sets(st.integers(1, 23), min_size=1, max_size=6), one_by_one=st.booleans(),
    others=st.lists(lengths, max_size=3), place=st.integers(0, 3),
)  # fmt: skip
@example(count=9, seed=1, cuts={8}, one_by_one=False, others=[], place=0)
@cases(20)
def test_cuts_of_a_prompt_and_companions_in_the_batch_change_nothing(count, seed, cuts, one_by_one, others, place):
    """Of a cache that rounds nothing: only the order of FP32 sums is another."""
    tokens = tokens_from_seed(count, seed)
    expected = Run("fp32")(a=tokens)["a"]
    edges = range(count + 1) if one_by_one else [0, *sorted(cut for cut in cuts if cut < count), count]
    run = Run("fp32", num_blocks=99)
    for begin, end in pairwise(edges):
        rows = [(f"other{i}", tokens_from_seed(other, seed + begin + i)) for i, other in enumerate(others)]
        rows.insert(place, ("a", tokens[begin:end]))
        logits = run(**dict(rows))["a"]
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=bounds.REORDERED_LOGITS)


def three_steps(run: Run, seed: int) -> Tensor:
    """Two prompts, a later chunk of one, a decode step of both: all logits."""
    first = run(a=tokens_from_seed(11, seed), b=tokens_from_seed(5, seed + 1))
    second, third = run(a=tokens_from_seed(7, seed + 2)), run(a=[1], b=[2])
    return torch.stack([first["a"], first["b"], second["a"], third["a"], third["b"]])


def leave(cache: PagedKVCache, generator: torch.Generator) -> None:
    """Random numbers in every field, as others may have left them: of any sign, up to 3e4, infinities and NaN."""
    for _, _, _, tensor in cache_tensors(cache):
        if tensor.is_floating_point():
            tensor.copy_(torch.empty(tensor.shape).uniform_(-3e4, 3e4, generator=generator))
            tensor.view(-1)[::7], tensor.view(-1)[::11] = torch.inf, torch.nan
        else:
            tensor.random_(0, 16 if tensor.shape[-1] == cache.kv[0].shape.head_dim else 256, generator=generator)


def bytes_by_slot(tensor: Tensor) -> Tensor:
    """[slots, bytes of all heads]."""
    return tensor.transpose(1, 2).flatten(0, 1).flatten(1).contiguous().view(torch.uint8)


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("dtype", MODELS)
@given(order=st.permutations(range(12)), offset=st.integers(0, 50), seed=seeds)
@cases(3)
def test_where_blocks_lie_and_what_lies_in_others_changes_no_bit(dtype, kv, order, offset, seed):
    clean = Run(kv, num_blocks=12, dtype=dtype)
    dirty = Run(kv, num_blocks=12 + offset, order=[offset + block for block in order], dtype=dtype)
    leave(dirty.cache, torch.Generator().manual_seed(seed))
    before = [tensor.clone() for *_, tensor in cache_tensors(dirty.cache)]
    assert torch.equal(three_steps(clean, seed), three_steps(dirty, seed))
    others = sorted(set(range(dirty.cache.kv[0].num_slots)) - set(dirty.slots))
    assert len(set(dirty.slots)) == len(clean.slots) == 11 + 5 + 7 + 2
    for old, (*where, new), (*_, same) in zip(before, cache_tensors(dirty.cache), cache_tensors(clean.cache), strict=True):
        assert torch.equal(bytes_by_slot(old)[others], bytes_by_slot(new)[others]), where
        assert torch.equal(bytes_by_slot(same)[clean.slots], bytes_by_slot(new)[dirty.slots]), where


# -- Paging ----------------------------------------------------------------------------------------------------------------
def assert_sound(batch: Batch, lengths_before: list[int], new: list[int], size: int) -> list[list[int]]:
    """A batch says the same in all its tensors; returns each sequence's blocks."""
    blocks = []
    starts = batch.query_start_loc.tolist()
    assert starts == [0, *np.cumsum(new).tolist()]
    for row, (before, count) in enumerate(zip(lengths_before, new, strict=True)):
        table = batch.block_table[row].tolist()
        used_blocks = [block for block in table if block >= 0]
        assert table == used_blocks + [-1] * (len(table) - len(used_blocks))
        assert len(used_blocks) == -(-(before + count) // size)
        assert batch.seq_lens[row] == before + count
        assert batch.positions[starts[row] : starts[row + 1]].tolist() == list(range(before, before + count))
        places = [used_blocks[position // size] * size + position % size for position in range(before, before + count)]
        assert batch.slot_mapping[starts[row] : starts[row + 1]].tolist() == places
        blocks.append(used_blocks)
    return blocks


actions = st.one_of(
    st.tuples(st.just("extend"), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
    st.tuples(st.just("free"), st.integers(0, 5)),
)


@given(order=st.permutations(range(10)), size=st.integers(1, 4), todo=st.lists(actions, min_size=5, max_size=40))
@cases(150, shrink=True)
def test_sequences_own_their_blocks_alone_and_give_them_back(order, size, todo):
    paging = PagedSequences(10, size, order)
    lengths, blocks, slots = {}, {}, {}  # what the test itself expects
    for action, detail in todo:
        if action == "free":
            if lengths:
                freed_sequence = sorted(lengths)[detail % len(lengths)]
                paging.free(freed_sequence)
                del lengths[freed_sequence], blocks[freed_sequence], slots[freed_sequence]
                with pytest.raises(KeyError):
                    paging.length(freed_sequence)
            continue
        while len(lengths) < len(detail):
            new = paging.add()
            assert new not in lengths
            assert paging.length(new) == 0
            lengths[new], blocks[new], slots[new] = 0, [], []
        subset = sorted(lengths)[-len(detail) :]
        free = 10 - sum(map(len, blocks.values()))
        block_shortage = sum(-(-(lengths[s] + n) // size) - len(blocks[s]) for s, n in zip(subset, detail, strict=True))
        if block_shortage > free:
            with pytest.raises(
                CacheFullError, match=rf" {block_shortage} more blocks of {size} tokens are needed, {free} are free"
            ):
                paging.batch(subset, detail)
            assert [paging.length(one) for one in subset] == [lengths[one] for one in subset]
            continue
        batch = paging.batch(subset, detail)
        rows = assert_sound(batch, [lengths[s] for s in subset], detail, size)
        for sequence, count, block_row, new in zip(subset, detail, rows, batch.slot_mapping.split(detail), strict=True):
            assert block_row[: len(blocks[sequence])] == blocks[sequence]  # what it has, it keeps
            lengths[sequence], blocks[sequence] = lengths[sequence] + count, block_row
            slots[sequence] += new.tolist()
            assert paging.length(sequence) == lengths[sequence]
        everything = [block for block_row in blocks.values() for block in block_row]
        assert len(everything) == len(set(everything))
        assert set(everything) <= set(range(10))
        for sequence, block_row in slots.items():
            assert len(block_row) == len(set(block_row)) == lengths[sequence]
            assert {slot // size for slot in block_row} == set(blocks[sequence])
    for sequence in list(lengths):
        paging.free(sequence)
    everything = paging.batch([paging.add()], [10 * size]).block_table[0].tolist()
    assert sorted(everything) == list(range(10))


def test_a_sequence_grows_in_and_out_of_inference_mode():
    paging = PagedSequences(9, 4, order=[8, 1, 7, 2, 6, 3, 5, 4, 0])
    with torch.inference_mode():
        sequence = paging.add(5)
        paging.batch([sequence], [4])
    earlier = paging.batch([sequence], [8])
    with torch.inference_mode():
        later = paging.batch([sequence], [19])
    assert earlier.block_table.tolist() == [[8, 1, 7, 2, 6]]
    assert later.block_table.tolist() == [[8, 1, 7, 2, 6, 3, 5, 4, 0]]


@pytest.mark.parametrize("counts", [[], [0], [2, 0]])
def test_a_batch_without_a_token_of_each_sequence_is_refused(counts):
    paging = PagedSequences(4, BLOCK)
    with pytest.raises(ValueError, match="at least one"):
        paging.batch([paging.add() for _ in counts], counts)


def test_what_is_copied_at_once_comes_apart_as_it_was():
    paging = PagedSequences(num_blocks=40, block_size=4)
    tensors = paging.batch([paging.add() for _ in range(3)], [9, 1, 30]).tensors
    together = pack_bytes(tensors)
    parts = unpack_bytes(together, tensors)
    assert parts.keys() == tensors.keys()
    for name, part in parts.items():
        assert torch.equal(part, tensors[name])
        assert part.dtype == tensors[name].dtype
        assert (part.data_ptr() - together.data_ptr()) % 64 == 0
        part.fill_(1)  # reaches into no other
    assert all((part == 1).all() for part in parts.values())


# -- Round trips -----------------------------------------------------------------------------------------------------------
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(-100, 100, width=32)


def vectors(elements):
    return st.sampled_from([64, 128]).flatmap(lambda dim: arrays(np.float32, dim, elements=elements))


def round_trip(x: np.ndarray, layer: int = 0) -> tuple[np.ndarray, float, np.ndarray]:
    """(codes, scale, restored)."""
    tq4 = formats.get("tq4")
    fields = tq4.quantize(torch.from_numpy(x)[None], layer)
    return fields["codes"][0].numpy(), fields["scale"][0].item(), tq4.dequantize(fields, layer)[0].double().numpy()


@given(x=vectors(moderate) | vectors(finite), layer=st.integers(0, 5))
@example(x=np.zeros(128, np.float32), layer=0)
@example(x=np.full(128, -0.0, np.float32), layer=0)
@example(x=np.full(128, 1e-45, np.float32), layer=0)
@example(x=np.full(128, 1e-30, np.float32), layer=0)
@example(x=np.full(128, 1e-6, np.float32), layer=0)
@example(x=np.full(128, 1e30, np.float32), layer=0)
@example(x=np.full(128, np.finfo(np.float32).max, np.float32), layer=0)
@example(x=np.eye(128, dtype=np.float32)[5] * np.float32(2e38), layer=1)
@cases(100)
def test_tq4_keeps_direction_and_length_of_any_finite_vector(x, layer):
    _, scale, dequantized = round_trip(x, layer)
    exact = x.astype(np.float64)
    length = np.linalg.norm(exact)
    assert np.isfinite(dequantized).all()
    assert 0 <= scale <= 65504
    if not x.any():
        assert scale == 0
    if scale == 0:
        assert not dequantized.any()
        assert length < 1e-7
        return
    assert dequantized @ exact / (np.linalg.norm(dequantized) * length) >= bounds.TQ4_LOWEST_COSINE
    if 2.0**-14 <= scale < 65504:
        assert np.linalg.norm(dequantized) == pytest.approx(length, rel=bounds.TQ4_LENGTH)
    elif scale == 65504:
        assert length >= 65504 * 0.99
