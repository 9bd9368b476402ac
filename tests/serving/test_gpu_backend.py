"""The backend with the kernels of a GPU, in Triton's interpreter, on vLLM's own description of batches.

vLLM's engine has not run on a GPU with it. What is shown here: what lands in the pages and comes back, padded batches as vLLM
replays graphs for them, that a captured step would read what a later batch brings, and that nothing waits for the device.
"""

from __future__ import annotations

from types import SimpleNamespace

import bounds
import pytest
import torch
import vllm_paged
from op_tables import relative
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm_paged import Shape, Worker, packed_spec

from haarkv.serving.vllm_plugin import backend
from haarkv.serving.vllm_plugin.backend import GpuKernels, RotatedMetadataBuilder
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
pytestmark = pytest.mark.vllm_short

CPU = torch.device("cpu")
SHAPE = Shape(head_dim=64, heads=4, kv_heads=2, block_size=16, num_blocks=12)
LAYER = 3


@pytest.fixture(autouse=True)
def gpu(monkeypatch) -> GpuKernels:
    """The kernels of a GPU in place of the CPU's."""
    stand_in = GpuKernels(CPU)
    monkeypatch.setattr(backend, "kernels_on", lambda _device: stand_in)
    return stand_in


class Runner:
    """vLLM's worker: buffers that stay where they are, and a description of each batch that consists of their beginnings.

    Args:
        dtypes: of `slot_mapping` and `seq_lens`, should a version of vLLM keep others than int64 and int32.
    """

    def __init__(self, most: int = 64, slots: torch.dtype = torch.int64, lengths: torch.dtype = torch.int32) -> None:
        self.query_start_loc = torch.zeros(most + 1, dtype=torch.int32)
        self.seq_lens, self.slot_mapping = torch.zeros(most, dtype=lengths), torch.zeros(most, dtype=slots)
        self.block_table = torch.zeros(most, 4, dtype=torch.int32)
        scheduler = SimpleNamespace(max_num_batched_tokens=most, max_num_seqs=most)
        # Of a model of made-up weights nothing is balanced: no checkpoint is read.
        load = SimpleNamespace(load_format="dummy")
        config = SimpleNamespace(
            model_config=None, scheduler_config=scheduler, load_config=load, parallel_config=None, additional_config={},
            compilation_config=SimpleNamespace(static_forward_context={}),
        )  # fmt: skip
        self.builder = RotatedMetadataBuilder(packed_spec(SHAPE), ["model.layers.3.self_attn.attn"], config, CPU)
        self.lengths = [0] * 3

    def describe(self, new: dict[int, int], padded: int | None = None) -> CommonAttentionMetadata:
        """New tokens of sequences, each of which owns four blocks; with `padded`, a decode step of that many sequences."""
        rows, tokens = list(new), sum(new.values())
        count, width = padded or len(rows), padded or tokens
        starts = torch.tensor([0, *new.values()]).cumsum(0)
        self.query_start_loc[: len(starts)] = starts
        self.query_start_loc[len(starts) : count + 1] = starts[-1]
        self.seq_lens[:count] = 0
        self.block_table[:count] = 0
        self.slot_mapping[:width] = -1
        slots = []
        for row, (sequence, more) in enumerate(new.items()):
            blocks = torch.arange(4) * 3 + sequence
            positions = torch.arange(self.lengths[sequence], self.lengths[sequence] + more)
            self.lengths[sequence] += more
            self.seq_lens[row], self.block_table[row] = self.lengths[sequence], blocks
            slots.append(blocks[positions // 16] * 16 + positions % 16)
        self.slot_mapping[:tokens] = torch.cat(slots)
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc[: count + 1], query_start_loc_cpu=self.query_start_loc[: count + 1],
            seq_lens=self.seq_lens[:count], num_reqs=count, num_actual_tokens=width, max_query_len=max(new.values()),
            max_seq_len=64, block_table_tensor=self.block_table[:count], slot_mapping=self.slot_mapping[:width],
        )  # fmt: skip


def qkv(tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16):
    return vllm_paged.qkv(tokens, seed, dtype, SHAPE)


def forward(worker: Worker, runner: Runner, common: CommonAttentionMetadata, tensors, metadata=None):
    q, k, v = tensors
    metadata = metadata or runner.builder.build(0, common)
    worker.store(LAYER, k, v, common.slot_mapping)
    return worker.attend(LAYER, q, k, v, metadata)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtypes", [(torch.int64, torch.int32), (torch.int32, torch.int64)], ids=str)
def test_prompts_and_decode_steps_are_near_the_reference(dtype, dtypes):
    worker, runner = Worker(SHAPE, (LAYER,), KVCacheLayout.BLHNC), Runner(slots=dtypes[0], lengths=dtypes[1])
    cache = PagedKVCache(KVSpec("tq4").plan(LAYER + 1), KVShape(2, 64), num_blocks=12, block_size=16)
    wide = torch.float32 if dtype == torch.float16 else dtype
    limit = (bounds.LAYER_FP32 if wide == torch.float32 else bounds.LAYER_BF16).attention
    for step, new in enumerate(({0: 17, 2: 5}, {0: 1, 1: 9, 2: 1}, {2: 1, 1: 1, 0: 1})):
        common, tensors = runner.describe(new), qkv(sum(new.values()), step, dtype)
        metadata = runner.builder.build(0, common)
        out = forward(worker, runner, common, tensors, metadata)
        q, k, v = (x.to(wide) for x in tensors)
        reference.store_kv(k, v, cache.view(LAYER, metadata.batch))
        expected = reference.paged_attention(q, cache.view(LAYER, metadata.batch), SHAPE.softmax_scale)
        # An FP16 result is rounded to FP16 once more.
        assert relative(out.float(), expected.float()) <= max(limit, 2.0**-10 if dtype == torch.float16 else 0.0)


def test_a_padded_decode_step_gives_and_stores_what_the_same_step_does_unpadded():
    outs, raws = [], []
    for padded in (None, 4):
        worker, runner = Worker(SHAPE, (LAYER,), KVCacheLayout.LBHNC), Runner()
        forward(worker, runner, runner.describe({0: 6, 1: 3}), qkv(9, 1))
        outs.append(forward(worker, runner, runner.describe({0: 1, 1: 1}, padded), [
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, (padded or 2) - 2), value=float("nan")) for x in qkv(2, 2)
        ])[:2])  # fmt: skip
        raws.append(worker.raw)
    assert relative(outs[1], outs[0]) <= bounds.LAYER_BF16.attention
    assert torch.equal(raws[0], raws[1])


