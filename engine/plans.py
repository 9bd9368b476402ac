"""The KV plan that a spec means for a model, and the model as that plan wants it."""

from __future__ import annotations

from haarkv.models import balance as balancing
from haarkv.models.base import DecoderConfig, DecoderModel
from haarkv.models.parallel import Split
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec, ModelShape


def shape_of(config: DecoderConfig) -> ModelShape:
    """The shapes that a plan file names its model by."""
    return ModelShape(config.num_layers, config.num_kv_heads, config.head_dim, config.hidden_size, config.vocab_size)


def plan_for(spec: KVSpec, config: DecoderConfig, split: Split | None = None) -> KVPlan:
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
    plan.require_layout(config.head_dim, num_kv_heads=config.num_kv_heads)
    return spec.heads(split.kv_heads).plan(config.num_layers) if split and spec.calibration else plan


def balanced_for(model: DecoderModel, plan: KVPlan, spec: KVSpec, balance: bool = True) -> balancing.Balanced:
    """A model as a session runs it: balanced where its cache loses something and knows no learned coordinates.

    Args:
        spec: that the plan was made of.
        balance: False balances nothing.
    """
    may = balance and spec.calibration is None
    return balancing.balance(model, lambda layer, side: may and plan.layers[layer][side == "V"].lossy)
