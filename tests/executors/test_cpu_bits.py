"""The executor `cpu` gives the same bits however a prompt is cut, on any threads and beside any other sequences."""

import random

import pytest
import torch
from at_length import MORE, rest

from haarkv.engine.generation import prefill_in_chunks
from haarkv.executors.cpu import CpuExecutor
from haarkv.models.catalog import load_model
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape, blocks_for

MODELS = {dtype: load_model("tiny", dtype) for dtype in ("bfloat16", "float32")}
CONFIG = MODELS["bfloat16"].config
SIZES = (1, 2, 7, 8, 16, 17, 33, 64, 65, 100, 250, 512)
LONG = 1200


def logits(dtype, kv, tokens, chunks, threads, companions=()):
    """[vocab] after `tokens`, which come in pieces of these sizes beside companions that come in others."""
    sequences, longest = [tokens, *companions], max(len(tokens), *map(len, companions), 1)
    cache = PagedKVCache(
        kv.plan(CONFIG.num_layers), KVShape(CONFIG.heads.num_kv_heads, CONFIG.heads.head_dim),
        num_blocks=len(sequences) * blocks_for(longest), num_rows=len(sequences),
    )  # fmt: skip
    paging = PagedSequences(cache.num_blocks, cache.block_size, num_rows=len(sequences))
    ids, before, executor = [paging.add() for _ in sequences], torch.get_num_threads(), CpuExecutor(MODELS[dtype])
    torch.set_num_threads(threads)
    try:
        begin = 0
        for size in chunks:
            pieces = [sequence[begin : begin + size] for sequence in sequences]
            running = [row for row, piece in enumerate(pieces) if piece]
            last = prefill_in_chunks(executor, [pieces[r] for r in running], [ids[r] for r in running], paging, cache)
            begin += size
        return last[0]
    finally:
        torch.set_num_threads(before)


def cut(count, seed):
    """Sizes of pieces of a prompt, each of SIZES about as often."""
    generator, sizes = random.Random(seed), []
    while sum(sizes) < count:
        sizes.append(min(generator.choice(SIZES), count - sum(sizes)))
    return sizes


def random_ids(count, seed):
    generator = random.Random(seed)
    return [generator.randrange(CONFIG.vocab_size) for _ in range(count)]


CALIBRATION = synthetic.calibration(CONFIG.num_layers, CONFIG.heads.num_kv_heads, CONFIG.heads.head_dim)
CASES = [
    ("bfloat16", KVSpec("tq4"), LONG),
    ("bfloat16", KVSpec("tq4", tail=128), LONG),
    ("bfloat16", KVSpec("tq3", layers={0: "k=tq8,v=bf16", 1: "k=bf16,v=tq5"}, tail=7, sink=3), 300),
    *(("bfloat16", KVSpec(kv), 300) for kv in ("tq2", "tq5", "tq8", "bf16")),
    ("bfloat16", KVSpec("k=lr4,v=tq3", tail=16, calibration=CALIBRATION), 300),
    ("float32", KVSpec("tq4", tail=16), 300),
    ("float32", KVSpec("fp32", layers={0: "k=tq6,v=fp32", 1: "k=fp32,v=tq3"}), 300),
]


# The rest runs with `make test-long`.
@pytest.mark.parametrize(
    ("dtype", "kv", "count"), rest(MORE, CASES, lambda i, _: i in (0, 2, 7, 8)), ids=lambda x: str(getattr(x, "kv", x))
)
def test_logits_have_the_same_bits_however_their_prompt_came(dtype, kv, count):
    tokens = random_ids(count, 0)
    expected = logits(dtype, kv, tokens, [512] * -(-count // 512), 1)
    assert torch.equal(logits(dtype, kv, tokens, cut(count, 1), 2), expected)
    assert torch.equal(logits(dtype, kv, tokens, cut(count, 2), 1, [random_ids(count - 90, 3), random_ids(40, 4)]), expected)
    assert torch.equal(logits(dtype, kv, tokens, [count - 5] + 5 * [1], 2, [random_ids(count, 5)]), expected)


def test_other_tokens_give_other_logits():
    tokens, kv = random_ids(300, 0), KVSpec("tq4")
    other = [(tokens[0] + 1) % CONFIG.vocab_size, *tokens[1:]]
    assert not torch.equal(*(logits("bfloat16", kv, ids, [300], 1) for ids in (tokens, other)))
