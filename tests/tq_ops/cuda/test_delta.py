"""Gated DeltaNet on a GPU, or in Triton's interpreter: what its table alone does, beside `test_delta_tables.py`."""

from __future__ import annotations

import pytest
import torch
from cuda_caches import DEVICE
from delta_runs import VERSIONS, Run, whole
from op_tables import LAYER

from haarkv.tq_ops import reference

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")

from op_contract.delta import Delta

from haarkv.tq_ops.cuda import delta, ops
from haarkv.tq_ops.cuda.layout import fault_place

CASE = Delta(1, 2, 16, 12, (0,), (1,))
"""Heads that share keys, and columns that fill no program."""
LENGTH = 6


def a_run(sequences=1, length=LENGTH):
    return Run(ops, CASE, sequences, length, DEVICE)


def test_a_state_that_is_not_there_is_noted_and_nothing_is_read_or_kept():
    """Beside a sequence whose state is there."""
    run = a_run(2)
    run.run([0, 1], [5, 1])
    run.paging.take_back([run.ids[0]], [VERSIONS - 1])
    state = run.cache.states[LAYER]
    state_before = [tensor[0].clone() for tensor in (state.counts, *state.tensors.values())]
    batch, begins = run.batch([1, 0], [1, 2]).to(DEVICE), (1, 1)
    parts = [[x[begin : begin + n] for x in run.told[row]] for row, begin, n in zip((1, 0), begins, (1, 2), strict=True)]
    x, a, b = map(torch.cat, zip(*parts, strict=True))
    with pytest.raises(ValueError, match="too many were taken back"):
        ops.gated_delta(x, a, b, *run.weights, run.cache.view(LAYER, batch))
    fault = ops.new_fault(DEVICE)
    out = delta.advance(x, a, b, *run.weights, run.cache.view(LAYER, batch), fault)
    assert fault_place(int(fault))[:3] == (LAYER, "state", 1)
    assert out[1:].isnan().all()
    assert torch.equal(out[:1], whole(ops, CASE, 1, 2, LENGTH, DEVICE)[0][1:])
    assert all(map(torch.equal, state_before, (tensor[0] for tensor in (state.counts, *state.tensors.values()))))
    with pytest.raises(ValueError, match="too many were taken back"):
        ops.raise_fault(fault, run.cache, batch)
    ops.raise_fault(fault, run.cache, batch)  # said once


def test_small_rates_of_forgetting_are_exact():
    """log(1 + exp(z)) where it is nearly nothing, times exp(9), which shows its last places."""
    run = a_run(length=2)
    run.weights[1].fill_(9.0)
    x, _, b = run.told[0]
    for z in (-15.5, -0.5, 30.0):
        run.told[0] = x, torch.full((2, CASE.value_heads), z, device=x.device) - run.weights[2], b
        theirs = Run(reference, CASE, length=2)
        theirs.weights[1].fill_(9.0)
        theirs.told[0] = tuple(tensor.cpu() for tensor in run.told[0])
        ours, expected = run.run([0], [2])[0].cpu(), theirs.run([0], [2])[0]
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
        run.paging.take_back([run.ids[0]], [2])
