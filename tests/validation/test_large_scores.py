"""Scores of thousands lose bits in any order of sums: that is no fault, and it excuses nothing else."""

import pytest
import torch
from planted import tiny_qwen2, token_ids

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.planted import key_biases
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation import validate
from haarkv.validation.layers import large_scores
from haarkv.validation.layers.faults import table_with
from haarkv.validation.layers.restored import as_numbers
from haarkv.validation.layers.self_test import WholeLayers

DRIVES = {"ops": lambda executor: executor, "layers": WholeLayers}


def flipped(q, cache, layer, batch, scale):
    """Attention whose scores are added up from the other end."""
    k = cache.k_format(layer).dequantize(cache.k_fields(layer), layer)
    v = cache.v_format(layer).dequantize(cache.v_fields(layer), layer)
    return reference.paged_attention(q.flip(-1), as_numbers(cache, layer, k.flip(-1), v), layer, batch, scale)


def report(drive, attend, norm=20000.0):
    """Of `tiny` as a Qwen2 in FP32 with a large bias of K in layers 1 and 2."""
    model = key_biases(tiny_qwen2(), norm, [1, 2])
    candidate = DRIVES[drive](ReferenceExecutor(model, table_with({"paged_attention": attend})))
    plan = KVSpec("k=bf16,v=tq4").plan(model.config.num_layers)
    return validate(ReferenceExecutor(model), candidate, model, [token_ids(24)], 1, plan)


@pytest.mark.parametrize("drive", DRIVES)
def test_another_order_of_large_sums_is_no_fault_and_would_be_one_without_its_slack(drive, monkeypatch):
    found = report(drive, flipped)
    assert found.passed, found.first_divergence
    monkeypatch.setattr(large_scores, "slack", lambda attend, cache, layer: torch.zeros(()))
    assert report(drive, flipped).first_divergence.layer in (1, 2)


@pytest.mark.parametrize("drive", DRIVES)
def test_a_factor_of_attention_is_still_a_fault_where_scores_are_large(drive):
    def larger(q, cache, layer, batch, scale):
        return flipped(q, cache, layer, batch, scale) * (1.01 if layer == 1 else 1.0)

    found = report(drive, larger)
    assert not found.passed
    assert found.first_divergence.layer == 1
