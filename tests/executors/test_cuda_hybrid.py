"""Hybrids and mixtures of experts on the CUDA executor: op by op, decode in buckets, experts chosen on the device."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import bounds
import pytest
import torch
from at_length import MORE_CUDA, rest
from block_weights import in_blocks
from small_models import random_tokens, resize_config, small_config, small_model

from haarkv.engine.plans import shape_signature
from haarkv.executors import base
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel, new_cache
from haarkv.models.config import Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope
from haarkv.models.layer import DeltaNet
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv import cache_file
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.stored import Advance, put, take
from haarkv.validation.faults.states import small_hybrid
from haarkv.validation.layers.runner import validate

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from step_launches import executor_on_meta, launches

from haarkv.executors.cuda import CudaExecutor
from haarkv.tq_ops.cuda import available

GPU = torch.cuda.is_available()
FP32, BF16 = torch.float32, torch.bfloat16
TQ4, TAIL = KVSpec("tq4"), KVSpec("tq4", tail=3, sink=1)
DTYPES = (FP32, BF16)
TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32]


def three_layer_model(dtype: torch.dtype) -> DecoderModel:
    """Three layers, with room for drafts."""
    model = small_hybrid(dtype, 61)
    return DecoderModel.from_weights(model.config.for_drafts(2), model.weights)


def tiny_model(mlp: Experts | None = None, dtype: torch.dtype = FP32) -> DecoderModel:
    """Two layers of few and short heads, for the interpreter: one of Gated DeltaNet, one of gated attention."""
    norm = Norm(1e-6, plus_one=True)
    mixers = DeltaNet(1, 2, 16, 16, versions=4), Attention(2, 1, 64, Rope(1e4, 16), 0.125, head_norms=True, gated=True)
    layers = tuple(Layer(mixer, mlp or Dense(40), norm) for mixer in mixers)
    return small_model(ModelConfig("hybrid", layers, 48, 61, norm, max_position_embeddings=512), dtype=dtype)


def qwen_moe(dtype: torch.dtype = FP32, layers: int = 1, width: int = 24) -> DecoderModel:
    """Attention as Qwen3's, and four experts."""
    plain = small_config(num_layers=layers, num_heads=2, num_kv_heads=1, head_dim=64, hidden_size=64)
    expert_settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width, "norm_topk_prob": True}
    return small_model(resize_config(plain, model_type="qwen3_moe", **expert_settings), dtype=dtype)


def delta_moe(dtype: torch.dtype = FP32) -> DecoderModel:
    """Each layer with experts of which all tokens share one."""
    return tiny_model(Experts(5, 2, 24, normalized=True, shared=40), dtype)


class BatchRunner:
    """Three sequences of a hybrid on an executor, all logits on the host."""

    def __init__(self, one, spec=TQ4) -> None:
        self.one, self.config, self.plan = one, one.config, spec.plan(one.config.num_layers)
        self.device = getattr(one, "device", torch.device("cpu"))
        self.cache, self.paging = self.new_cache()
        self.ids = [self.paging.add() for _ in range(3)]

    def new_cache(self):
        return new_cache(self.config, self.plan, sequences=3, tokens=16, device=self.device)

    def run(self, rows, texts, batch=None):
        batch = batch or self.paging.batch([self.ids[row] for row in rows], [len(text) for text in texts])
        tokens = torch.tensor([token for text in texts for token in text], device=self.device)
        return base.verify(self.one, tokens, batch.to(self.device), self.cache).cpu()

    def everything(self, folder):
        """Prompts of other lengths, decode steps of three and of two, drafts of which some stay, a row that begins anew, and
        a cache file that goes on."""
        logits = [self.run([0, 1, 2], [TEXT[:3], TEXT[:1], TEXT[:2]]), self.run([2, 0, 1], [[5], [6], [7]])]
        logits.append(self.run([0, 2], [[8], [9]]))
        advance = Advance(self.cache, self.paging, [self.ids[0], self.ids[2]], [2, 2])
        logits.append(self.run([0, 2], [TEXT[:2], TEXT[2:4]], advance.batch))
        advance.keep([0, 2])
        logits.append(self.run([0, 2], [[1], [2]]))
        self.paging.free(self.ids[1])
        self.ids[1] = self.paging.add()
        logits.append(self.run([1], [TEXT[5:7]]))
        origin = cache_file.sequence_origin(self.plan, shape_signature(self.config), "weights")
        tokens = [*TEXT[:3], 6, 8, 1]
        cache_file.save(folder / self.one.name, take(self.cache, self.paging, self.ids[0], tokens), origin)
        self.cache, self.paging = self.new_cache()
        self.ids[0] = put(cache_file.load_for(folder / self.one.name, origin, self.plan), self.cache, self.paging)
        return torch.cat([*logits, self.run([0], [[4]])])