def test_what_a_graph_captured_reads_what_a_later_batch_brings():
    """A graph holds the tensors of the metadata it was captured with; vLLM describes later batches in the same memory."""
    worker, runner = Worker(SHAPE, (LAYER,), KVCacheLayout.LBHNC), Runner()
    graph_metadata = runner.builder.build_for_cudagraph_capture(runner.describe({0: 1, 1: 1, 2: 1}, 4))
    runner.lengths = [0] * 3
    forward(worker, runner, runner.describe({0: 6, 1: 3}), qkv(9, 1))
    common, tensors = runner.describe({1: 1, 0: 1}, 4), qkv(4, 2)
    fresh = runner.builder.build(0, common)
    for name, tensor in graph_metadata.batch.tensors.items():
        assert tensor.data_ptr() == getattr(fresh.batch, name).data_ptr(), name
        assert tensor.shape == getattr(fresh.batch, name).shape, name
    assert graph_metadata.batch.positions[:2].tolist() == [3, 6]
    out = forward(worker, runner, common, tensors, graph_metadata)
    assert torch.equal(out[:2], worker.attend(LAYER, *tensors, fresh)[:2])


def test_it_says_that_decode_steps_can_be_captured():
    support = RotatedMetadataBuilder.get_cudagraph_support(None, None)
    assert support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class NeverWaits(TorchDispatchMode):
    """Refuses what makes the host wait for a GPU: reading a number, and results whose size depends on numbers."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "repeat_interleave.Tensor")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        has_size = name.startswith("repeat_interleave") and (kwargs or {}).get("output_size") is not None
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for indexer in args[1:2] for index in (indexer if isinstance(indexer, list | tuple) else [indexer])
        )  # fmt: skip
        waits = by_mask or (name.startswith(self.WAITS) and not has_size)
        assert not waits, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


class LaunchRecorder:
    """A kernel whose launch is noted and does nothing."""

    def __init__(self, name: str, launches: list[str]) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *_, **__: self.launches.append(self.name)


def test_nothing_of_a_forward_waits_for_the_device(monkeypatch):
    """The kernels themselves are replaced: Triton's interpreter reads numbers on the host."""
    from haarkv.tq_ops.cuda import ops, prologue

    launches = []
    for module in (ops.attention, prologue):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, LaunchRecorder(name, launches))
    worker, runner = Worker(SHAPE, (LAYER,), KVCacheLayout.LBHNC), Runner()
    forward(worker, runner, runner.describe({0: 3}), qkv(3, 1))  # what is made once, layouts and views, may wait
    launches.clear()
    common, tensors = runner.describe({0: 1, 1: 4}), qkv(5, 2)
    # Told of earlier faults is what has arrived on the host already.
    monkeypatch.setattr(GpuKernels, "next_batch", lambda self: None)
    with NeverWaits():
        forward(worker, runner, common, tensors)
    assert launches.count("prologue_kernel") == 2  # K and V, and queries
    with pytest.raises(AssertionError, match="waits for the device"), NeverWaits():
        ops.store_kv(*tensors[1:], worker.impls[LAYER]._cache.view(LAYER, runner.builder.build(0, common).batch))


@pytest.mark.parametrize(("side", "value"), [("k", float("nan")), ("v", -float("inf"))])
def test_one_requests_numbers_do_not_reach_another_and_the_log_tells_after_the_step(gpu, monkeypatch, side, value):
    messages: list[str] = []
    monkeypatch.setattr(backend.logger, "error", lambda message, *args: messages.append(message % args))
    q, k, v = qkv(9, 1)
    outs, raws = [], []
    for number in (0.0, value):
        new = {"k": k.clone(), "v": v.clone()}
        new[side][7, 1, 5] = number  # of the second request
        worker, runner = Worker(SHAPE, (LAYER,), KVCacheLayout.LBHNC), Runner()
        outs.append(forward(worker, runner, runner.describe({0: 6, 1: 3}), [q, new["k"], new["v"]]))
        raws.append(worker.raw)
    assert torch.equal(raws[0], raws[1])
    assert torch.equal(outs[0], outs[1])
    assert messages == []
    for _ in range(3):
        gpu.next_batch()
    where = f"layer 3: {side.upper()} of token 7 of an earlier batch, KV head 1"
    assert messages == [f"{where} is not finite; zeros stand in for what is not finite"]
