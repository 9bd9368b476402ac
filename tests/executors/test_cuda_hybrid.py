"""A small hybrid on the CUDA executor: its layers of Gated DeltaNet and its gated attention, op by op, decode in buckets."""

from __future__ import annotations

from dataclasses import replace

import bounds
import pytest
import torch
from at_length import MORE_CUDA
from small_models import random_tokens, small_model

from haarkv.engine.plans import shape_of
from haarkv.executors import base
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.caches import new_cache
from haarkv.models.config import Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope
from haarkv.models.layer import DeltaNet
from haarkv.tq_ops.kv import cache_file
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.stored import Advance, put, take
from haarkv.validation.faults.states import small_hybrid
from haarkv.validation.layers.runner import validate

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from step_launches import executor_on_meta, launches

from haarkv.executors.cuda import CudaExecutor

GPU = torch.cuda.is_available()
TQ4, TAIL = KVSpec("tq4"), KVSpec("tq4", tail=3, sink=1)
DTYPES = (torch.float32, torch.bfloat16)
TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32]


def model_of(dtype: torch.dtype) -> DecoderModel:
    """Three layers, with room for drafts."""
    made = small_hybrid(dtype, 61)
    return DecoderModel.of(made.config.for_drafts(2), made.weights)


def tiny_model() -> DecoderModel:
    """Two layers of few and short heads, for the interpreter: one of Gated DeltaNet, one of gated attention."""
    norm = Norm(1e-6, plus_one=True)
    mixers = DeltaNet(1, 2, 16, 16, versions=4), Attention(2, 1, 64, Rope(1e4, 16), 0.125, head_norms=True, gated=True)
    layers = tuple(Layer(mixer, Dense(40), norm) for mixer in mixers)
    return small_model(ModelConfig("hybrid", layers, 48, 61, norm, max_position_embeddings=512))


class Served:
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
        found = [self.run([0, 1, 2], [TEXT[:3], TEXT[:1], TEXT[:2]]), self.run([2, 0, 1], [[5], [6], [7]])]
        found.append(self.run([0, 2], [[8], [9]]))
        advance = Advance(self.cache, self.paging, [self.ids[0], self.ids[2]], [2, 2])
        found.append(self.run([0, 2], [TEXT[:2], TEXT[2:4]], advance.batch))
        advance.keep([0, 2])
        found.append(self.run([0, 2], [[1], [2]]))
        self.paging.free(self.ids[1])
        self.ids[1] = self.paging.add()
        found.append(self.run([1], [TEXT[5:7]]))
        origin = cache_file.origin_of(self.plan, shape_of(self.config), "weights")
        tokens = [*TEXT[:3], 6, 8, 1]
        cache_file.save(folder / self.one.name, take(self.cache, self.paging, self.ids[0], tokens), origin)
        self.cache, self.paging = self.new_cache()
        self.ids[0] = put(cache_file.load_for(folder / self.one.name, origin, self.plan), self.cache, self.paging)
        return torch.cat([*found, self.run([0], [[4]])])


def executor(model):
    return CudaExecutor(model, interpreted=not GPU)


@pytest.mark.parametrize(
    ("dtype", "spec"),
    [(None, TQ4), *(pytest.param(dtype, TAIL, marks=MORE_CUDA) for dtype in DTYPES)],
    ids=["tiny", *map(str, DTYPES)],
)
def test_a_hybrid_runs_as_the_reference_does(tmp_path, dtype, spec):
    model, dtype = model_of(dtype) if dtype else tiny_model(), dtype or torch.float32
    theirs, ours = (Served(one(model), spec).everything(tmp_path) for one in (ReferenceExecutor, executor))
    error = (ours - theirs).abs().amax(-1) / theirs.std(dim=-1)
    assert error.max() <= bounds.EXECUTOR_LOGITS[str(dtype).removeprefix("torch.")]
    if dtype == torch.float32:
        assert error.max() <= bounds.LAYER_FP32.logits


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=MORE_CUDA) for dtype in DTYPES], ids=str)
def test_the_validator_passes_it_layer_by_layer(dtype):
    model = small_hybrid(dtype, 61)
    prompts = [random_tokens(model.config, 5), random_tokens(model.config, 3, seed=1)]
    report = validate(ReferenceExecutor(model), executor(model), model, prompts, 1, TQ4.plan(3))
    assert report.passed, report.first_divergence
    most = max(row.state_err for row in report.rows if row.state_err is not None)
    assert 0 < most < (bounds.LAYER_FP32 if dtype == torch.float32 else bounds.LAYER_BF16).state


def test_a_state_that_is_not_there_is_an_error_when_the_step_is_over():
    served = Served(executor(tiny_model()))
    served.run([0, 1], [TEXT[:5], TEXT[:1]])
    served.paging.take_back([served.ids[0]], [4])
    with pytest.raises(ValueError, match="too many were taken back"):
        served.run([0, 1], [[1], [2]])
    served.run([1], [[3]])  # said once; the sequence beside it goes on


def test_nothing_in_a_step_of_a_hybrid_waits_for_the_device(monkeypatch):
    """On a device without numbers; `launches` would raise. Two launches a layer of Gated DeltaNet, in prompts and in steps."""
    model = small_hybrid(torch.bfloat16, 61)
    for names in launches(executor_on_meta(model, monkeypatch), TQ4, [20, 3], monkeypatch):
        assert [name for name in names if name.startswith("delta_")] == 2 * ["delta_inputs_kernel", "delta_rule_kernel"]


def test_hybrids_are_taken_dense_and_with_experts():
    config, plan = small_hybrid(torch.float32, 61).config, TQ4.plan(3)
    mixed = replace(config.layers[0], mlp=Experts(4, 2, 16, shared=8))
    for layers in (config.layers, (mixed, *config.layers[1:])):
        assert CudaExecutor.supports(replace(config, layers=layers), plan) is None
