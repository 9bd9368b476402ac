"""What must hold for any tokens, blocks and vectors: of forwards through a paged cache, of paging and of round trips.

Hypothesis draws the cases, the same ones on every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import bounds
import numpy as np
import oracles
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from small_models import CONFIGS, KV_FORMATS, SMALL, cache_tensors, new_cache, new_paging, random_tokens, small_model
from torch import Tensor

from haarkv.codebooks import haar_rotation, lloyd_max
from haarkv.executors.base import last_rows, prefill
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.kv.batch import Batch, CacheFullError, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache


def cases(count: int, shrink: bool = False):
    """So many examples, always the same, with no clock and no database; a smaller one is only sought where that is quick."""
    phases = [Phase.explicit, Phase.generate] + [Phase.shrink] * shrink
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, phases=phases, suppress_health_check=slow
    )


def tables(layer: int, head_dim: int) -> oracles.Tables:
    book = lloyd_max(4, head_dim)
    return oracles.Tables(*(t.double().numpy() for t in (*book, haar_rotation(layer, head_dim))))


MODEL = small_model(SMALL)
BLOCK = 8


def logits_bound(kv: str) -> float:
    return bounds.REORDERED_LOGITS_RESTORED_TO_BF16 if kv == "tq4_seed" else bounds.REORDERED_LOGITS


# -- Forwards through a cache ----------------------------------------------------------------------------------------------
@dataclass
class Outcome:
    """Named sequences through the reference's forwards, remembering where each token went and what was stored of it.

    With `like`, another run of the same tokens: every vector is compared with what was stored there, a difference must be
    a tie that rounding explains, and then the other's numbers are taken over, so that a tie cannot grow and the logits
    are compared with the bound of FP32 alone.
    """

    kv: str
    num_blocks: int = 12
    order: Sequence[int] | None = None
    like: Outcome | None = None
    model: object = MODEL
    cache: PagedKVCache | None = None
    kept: dict = field(default_factory=dict)  # (layer, side, name, position) -> (vectors, stored fields)
    places: dict = field(default_factory=dict)  # name -> slots
    ties: int = 0

    def __post_init__(self):
        self.cache = self.cache or new_cache(self.model.config, self.kv, self.num_blocks, BLOCK)
        self.paging = new_paging(self.cache, self.order)
        self.ids: dict[str, int] = {}
        table = {name: getattr(reference, name) for name in ("rms_norm", "linear", "rope", "silu_mul", "paged_attention")}
        self._ops = SimpleNamespace(**table, store_kv=self._store)

    def prefill(self, **tokens: Sequence[int]) -> dict[str, Tensor]:
        """The next tokens of some sequences: logits by name."""
        return self._forward(tokens)

    def decode(self, **tokens: int) -> dict[str, Tensor]:
        """One more token of some sequences."""
        return self._forward({name: [token] for name, token in tokens.items()})

    def free(self, name: str) -> None:
        self.paging.free(self.ids.pop(name))
        del self.places[name]

    def _forward(self, tokens):
        for name in tokens:
            if name not in self.ids:
                self.ids[name], self.places[name] = self.paging.add(), []
        batch = self.paging.batch([self.ids[name] for name in tokens], [len(t) for t in tokens.values()])
        slots = iter(batch.slot_mapping.tolist())
        self._now = []  # (name, position) of each token of the batch
        for name, new in tokens.items():
            for _ in new:
                self._now.append((name, len(self.places[name])))
                self.places[name].append(next(slots))
        ids = torch.tensor([t for new in tokens.values() for t in new])
        with torch.inference_mode():
            hidden = self.model.forward(ids, batch, self.cache, self._ops)
            logits = self.model.head(last_rows(hidden, batch), self._ops)
        return dict(zip(tokens, logits, strict=True))

    def _store(self, k, v, cache, layer, batch):
        reference.store_kv(k, v, cache, layer, batch)
        for side, x in (("k", k), ("v", v)):
            stored = getattr(cache, f"{side}_fields")(layer)
            for token, (name, position) in enumerate(self._now):
                block, offset = divmod(int(batch.slot_mapping[token]), cache.block_size)
                here = {field_name: tensor[block, :, offset] for field_name, tensor in stored.items()}
                key = (layer, side, name, position)
                if self.like is not None and key in self.like.kept:
                    self._take_over(key, x[token], here)
                self.kept[key] = (x[token].clone(), {field_name: tensor.clone() for field_name, tensor in here.items()})

    def _take_over(self, key, x, here):
        layer, side, _, _ = key
        like_x, like_fields = self.like.kept[key]
        kv_format = getattr(self.cache, f"{side}_format")(layer).name
        assert ((x - like_x).norm(dim=-1) <= bounds.REORDERED_KV * like_x.norm(dim=-1)).all(), key
        for head in range(len(x)):
            mine = {name: tensor[head] for name, tensor in here.items()}
            theirs = {name: tensor[head] for name, tensor in like_fields.items()}
            if kv_format == "fp32" or all(torch.equal(mine[name], theirs[name]) for name in mine):
                continue
            mine_numpy = {name: as_numpy(tensor) for name, tensor in mine.items()}
            vector, t = like_x[head].double().numpy(), tables(layer, x.shape[-1])
            assert oracles.judge(kv_format, vector, mine_numpy, t, bounds.REORDERED_KV).unexplained == 0, key
            self.ties += 1
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])

    def written(self) -> set[int]:
        return {slot for slots in self.places.values() for slot in slots}


def as_numpy(tensor: Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def assert_close(ours: Tensor, theirs: Tensor, kv: str) -> None:
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=logits_bound(kv))


def tokens_of(count: int, seed: int) -> list[int]:
    return random_tokens(SMALL, count, seed)


lengths = st.integers(1, 20)
seeds = st.integers(0, 10_000)


@pytest.mark.parametrize("kv", KV_FORMATS)
@given(count=lengths, seed=seeds)
@example(count=1, seed=0)
@example(count=BLOCK, seed=1)
@cases(5)
def test_prefill_then_decode_equals_a_longer_prefill(kv, count, seed):
    tokens = tokens_of(count + 1, seed)
    whole = Outcome(kv)
    expected = whole.prefill(a=tokens)["a"]
    stepwise = Outcome(kv, like=whole)
    stepwise.prefill(a=tokens[:-1])
    assert_close(stepwise.decode(a=tokens[-1])["a"], expected, kv)


@pytest.mark.parametrize("kv", KV_FORMATS)
@given(count=st.integers(2, 24), seed=seeds, cuts=st.sets(st.integers(1, 23), min_size=1, max_size=6))
@cases(5)
def test_chunks_of_a_prompt_change_nothing(kv, count, seed, cuts):
    tokens = tokens_of(count, seed)
    whole = Outcome(kv)
    expected = whole.prefill(a=tokens)["a"]
    chunked = Outcome(kv, like=whole)
    edges = [0, *sorted(cut for cut in cuts if cut < count), count]
    for begin, end in pairwise(edges):
        logits = chunked.prefill(a=tokens[begin:end])["a"]
    assert_close(logits, expected, kv)


@pytest.mark.parametrize("kv", KV_FORMATS)
@given(count=lengths, seed=seeds, others=st.lists(lengths, min_size=1, max_size=3), place=st.integers(0, 3))
@cases(5)
def test_companions_in_the_batch_change_nothing(kv, count, seed, others, place):
    tokens = tokens_of(count, seed)
    alone = Outcome(kv)
    expected = [alone.prefill(a=tokens)["a"], *(alone.decode(a=token)["a"] for token in (3, 5))]
    rows = [(f"other{i}", tokens_of(other, seed + 1 + i)) for i, other in enumerate(others)]
    rows.insert(place, ("a", tokens))
    together = Outcome(kv, like=alone)
    found = [together.prefill(**dict(rows))["a"]]
    found += [together.decode(**{name: token if name == "a" else 7 for name, _ in rows})["a"] for token in (3, 5)]
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, kv)


def three_steps(run: Outcome, seed: int) -> Tensor:
    """Two prompts, a later chunk of one, a decode step of both: all logits."""
    first = run.prefill(a=tokens_of(11, seed), b=tokens_of(5, seed + 1))
    second = run.prefill(a=tokens_of(7, seed + 2))
    third = run.decode(a=1, b=2)
    return torch.stack([first["a"], first["b"], second["a"], third["a"], third["b"]])


MODELS = {
    "fp32": MODEL,
    "bf16": small_model(SMALL, dtype=torch.bfloat16),
    "mha_d64": small_model(CONFIGS["mha_d64"]),
}


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("model", MODELS)
@given(order=st.permutations(range(12)), seed=seeds)
@cases(3)
def test_a_permutation_of_the_blocks_changes_no_bit(model, kv, order, seed):
    plain, permuted = (Outcome(kv, order=o, model=MODELS[model]) for o in (None, order))
    assert torch.equal(three_steps(plain, seed), three_steps(permuted, seed))
    if order[:4] != list(range(4)):
        assert plain.places != permuted.places


@pytest.mark.parametrize("kv", KV_FORMATS)
@given(offset=st.integers(1, 500), seed=seeds)
@cases(3)
def test_the_place_in_a_larger_cache_changes_no_bit(kv, offset, seed):
    small = Outcome(kv, num_blocks=5)
    large = Outcome(kv, num_blocks=offset + 5, order=list(range(offset, offset + 5)))
    assert torch.equal(three_steps(small, seed), three_steps(large, seed))
    assert min(large.written()) >= offset * BLOCK


def fill(cache: PagedKVCache, generator: torch.Generator) -> None:
    """Random finite numbers in every field, as other sequences may have left them: of any sign and up to 3e4."""
    for _, _, _, tensor in cache_tensors(cache):
        if tensor.is_floating_point():
            tensor.copy_(torch.empty(tensor.shape).uniform_(-3e4, 3e4, generator=generator))
        else:
            tensor.random_(0, 16 if tensor.shape[-1] == cache.shape(0).head_dim else 256, generator=generator)


def bytes_by_slot(tensor: Tensor) -> Tensor:
    """[slots, bytes of all heads]."""
    return tensor.transpose(1, 2).flatten(0, 1).flatten(1).contiguous().view(torch.uint8)


@pytest.mark.parametrize("kv", KV_FORMATS)
@given(seed=seeds, order=st.permutations(range(8)))
@cases(3)
def test_what_lies_in_other_slots_is_neither_read_nor_changed(kv, seed, order):
    clean, dirty = (Outcome(kv, num_blocks=8, order=order) for _ in range(2))
    fill(dirty.cache, torch.Generator().manual_seed(seed))
    before = [tensor.clone() for *_, tensor in cache_tensors(dirty.cache)]
    assert torch.equal(three_steps(clean, seed), three_steps(dirty, seed))
    written = sorted(dirty.written())
    others = [slot for slot in range(dirty.cache.num_slots) if slot not in dirty.written()]
    assert len(written) == 11 + 5 + 7 + 2
    for old, (*where, new), (*_, same) in zip(before, cache_tensors(dirty.cache), cache_tensors(clean.cache), strict=True):
        assert torch.equal(bytes_by_slot(old)[others], bytes_by_slot(new)[others]), where
        assert torch.equal(bytes_by_slot(same)[written], bytes_by_slot(new)[written]), where
        assert (bytes_by_slot(old)[written] != bytes_by_slot(new)[written]).any(dim=1).all(), where


@pytest.mark.parametrize("kv", KV_FORMATS)
@given(first=st.integers(9, 24), second=st.integers(1, 30), seed=seeds)
@cases(3)
def test_blocks_of_a_freed_sequence_are_as_good_as_new(kv, first, second, seed):
    used, fresh = Outcome(kv, num_blocks=7), Outcome(kv, num_blocks=7)
    used.prefill(old=tokens_of(first, seed), staying=tokens_of(9, seed + 1))
    fresh.prefill(staying=tokens_of(9, seed + 1))
    blocks_of_old = {slot // BLOCK for slot in used.places["old"]}
    used.free("old")
    ours, theirs = (run.prefill(new=tokens_of(second, seed + 2))["new"] for run in (used, fresh))
    assert blocks_of_old & {slot // BLOCK for slot in used.places["new"]}
    assert torch.equal(ours, theirs)
    assert torch.equal(used.decode(new=4)["new"], fresh.decode(new=4)["new"])


# -- Paging ----------------------------------------------------------------------------------------------------------------
def assert_sound(batch: Batch, lengths_before: list[int], new: list[int], size: int) -> list[list[int]]:
    """A batch says the same in all its tensors; returns each sequence's blocks."""
    blocks = []
    starts = batch.query_start_loc.tolist()
    assert starts == [0, *np.cumsum(new).tolist()]
    for row, (before, count) in enumerate(zip(lengths_before, new, strict=True)):
        table = batch.block_table[row].tolist()
        own = [block for block in table if block >= 0]
        assert table == own + [-1] * (len(table) - len(own))
        assert len(own) == -(-(before + count) // size)
        assert batch.seq_lens[row] == before + count
        assert batch.positions[starts[row] : starts[row + 1]].tolist() == list(range(before, before + count))
        places = [own[position // size] * size + position % size for position in range(before, before + count)]
        assert batch.slot_mapping[starts[row] : starts[row + 1]].tolist() == places
        blocks.append(own)
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
                gone = sorted(lengths)[detail % len(lengths)]
                paging.free(gone)
                del lengths[gone], blocks[gone], slots[gone]
                with pytest.raises(KeyError):
                    paging.length(gone)
            continue
        while len(lengths) < len(detail):
            new = paging.add()
            assert new not in lengths
            assert paging.length(new) == 0
            lengths[new], blocks[new], slots[new] = 0, [], []
        chosen = sorted(lengths)[-len(detail) :]
        free = 10 - sum(map(len, blocks.values()))
        needed = sum(-(-(lengths[s] + n) // size) - len(blocks[s]) for s, n in zip(chosen, detail, strict=True))
        if needed > free:
            if len(chosen) == 1:
                with pytest.raises(CacheFullError, match=rf"{free} are free"):
                    paging.batch(chosen, detail)
                assert paging.length(chosen[0]) == lengths[chosen[0]]
            continue
        batch = paging.batch(chosen, detail)
        rows = assert_sound(batch, [lengths[s] for s in chosen], detail, size)
        for sequence, count, own, new in zip(chosen, detail, rows, batch.slot_mapping.split(detail), strict=True):
            assert own[: len(blocks[sequence])] == blocks[sequence]  # what it has, it keeps
            lengths[sequence], blocks[sequence] = lengths[sequence] + count, own
            slots[sequence] += new.tolist()
            assert paging.length(sequence) == lengths[sequence]
        everything = [block for own in blocks.values() for block in own]
        assert len(everything) == len(set(everything))
        assert set(everything) <= set(range(10))
        for sequence, own in slots.items():
            assert len(own) == len(set(own)) == lengths[sequence]
            assert {slot // size for slot in own} == set(blocks[sequence])
    for sequence in list(lengths):
        paging.free(sequence)
    everything = paging.batch([paging.add()], [10 * size]).block_table[0].tolist()
    assert sorted(everything) == list(range(10))


def test_blocks_are_handed_out_in_the_order_asked_for():
    paging = PagedSequences(5, 4, order=[3, 0, 4, 1, 2])
    first, second = paging.add(), paging.add()
    assert paging.batch([first, second], [5, 1]).block_table.tolist() == [[3, 0], [4, -1]]


def test_a_full_cache_is_usable_after_the_refusal():
    run = Outcome("tq4", num_blocks=2)
    run.prefill(a=tokens_of(9, 0))
    with pytest.raises(CacheFullError, match="the KV cache is full: 1 more blocks of 8 tokens are needed, 0 are free"):
        run.paging.batch([run.ids["a"]], [8])
    assert run.paging.length(run.ids["a"]) == 9
    fresh = Outcome("tq4", num_blocks=2)
    fresh.prefill(a=tokens_of(9, 0))
    assert torch.equal(run.prefill(a=tokens_of(7, 1))["a"], fresh.prefill(a=tokens_of(7, 1))["a"])
    run.free("a")
    assert len(run.prefill(b=tokens_of(16, 2))) == 1


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


def check_round_trip(x: np.ndarray, layer: int) -> None:
    codes, scale, restored = round_trip(x, layer)
    exact, t = x.astype(np.float64), tables(layer, len(x))
    length = np.linalg.norm(exact)
    assert np.isfinite(restored).all()
    fields = {"codes": codes, "scale": np.float16(scale)}
    assert oracles.judge("tq4", exact, fields, t, bounds.FORMAT_FP32).unexplained == 0
    assert oracles.judge_restored("tq4", restored, fields, t, bounds.FORMAT_FP32).unexplained == 0
    assert 0 <= scale <= 65504
    if not x.any():
        assert scale == 0
    if scale == 0:
        assert not restored.any()
        assert length < 1e-7
        return
    assert restored @ exact / (np.linalg.norm(restored) * length) >= bounds.TQ4_LOWEST_COSINE
    if 2.0**-14 <= scale < 65504:
        assert np.linalg.norm(restored) == pytest.approx(length, rel=bounds.TQ4_LENGTH)
    elif scale == 65504:
        assert length >= 65504 * 0.99


@given(x=vectors(finite), layer=st.integers(0, 5))
@example(x=np.zeros(128, np.float32), layer=0)
@example(x=np.full(128, -0.0, np.float32), layer=0)
@example(x=np.full(128, 1e-45, np.float32), layer=0)
@example(x=np.full(128, 1e-30, np.float32), layer=0)
@example(x=np.full(128, 1e-6, np.float32), layer=0)
@example(x=np.full(128, 1e30, np.float32), layer=0)
@example(x=np.full(128, np.finfo(np.float32).max, np.float32), layer=0)
@example(x=np.eye(128, dtype=np.float32)[5] * np.float32(2e38), layer=1)
@cases(60)
def test_tq4_of_any_finite_vector_is_finite(x, layer):
    check_round_trip(x, layer)


@given(x=vectors(moderate), power=st.integers(-10, 10))
@cases(30)
def test_tq4_codes_do_not_depend_on_length(x, power):
    codes, _, _ = round_trip(x)
    scaled, _, _ = round_trip(x * np.float32(2.0**power))
    if np.abs(x[x != 0]).min(initial=1.0) > 1e-30:  # a denormal loses bits when it shrinks
        np.testing.assert_array_equal(codes, scaled)


@pytest.mark.parametrize("head_dim", bounds.TQ4_COSINE_ALONG_AN_AXIS)
def test_the_worst_vector_lies_along_an_axis_of_the_rotation(head_dim):
    """One rotated coordinate of 1 and the rest 0 is what no codebook for Gaussian coordinates is made for.

    The outermost centroid a stands for 1 and the innermost b for the zeros: cosine = a / sqrt(a^2 + (D - 1) b^2).
    """
    axis = haar_rotation(0, head_dim).float()[:, 7].contiguous().numpy()
    _, _, restored = round_trip(axis)
    exact = axis.astype(np.float64)
    cosine = restored @ exact / np.linalg.norm(restored) / np.linalg.norm(exact)
    centroids = tables(0, head_dim).centroids
    theory = centroids[-1] / np.hypot(centroids[-1], (head_dim - 1) ** 0.5 * centroids[8])
    assert cosine == pytest.approx(theory, abs=0.002)
    assert cosine == pytest.approx(bounds.TQ4_COSINE_ALONG_AN_AXIS[head_dim], abs=0.002)


def test_a_batch_that_does_not_fit_advances_none_of_its_sequences():
    paging = PagedSequences(4, BLOCK)
    first, second = paging.add(), paging.add()
    paging.batch([first], [3])
    with pytest.raises(CacheFullError):
        paging.batch([first, second], [BLOCK, 3 * BLOCK])  # either would fit alone
    assert (paging.length(first), paging.length(second)) == (3, 0)
    # Nothing was reserved either: all three free blocks still go to one sequence.
    assert paging.batch([second], [3 * BLOCK]).seq_lens.tolist() == [3 * BLOCK]


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


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_infinities_left_in_slots_of_nobody_do_not_leak(kv):
    """A freed or unwritten slot may hold anything; the same forward beside it gives the same bits."""
    results = []
    for leftover in (0.0, float("inf"), float("nan")):
        config = MODEL.config
        cache = new_cache(config, kv, 6, BLOCK)
        for layer in range(config.num_layers):
            for tensor in (*cache.k_fields(layer).values(), *cache.v_fields(layer).values()):
                tensor.fill_(leftover if tensor.is_floating_point() else 0)
        paging = PagedSequences(6, BLOCK, order=[3, 1, 0, 4, 2, 5])
        batch = paging.batch([paging.add(), paging.add()], [BLOCK + 3, 2])
        tokens = torch.arange(BLOCK + 5) % config.vocab_size
        results.append(prefill(ReferenceExecutor(MODEL), tokens, batch, cache))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
