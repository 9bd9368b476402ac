"""The CUDA executor: in Triton's interpreter without a GPU, compiled and captured with one."""

from __future__ import annotations

import gc
import re
import weakref

import bounds
import pytest
import torch
from cuda_rows import script_rows
from small_models import (
    cache_tensors,
    decode,
    gemma_config,
    new_cache,
    new_paging,
    prefill,
    random_tokens,
    small_config,
    small_model,
)  # fmt: skip

from haarkv.executors import base
from haarkv.executors.cuda import DecodeStep, padded_batch_size
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.layers.runner import validate

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from haarkv.executors.cuda import CudaExecutor

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CONFIG = small_config(num_layers=1, num_heads=4, head_dim=64)
GEMMA = gemma_config(num_layers=2, head_dim=64, window=6)  # of its own head_dim in the tests of its ops
TQ4, TAIL = KVSpec("tq4"), KVSpec("tq4", tail=2, sink=1)
SYNTHETIC_CALIBRATION = synthetic.calibration(CONFIG.num_layers, CONFIG.heads.num_kv_heads, CONFIG.heads.head_dim)
LEARNED_SPEC = KVSpec("k=lr3,v=tq3", tail=2, sink=1, calibration=SYNTHETIC_CALIBRATION)
PLAN = TQ4.plan(CONFIG.num_layers)


def executor(model) -> CudaExecutor:
    return CudaExecutor(model, interpreted=not GPU)


class OnHost:
    """An executor whose cache, batches and results the test has on the host; only its own cache is on its device."""

    def __init__(self, inner, cache) -> None:
        self.inner, self.device = inner, inner.device
        self.cache = PagedKVCache(
            cache.plan, cache.shapes, num_blocks=cache.num_blocks, block_size=cache.block_size, device=self.device
        )

    def forward(self, token_ids, batch, cache):
        return self.inner.forward(token_ids.to(self.device), batch.to(self.device), self.cache)

    def head(self, hidden):
        return self.inner.head(hidden).cpu()


def run(one, cache) -> torch.Tensor:
    """Logits of a ragged prefill, a decode step of three sequences, one of two of them, and a draft of theirs verified."""
    paging = new_paging(cache, order=range(cache.num_blocks - 1, -1, -1))
    ids = [paging.add() for _ in range(3)]
    logits = [prefill(one, cache, paging, ids, [[1, 2, 3], [4], [5, 6]]), decode(one, cache, paging, ids, [7, 8, 9])]
    logits += [decode(one, cache, paging, ids[::2], [3, 1])]
    draft_batch = paging.batch(ids[::2], [2, 3])
    return torch.cat([*logits, base.verify(one, torch.tensor([1, 2, 3, 4, 5]), draft_batch, cache)])


@pytest.mark.parametrize(
    ("dtype", "spec"),
    [
        ("float32", TQ4), ("bfloat16", LEARNED_SPEC),
        *(pytest.param(*given, marks=pytest.mark.cuda_long) for given in (("bfloat16", TAIL), ("float32", LEARNED_SPEC))),
    ],
    ids=lambda given: given.kv + "-kept" * bool(given.tail) if isinstance(given, KVSpec) else str(given)[:8],
)  # fmt: skip
def test_forwards_equal_the_references(dtype, spec):
    """Prompts, padded decode steps and a draft."""
    model = small_model(CONFIG, dtype=getattr(torch, dtype))
    caches = [new_cache(CONFIG, spec, num_blocks=6) for _ in range(2)]
    theirs = run(ReferenceExecutor(model), caches[0])
    ours = run(OnHost(executor(model), caches[1]), caches[1])
    error = (ours - theirs).abs().amax(-1) / theirs.std(dim=-1)
    assert error.max() <= bounds.EXECUTOR_LOGITS[dtype]
    if dtype == "float32":
        assert error.max() <= bounds.LAYER_FP32.logits


