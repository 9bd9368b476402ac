"""Small models for the CUDA executor by name, an executor of one, and batches of three sequences on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from block_weights import in_blocks
from small_models import gemma_config, resize_config, small_config, small_model
from torch import Tensor

from haarkv.engine.plans import shape_signature
from haarkv.executors.base import Executor, verify
from haarkv.executors.cuda import CudaExecutor
from haarkv.models.base import DecoderModel, new_cache
from haarkv.models.config import Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope
from haarkv.models.layer import DeltaNet
from haarkv.tq_ops.kv import cache_file
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.stored import Advance, put, take
from haarkv.validation.faults.states import small_hybrid

GPU = torch.cuda.is_available()
FP32, BF16 = torch.float32, torch.bfloat16
CONFIG = small_config(num_layers=1, num_heads=4, head_dim=64)
GEMMA = gemma_config(num_layers=2, head_dim=64, window=6)  # of its own head_dim in the tests of its ops
TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32]


def family_config(family: str, num_heads: int = 4, num_kv_heads: int = 2, num_layers: int = 2) -> ModelConfig:
    """A dense family's declaration; `wide` has heads of 128."""
    if family == "gemma":
        return gemma_config(num_layers=num_layers, num_heads=num_heads, head_dim=64)
    options = {"llama": {"head_norms": False}, "qwen2": {"head_norms": False, "bias": True}}.get(family, {})
    return small_config(
        family, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=128 if family == "wide" else 64, **options,
    )  # fmt: skip


def family_model(family: str, *sizes: int, dtype: torch.dtype) -> DecoderModel:
    return small_model(family_config(family, *sizes), dtype=dtype)


def tiny_hybrid(dtype: torch.dtype, mlp: Experts | None = None) -> DecoderModel:
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


def hybrid(dtype: torch.dtype) -> DecoderModel:
    """Three layers, with room for drafts."""
    model = small_hybrid(dtype, 61)
    return DecoderModel.from_weights(model.config.for_drafts(2), model.weights)


def blocks_model(*kinds: str, size: int = 64, dtype: torch.dtype = BF16) -> DecoderModel:
    """A layer whose projections are in GGUF blocks of these types in turn."""
    config = small_config(
        num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64, hidden_size=size, intermediate_size=size
    )  # fmt: skip
    return in_blocks(small_model(config, dtype=dtype), kinds)


MODELS: dict[str, Callable[..., DecoderModel]] = {
    "qwen3": partial(small_model, CONFIG),
    "gemma": partial(small_model, GEMMA),
    "hybrid": hybrid,
    "tiny hybrid": tiny_hybrid,
    "experts": qwen_moe,
    # Each layer with experts of which all tokens share one.
    "hybrid with experts": partial(tiny_hybrid, mlp=Experts(5, 2, 24, normalized=True, shared=40)),
    "blocks": partial(blocks_model, "Q4_0"),
    "blocks of three types": partial(blocks_model, "Q8_0", "Q5_0", "Q4_1"),
    "blocks of 256": partial(blocks_model, "Q4_K", "Q6_K", size=256),
    # Half of the interpreter's work.
    **{f"small {family}": partial(family_model, family, 2, 1) for family in ("gemma", "qwen2", "llama")},
    "small qwen3": partial(family_model, "qwen3", 2, 1, 1),
}


def executor(model: DecoderModel) -> CudaExecutor:
    return CudaExecutor(model, interpreted=not GPU)


class BatchRunner:
    """Three sequences on an executor, all logits on the host."""

    def __init__(self, one: Executor, spec: KVSpec) -> None:
        self.one, self.config, self.plan = one, one.config, spec.plan(one.config.num_layers)
        self.cache, self.paging = self.new_cache()
        self.ids = [self.paging.add() for _ in range(3)]

    def new_cache(self):
        return new_cache(self.config, self.plan, sequences=3, tokens=16, device=self.one.device)

    def run(self, rows: list[int], texts: list[list[int]], batch: Batch | None = None) -> Tensor:
        """Logits of each new token."""
        batch = batch or self.paging.batch([self.ids[row] for row in rows], [len(text) for text in texts])
        tokens = torch.tensor([token for text in texts for token in text], device=self.one.device)
        return verify(self.one, tokens, batch.to(self.one.device), self.cache).cpu()

    def everything(self, folder: Path) -> Tensor:
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


def expert_logits(one: Executor) -> Tensor:
    """Of three prompts in one batch, in which no other expert is as likely but for what BF16 rounds: a GPU would choose it."""
    return BatchRunner(one, KVSpec("tq4")).run([0, 1, 2], [[3, 14, 15], [9], [2, 6]])
