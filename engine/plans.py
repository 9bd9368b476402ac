"""The KV plan that a spec means for a model, the model as that plan wants it, and the memory that both take."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haarkv.engine.generation import PREFILL_CHUNK
from haarkv.models import balance as balancing
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.footprint import WeightBytes, work_bytes
from haarkv.models.hf_config import parse_config
from haarkv.models.parallel import Split
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.cache import cache_bytes, tokens_that_fit
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE
from haarkv.tq_ops.memory import require_memory

WORTH_SAYING = 2.0
"""A layer's error must shrink by this factor for balance to be mentioned; nobody would notice a smaller gain."""
TAIL, SINKS = 124, 4
"""Newest and first tokens that a cache keeps in BF16 where nobody says otherwise."""


def default_spec(has_calibration: bool, context: int = TAIL) -> KVSpec:
    """The cache of a real model where no format is named: with learned coordinates of its keys, and without."""
    return KVSpec("k=lr4,v=tq4" if has_calibration else "k=tq6,v=tq4", min(TAIL, context), min(SINKS, context))


def shape_signature(config: ModelConfig) -> ModelShape:
    """What stored files name a model by."""
    declaration = json.dumps(config.declaration(), sort_keys=True)
    return ModelShape(
        config.kv_shapes, config.hidden_size, config.vocab_size, tuple(config.state_shapes.items()), declaration
    )  # fmt: skip


def declaration_in(settings: Mapping[str, Any]) -> str:
    """`ModelShape.declaration` of a model that another library runs; "" of one that is not built here.

    Args:
        settings: the entries of its `config.json`, as that library has them now.
    """
    try:
        return shape_signature(parse_config(Path("config.json"), settings)).declaration
    except InputError:
        return ""


def plan_for(spec: KVSpec, config: ModelConfig, split: Split | None = None) -> KVPlan:
    """The KV plan that a spec means for a model, which it must fit; with `split`, of the plan for a rank's KV heads."""
    if (longest := max(spec.tail or 0, spec.sink)) > config.max_position_embeddings:
        raise InputError(
            f"a tail or sink of {longest:,} tokens is longer than this model's context of {config.max_position_embeddings:,}; "
            "take a shorter one"
        )
    plan = spec.plan(config.num_layers, shape_signature(config))
    plan.require_layout(config.kv_shapes)
    return spec.heads(split.kv_heads(0)).plan(config.num_layers) if split and spec.calibration else plan


def balanced_for(model: DecoderModel, plan: KVPlan, spec: KVSpec, balance: bool = True) -> balancing.BalancedModel:
    """A model as a session runs it: balanced where its cache loses something and knows no learned coordinates."""
    return balancing.balance(model, balancing.where_lossy(plan, balance and spec.calibration is None))


def worth_saying(uneven: Sequence[balancing.Uneven]) -> bool:
    """Whether balance gained enough to be mentioned."""
    return any(side.ratio >= WORTH_SAYING for side in uneven)


# -- What it takes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of a loaded model with an allocated cache, and what a forward computes with.

    Attributes:
        weights: of the model; a head tied to the embedding counts once.
        kv: of the cache: whole blocks, the tokens that stay in BF16, and states.
        work: about what the widest layer makes of the tokens that come at once.
    """

    weights: WeightBytes
    kv: int
    work: int = 0

    @property
    def private(self) -> int:
        """What the process must have, whatever the system drops of the file's pages."""
        return self.weights.private + self.kv + self.work

    @property
    def total(self) -> int:
        """All that is computed with: the process's own, and the file's pages that are read at each step."""
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
    """What sequences of `tokens` each take beside a model's weights."""
    kv = cache_bytes(plan, tokens, config.kv_shapes, sequences, config.state_bytes)
    return MemoryNeed(weights, kv, work_bytes(config, sequences * min(tokens, PREFILL_CHUNK), sequences))


def pays_from(config: ModelConfig, plan: KVPlan) -> int | None:
    """Tokens of the shortest text, in whole blocks, whose cache is smaller than one in bf16: tokens that a plan keeps in BF16
    take their room beside the packed ones, however short the text. None where no text of this model is long enough."""
    bf16, most = KVSpec("bf16").plan(config.num_layers), config.max_position_embeddings
    lengths = range(BLOCK_SIZE, most + BLOCK_SIZE, BLOCK_SIZE)

    def smaller(tokens: int) -> bool:
        packed, plain = (cache_bytes(each, tokens, config.kv_shapes, 1, config.state_bytes) for each in (plan, bf16))
        return packed < plain

    # Once it is smaller it stays so, for every token widens the gap.
    at = bisect_left(lengths, True, key=smaller)
    return lengths[at] if at < len(lengths) else None


def longest_context(config: ModelConfig, plan: KVPlan, memory: int, weights: WeightBytes, sequences: int = 1) -> int:
    """The most tokens of each sequence that `memory` has room for, as `memory_need` counts, in whole blocks; at least 0."""
    room = memory - memory_need(config, plan, PREFILL_CHUNK, weights, sequences).work - weights.total
    return tokens_that_fit(plan, room, config.kv_shapes, sequences, config.state_bytes)
