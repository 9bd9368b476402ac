"""Learned keys beyond their first stretch of 1,024 positions: turned as they are stored, and met by queries turned as much."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import bounds
import pytest
import torch
from at_length import MORE_CUDA, rest
from cuda_caches import DEVICE, attention_bound, attention_error, check_stored
from op_contract.caches import Store, bf16_windows
from op_tables import Case

from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.formats.stretches import MOST_POSITIONS

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from haarkv.tq_ops.cuda import ops, prologue
from haarkv.tq_ops.cuda.layout import stretch_room

FP32, BF16 = torch.float32, torch.bfloat16
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
    assert attention_error(ops, case, BF16) <= attention_bound(BF16)


# The rest runs with `make test-cuda-long`.
@pytest.mark.parametrize(
    ("rope_dims", "window"),
    rest(MORE_CUDA, product((64, 32, 48, 0), ({}, {"tail": 9, "sink": 2})), lambda i, _: i in (4, 7)),
    ids=str,
)
def test_keys_at_a_border_are_stored_and_read_as_the_reference_does(monkeypatch, rope_dims, window):
    """Also where RoPE turns a part of each key, whose halves are then not those of memory, or how it turns is not known."""
    whole = synthetic.calibration

    def part_layout(*args: int):
        basis = whole(*args)
        return replace(basis, k=tuple(replace(one, inv_freq=one.inv_freq[: rope_dims // 2]) for one in basis.k))

    monkeypatch.setattr(synthetic, "calibration", part_layout)
    case = Case("k=lr3,v=tq4", 64, 2, 2, 16, (1021,), (6,), **window)
    (k, v, theirs), arguments = (Store(case).arguments(device) for device in (torch.device("cpu"), DEVICE))
    reference.store_kv(k, v, theirs)
    ops.store_kv(*arguments)
    check_stored(arguments[2].cache, theirs.cache, k, v, theirs.batch, bounds.ROTATED_FP32)
    for mine, other in zip(bf16_windows(arguments[2].cache), bf16_windows(theirs.cache), strict=True):
        assert torch.equal(mine.cpu().view(torch.int16), other.view(torch.int16))
    assert attention_error(ops, case, FP32) <= attention_bound(FP32)


def test_a_sequence_longer_than_the_tables_is_refused_by_name():
    batch = Store(SMALL).arguments(torch.device("cpu"))[2].batch
    assert stretch_room(batch, 16) == 2
    wide = replace(batch, block_table=batch.block_table[:, :1].expand(2, MOST_POSITIONS // 16 + 1))
    with pytest.raises(InputError, match="longer than learned keys are stored for on a GPU"):
        stretch_room(wide, 16)