def executor(model):
    return CudaExecutor(model, interpreted=not GPU)


def texts(one, steps: int = 2) -> torch.Tensor:
    """Logits of three prompts in one batch, of a step of all, and of one of two, as far as `steps` says."""
    runner = BatchRunner(one)
    # Of none of these is another expert as likely but for what BF16 rounds: a GPU would choose it.
    batches = (([0, 1, 2], [[3, 14, 15], [9], [2, 6]]), ([2, 0, 1], [[5], [35], [8]]), ([0, 2], [[16], [30]]))
    return torch.cat([runner.run(*some) for some in batches[: 1 + steps]])


def require_near(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    """The largest error of a position's logits, in their standard deviations, is within an executor's bound."""
    error = float(((ours - theirs).abs().amax(-1) / theirs.std(dim=-1)).max())
    assert error <= (bounds.LAYER_FP32.logits if dtype == FP32 else bounds.EXECUTOR_LOGITS["bfloat16"])


@pytest.mark.parametrize(
    ("dtype", "spec"),
    [(None, TQ4), *(pytest.param(dtype, TAIL, marks=MORE_CUDA) for dtype in DTYPES)],
    ids=["tiny", *map(str, DTYPES)],
)
def test_a_hybrid_runs_as_the_reference_does(tmp_path, dtype, spec):
    model, dtype = three_layer_model(dtype) if dtype else tiny_model(), dtype or torch.float32
    theirs, ours = (BatchRunner(one(model), spec).everything(tmp_path) for one in (ReferenceExecutor, executor))
    require_near(ours, theirs, dtype)


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=MORE_CUDA) for dtype in DTYPES], ids=str)
def test_the_validator_passes_it_layer_by_layer(dtype):
    model = small_hybrid(dtype, 61)
    prompts = [random_tokens(model.config, 5), random_tokens(model.config, 3, seed=1)]
    report = validate(ReferenceExecutor(model), executor(model), model, prompts, 1, TQ4.plan(3))
    assert report.passed, report.first_divergence
    most = max(row.state_err for row in report.rows if row.state_err is not None)
    assert 0 < most < (bounds.LAYER_FP32 if dtype == torch.float32 else bounds.LAYER_BF16).state


def test_a_state_that_is_not_there_is_an_error_when_the_step_is_over():
    runner = BatchRunner(executor(tiny_model()))
    runner.run([0, 1], [TEXT[:5], TEXT[:1]])
    runner.paging.take_back([runner.ids[0]], [4])
    with pytest.raises(ValueError, match="too many were taken back"):
        runner.run([0, 1], [[1], [2]])
    runner.run([1], [[3]])  # said once; the sequence beside it goes on


def test_nothing_in_a_step_of_a_hybrid_waits_for_the_device(monkeypatch):
    """On a device without numbers; `launches` would raise. Two launches a layer of Gated DeltaNet, in prompts and in steps."""
    model = small_hybrid(torch.bfloat16, 61)
    for names in launches(executor_on_meta(model, monkeypatch), TQ4, [20, 3], monkeypatch):
        assert [name for name in names if name.startswith("delta_")] == 2 * ["delta_inputs_kernel", "delta_rule_kernel"]


