"""What the validator says of an executor beside the reference; what honest runs gave is shared by all who ask for the same."""

from small_models import SMALL, random_tokens, small_model

from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.faults.base import WholeLayers
from haarkv.validation.layers.runner import validate

MODEL = small_model(SMALL)
PROMPTS = [random_tokens(SMALL, 7), random_tokens(SMALL, 3, seed=1)]
_NULLS = {}


def validation_report(candidate, model=MODEL, prompts=PROMPTS, steps=1, kv="tq4", trusted=None, **more):
    """
    Args:
        kv: a format by name, or a whole spec.
        trusted: in the place of the reference; nothing is shared then.
    """
    plan = (KVSpec(kv) if isinstance(kv, str) else kv).plan(model.config.num_layers)
    key = id(model), str(prompts), steps, plan.describe(), tuple(candidate.blocks)
    _, null = _NULLS.setdefault(key, (model, {}))  # the model stays, so that no other has its id
    more.setdefault("honest_cache", {} if trusted else null)
    return validate(trusted or ReferenceExecutor(model), candidate, model, prompts, steps, plan, **more)


def where(report):
    first = report.first_divergence
    assert not report.passed
    assert first.reason == "fault"
    return first.layer, first.stage


class Whole(WholeLayers):
    """A fused executor whose layers, forward or head can be spoilt: each is given what it would be, and what it gave."""

    def __init__(self, model=MODEL, **changes):
        super().__init__(ReferenceExecutor(model))
        for name, change in changes.items():
            right = getattr(self, name)
            setattr(self, name, lambda *args, right=right, change=change: change(right(*args), *args))
