"""Prompts beside a tail: as many tokens at once as without one, where that changes no bit."""

import pytest
import torch
from small_models import SMALL, gemma_config, small_model

from haarkv.engine.generation import PREFILL_CHUNK, prefill_in_chunks, tail_chunk
from haarkv.executors.base import verify
from haarkv.executors.catalog import create
from haarkv.models.base import new_cache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import WINDOW_CHUNK

WINDOW_MODEL = gemma_config()


@pytest.mark.parametrize("tail", [8, 124])
@pytest.mark.parametrize("config", [SMALL, WINDOW_MODEL], ids=["all tokens", "windows"])
def test_prompts_in_larger_chunks_beside_a_tail_have_the_same_bits(config, tail):
    plan = KVSpec("k=tq6,v=tq4", tail=tail, sink=4).plan(config.num_layers)
    executor = create("cpu", small_model(config), plan, None)
    assert tail_chunk(executor) == PREFILL_CHUNK
    logits, sequences = zip(
        *(
            run(executor, plan, chunk, lengths)
            for lengths in ([500], [500, 70, 130])
            for chunk in (WINDOW_CHUNK, PREFILL_CHUNK)
        ),
        strict=True,
    )
    assert torch.equal(*logits[:2])
    assert torch.equal(*logits[2:])
    assert sequences[0] == sequences[1]  # of several sequences, blocks are handed out in another order


def run(executor, plan, chunk, lengths):
    """Logits after prompts and each of three steps, which read what prompts left in rings and tails; the cache's bytes."""
    config = executor.config
    prompts = [[(7 * i + length) % config.vocab_size for i in range(length)] for length in lengths]
    cache, paging = new_cache(config, plan, sequences=len(prompts), tokens=512, chunk=chunk)
    assert cache.most_new_tokens == chunk
    sequences = [paging.add() for _ in prompts]
    logits = [prefill_in_chunks(executor, prompts, sequences, paging, cache)]
    for step in range(3):
        batch = paging.batch(sequences, [1] * len(prompts))
        logits.append(verify(executor, torch.tensor([step + 1] * len(prompts)), batch, cache))
    return torch.stack(logits), [
        field.numpy().tobytes() for kv in cache.kv.values() for fields in kv.fields for field in fields.values()
    ]


def test_where_sums_follow_the_cut_chunks_stay_small():
    plan = KVSpec("tq4").plan(SMALL.num_layers)
    assert tail_chunk(create("reference", small_model(SMALL), plan, None)) == WINDOW_CHUNK
