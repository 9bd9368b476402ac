"""As many layers as Qwen3-14B has, one on the result of the other: the NPU's programs stay within their bounds to the last."""

import pytest
from npu_programs import needs_pypto

from haarkv.executors import catalog
from haarkv.models.catalog import load_model
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.layers.runner import validate

pytestmark = [pytest.mark.npu_long, needs_pypto[1]]


def test_forty_layers_stay_within_their_bounds():
    model = load_model("random:narrow", "bfloat16")
    layers = model.config.num_layers
    plan = KVSpec("tq4").plan(layers)
    trusted, on_trial = (catalog.create(name, model, plan, device) for name, device in (("reference", None), ("npu", "sim")))
    tokens = [(7 * i * i + 3) % model.config.vocab_size for i in range(140)]
    report = validate(trusted, on_trial, model, [tokens], 1, plan)
    assert report.passed, report.first_divergence
    assert {(row.mode, row.layer) for row in report.rows} == {
        (mode, layer) for mode in ("teacher-forced", "free-running") for layer in range(40)
    }
    forced, free = report.worst("teacher-forced"), report.worst("free-running")
    assert all(row.unexplained == 0 for row in forced.values())
    # A layer's own error does not grow with depth; what it is given drifts.
    assert free[layers - 1].hidden_cos < forced[layers - 1].hidden_cos
