"""`tiny` with planted faults, on disk and in memory; what plants them is `models.planted`."""

from functools import cache

import torch

from haarkv.models import planted
from haarkv.models.catalog import load_model
from haarkv.models.text import load_tokenizer
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec


@cache
def tiny():
    return load_model("tiny")


@cache
def text():
    """Held-out text of `tiny`."""
    return next(text for text in held_out_texts().values() if len(text) > 20_000)


@cache
def token_ids(count):
    return tuple(load_tokenizer("tiny", tiny().config).encode(text())[:count])


@cache
def tiny_qwen2():
    """`tiny` as a Qwen2: its norms of Q and K are fixed where they are on average, its biases are 0."""
    return planted.without_norms(tiny(), "qwen2", *planted.measured_rms(tiny(), token_ids(128)))


def run(model, ids, ops=reference, kv="bf16"):
    """Logits [T, vocab] after each of some tokens."""
    config = model.config
    blocks = -(-len(ids) // 128)
    cache = PagedKVCache(KVSpec(kv).plan(config.num_layers), config.kv_shapes, num_blocks=blocks)
    paging = PagedSequences(blocks, 128)
    batch = paging.batch([paging.add()], [len(ids)])
    with torch.inference_mode():
        hidden = model.layers(model.embed(torch.tensor(ids)), range(config.num_layers), batch, cache, ops)
        return model.head(hidden, ops)
