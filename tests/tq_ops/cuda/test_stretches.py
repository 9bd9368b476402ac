"""Learned keys beyond their first stretch of 1,024 positions: turned as they are stored, and met by queries turned as much."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from at_length import MORE_CUDA, rest
from op_contract.caches import Attention, Store
from op_contract.suite import CUDA
from op_tables import Case

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.stretches import MOST_POSITIONS

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from haarkv.tq_ops.cuda import ops, prologue
from haarkv.tq_ops.cuda.layout import stretch_room

SMALL = Case("k=lr4,v=tq4", 64, 2, 1, 16, (1022, 30), (5, 1))
"""New tokens on both sides of a border."""


# The rest runs with `make test-cuda-long`.
@pytest.mark.parametrize(
    ("tokens", "window"),
    rest(MORE_CUDA, product((1, 2, 4), ({}, {"tail": 3, "window": 70})), lambda i, _: i == 3),
    ids=str,
)
def test_queries_that_do_not_fit_at_once_are_rotated_and_attended_to_in_turns(monkeypatch, tokens, window):
    """Also as many tokens as sequences, which are no batch of one new token each."""
    case = replace(SMALL, **window)
    monkeypatch.setattr(prologue, "MOST_AHEAD", 2 * case.head_dim * case.group * 2 * tokens)
    assert Attention(case, torch.bfloat16).check(ops, CUDA.device).passed


def test_a_sequence_longer_than_the_tables_is_refused_by_name():
    batch = Store(SMALL).arguments(torch.device("cpu"))[2].batch
    assert stretch_room(batch, 16) == 2
    wide = replace(batch, block_table=batch.block_table[:, :1].expand(2, MOST_POSITIONS // 16 + 1))
    with pytest.raises(InputError, match="longer than learned keys are stored for on a GPU"):
        stretch_room(wide, 16)
