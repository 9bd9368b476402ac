"""Decode attention in CUDA C++, compiled by NVRTC, its PTX executed thread by thread, beside the reference."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import bounds
import pytest
import torch
from op_tables import LAYER, Case, filled, relative
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.layer import page_bytes
from haarkv.tq_ops.kv.shapes import KVShape

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from haarkv.tq_ops.cuda import decode, ops
from haarkv.tq_ops.cuda.in_bf16 import attend_windows, layer_windows
from haarkv.tq_ops.cuda.layout import to_layout
from lab.ptx import LaunchFault, Memory, execute, far
from lab.ptx.tensors import fresh_memory_is_poison, place

if reason := decode.nvrtc_missing():
    pytest.skip(reason, allow_module_level=True)


@cache
def kernel_ptx(shape: decode.Shape) -> str:
    """The kernel's PTX."""
    return decode.compile_kernel("compute_90", *shape).decode().rstrip("\0")


class PtxKernel:
    """A kernel that runs in memory which it was shown."""

    def __init__(self, text: str, shared_bytes: int, memory: Memory, order: str) -> None:
        self._text, self._shared_bytes, self._memory, self._order = text, shared_bytes, memory, order

    def launch(self, grid: tuple[int, int], threads: int, arguments: ctypes.Structure) -> None:
        execute(
            self._text, "decode", grid, (threads,), [bytes(arguments)], self._memory, self._shared_bytes, order=self._order
        )


@contextmanager
def ptx_execution(order: str = "ascending", edit: Callable[[str], str] = str) -> Iterator[list[str]]:
    """`decode.attend` on CPU tensors meanwhile; `edit` changes the PTX before it runs. Names what is launched."""
    memory, tensors, kernel_names = Memory(), [], []

    def address(tensor: Tensor) -> int:
        tensors.append(tensor)
        return place(memory, f"tensor {len(tensors)} {tuple(tensor.shape)}", tensor)

    def kernel(shape: decode.Shape, device: torch.device) -> PtxKernel:
        kernel_names.append("decode")
        return PtxKernel(edit(kernel_ptx(shape)), decode.shared_bytes(shape.group, shape.head_dim), memory, order)

    with patch.object(decode, "address", address), patch.object(decode, "_kernel", kernel), fresh_memory_is_poison():
        yield kernel_names


def attend_in(kv_cache, batch, case: Case, *, reference_too: bool = True, **how):
    """What the kernel makes of a layer's attention, and what the reference does."""
    torch.manual_seed(1)
    q = (2 * torch.randn(len(batch.positions), case.kv_heads * case.group, case.head_dim)).bfloat16()
    theirs = reference.paged_attention(q, kv_cache.view(LAYER, batch), case.head_dim**-0.5) if reference_too else None
    at = kv_cache.view(LAYER, batch)
    k, v = (to_layout(kv_format, LAYER, case.head_dim, q.device) for kv_format in at.kv.formats)
    scale, windows = case.head_dim**-0.5 * ops.LOG2_E, layer_windows(at.kv)
    in_bf16 = attend_windows(q, windows, at, scale) if windows else None
    with ptx_execution(**how):
        ours = decode.attend(q, ops.rotate(q, at), at, (k, v), scale, in_bf16)
    return ours, theirs


def attend(case: Case, **how):
    return attend_in(*filled(case), case, **how)


def case(kv: str, head_dim: int, group: int, kv_heads: int, block: int, *lengths: int, **more: int) -> Case:
    return Case(kv, head_dim, group, kv_heads, block, tuple(n - 1 for n in lengths), (1,) * len(lengths), **more)


