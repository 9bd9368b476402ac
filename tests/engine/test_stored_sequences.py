"""Stored sequences: they go on as if they had never stopped, are read where they belong, and damaged files are refused."""

import json
import random
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from haarkv.tq_ops import artifact
from haarkv.tq_ops.artifact import CACHE
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.tq_ops.kv import cache_file
from haarkv.tq_ops.kv.batch import CacheFullError, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import WINDOW_CHUNK, WINDOW_ROOM, KVShape
from haarkv.tq_ops.kv.stored import StoredSequence, put, reusable, take


def same(one, other):
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items()
    )


# -- Where a prefix may be cut ---------------------------------------------------------------------------------------------


def stored_sequence(plan, tokens=300, room=WINDOW_CHUNK, turn=None):
    generator = torch.Generator().manual_seed(1)
    cache = PagedKVCache(plan, KVShape(1, 64), num_blocks=4, num_rows=2, room=room)
    paging = PagedSequences(4, 128, order=[2, 0, 3, 1], num_rows=2)
    paging.add()
    sequence = paging.add()
    x, earlier = torch.randn(tokens, 1, 64, generator=generator), None
    # What a format has restored lies in the middle of its levels: none depends on how many are stored at once.
    x = plan.k(0).dequantize(plan.k(0).quantize(x, 0), 0) if plan.k(0).group_tokens == 1 else x
    for begin in range(0, tokens, step := min(50, room)):
        if begin == turn:
            earlier = take(cache, paging, sequence, range(turn), whole=False)
        batch = paging.batch([sequence], [min(step, tokens - begin)])
        cache.view(0, batch).write(x[batch.positions], -x[batch.positions])
    return x, take(cache, paging, sequence, range(tokens), earlier=earlier)


@pytest.mark.parametrize("spec", [KVSpec("tq4"), KVSpec("tq4", tail=30, sink=3), KVSpec("kivi2"), KVSpec("kivi2", tail=70)])
def test_a_prefix_stores_what_the_whole_did(spec):
    """A sequence put back up to any length that `reusable` allows, and continued, holds the bytes of one never cut."""
    plan = spec.plan(1)
    x, whole = stored_sequence(plan)
    lengths = []
    for length in (1, 100, 200, 236, 250, 268, 299):
        other = [*range(length), *([-1] * (300 - length))]
        cache = PagedKVCache(plan, KVShape(1, 64), num_blocks=4, num_rows=1)
        common = reusable(whole, other, cache)
        assert common in (0, length)
        lengths += [length] * bool(common)
        paging = PagedSequences(4, 128, num_rows=1)
        sequence = put(whole, cache, paging, common)
        for begin in range(common, 300, 50):
            batch = paging.batch([sequence], [min(50, 300 - begin)])
            cache.view(0, batch).write(x[batch.positions], -x[batch.positions])
        assert same(take(cache, paging, sequence, range(300)), whole)
    # The ring has 64 tokens beside the tail, and the group that the next token is in must be whole.
    least = 300 - 64 + plan.k(0).group_tokens if plan.has_windows else 0
    assert lengths == [length for length in (1, 100, 200, 236, 250, 268, 299) if length >= least]


def test_what_others_left_in_a_block_is_not_taken():
    plan = KVSpec("tq4", tail=4, sink=2).plan(1)
    cache = PagedKVCache(plan, KVShape(1, 64), num_blocks=1, num_rows=1)
    paging = PagedSequences(1, 128, num_rows=1)
    sequences = []
    for tokens in (60, 9):
        sequence = paging.add()
        batch = paging.batch([sequence], [tokens])
        x = torch.randn(tokens, 1, 64, generator=torch.Generator().manual_seed(tokens))
        cache.view(0, batch).write(x, x)
        sequences.append(take(cache, paging, sequence, range(tokens)))
        paging.free(sequence)
    assert not any(tensor[:, :, 9:].any() for name, tensor in sequences[1].tensors.items() if not name.endswith("window"))
    assert (sequences[1].tensors["layers.0.k.window"] != 0).any(-1).sum() == 9 + 2  # the ring holds all; sinks lie there twice
    assert sequences[0].nbytes == sequences[1].nbytes


def test_a_sequence_that_does_not_fit_begins_nothing():
    plan = KVSpec("tq4").plan(1)
    _, whole = stored_sequence(plan)
    cache, paging = PagedKVCache(plan, KVShape(1, 64), num_blocks=2), PagedSequences(2, 128)
    with pytest.raises(CacheFullError):
        put(whole, cache, paging)
    assert put(whole, cache, paging, 256) is not None


# -- The file --------------------------------------------------------------------------------------------------------------

SHAPE = ModelShape.uniform(1, 1, 64, 32, 400)


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def file(request, tmp_path):
    plan = KVSpec("tq4", tail=4).plan(1)
    _, sequence = stored_sequence(plan, room=WINDOW_ROOM, turn=240)
    origin = cache_file.sequence_origin(plan, SHAPE, "weights")
    cache_file.save(tmp_path / "c", sequence, origin, compress=request.param)
    return tmp_path / "c", plan, sequence, origin


