"""Mixtures of experts on a GPU, or in Triton's interpreter: the formula, and the same bits beside any others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import bounds
import pytest
import torch
from at_length import MORE_CUDA, rest
from block_weights import random_blocks
from cuda_caches import DEVICE

from haarkv.tq_ops.table import Stack
from haarkv.tq_ops.weight import weight_numbers

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from cuda_mixtures import CASE, FULL, Mixture, off_by

from haarkv.tq_ops.cuda import experts
from haarkv.tq_ops.cuda.block_planes import by_planes

BF16 = torch.bfloat16
FORMULAS = [
    CASE,
    Mixture(7, 3, 40, 33, 5, normalized=False),
    Mixture(9, 2, 130, 48, 3, activation="gelu_tanh"),
    FULL,
    Mixture(4, 4, 32, 40, 3, dtype=BF16),
    Mixture(3, 2, 48, 16, 21, dtype=BF16, crowd=1),
    Mixture(12, 2, 16, 16, 70),
]


@pytest.mark.parametrize("case", FORMULAS, ids=str)
def test_each_token_goes_through_its_experts_as_the_formula_says(case):
    # In BF16 a gated product beside a rounding point may fall to its other side.
    assert off_by(case, DEVICE) <= (bounds.LAYER_FP32.op if case.dtype == torch.float32 else bounds.LAYER_BF16.rounded_op)


# -- The same bits ---------------------------------------------------------------------------------------------------------
MANY = replace(CASE, tokens=20, crowd=1)


@cache
def all_at_once(case):
    x, logits = case.inputs()
    return experts.run_experts(x.to(DEVICE), logits.to(DEVICE), on_device(case.stack()))


def on_device(stack):
    return Stack(*list(vars(stack).values())[:4], *(weight.to(DEVICE) for weight in (stack.gate, stack.up, stack.down)))


@pytest.mark.parametrize("case", [MANY, replace(MANY, dtype=BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [(1, 2, 17), (18, 2)], ids=str)
def test_a_prompt_in_pieces_is_the_whole_prompt_to_the_bit(case, sizes):
    """Alone and among others, in a tile's first column and in others, with a slot for each pair and with fewer."""
    stack = on_device(case.stack())
    parts = zip(*(torch.split(tensor.to(DEVICE), sizes) for tensor in case.inputs()), strict=True)
    pieces = [experts.run_experts(x, logits, stack) for x, logits in parts]
    assert torch.equal(torch.cat(pieces), all_at_once(case))


# -- Choice and order ------------------------------------------------------------------------------------------------------
def test_of_equal_experts_the_first_are_chosen():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [-torch.inf, 0.0, -torch.inf, -torch.inf, -torch.inf]])
    expert_ids, shares = experts.choose(logits.to(DEVICE), 3, normalized=True)
    assert expert_ids.tolist() == [[1, 2, 3], [0, 1, 2]]
    torch.testing.assert_close(shares.cpu(), torch.tensor([[1 / 3] * 3, [0.0, 1.0, 0.0]]))


def test_logits_that_are_not_finite_choose_experts_that_there_are_and_give_no_number():
    x, logits = CASE.inputs()
    logits[1, 2], logits[3, 4], logits[4] = torch.nan, torch.inf, -torch.inf
    expert_ids, shares = experts.choose(logits.to(DEVICE), 2, normalized=True)
    assert all(0 <= one < other < CASE.count for one, other in expert_ids.tolist())
    bad = torch.tensor([False, True, False, True, True, False])
    assert shares.cpu().isnan().all(-1).tolist() == bad.tolist()
    ours, right = experts.run_experts(x.to(DEVICE), logits.to(DEVICE), on_device(CASE.stack())).cpu(), all_at_once(CASE).cpu()
    assert ours[bad].isnan().all()
    assert torch.equal(ours[~bad], right[~bad])


# -- Weights in blocks -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kinds", "hidden", "width"),
    rest(MORE_CUDA, [(("Q4_0", "Q8_0", "Q5_1"), 64, 32), (("Q4_K", "Q4_K", "Q6_K"), 256, 256)], lambda index, _: not index),
    ids=str,
)
def test_experts_in_blocks_are_the_restored_ones(kinds, hidden, width):
    """Gate, up and down each in blocks of a type of its own, as in GGUF files; one of them dense; rows times powers of two."""
    case, kind_by_name = Mixture(3, 2, hidden, width, 5), dict(zip(("gate", "up", "down"), kinds, strict=True))

    def place_weights(name, numbers):
        blocks = random_blocks(kind_by_name[name], *numbers.shape, seed=len(name))
        return blocks * torch.full((len(numbers), 1), 4.0) if name == "gate" else blocks

    def planes(name, numbers):
        return by_planes(place_weights(name, numbers), DEVICE)

    def mix_types(name, numbers):
        return weight_numbers(place_weights(name, numbers)) if name == "down" else planes(name, numbers)

    for how in (planes, mix_types):
        assert off_by(case, DEVICE, how) <= bounds.LAYER_FP32.op