CASES = [
    case("tq4", 128, 5, 2, 128, 700, 3, 255, 32, 257),
    case("tq4", 64, 3, 1, 16, 1025, 5),
    case("tq4", 256, 8, 1, 32, 130, 31),
    case("tq4", 128, 4, 2, 16, 300, 17, pages=True),
    case("k=tq3,v=tq2", 256, 2, 1, 128, 70),
    # Contexts within the tail and the sinks, a token beyond them, and parts of several thread blocks.
    case("tq4", 64, 3, 1, 128, 300, 3, 12, 13, 14, 49, tail=9, sink=4),
    # More sequences than thread blocks: each takes several in turn, the first among them, whose barriers are watched.
    case("tq4", 128, 5, 2, 128, *[200] * 8),
    # Windows that begin within 32 tokens, at their edge and before the context.
    case("tq4", 128, 4, 1, 32, 700, 3, 224, 210, window=200),
    # Learned keys: units of a byte, of two, and both; stretches beside a tail and in a window.
    case("k=lr4,v=tq4", 128, 5, 2, 128, 300, 3),
    case("k=lr5,v=tq2", 128, 3, 2, 128, 40, 13, tail=9, sink=4),
    case("k=lr3,v=tq3", 128, 2, 1, 16, 1130, 40, tail=9, sink=4, window=200),
    *(
        pytest.param(one, marks=pytest.mark.long)
        for one in (
            case("tq4", 128, 16, 1, 48, 600, 33),
            case("tq4", 128, 4, 1, 16, *range(1, 41)),
            case("tq2", 128, 2, 1, 16, 300, 17),
            case("tq4", 64, 9, 1, 16, 600, 300, 302, 1, tail=2, sink=300),
            case("tq4", 64, 3, 1, 16, 500, 301, sink=300, window=260),
            case("tq4", 256, 4, 1, 128, 700, 3, window=512),
            case("k=lr2,v=tq3", 128, 9, 1, 16, 310, 300, 1, tail=2, sink=300),
            case("k=lr4,v=tq4", 128, 9, 1, 128, 2600, 1024, 30),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_reference(case):
    ours, theirs = attend(case)
    assert relative(ours, theirs) <= bounds.LAYER_BF16.attention


@pytest.mark.parametrize("order", [pytest.param("descending", marks=pytest.mark.long), "random"])
def test_no_order_of_the_thread_blocks_changes_a_bit(order):
    one = CASES[0]
    assert torch.equal(attend(one)[0], attend(one, order=order)[0])


def test_nothing_is_left_from_launch_to_launch():
    """Counters of arrived parts are zeros again; a second launch over the same cache merges as the first did."""
    one = CASES[0]
    kv_cache, batch = filled(one)
    first, second = (attend_in(kv_cache, batch, one)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("window", [{}, {"tail": 9, "sink": 4}, {"window": 40}], ids=str)
def test_a_sequence_without_tokens_reads_nothing_and_its_output_is_zero(window):
    """What pads a captured batch: length 0, position 0, a block table of -1."""
    one = case("tq4", 128, 4, 1, 16, 300, 17, **window)
    kv_cache, batch = filled(one)
    alone, _ = attend_in(kv_cache, batch, one)
    batch = replace(batch, seq_lens=torch.tensor([300, 0], dtype=torch.int32), block_table=batch.block_table.clone())
    batch.block_table[1] = -1
    ours, _ = attend_in(kv_cache, batch, one, reference_too=False)
    assert torch.equal(ours[0], alone[0])
    assert (ours[1] == 0).all()


def test_blocks_beyond_two_gigabytes():
    """A table of 70,000 blocks; a product of block and stride in 32 bits would read elsewhere."""
    one = case("tq4", 128, 4, 8, 128, 300)
    kv_cache, batch = filled(one)
    size = page_bytes(one.plan.layers[LAYER], 8, 128, 128)
    pages = torch.from_numpy(far(70_000 * size)).view(70_000, size)
    wide = PagedKVCache(one.plan, KVShape(8, 128), num_blocks=70_000, block_size=128, pages={LAYER: pages})
    blocks = torch.tensor([69_999, 16_400, 33_000])
    for fields, others in (
        (wide.kv[LAYER].k.fields, kv_cache.kv[LAYER].k.fields),
        (wide.kv[LAYER].v.fields, kv_cache.kv[LAYER].v.fields),
    ):
        for name, tensor in fields.items():
            tensor[blocks] = others[name][batch.block_table[0].long()]
    ours, _ = attend_in(wide, replace(batch, block_table=blocks.int().unsqueeze(0)), one, reference_too=False)
    assert torch.equal(ours, attend_in(kv_cache, batch, one)[0])


def ptx_edit(pattern: str, becomes: str = "", count: int = 0):
    """An edit of the PTX that changes something."""

    def edit(text: str) -> str:
        result, replacements = re.subn(pattern, becomes, text, count=count, flags=re.MULTILINE)
        assert replacements
        return result

    return edit


FAULTS = {
    "no fence before a part is announced": ptx_edit(r"^.*membar\.gl.*$"),
    "no barrier": ptx_edit(r"^.*bar\.sync.*$", count=1),
    "another byte of the codes": ptx_edit(r", 21780;", ", 21796;"),
    "counters that stay": ptx_edit(r"^.*st\.global\.u32.*$"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault):
    one = CASES[0]
    kv_cache, batch = filled(one)

    shape = (2, 5, 128, 4, 4, 128, 2, 0, 0, 0)
    faulty_ptx = FAULTS[fault](kernel_ptx(decode.Shape(*shape)))  # an edit that changes nothing fails here

    def check_twice() -> None:
        for _ in range(2):
            ours, theirs = attend_in(kv_cache, batch, one, edit=lambda _: faulty_ptx)
            assert relative(ours, theirs) <= bounds.LAYER_BF16.attention

    with pytest.raises((LaunchFault, AssertionError)):
        check_twice()


STRETCH_CASE = case("k=lr4,v=tq4", 128, 2, 1, 16, 1100)


@pytest.mark.parametrize("fault", [{"lacks": 0.0}, {"queries": 0}, {"gains": 2.0}], ids=str)
def test_what_each_stretch_is_given_counts(monkeypatch, fault):
    """What logits lack, queries and gains: those of the first stretch in place of the second's, or others."""
    right = ops.rotate

    def wrong(*args):
        rotated = right(*args)
        for name, by in fault.items():
            part = getattr(rotated, name)
            part[1] = part[0] if name == "queries" else part[1] * by
        return rotated

    monkeypatch.setattr(ops, "rotate", wrong)
    ours, theirs = attend(STRETCH_CASE)
    assert not relative(ours, theirs) <= 5 * bounds.LAYER_BF16.attention


def test_the_op_takes_it_for_one_new_token_a_sequence(monkeypatch):
    """`paged_attention` itself: rotation of the queries in Triton's interpreter, then this kernel."""
    one = case("k=tq4,v=tq3", 128, 4, 2, 16, 300, 17, window=130)
    kv_cache, batch = filled(one)
    q = torch.randn(2, 8, 128).bfloat16()
    theirs = reference.paged_attention(q, kv_cache.view(LAYER, batch), 0.1)
    monkeypatch.setattr(decode, "takes", lambda *_: True)
    with ptx_execution() as kernel_names:
        ours = ops.paged_attention(q, kv_cache.view(LAYER, batch), 0.1)
    assert kernel_names == ["decode"]
    assert relative(ours, theirs) <= bounds.LAYER_BF16.attention