def run_steps(one, spec: KVSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """What is packed in the end, and logits of a Gemma's every new token.

    Prompts in chunks whose rings begin anew, decode steps that are padded, and a draft.
    """
    cache = PagedKVCache(
        spec.plan(2), GEMMA.kv_shapes, num_blocks=16, num_rows=4, block_size=4, chunk=8, ring_chunk=8, device=one.device
    )
    paging, logits, tokens = PagedSequences(16, 4, num_rows=4), [], random_tokens(GEMMA, 14)
    ids = [paging.add() for _ in range(3)][::-1]
    for rows in (
        [tokens[:8], tokens[:3]], [tokens[8:14], tokens[3:4]], [[5], [6], [7]], [[8], [9], [1]], [[1, 2, 3], [4]],
    ):  # fmt: skip
        batch = paging.batch(ids[: len(rows)], [len(row) for row in rows]).to(cache.device)
        token_ids = torch.tensor([token for row in rows for token in row], device=cache.device)
        logits.append(base.verify(one, token_ids, batch, cache).cpu())
    codes = [tensor.cpu().flatten() for _, _, name, tensor in cache_tensors(cache) if name == "codes"]
    return torch.cat(codes), torch.cat(logits)


@pytest.mark.parametrize(
    ("dtype", "spec", "by_ops"),
    [
        ("bfloat16", KVSpec("tq4", tail=3, sink=2), True),
        pytest.param("bfloat16", TQ4, False, marks=pytest.mark.cuda_long),
        pytest.param("float32", TAIL, False, marks=pytest.mark.cuda_long),
        pytest.param("float32", TQ4, True, marks=pytest.mark.cuda_long),
    ],
    ids=lambda given: given.kv + "-kept" * bool(given.tail) if isinstance(given, KVSpec) else str(given),
)
def test_a_gemma_runs_as_the_reference_does(monkeypatch, dtype, spec, by_ops):
    """Windows with a RoPE of their own, 1 + w, norms behind, GELU, scaled embeddings; its layers fused, and op by op."""
    if by_ops:
        monkeypatch.setattr("haarkv.models.fused.unsupported", lambda _: "to run it op by op")
    model = small_model(GEMMA, dtype=getattr(torch, dtype))
    (their_codes, theirs), (our_codes, ours) = (run_steps(one(model), spec) for one in (ReferenceExecutor, executor))
    error = (ours - theirs).abs().amax(-1) / theirs.std(dim=-1)
    assert error.max() <= bounds.EXECUTOR_LOGITS[dtype]
    if dtype == "float32":
        # Of 17,920 levels one or another is a tie, on which the few tokens after it depend.
        assert (our_codes != their_codes).sum() <= 2
        assert error.median() <= bounds.LAYER_FP32.logits


@pytest.mark.parametrize(
    ("config", "spec", "most"), [(CONFIG, KVSpec("tq4", tail=3), 64), (GEMMA, TQ4, 512)], ids=["tail", "window"]
)
def test_more_new_tokens_than_there_is_room_for_are_refused(config, spec, most):
    ours, cache = executor(small_model(config)), new_cache(config, spec, num_blocks=80)
    host, paging = OnHost(ours, cache), new_paging(cache)
    with pytest.raises(ValueError, match=f"at most {most} new tokens"):
        prefill(host, cache, paging, [paging.add()], [[1] * (most + 1)])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_damaged_weight_is_named(phase):
    model = small_model(CONFIG)
    ours, cache = OnHost(executor(model), new_cache(CONFIG)), new_cache(CONFIG)
    paging = new_paging(cache)
    ids = [paging.add()]
    if phase == "decode":
        prefill(ours, cache, paging, ids, [[1, 2]])
    ours.inner._model.weights.layers[0]["k_proj"][3, 5] = float("nan")
    forward, tokens = (decode, [3]) if phase == "decode" else (prefill, [[1, 2]])
    with pytest.raises(NonFiniteError, match=r"layers\.0\.self_attn\.k_proj\.weight holds nan at \[3, 5\]"):
        forward(ours, cache, paging, ids, tokens)


@pytest.mark.parametrize("device", ["cpu", "cuda:x", "cuda:", "cuda:7"])
def test_a_device_that_is_not_there_is_refused(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="cuda"):
        CudaExecutor(small_model(CONFIG), device)


def test_what_an_earlier_forward_left_out_is_told_when_a_head_is_asked_for():
    """V that overflows in a forward whose head is not asked for; the last one is sound."""
    model = small_model(CONFIG)
    ours, cache = executor(model), new_cache(CONFIG)
    paging = new_paging(cache)
    host, ids = OnHost(ours, cache), [paging.add()]
    weight = ours._model.weights.layers[0]["v_proj"]
    saved_weight = weight.clone()
    weight.fill_(torch.inf)
    host.forward(torch.tensor([1, 2]), paging.batch(ids, [2]), cache)
    weight.copy_(saved_weight)
    with pytest.raises(NonFiniteError, match=r"layer 0: V was not finite .*, although all weights are finite"):
        decode(host, cache, paging, ids, [3])
    decode(host, cache, paging, ids, [4])  # told once


def test_no_cache_lives_longer_for_the_last_forward():
    ours = executor(small_model(CONFIG))
    cache = new_cache(CONFIG)
    host, paging = OnHost(ours, cache), new_paging(cache)
    decode(host, cache, paging, [paging.add()], [1])
    cache_ref = weakref.ref(host.cache)
    del host
    gc.collect()
    assert cache_ref() is None


def test_sequences_that_left_a_batch_are_dead_in_its_next_step():
    cache, calls = new_cache(CONFIG), []

    def step(token_ids, batch):
        calls.append((token_ids.tolist(), batch.slot_mapping.tolist(), batch.seq_lens.tolist()))
        return token_ids.unsqueeze(1).float()

    decode_step, paging = DecodeStep(4, cache, 64, step, None), new_paging(cache)
    ids = [paging.add() for _ in range(4)]
    decode_step(torch.tensor([5, 6, 7, 8]), paging.batch(ids, [1] * 4))
    hidden = decode_step(torch.tensor([9, 8, 7]), paging.batch(ids[1:], [1] * 3))
    assert hidden.flatten().tolist() == [9, 8, 7]
    assert calls == [([5, 6, 7, 8], [0, 8, 16, 24], [1] * 4), ([9, 8, 7, 0], [9, 17, 25, -1], [2, 2, 2, 0])]


def test_batches_share_few_sizes():
    assert [padded_batch_size(n) for n in (1, 2, 3, 8, 9, 64, 65, 129)] == [1, 2, 4, 8, 16, 64, 128, 192]


@pytest.mark.parametrize("kv", ["tq4", "tail", "learned", "short"])
def test_what_is_compiled_ahead_is_what_is_launched(kv):
    """As a card would compile it: in the background, with nothing launched, and later nothing is left to compile."""
    (result,) = script_rows("cuda_compiled_ahead.py", kv)
    assert result.pop("asked") > 8
    assert result.pop("launches") > 30
    (message,) = result.pop("said")
    assert re.fullmatch(r"\d+ kernels", message)
    assert result == {"launched": 0, "here": False, "later": 0}


# -- With a GPU --------------------------------------------------------------------------------------------------------
@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU")
def test_memory_of_a_decode_step_does_not_grow_with_the_context():
    config = small_config(num_layers=2, max_position_embeddings=70_000)
    model = small_model(config, dtype=torch.bfloat16)
    ours = executor(model)
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
def test_a_captured_step_gives_what_the_same_step_gives_uncaptured():
    model = small_model(CONFIG, dtype=torch.bfloat16)
    results = []
    for captured in (True, False):
        ours = executor(model)
        if not captured:
            ours._graphs = False
        cache = new_cache(CONFIG, "tq4", num_blocks=6)
        host = OnHost(ours, cache)
        results.append((run(host, cache), [t.cpu() for *_, t in cache_tensors(host.cache)]))
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