def test_a_file_holds_what_was_stored(file):
    path, plan, sequence, origin = file
    read_back = cache_file.load_for(path, origin, plan)
    assert same(read_back, sequence)
    assert same(read_back.earlier, sequence.earlier)
    assert (read_back.token_ids, read_back.length) == (sequence.token_ids, 300)
    assert (read_back.earlier.token_ids, read_back.earlier.length) == (sequence.earlier.token_ids, 240)
    assert cache_file.read_origin(path) == (300, origin)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"shape": replace(SHAPE, hidden_size=64)}, "made for another model"),
        ({"weights": "others"}, "other weights"),
        ({"weights": "weights-0"}, "made with no channels balanced; give --balance off"),
        ({"layers": ("tq3",)}, "stores layer 0 in tq4, and this run in tq3"),
        ({"tail": 8}, "keeps tail 4"),
        ({"sink": 1}, "sink 0"),
        ({"tables": "0" * 16}, "other rotations or learned coordinates"),
    ],
)
def test_another_place_is_refused_by_name(file, other, words):
    path, plan, _, origin = file
    with pytest.raises(InputError, match=words):
        cache_file.load_for(path, replace(origin, **other), plan)


def test_tables_tell_rotations_and_coordinates_apart():
    shape = ModelShape.uniform(2, 1, 64, 32, 400)
    specs = [KVSpec("k=lr3,v=tq4", calibration=calibration(2, 1, 64, seed)) for seed in (0, 1)]
    plans = [KVSpec("tq4").plan(2), KVSpec("tq3").plan(2)]
    plans += [spec.plan(2) for spec in specs]
    tables = [cache_file.sequence_origin(plan, shape, "w").tables for plan in plans]
    assert len(set(tables)) == len(tables)


def test_every_damaged_file_is_refused_in_one_line(file):
    """500 of them: bits flipped, ends cut off, pieces exchanged."""
    path, plan, sequence, origin = file
    content, draw, passes = path.read_bytes(), random.Random(1), 0
    for number in range(500):
        data = bytearray(content)
        if number % 5 == 0:
            data = data[: draw.randrange(len(data))]
        elif number % 5 == 1:
            a, b = (draw.randrange(len(data) - 64) for _ in range(2))
            data[a : a + 64], data[b : b + 64] = data[b : b + 64], data[a : a + 64]
        else:
            data[draw.randrange(len(data) if number % 2 else 900)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        if data == content:
            continue
        with suppress(InputError):  # a space of the header may be another one
            read_back = cache_file.load_for(path, origin, plan)
            assert same(read_back, sequence)
            assert same(read_back.earlier, sequence.earlier)
            assert (read_back.token_ids, read_back.length) == (sequence.token_ids, sequence.length)
            passes += 1
    assert passes < 25


def test_content_that_does_not_fit_its_header_is_refused(file):
    """With digests taken anew, as a file would be that another program wrote."""
    path, plan, sequence, origin = file
    more = {**sequence.tensors, "layers.1.k.codes": torch.zeros(3, 1, 128, 32)}
    for wrong in (
        StoredSequence(sequence.token_ids, 300, more),
        StoredSequence(sequence.token_ids, 2, sequence.tensors),
        StoredSequence(sequence.token_ids, 300, {name: tensor.float() for name, tensor in sequence.tensors.items()}),
        StoredSequence((999,) * 300, 300, sequence.tensors),
        replace(
            sequence, earlier=replace(sequence.earlier, tensors={name: t.clone() for name, t in sequence.tensors.items()})
        ),
        replace(sequence, earlier=replace(sequence.earlier, tensors={})),
    ):
        cache_file.save(path, wrong, origin)
        with pytest.raises(InputError, match=r"does not fit|does not know|not of as many blocks"):
            cache_file.load_for(path, origin, plan)


@pytest.mark.parametrize(
    "entries", [{"length": "-1"}, {"length": "1e3"}, {"origin": "[]"}, {"origin": '{"shape": 1}'}, {"earlier": "301"}]
)
def test_metadata_of_another_kind_is_refused(file, entries):
    path, plan, _, origin = file
    tensors = load_file(path)
    metadata = {name: text for name, text in artifact.header(path, CACHE).items() if name != "sha256"}
    artifact.write(path, CACHE, metadata | entries, tensors)
    with pytest.raises(InputError, match=r"is no stored cache: (its (length|origin|model)|not a number)"):
        cache_file.load_for(path, origin, plan)


def test_a_format_that_is_not_known_here_is_named(file):
    path = file[0]
    metadata, tensors = artifact.read(path, CACHE)
    origin = json.loads(metadata["origin"])
    origin["layers"][0] = "k=kvarn4,v=tq4"
    artifact.write(path, CACHE, metadata | {"origin": json.dumps(origin)}, tensors)
    with pytest.raises(InputError, match=r"c is no stored cache: unknown KV format 'kvarn4'"):
        cache_file.read_origin(path)