def test_hybrids_are_taken_dense_and_with_experts():
    config, plan = small_hybrid(torch.float32, 61).config, TQ4.plan(3)
    expert_layer = replace(config.layers[0], mlp=Experts(4, 2, 16, shared=8))
    for layers in (config.layers, (expert_layer, *config.layers[1:])):
        assert CudaExecutor.supports(replace(config, layers=layers), plan) is None


# -- Experts -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make_model", "dtype"),
    rest(MORE_CUDA, product((delta_moe, qwen_moe), (FP32, BF16)), lambda index, _: not index),
    ids=lambda given: getattr(given, "__name__", str(given)),
)  # fmt: skip
def test_a_model_with_experts_runs_as_the_reference_does(make_model, dtype):
    model = make_model(dtype)
    require_near(texts(executor(model)), texts(ReferenceExecutor(model)), dtype)


@pytest.mark.parametrize(
    ("make_model", "dtype", "modes"),
    [
        (qwen_moe, BF16, ("teacher-forced",)),
        *rest(MORE_CUDA, product((qwen_moe, delta_moe), (BF16, FP32), [("teacher-forced", "free-running")]), lambda *_: False),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)  # fmt: skip
def test_the_validator_passes_experts(make_model, dtype, modes):
    model = make_model(dtype)
    report = validate(
        ReferenceExecutor(model), executor(model), model, [random_tokens(model.config, 3)], 1,
        TQ4.plan(model.config.num_layers), modes=modes,
    )  # fmt: skip
    assert report.passed, report.first_divergence
    assert {"router", "experts.up_proj", "experts.down_proj"} <= {verdict.stage for verdict in report.stages}


# -- Weights ---------------------------------------------------------------------------------------------------------------
def test_experts_lie_in_one_weight_and_are_there_once():
    model = qwen_moe(layers=2)
    ours = executor(model)
    for (name, mine), (same, theirs) in zip(ours.weights.named_tensors(), model.weights.named_tensors(), strict=True):
        assert name == same
        assert torch.equal(mine.cpu(), theirs)
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
    stack = ours.weights.layers[0].stack
    assert isinstance(stack.up, torch.Tensor) == (len(kinds) > 1)
    require_near(texts(ours, steps=0), texts(ReferenceExecutor(model), steps=0), BF16)


def test_a_weight_of_an_expert_that_is_not_finite_is_named():
    ours = executor(qwen_moe())
    ours.weights.layers[0].matrix("experts.2.down_proj")[5, 3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"model.layers.0.mlp.experts.2.down_proj.weight holds nan at \[5, 3\]"):
        texts(ours, steps=0)


# -- Launches --------------------------------------------------------------------------------------------------------------
EXPERT_KERNELS = ["choose_kernel", "zeros", "order_kernel", "expert_kernel", "expert_kernel", "share_kernel"]


@pytest.mark.parametrize("make_model", [qwen_moe, delta_moe])
def test_nothing_in_a_step_with_experts_waits_for_the_device(monkeypatch, make_model):
    """On a device without numbers; `launches` would raise."""
    model = make_model(BF16)
    for names in launches(executor_on_meta(model, monkeypatch), TQ4, [20, 3], monkeypatch):
        ours = [name for name in EXPERT_KERNELS if name.endswith("_kernel")]
        assert [name for name in names if name in ours] == model.config.num_layers * ours


def test_a_layer_of_a_decode_step_of_qwen3_is_thirteen_launches(monkeypatch):
    """Seven in place of a dense layer's three between its last norms."""
    monkeypatch.setattr(available, "nvrtc_missing", lambda: None)
    steps = [launches(executor_on_meta(qwen_moe(BF16, n), monkeypatch), TQ4, [20, 3], monkeypatch)[1] for n in (1, 2)]
    one, two = steps
    expected = ["mm", "prologue_kernel", "decode", "mm", "add_norm_kernel", "mm", *EXPERT_KERNELS, "add_norm_kernel"]
    assert len(expected) == len(two) - len(one) == 13
    begin = two.index("mm")
    assert two[begin : begin + 26] == 2 * expected
