"""Prompts beside a tail: as many tokens at once as without one, where that changes no bit."""

import pytest
import torch
from small_models import SMALL, gemma_config, small_model

from haarkv.engine.generation import PREFILL_CHUNK, prefill_in_chunks, tail_chunk
from haarkv.executors.catalog import create
from haarkv.models.caches import new_cache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KEPT_CHUNK


@pytest.mark.parametrize("tail", [8, 124])
def test_a_prompt_in_larger_chunks_beside_a_tail_has_the_same_bits(tail):
    model, plan = small_model(SMALL), KVSpec("k=tq6,v=tq4", tail=tail, sink=4).plan(SMALL.num_layers)
    executor = create("cpu", model, plan, None)
    assert tail_chunk(executor) == PREFILL_CHUNK
    ids, logits, stored = [(7 * i) % SMALL.vocab_size for i in range(500)], [], []
    for chunk in (KEPT_CHUNK, tail_chunk(executor)):
        cache, paging = new_cache(SMALL, plan, sequences=1, tokens=512, chunk=chunk)
        assert cache.most_new_tokens == chunk
        logits.append(prefill_in_chunks(executor, [ids], [paging.add()], paging, cache))
        stored.append([bytes(field.numpy().tobytes()) for _, _, fields, _ in cache.fields() for field in fields.values()])
    assert torch.equal(*logits)
    assert stored[0] == stored[1]


def test_where_sums_follow_the_cut_and_beside_windows_chunks_stay_small():
    plan, windowed = KVSpec("tq4").plan(SMALL.num_layers), gemma_config()
    assert tail_chunk(create("reference", small_model(SMALL), plan, None)) == KEPT_CHUNK
    assert tail_chunk(create("cpu", small_model(windowed), KVSpec("tq4").plan(windowed.num_layers), None)) == KEPT_CHUNK
