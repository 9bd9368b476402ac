"""Decode attention in CUDA C++, its PTX executed thread by thread, beside the reference."""

from __future__ import annotations

import pytest
import torch
from op_tables import LAYER, Case, filled, relative

from haarkv.tq_ops import reference
from haarkv.validation import bounds

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
from ptx_decode import executed

from haarkv.tq_ops.cuda import decode, ops
from haarkv.tq_ops.cuda.layout import layout_of


def attend(case: Case, order: str = "ascending", rotate_back: bool = True):
    made, batch = filled(case)
    q = (2 * torch.randn(len(batch.positions), case.kv_heads * case.group, case.head_dim)).bfloat16()
    theirs = reference.paged_attention(q, made, LAYER, batch, case.head_dim**-0.5)
    k, v = (layout_of(f, LAYER, case.head_dim, q.device) for f in (made.k_format(LAYER), made.v_format(LAYER)))
    rotated = (q.float().flatten(0, 1) @ k.rotation.float()).half().view(q.shape)
    scale = case.head_dim**-0.5 * ops.LOG2_E
    with executed(order):
        ours = decode.attend(q, rotated, made, LAYER, batch, k, v, scale, rotate_back)
    return ours, theirs


def case(kv: str, head_dim: int, group: int, kv_heads: int, block: int, *lengths: int, pages: bool = False) -> Case:
    return Case(kv, head_dim, group, kv_heads, block, tuple(n - 1 for n in lengths), (1,) * len(lengths), pages=pages)


CASES = [
    case("tq4", 128, 5, 2, 128, 700, 3, 255, 32, 257),
    case("tq4", 128, 1, 3, 16, 1, 40, 300),
    case("tq4", 128, 16, 1, 48, 600, 33),
    case("tq4", 64, 3, 1, 16, 1025, 5),
    case("tq4", 256, 8, 1, 32, 513, 31),
    case("tbq4_0", 128, 2, 1, 128, 2000),
    case("k=tq4,v=tbq4_0", 128, 2, 1, 64, 300),
    case("tq4", 128, 4, 1, 16, *range(1, 41)),
    case("tq4", 128, 4, 2, 16, 300, 17, pages=True),
    case("tq2", 128, 2, 1, 16, 300, 17),
    case("tq3", 128, 2, 2, 128, 300, 17),
    case("k=tq3,v=tq2", 256, 2, 1, 128, 300),
    case("k=tq2,v=tq3", 256, 2, 1, 128, 300),
    case("k=tq4,v=tq3", 128, 5, 1, 128, 300),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_reference(case):
    ours, theirs = attend(case)
    print(relative(ours, theirs))
    assert relative(ours, theirs) <= bounds.LAYER_BF16.attention


@pytest.mark.parametrize("order", ["descending", "random"])
def test_no_order_of_the_thread_blocks_changes_a_bit(order):
    one = CASES[0]
    assert torch.equal(attend(one)[0], attend(one, order)[0])


def test_without_the_rotation_back_the_output_stays_rotated():
    one = CASES[0]
    made, _ = filled(one)
    rotation = layout_of(made.v_format(LAYER), LAYER, one.head_dim, torch.device("cpu")).rotation.float()
    ours, theirs = attend(one, rotate_back=False)
    assert relative(ours.float() @ rotation.T, theirs) <= bounds.LAYER_BF16.attention
