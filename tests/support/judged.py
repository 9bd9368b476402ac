"""What the validator says of an executor beside the reference; what honest runs gave is shared by all who ask for the same."""

from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation import validate

_NULLS = {}


def report_of(candidate, model, prompts, steps=1, kv="tq4", trusted=None, **more):
    """
    Args:
        kv: a format by name, or a whole spec.
        trusted: in the place of the reference; nothing is shared then.
    """
    plan = (KVSpec(kv) if isinstance(kv, str) else kv).plan(model.config.num_layers)
    key = id(model), str(prompts), steps, plan.describe(), tuple(candidate.blocks)
    _, null = _NULLS.setdefault(key, (model, {}))  # the model stays, so that no other has its id
    more.setdefault("known", {} if trusted else null)
    return validate(trusted or ReferenceExecutor(model), candidate, model, prompts, steps, plan, **more)
