"""The KV plan of a spec for a model, the model balanced for it, and the memory that both take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haarkv.engine.generation import PREFILL_CHUNK
from haarkv.models import balance as balancing
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.hf_config import parse_config
from haarkv.models.parallel import Split
from haarkv.models.weights import WeightBytes, work_bytes
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.cache import cache_bytes, tokens_that_fit
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.memory import require_memory

TAIL, SINKS = 124, 4
"""Newest and first tokens in BF16 by default."""
WITH_CALIBRATION = KVSpec("k=lr4,v=tq4", TAIL, SINKS)
"""The cache where learned keys are given and no format is."""


def shape_signature(config: ModelConfig) -> ModelShape:
    """The shape by which stored files identify a model."""
    declaration = json.dumps(config.declaration(), sort_keys=True)
    return ModelShape(
        config.kv_shapes, config.hidden_size, config.vocab_size, tuple(config.state_shapes.items()), declaration
    )  # fmt: skip


def declaration_in(settings: Mapping[str, Any]) -> str:
    """`ModelShape.declaration` of a model that another library runs, from the entries of its `config.json`; "" if unknown
    here.
    """
    try:
        return shape_signature(parse_config(Path("config.json"), settings)).declaration
    except InputError:
        return ""


def plan_for(spec: KVSpec, config: ModelConfig, split: Split | None = None) -> KVPlan:
    """The KV plan of a spec for a model, which it must fit; with `split`, for a rank's KV heads."""
    if (longest := max(spec.tail or 0, spec.sink)) > config.max_position_embeddings:
        raise InputError(
            f"a tail or sink of {longest:,} tokens is longer than this model's context of {config.max_position_embeddings:,}; "
            "take a shorter one"
        )
    if not config.attentions:
        raise InputError("no layer of this model has K and V, which a cache stores; give more --layers")
    plan = spec.plan(config.num_layers, shape_signature(config))
    plan.require_layout(config.kv_shapes)
    if split and split.size > 1 and spec.calibration:
        plan = spec.heads(split.kv_heads(0)).plan(config.num_layers)
    return plan


def balanced_for(
    model: DecoderModel, plan: KVPlan, spec: KVSpec, balance: bool = True
) -> tuple[DecoderModel, balancing.Scaling]:
    """The model as a session runs it, and its scaling: balanced where its cache is lossy and has no learned coordinates."""
    return balancing.balance(model, balancing.where_lossy(plan, balance and spec.calibration is None))


# -- What it takes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of a loaded model with its cache.

    Attributes:
        weights: of the model; a tied head counts once.
        kv: whole blocks, tokens in BF16, and states.
        work: about what the widest layer's activations take.
    """

    weights: WeightBytes
    kv: int
    work: int = 0

    @property
    def private(self) -> int:
        """Memory of the process itself, without pages of the file."""
        return self.weights.private + self.kv + self.work

    @property
    def total(self) -> int:
        """`private` and the file's pages that every step reads."""
        return self.private + self.weights.mapped

    def describe(self) -> str:
        parts = [
            (self.weights.private, "weights"),
            (self.kv, "KV cache and states"),
            (self.work, "what a forward computes with"),
        ]
        text = " + ".join(f"{count / 2**30:,.2f} {what}" for count, what in parts if count)
        mapped_bytes = self.weights.mapped
        return text + (
            f"; beside them {mapped_bytes / 2**30:,.2f} of weights stay in the file's pages" if mapped_bytes else ""
        )

    def require(self, name: str) -> None:
        """Refuse what this machine has no room for now."""
        remedy = "take a smaller model, fewer tokens or sequences, a smaller --kv"
        remedy += ", or --dtype bfloat16" if self.weights.private > self.kv else ""
        require_memory(self.private, f"{name} ({self.describe()})", remedy)


def memory_need(config: ModelConfig, plan: KVPlan, tokens: int, weights: WeightBytes, sequences: int = 1) -> MemoryNeed:
    """Memory for `sequences` of `tokens` each."""
    kv = cache_bytes(plan, tokens, config.kv_shapes, sequences, config.state_bytes)
    return MemoryNeed(weights, kv, work_bytes(config, sequences * min(tokens, PREFILL_CHUNK), sequences))


def longest_context(config: ModelConfig, plan: KVPlan, memory: int, weights: WeightBytes) -> int:
    """Tokens of a sequence that fit into `memory`, in whole blocks."""
    room = memory - memory_need(config, plan, PREFILL_CHUNK, weights).work - weights.total
    return tokens_that_fit(plan, room, config.kv_shapes, config.state_bytes)
