"""Models with experts on the CUDA executor: chosen on the device, in prompts and in steps that a graph can hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import bounds
import pytest
import torch
from at_length import MORE_CUDA, rest
from block_weights import in_blocks
from small_models import random_tokens, resized, small_config, small_model

from haarkv.executors.base import verify
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.caches import new_cache
from haarkv.models.config import Attention, Experts, Layer, ModelConfig, Norm, Rope
from haarkv.models.layer import DeltaNet
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.layers.runner import validate

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from step_launches import executor_on_meta, launches

from haarkv.executors.cuda import CudaExecutor
from haarkv.tq_ops.cuda import available

GPU = torch.cuda.is_available()
FP32, BF16 = torch.float32, torch.bfloat16
TQ4 = KVSpec("tq4")


def of_qwen3(dtype: torch.dtype = FP32, layers: int = 1, width: int = 24) -> DecoderModel:
    """Attention as Qwen3's, and four experts."""
    plain = small_config(num_layers=layers, num_heads=2, num_kv_heads=1, head_dim=64, hidden_size=64)
    of_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width, "norm_topk_prob": True}
    return small_model(resized(plain, model_type="qwen3_moe", **of_experts), dtype=dtype)


def of_hybrid(dtype: torch.dtype = FP32) -> DecoderModel:
    """A layer of Gated DeltaNet and one of gated attention, each with experts of which all tokens share one."""
    norm, mlp = Norm(1e-6, plus_one=True), Experts(5, 2, 24, normalized=True, shared=40)
    mixers = DeltaNet(1, 2, 16, 16), Attention(2, 1, 64, Rope(1e4, 16), 0.125, head_norms=True, gated=True)
    layers = tuple(Layer(mixer, mlp, norm) for mixer in mixers)
    return small_model(ModelConfig("qwen3_5_moe", layers, 48, 61, norm, max_position_embeddings=512), dtype=dtype)


def executor(model: DecoderModel) -> CudaExecutor:
    return CudaExecutor(model, interpreted=not GPU)


def texts(one, steps: int = 2) -> torch.Tensor:
    """Logits of three prompts in one batch, of a step of all, and of one of two, as far as `steps` says."""
    cache, paging = new_cache(one.config, TQ4.plan(one.config.num_layers), sequences=3, tokens=16, device=one.device)
    ids = [paging.add() for _ in range(3)]

    def run(rows, new):
        batch = paging.batch([ids[row] for row in rows], [len(tokens) for tokens in new])
        tokens = torch.tensor([token for some in new for token in some])
        return verify(one, tokens.to(cache.device), batch.to(cache.device), cache).cpu()

    # Of none of these is another expert as likely but for what BF16 rounds: a GPU would choose it.
    told = (([0, 1, 2], [[3, 14, 15], [9], [2, 6]]), ([2, 0, 1], [[5], [35], [8]]), ([0, 2], [[16], [30]]))
    return torch.cat([run(*some) for some in told[: 1 + steps]])


