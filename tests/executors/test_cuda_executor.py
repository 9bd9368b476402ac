"""The CUDA executor: in Triton's interpreter without a GPU, compiled and captured with one."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace

import bounds
import pytest
import torch
from at_length import MORE_CUDA
from block_weights import in_blocks
from cuda_rows import script_rows
from small_models import cache_tensors, random_tokens, small_config, small_model

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model
from haarkv.models.config import Experts
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.layers.runner import validate

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from cuda_models import (
    BF16,
    CONFIG,
    FP32,
    GEMMA,
    GPU,
    MODELS,
    TEXT,
    BatchRunner,
    executor,
    expert_logits,
    qwen_moe,
    tiny_hybrid,
)  # fmt: skip

from haarkv.executors.cuda import CudaExecutor, DecodeStep
from haarkv.tq_ops.cuda.block_planes import PlaneBlocks

TQ4, TAIL = KVSpec("tq4"), KVSpec("tq4", tail=3, sink=1)
SYNTHETIC_CALIBRATION = synthetic.calibration(CONFIG.num_layers, CONFIG.heads.num_kv_heads, CONFIG.heads.head_dim)
LEARNED = KVSpec("k=lr3,v=tq3", tail=2, sink=1, calibration=SYNTHETIC_CALIBRATION)


def at_length(*rows):
    return [pytest.param(*row, marks=MORE_CUDA) for row in rows]


def require_near(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    """The largest error of a position's logits, in their standard deviations, is within an executor's bound."""
    error = float(((ours - theirs).abs().amax(-1) / theirs.std(dim=-1)).max())
    assert error <= (bounds.LAYER_FP32.logits if dtype == FP32 else bounds.EXECUTOR_LOGITS["bfloat16"])


@pytest.mark.parametrize(
    ("name", "dtype", "spec", "by_ops"),
    [
        ("qwen3", FP32, TQ4, False), ("qwen3", BF16, LEARNED, False), ("gemma", BF16, TAIL, True),
        ("tiny hybrid", FP32, TQ4, True),
        *at_length(
            ("qwen3", BF16, TAIL, False), ("qwen3", FP32, LEARNED, False), ("gemma", BF16, TQ4, False),
            ("gemma", FP32, TAIL, False), ("gemma", FP32, TQ4, True), ("hybrid", FP32, TAIL, True),
            ("hybrid", BF16, TAIL, True),
        ),
    ],
    ids=lambda given: given.kv + "-kept" * bool(given.tail) if isinstance(given, KVSpec) else str(given),
)  # fmt: skip
def test_a_model_runs_as_the_reference_does(monkeypatch, tmp_path, name, dtype, spec, by_ops):
    """Dense layers fused, or op by op; a Gemma has windows with a RoPE of their own, norms behind, scaled embeddings."""
    if by_ops:
        monkeypatch.setattr("haarkv.models.fused.unsupported", lambda _: "to run it op by op")
    model = MODELS[name](dtype=dtype)
    theirs, ours = (BatchRunner(one(model), spec).everything(tmp_path) for one in (ReferenceExecutor, executor))
    require_near(ours, theirs, dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "modes"),
    [
        ("small qwen3", BF16, ("teacher-forced", "free-running")), ("experts", BF16, ("teacher-forced",)),
        ("blocks", BF16, ("teacher-forced",)), ("hybrid with experts", FP32, ("teacher-forced",)),
        *at_length(*(
            (name, dtype, ("teacher-forced", "free-running")) for name, dtype in (
                ("blocks of three types", BF16), ("blocks of 256", BF16), ("small gemma", BF16), ("small qwen2", BF16),
                ("small llama", FP32), ("hybrid", FP32), ("hybrid", BF16), ("experts", FP32), ("hybrid with experts", BF16),
            )
        )),
    ],
    ids=str,
)  # fmt: skip
def test_the_validator_passes_layer_by_layer(name, dtype, modes):
    model = MODELS[name](dtype=dtype)
    prompts = [random_tokens(model.config, n, seed=n) for n in (3, 2)]
    plan = TQ4.plan(model.config.num_layers)
    ours = executor(model)
    report = validate(ReferenceExecutor(model), ours, model, prompts, 1, plan, modes=modes)
    assert report.passed, report.first_divergence
    if "blocks" in name:  # projections of one input are one weight where their types agree, else each its own
        packed = ours._model.packed[0].qkv_proj
        assert isinstance(packed, PlaneBlocks) == (name == "blocks")
    if "experts" in name:
        assert {"router", "experts.up_proj", "experts.down_proj"} <= {verdict.stage for verdict in report.tensors}


# -- What it refuses -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "spec", "most"), [(CONFIG, KVSpec("tq4", tail=3), 64), (GEMMA, TQ4, 512)], ids=["tail", "window"]
)
def test_more_new_tokens_than_there_is_room_for_are_refused(config, spec, most):
    ours = executor(small_model(config))
    cache = PagedKVCache(spec.plan(config.num_layers), config.kv_shapes, num_blocks=80, block_size=8, device=ours.device)
    paging = PagedSequences(80, 8)
    batch = paging.batch([paging.add()], [most + 1]).to(ours.device)
    with pytest.raises(ValueError, match=f"at most {most} new tokens"):
        ours.forward(torch.ones(most + 1, dtype=torch.int64, device=ours.device), batch, cache)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_damaged_weight_is_named(phase):
    ours = executor(small_model(CONFIG))
    runner = BatchRunner(ours, TQ4)
    if phase == "decode":
        runner.run([0], [[1, 2]])
    ours._model.weights.layers[0]["k_proj"][3, 5] = float("nan")
    with pytest.raises(NonFiniteError, match=r"layers\.0\.self_attn\.k_proj\.weight holds nan at \[3, 5\]"):
        runner.run([0], [[3]] if phase == "decode" else [[1, 2]])


@pytest.mark.parametrize("device", ["cpu", "cuda:x", "cuda:", "cuda:7"])
def test_a_device_that_is_not_there_is_refused(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="cuda"):
        CudaExecutor(small_model(CONFIG), device)


def test_what_an_earlier_forward_left_out_is_told_when_a_head_is_asked_for():
    """V that overflows in a forward whose head is not asked for; the last one is sound."""
    ours = executor(small_model(CONFIG))
    runner = BatchRunner(ours, TQ4)
    weight = ours._model.weights.layers[0]["v_proj"]
    saved_weight = weight.clone()
    weight.fill_(torch.inf)
    batch = runner.paging.batch(runner.ids[:1], [2]).to(ours.device)
    ours.forward(torch.tensor([1, 2], device=ours.device), batch, runner.cache)
    weight.copy_(saved_weight)
    with pytest.raises(NonFiniteError, match=r"layer 0: V was not finite .*, although all weights are finite"):
        runner.run([0], [[3]])
    runner.run([0], [[4]])  # told once


def test_a_state_that_is_not_there_is_an_error_when_the_step_is_over():
    runner = BatchRunner(executor(tiny_hybrid(FP32)), TQ4)
    runner.run([0, 1], [TEXT[:5], TEXT[:1]])
    runner.paging.take_back([runner.ids[0]], [4])
    with pytest.raises(ValueError, match="too many were taken back"):
        runner.run([0, 1], [[1], [2]])
    runner.run([1], [[3]])  # said once; the sequence beside it goes on


def test_hybrids_are_taken_dense_and_with_experts():
    config = MODELS["hybrid"](dtype=FP32).config
    expert_layer = replace(config.layers[0], mlp=Experts(4, 2, 16, shared=8))
    for layers in (config.layers, (expert_layer, *config.layers[1:])):
        assert CudaExecutor.supports(replace(config, layers=layers), TQ4.plan(3)) is None


# -- Steps and kernels ---------------------------------------------------------------------------------------------------
def test_no_cache_lives_longer_for_the_last_forward():
    runner = BatchRunner(executor(small_model(CONFIG)), TQ4)
    runner.run([0], [[1]])
    cache_ref = weakref.ref(runner.cache)
    del runner.cache
    gc.collect()
    assert cache_ref() is None


def test_sequences_that_left_a_batch_are_dead_in_its_next_step():
    calls = []
    cache = PagedKVCache(TQ4.plan(1), CONFIG.kv_shapes, num_blocks=12, block_size=8)

    def step(token_ids, batch):
        calls.append((token_ids.tolist(), batch.slot_mapping.tolist(), batch.seq_lens.tolist()))
        return token_ids.unsqueeze(1).float()

    decode_step, paging = DecodeStep(4, cache, 64, step, None), PagedSequences(12, 8)
    ids = [paging.add() for _ in range(4)]
    decode_step(torch.tensor([5, 6, 7, 8]), paging.batch(ids, [1] * 4))
    hidden = decode_step(torch.tensor([9, 8, 7]), paging.batch(ids[1:], [1] * 3))
    assert hidden.flatten().tolist() == [9, 8, 7]
    assert calls == [([5, 6, 7, 8], [0, 8, 16, 24], [1] * 4), ([9, 8, 7, 0], [9, 17, 25, -1], [2, 2, 2, 0])]


@pytest.mark.parametrize("kv", ["tq4", "tail", "learned", "short"])
def test_what_is_compiled_ahead_is_what_is_launched(kv):
    """As a card would compile it: in the background, with nothing launched, and later nothing is left to compile."""
    (result,) = script_rows("cuda_compiled_ahead.py", kv)
    assert result.pop("asked") > 8
    assert result.pop("launches") > 30
    (message,) = result.pop("said")
    assert re.fullmatch(r"\d+ kernels", message)
    assert result == {"launched": 0, "here": False, "later": 0}


# -- Experts' weights ----------------------------------------------------------------------------------------------------
def test_experts_lie_in_one_weight_and_are_there_once():
    model = qwen_moe(layers=2)
    ours = executor(model)
    torch.testing.assert_close(
        *(dict(one.weights.named_tensors()) for one in (ours, model)), rtol=0, atol=0, check_device=False
    )
    storage_sizes = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for _, weight in ours.weights.named_tensors()
    }
    assert sum(storage_sizes.values()) == model.weights.nbytes
    for layer, again in zip(ours.weights.layers, executor(ours._model).weights.layers, strict=True):
        for part in ("gate", "up", "down"):
            whole = getattr(layer.stack, part)
            assert torch.equal(whole, torch.cat([layer[f"experts.{expert}.{part}_proj"] for expert in range(4)]))
            assert whole.untyped_storage().data_ptr() in storage_sizes
            assert getattr(again.stack, part).data_ptr() == whole.data_ptr()  # taken as it is the next time


@pytest.mark.parametrize("kinds", [("Q8_0",), pytest.param(("Q4_0", "Q5_1", "IQ4_NL"), marks=MORE_CUDA)], ids=str)
def test_experts_of_a_gguf_file_stay_in_blocks(kinds):
    """Of types that differ within a layer, or that have no planes, they are restored."""
    model = in_blocks(qwen_moe(BF16, width=32), kinds)
    ours = executor(model)
    assert isinstance(ours.weights.layers[0].stack.up, torch.Tensor) == (len(kinds) > 1)
    require_near(expert_logits(ours), expert_logits(ReferenceExecutor(model)), BF16)


def test_a_weight_of_an_expert_that_is_not_finite_is_named():
    ours = executor(qwen_moe())
    ours.weights.layers[0].matrix("experts.2.down_proj")[5, 3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"model.layers.0.mlp.experts.2.down_proj.weight holds nan at \[5, 3\]"):
        expert_logits(ours)


# -- With a GPU ----------------------------------------------------------------------------------------------------------
@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU")
def test_memory_of_a_decode_step_does_not_grow_with_the_context():
    config = small_config(num_layers=2, max_position_embeddings=70_000)
    ours = executor(small_model(config, dtype=BF16))
    scratch = []
    for blocks in (16, 512):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        cache = PagedKVCache(TQ4.plan(2), config.kv_shapes, num_blocks=blocks, device=ours.device)
        paging = PagedSequences(blocks, cache.block_size)
        ids = [paging.add()]
        paging.batch(ids, [blocks * cache.block_size - 2])
        torch.cuda.reset_peak_memory_stats()
        for token in (1, 2):
            ours.forward(torch.tensor([token], device=ours.device), paging.batch(ids, [1]).to(ours.device), cache)
        scratch.append(torch.cuda.max_memory_allocated() - before - cache.nbytes)
        del cache
    # 512 parts of 8 columns of 128 numbers are 2 MiB; the room is for cuBLAS' and the graph's own.
    assert max(scratch) <= 64 * 2**20
    assert scratch[1] <= scratch[0] + 2 * 2**20


@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU")
@pytest.mark.parametrize("kv", ["tq4", "tq3"])
def test_the_validator_passes_on_the_model_that_ships(kv):
    model = load_model("tiny", "bfloat16")
    plan = KVSpec(kv).plan(model.config.num_layers)
    prompts = [random_tokens(model.config, 200), random_tokens(model.config, 37, seed=1)]
    report = validate(ReferenceExecutor(model), executor(model), model, prompts, 3, plan)
    assert report.passed, report.first_divergence


@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU")
def test_a_captured_step_gives_what_the_same_step_gives_uncaptured(tmp_path):
    model, results = small_model(CONFIG, dtype=BF16), []
    for captured in (True, False):
        ours = executor(model)
        if not captured:
            ours._graphs = False
        runner = BatchRunner(ours, TQ4)
        results.append((runner.everything(tmp_path), [t.cpu() for *_, t in cache_tensors(runner.cache)]))
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
