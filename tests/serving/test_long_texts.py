"""Learned keys of texts longer than a stretch of 1,024 positions: pages know where their tokens stand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from learned_tiny import write_plan
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm_judge import Judge, prompts
from vllm_paged import Shape, Worker, configuration, plain_spec, vllm_metadata
from vllm_server import serving

from haarkv.serving.vllm_plugin import backend, limits
from haarkv.serving.vllm_plugin.backend import Buffers, RotatedMetadata, forward_batch
from haarkv.tq_ops import formats
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.plan_file import load
from haarkv.tq_ops.kv.shapes import KVShape

SHAPE = Shape(heads=4, block_size=64, num_blocks=60)
CPU = torch.device("cpu")


@pytest.mark.vllm_short
def test_pages_hold_and_return_what_a_cache_of_our_own_does_in_every_stretch():
    """Chunks that cross a stretch's border, a sequence far behind another, a short one, and tokens that pad the batch."""
    pair = formats.parse("k=lr4,v=tq3", synthetic.calibration(1, SHAPE.kv_heads, SHAPE.head_dim))
    worker, ops, padding = Worker(SHAPE, (0,), KVCacheLayout.BLHNC, pair), CpuOps(), 3
    shape = KVShape(SHAPE.kv_heads, SHAPE.head_dim)
    cache = PagedKVCache(KVPlan((pair,)), shape, num_blocks=SHAPE.num_blocks, block_size=SHAPE.block_size)
    order = torch.randperm(SHAPE.num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    paging = PagedSequences(SHAPE.num_blocks, SHAPE.block_size, order)
    a, b, c = (paging.add() for _ in range(3))
    forwards = ([a, b], [1000, 7]), ([a, b], [50, 900]), ([b, a], [300, 1030]), ([a, b, c], [1, 1, 9]), ([c, a], [1, 1])
    generator = torch.Generator().manual_seed(1)
    for sequences, counts in forwards:
        batch = paging.batch(sequences, counts)
        tokens = len(batch.positions)
        metadata = RotatedMetadata(forward_batch(vllm_metadata(batch, padding), Buffers(64, 4, CPU)))
        heads = (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
        q, k, v = (torch.randn(tokens + padding, n, SHAPE.head_dim, generator=generator).bfloat16() for n in heads)
        worker.store(0, k, v, torch.cat([batch.slot_mapping, torch.full((padding,), -1)]), metadata)
        ops.store_kv(k[:tokens], v[:tokens], cache.view(0, batch))
        out = worker.attend(0, q, k, v, metadata)
        assert torch.equal(out[:tokens], ops.paged_attention(q[:tokens], cache.view(0, batch), SHAPE.softmax_scale))


@pytest.mark.vllm_short
@pytest.mark.parametrize(("size", "is_refused"), [(16, False), (128, False), (48, True), (2048, True)])
def test_blocks_that_a_stretch_ends_in_are_refused(monkeypatch, size, is_refused):
    pair = formats.parse("k=lr4,v=tq3", synthetic.calibration(6, 2, 128))
    config = configuration(6)
    config.cache_config = SimpleNamespace(block_size=size)
    words = f"lr4 takes blocks that divide 1,024 tokens, not of {size}; give --block-size 128"
    for plan, expected in ((KVPlan((pair,) * 6), words if is_refused else None), (KVSpec("tq4").plan(6), None)):
        monkeypatch.setattr(limits, "kv_plan", lambda _, plan=plan: plan)
        monkeypatch.setattr(limits, "_weights", lambda _: None)
        assert limits._cache(config) == expected


@pytest.mark.vllm_short
def test_blocks_that_vllm_chose_itself_are_refused_too(monkeypatch):
    pair = formats.parse("k=lr4,v=tq3", synthetic.calibration(6, 2, 128))
    monkeypatch.setattr(backend, "require_supported", lambda _: None)
    monkeypatch.setattr(backend, "layer_formats", lambda *_: pair)
    spec, name, config = plain_spec(Shape(block_size=384)), "model.layers.3.self_attn.attn", configuration(6)
    config.compilation_config = SimpleNamespace(static_forward_context={name: None})
    with pytest.raises(ValueError, match="lr4 takes blocks that divide 1,024 tokens, not of 384"):
        backend.RotatedMetadataBuilder(spec, [name], config, CPU)


# -- The real server -----------------------------------------------------------------------------------------------------
LENGTHS = (1000, 1270, 1400, 1530)
BLOCKS = 30
"""Room for three of the prompts; as they go on, each of them takes one block more."""


@pytest.mark.vllm_server
def test_a_server_writes_the_references_text_behind_long_prompts(tmp_path, record_property):
    """In chunks, with requests put off and computed again, and with blocks that an earlier request left."""
    file = write_plan(tmp_path / "plan.safetensors", ("k=lr4,v=tq3",) * 6)
    prompt_ids, flags = prompts(4, (2000,)), ("--max-model-len", "2048", "--max-num-batched-tokens", "256")
    prompt_ids = [prompt[:length] for prompt, length in zip(prompt_ids, LENGTHS, strict=True)]
    assert tuple(map(len, prompt_ids)) == LENGTHS
    judge = Judge(spec=load(file))
    room = int((BLOCKS + 1.5) * 128 * 6 * 2 * (66 + 50))
    with serving(tmp_path / "log", "--kv-plan", str(file), *flags, kv=None, cache_bytes=room) as server:
        for number in (1, 2):
            verdict = judge.judge(prompt_ids, server.complete(prompt_ids, 64))
            record_property(f"round {number}", str(verdict))
            print(verdict)
            assert verdict.passes, verdict
        # The last again, alone: what the prefix cache holds of it is beyond the first stretch, too.
        before = server.metrics()["vllm:prefix_cache_hits_total"]
        assert judge.judge(prompt_ids[-1:], server.complete(prompt_ids[-1:], 64)).passes
        again = judge.judge(prompt_ids[-1:], server.complete(prompt_ids[-1:], 64))
        figures = server.metrics()
        print(again, figures["vllm:num_preemptions_total"], figures["vllm:prefix_cache_hits_total"] - before)
        assert again.passes, again
        assert figures["vllm:num_preemptions_total"] > 0
        assert figures["vllm:prefix_cache_hits_total"] - before >= 1024 + 128