def off_by(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest error of a position's logits, in their standard deviations."""
    return float(((ours - theirs).abs().amax(-1) / theirs.std(dim=-1)).max())


@pytest.mark.parametrize(
    ("model_of", "dtype"),
    rest(MORE_CUDA, product((of_hybrid, of_qwen3), (FP32, BF16)), lambda index, _: not index),
    ids=lambda given: getattr(given, "__name__", str(given)),
)  # fmt: skip
def test_a_model_with_experts_runs_as_the_reference_does(model_of, dtype):
    model = model_of(dtype)
    error = off_by(texts(executor(model)), texts(ReferenceExecutor(model)))
    assert error <= bounds.EXECUTOR_LOGITS[str(dtype).removeprefix("torch.")]
    if dtype == FP32:
        assert error <= bounds.LAYER_FP32.logits


@pytest.mark.parametrize(
    ("model_of", "dtype", "modes"),
    [
        (of_qwen3, BF16, ("teacher-forced",)),
        *rest(MORE_CUDA, product((of_qwen3, of_hybrid), (BF16, FP32), [("teacher-forced", "free-running")]), lambda *_: False),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)  # fmt: skip
def test_the_validator_passes_it(model_of, dtype, modes):
    model = model_of(dtype)
    report = validate(
        ReferenceExecutor(model), executor(model), model, [random_tokens(model.config, 3)], 1,
        TQ4.plan(model.config.num_layers), modes=modes,
    )  # fmt: skip
    assert report.passed, report.first_divergence
    assert {"router", "experts.up_proj", "experts.down_proj"} <= {verdict.stage for verdict in report.stages}


@pytest.mark.parametrize("part", [pytest.param(part, marks=MORE_CUDA) for part in ("gate", "down")])
def test_the_validator_sees_an_expert_of_another(monkeypatch, part):
    """Two experts exchanged where the device reads them, and nowhere else."""
    model = of_qwen3()
    ours = executor(model)
    stack = ours._model.weights.layers[0].stack
    whole = getattr(stack, part)
    swapped = whole.view(4, -1, whole.shape[1])[[1, 0, 2, 3]].reshape(whole.shape)
    monkeypatch.setattr(ours._model.weights.layers[0], "stack", replace(stack, **{part: swapped}))
    report = validate(
        ReferenceExecutor(model), ours, model, [random_tokens(model.config, 2)], 0, TQ4.plan(1), modes=("teacher-forced",)
    )
    assert not report.passed
    assert report.first_divergence.stage == "attention_mlp"


# -- Weights ---------------------------------------------------------------------------------------------------------------
def test_experts_lie_in_one_weight_and_are_there_once():
    model = of_qwen3(layers=2)
    ours = executor(model)
    for (name, mine), (same, theirs) in zip(ours.weights.named(), model.weights.named(), strict=True):
        assert name == same
        assert torch.equal(mine.cpu(), theirs)
    held = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for _, weight in ours.weights.named()}
    assert sum(held.values()) == model.weights.nbytes
    for layer, again in zip(ours.weights.layers, executor(ours._model).weights.layers, strict=True):
        for part in ("gate", "up", "down"):
            whole = getattr(layer.stack, part)
            assert torch.equal(whole, torch.cat([layer[f"experts.{expert}.{part}_proj"] for expert in range(4)]))
            assert whole.untyped_storage().data_ptr() in held
            assert getattr(again.stack, part).data_ptr() == whole.data_ptr()  # taken as it is the next time


@pytest.mark.parametrize("kinds", [("Q8_0",), pytest.param(("Q4_0", "Q5_1", "IQ4_NL"), marks=MORE_CUDA)], ids=str)
def test_experts_of_a_gguf_file_stay_in_blocks(kinds):
    """Of types that differ within a layer, or that have no planes, they are restored."""
    model = in_blocks(of_qwen3(BF16, width=32), kinds)
    ours = executor(model)
    stack = ours.weights.layers[0].stack
    assert isinstance(stack.up, torch.Tensor) == (len(kinds) > 1)
    assert off_by(texts(ours, steps=0), texts(ReferenceExecutor(model), steps=0)) <= bounds.EXECUTOR_LOGITS["bfloat16"]


def test_a_weight_of_an_expert_that_is_not_finite_is_named():
    ours = executor(of_qwen3())
    ours.weights.layers[0].matrix("experts.2.down_proj")[5, 3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"model.layers.0.mlp.experts.2.down_proj.weight holds nan at \[5, 3\]"):
        texts(ours, steps=0)


# -- Launches --------------------------------------------------------------------------------------------------------------
OF_EXPERTS = ["choose_kernel", "zeros", "order_kernel", "expert_kernel", "expert_kernel", "share_kernel"]


@pytest.mark.parametrize("model_of", [of_qwen3, of_hybrid])
def test_nothing_in_a_step_with_experts_waits_for_the_device(monkeypatch, model_of):
    """On a device without numbers; `launches` would raise."""
    model = model_of(BF16)
    for names in launches(executor_on_meta(model, monkeypatch), TQ4, [20, 3], monkeypatch):
        ours = [name for name in OF_EXPERTS if name.endswith("_kernel")]
        assert [name for name in names if name in ours] == model.config.num_layers * ours


def test_a_layer_of_a_decode_step_of_qwen3_is_thirteen_launches(monkeypatch):
    """Seven in place of a dense layer's three between its last norms."""
    monkeypatch.setattr(available, "nvrtc_missing", lambda: None)
    steps = [launches(executor_on_meta(of_qwen3(BF16, n), monkeypatch), TQ4, [20, 3], monkeypatch)[1] for n in (1, 2)]
    one, two = steps
    expected = ["mm", "prologue_kernel", "decode", "mm", "add_norm_kernel", "mm", *OF_EXPERTS, "add_norm_kernel"]
    assert len(expected) == len(two) - len(one) == 13
    begin = two.index("mm")
    assert two[begin : begin + 26] == 2 * expected
