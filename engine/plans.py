"""The KV plan that a spec means for a model, and the model as that plan wants it."""

from __future__ import annotations

from haarkv.models import balance as balancing
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.parallel import Split
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec, ModelShape


def shape_of(config: ModelConfig) -> ModelShape:
    """The shapes that a plan file names its model by."""
    return ModelShape(config.kv_shapes, config.hidden_size, config.vocab_size, tuple(config.state_shapes.items()))


def plan_for(spec: KVSpec, config: ModelConfig, split: Split | None = None) -> KVPlan:
    """The KV plan that a spec means for a model.

    Args:
        split: of the plan for a rank's KV heads.
    Raises:
        InputError: it does not fit the model.
    """
    if (kept := max(spec.tail or 0, spec.sink)) > config.max_position_embeddings:
        raise InputError(
            f"a tail or sink of {kept:,} tokens is longer than this model's context of {config.max_position_embeddings:,}; "
            "take a shorter one"
        )
    plan = spec.plan(config.num_layers, shape_of(config))
    plan.require_layout(config.kv_shapes)
    return spec.heads(split.kv_heads(0)).plan(config.num_layers) if split and spec.calibration else plan


def balanced_for(model: DecoderModel, plan: KVPlan, spec: KVSpec, balance: bool = True) -> balancing.Balanced:
    """A model as a session runs it: balanced where its cache loses something and knows no learned coordinates.

    Args:
        spec: that the plan was made of.
        balance: False balances nothing.
    """
    may = balance and spec.calibration is None
    return balancing.balance(model, lambda layer, side: may and plan.layers[layer][side == "V"].lossy)
