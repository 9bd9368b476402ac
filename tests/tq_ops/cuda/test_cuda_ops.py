"""What only some inputs show of the Triton op table, which also passes the contract of `test_op_tables.py`.

Compiled where there is a GPU, in Triton's interpreter elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from learned_slow import other_than_golden
from op_tables import LAYER, Case, everything_in, filled, poisoned_cache, relative

from haarkv.tq_ops import reference
from haarkv.tq_ops.cuda.layout import layout_of
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation import bounds
from haarkv.validation.layers.compare import compare_stored

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from haarkv.tq_ops.cuda import choices, lookup, ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP32, BF16 = torch.float32, torch.bfloat16


LONG = [
    Case("tq4", head_dim, group, 2, 128, (2047, 512, 128, 1), new)
    for head_dim in (64, 128, 256) for group in (1, 2, 5, 8) for new in ((1, 1, 1, 1), (1, 130, 7, 64))
]  # fmt: skip


def on_device(made: PagedKVCache, case: Case) -> PagedKVCache:
    copy = poisoned_cache(case, DEVICE)
    for ours, theirs in zip(everything_in(copy), everything_in(made), strict=True):
        ours.copy_(theirs)
    return copy


def check_attention(case: Case) -> None:
    made, batch = filled(case)
    copy = on_device(made, case)
    scale = case.head_dim**-0.5
    queries = 2 * torch.randn(len(batch.positions), case.kv_heads * case.group, case.head_dim)
    for dtype in (FP32, BF16):
        q = queries.to(dtype)
        theirs = reference.paged_attention(q, made, LAYER, batch, scale)
        ours = ops.paged_attention(q.to(DEVICE), copy, LAYER, batch.to(DEVICE), scale)
        assert (ours.dtype, ours.shape) == (dtype, theirs.shape)
        assert relative(ours, theirs) <= (bounds.LAYER_FP32 if dtype == FP32 else bounds.LAYER_BF16).attention


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no NVIDIA GPU")
@pytest.mark.parametrize("case", LONG, ids=str)
def test_attention_equals_the_references_at_length(case):
    check_attention(case)


def attended(case: Case, dtype: torch.dtype, programs: int, monkeypatch) -> float:
    """The error of attention whose line of work so many programs share, over V whose scales grow from tile to tile."""
    made, batch = filled(case)
    late = batch.block_table[:, 16:][batch.block_table[:, 16:] >= 0].long()
    made.v_fields(LAYER)["scale"][late] *= 3
    copy, q = on_device(made, case), torch.randn(len(batch.positions), case.kv_heads * case.group, case.head_dim).to(dtype)
    theirs = reference.paged_attention(q, made, LAYER, batch, case.head_dim**-0.5)
    monkeypatch.setattr(choices, "count_programs", lambda *_: programs)
    return relative(ops.paged_attention(q.to(DEVICE), copy, LAYER, batch.to(DEVICE), case.head_dim**-0.5), theirs)


@pytest.mark.parametrize("programs", [1, pytest.param(3, marks=pytest.mark.cuda_long), 12])
@pytest.mark.parametrize(
    "case",
    [
        Case("tq4", 64, 2, 1, 8, (150, 0, 300), (1, 1, 1)),
        Case("tq4", 64, 2, 2, 8, (150, 0), (3, 2)),  # as narrow tiles, though ragged
        Case("k=tq3,v=tq4", 64, 8, 1, 8, (153, 3), (10, 6)),  # as wide tiles; by one program, each takes all
    ],
    ids=str,
)
def test_pieces_of_a_context_are_merged(monkeypatch, case, programs):
    assert attended(case, BF16, programs, monkeypatch) <= bounds.LAYER_BF16.attention


def test_each_head_of_a_prompt_goes_back_by_its_own_matrix(monkeypatch):
    """One program takes all of a column tile, whose vectors are then merged 16 at a time, those of one head."""
    case = Case("k=lr48,v=lr112", 64, 8, 2, 16, (20,), (8,), tail=4, sink=2)
    assert attended(case, BF16, 1, monkeypatch) <= bounds.LAYER_BF16.attention


@pytest.mark.parametrize(
    "case",
    [
        Case("tq3", 64, 2, 1, 8, (150, 0), (1, 1)),
        Case("k=tq4,v=tq2", 128, 5, 1, 16, (70, 3), (1, 1)),
        Case("tq4", 256, 2, 1, 8, (30,), (1,)),
        Case("k=tq5,v=tq4", 64, 2, 1, 8, (40, 3), (3, 2)),
        Case("tq4", 64, 2, 1, 8, (70, 0), (3, 2)),
        Case("k=lr48,v=lr112", 64, 8, 2, 16, (20,), (8,)),
    ],
    ids=str,
)
def test_sizes_for_blackwell_change_no_result(case, monkeypatch):
    monkeypatch.setattr(ops, "capability", lambda _: 100)
    check_attention(case)


def test_tiny_v_keeps_its_precision():
    """Probabilities times scales go to the tensor cores in units of the largest scale, not below FP16's range."""
    case = Case("tq4", 64, 1, 1, 8, (20,), (1,))
    made, batch = filled(case)
    made.v_fields(LAYER)["scale"].mul_(2.0**-16)
    q = torch.randn(1, 1, 64).bfloat16()
    theirs = reference.paged_attention(q.float(), made, LAYER, batch, 0.125)
    ours = ops.paged_attention(q.to(DEVICE), on_device(made, case), LAYER, batch.to(DEVICE), 0.125)
    assert relative(ours, theirs) <= bounds.LAYER_BF16.attention


@pytest.mark.parametrize("new", [1, 8])
def test_queries_too_large_for_fp16_in_learned_coordinates_keep_their_precision(new):
    """Learned matrices are of any size; here queries become ten times FP16's largest number."""
    case = Case("k=lr80,v=lr48", 64, 8, 1, 8, (20,), (new,))
    made, batch = filled(case)
    q = 1e4 * torch.randn(new, 8, 64).bfloat16()
    theirs = reference.paged_attention(q.float(), made, LAYER, batch, 0.125e-4)
    ours = ops.paged_attention(q.to(DEVICE), on_device(made, case), LAYER, batch.to(DEVICE), 0.125e-4)
    assert relative(ours, theirs) <= bounds.LAYER_BF16.attention


@pytest.mark.parametrize("kept", [{}, {"tail": 3, "sink": 2}, {"tail": 40}], ids=str)
def test_a_dead_sequence_reads_and_stores_nothing(kept):
    """What pads a captured batch: length 0, slot -1, a block table of zeros."""
    case = Case("tq4", 64, 2, 1, 8, (9,), (1,), **kept)
    made, batch = filled(case)
    copy, q = on_device(made, case), torch.randn(1, 2, 64).to(DEVICE)
    alone = ops.paged_attention(q, copy, LAYER, batch.to(DEVICE), 0.125)
    pad = torch.nn.functional.pad
    padded = replace(
        batch, positions=pad(batch.positions, (0, 1)), slot_mapping=pad(batch.slot_mapping, (0, 1), value=-1),
        block_table=pad(batch.block_table, (0, 0, 0, 1)), seq_lens=pad(batch.seq_lens, (0, 1)),
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32), rows=pad(batch.rows, (0, 1)),
    ).to(DEVICE)  # fmt: skip
    both = ops.paged_attention(torch.cat([q, q]), copy, LAYER, padded, 0.125)
    assert relative(both[:1], alone) <= bounds.LAYER_FP32.attention
    assert (both[1] == 0).all()
    before = [tensor.clone() for tensor in everything_in(copy)]
    fault = ops.new_fault(DEVICE)
    kv = torch.full((2, 1, 64), float("nan"), device=DEVICE)
    kv[0] = 1.0
    ops.append(kv, kv, copy, LAYER, replace(padded, slot_mapping=torch.tensor([-1, -1], device=DEVICE)), fault)
    ops.raise_fault(fault, copy, padded)  # a dead sequence has no fault
    for was, tensor in zip(before, everything_in(copy), strict=True):
        assert torch.equal(was.view(torch.uint8), tensor.view(torch.uint8))


# -- Quantize and append -----------------------------------------------------------------------------------------------
def new_tokens(case: Case):
    """Two untouched caches, ours and the reference's, a batch, and K and V with some unusual vectors among them."""
    paging = PagedSequences(99, case.block_size, order=list(reversed(range(poisoned_cache(case, DEVICE).num_blocks))))
    batch = paging.batch([paging.add() for _ in case.new], case.new)
    k, v = torch.randn(2, len(batch.positions), case.kv_heads, case.head_dim, generator=torch.Generator().manual_seed(2))
    k[0, 0] = 0.0
    if "tbq4_0" not in case.kv:
        k[1, 0] *= 1e30  # its scale saturates
        k[2, 0] *= 1e-42  # denormal numbers
    v[0, 0] *= 1e-12  # and this one's is below FP16
    v[1, 0] = 0.0
    v[1, 0, 3] = -2.5
    return poisoned_cache(case, DEVICE), poisoned_cache(case, torch.device("cpu")), batch, k, v


STORES = [
    Case("tq4", 64, 1, 3, 8, (0, 0), (11, 4)),
    Case("tq4", 128, 1, 2, 128, (0, 0, 0), (1, 1, 1)),
    Case("tq4", 256, 1, 1, 24, (0,), (5,)),
    Case("tbq4_0", 128, 1, 1, 128, (0,), (5,)),
    Case("k=tq4,v=tbq4_0", 128, 1, 1, 8, (0,), (3,)),
]


@pytest.mark.parametrize("case", STORES, ids=str)
def test_the_same_codes_and_scales_are_stored_at_the_same_slots_and_nowhere_else(case):
    ours, theirs, batch, k, v = new_tokens(case)
    ops.store_kv(k.to(DEVICE), v.to(DEVICE), ours, LAYER, batch.to(DEVICE))
    reference.store_kv(k, v, theirs, LAYER, batch)
    block, offset = batch.slot_mapping // case.block_size, batch.slot_mapping % case.block_size
    for side, x in (("k", k), ("v", v)):
        mine, other = ({n: t.cpu() for n, t in getattr(c, f"{side}_fields")(LAYER).items()} for c in (ours, theirs))
        kv_format = getattr(theirs, f"{side}_format")(LAYER)
        new = [{name: t[block, :, offset] for name, t in fields.items()} for fields in (other, mine)]
        compared, length = compare_stored(kv_format, LAYER, *new, x, bounds.ROTATED_FP32)
        assert compared.unexplained == 0
        assert compared.match > 0.999
        assert length <= bounds.LAYER_FP32.length
        for name, tensor in mine.items():
            untouched = torch.ones(tensor.shape[:3], dtype=torch.bool)
            untouched[block, :, offset] = False
            assert torch.equal(tensor[untouched].view(torch.uint8), other[name][untouched].view(torch.uint8))


def test_the_golden_bytes_of_learned_nibbles_are_stored(golden):
    assert not other_than_golden(ops, golden("learned/lr"), 80, DEVICE)


@pytest.mark.parametrize(("side", "value"), [("k", float("nan")), ("k", -float("inf")), ("v", float("inf")), ("v", 1e7)])
@pytest.mark.parametrize("kept", [{}, {"tail": 3, "sink": 2}], ids=str)
def test_a_refused_vector_is_named_as_the_reference_names_it_and_nothing_is_stored(side, value, kept):
    # 1e7 is finite, and too long for tbq4_0's scale.
    ours, theirs, batch, k, v = new_tokens(replace(STORES[4], **kept))
    before = [tensor.clone() for tensor in everything_in(ours)]
    (k if side == "k" else v)[2, 0, 127] = value
    with pytest.raises(NonFiniteError) as wanted:
        reference.store_kv(k, v, theirs, LAYER, batch)
    with pytest.raises(NonFiniteError) as error:
        ops.store_kv(k.to(DEVICE), v.to(DEVICE), ours, LAYER, batch.to(DEVICE))
    assert str(error.value) == str(wanted.value)
    assert f"{side.upper()} of token 2" in str(error.value)
    for was, tensor in zip(before, everything_in(ours), strict=True):
        assert torch.equal(was.view(torch.uint8), tensor.view(torch.uint8))


def test_a_slot_outside_the_cache_is_refused():
    ours, _, batch, k, v = new_tokens(STORES[0])
    batch.slot_mapping[3] = ours.num_slots
    with pytest.raises(IndexError):
        ops.store_kv(k.to(DEVICE), v.to(DEVICE), ours, LAYER, batch.to(DEVICE))


def test_what_a_step_refuses_is_kept_neither_packed_nor_in_bf16():
    """`append` alone, which does not wait: all vectors but that one are there."""
    case = replace(STORES[2], tail=3, sink=2)
    ours, theirs, batch, k, v = new_tokens(case)
    reference.store_kv(k, v, theirs, LAYER, batch)
    k[3, 0, 7] = torch.nan
    fault = ops.new_fault(DEVICE)
    ops.append(k.to(DEVICE), v.to(DEVICE), ours, LAYER, batch.to(DEVICE), fault)
    with pytest.raises(NonFiniteError, match="K of token 3"):
        ops.raise_fault(fault, ours, batch)
    (k_window, v_window), (theirs_k, theirs_v) = ours.kept(LAYER), theirs.kept(LAYER)
    ring = theirs_k.vectors[int(batch.rows[0]), 0, 2:]
    ring[3] = torch.nan
    assert torch.equal(k_window.vectors.cpu().view(torch.uint8), theirs_k.vectors.view(torch.uint8))
    assert torch.equal(v_window.vectors.cpu().view(torch.uint8), theirs_v.vectors.view(torch.uint8))


def test_more_new_tokens_than_the_ring_takes_are_refused():
    made, _, batch, k, v = new_tokens(replace(STORES[2], tail=3))
    made.most_new_tokens = 4
    with pytest.raises(ValueError, match="at most 4 new tokens"):
        ops.store_kv(k.to(DEVICE), v.to(DEVICE), made, LAYER, batch.to(DEVICE))


# -- What they read, and the lookup -------------------------------------------------------------------------------------


def ran(ptx: str, registers: dict[str, int]) -> dict[str, int]:
    """Registers after a few lines of PTX on words of 32 bits: what `lookup` is made of, each as the PTX manual defines it."""

    def prmt(a: int, b: int, selector: int) -> int:
        octets = (a | b << 32).to_bytes(8, "little")
        picked = [(octets[n & 7], n & 8) for n in (selector >> 4 * i & 15 for i in range(4))]
        return int.from_bytes([255 * (octet >> 7) if sign else octet for octet, sign in picked], "little")

    does = {
        "mov.b32": lambda a: a, "not.b32": lambda a: ~a, "and.b32": int.__and__, "or.b32": int.__or__, "xor.b32": int.__xor__,
        "shr.u32": int.__rshift__, "shl.b32": int.__lshift__, "sub.u32": int.__sub__, "prmt.b32": prmt,
        "mad.lo.u32": lambda a, b, c: a * b + c,
    }  # fmt: skip
    for line in ptx.replace("{", "").replace("}", "").split(";"):
        name, *operands = line.replace(",", " ").split() or [".reg"]
        if name != ".reg":
            target, *given = operands
            values = [registers[g] if g in registers else int(g, 0) for g in given]
            registers[target] = does[name](*values) & 0xFFFFFFFF
    return registers


@pytest.mark.parametrize("name", ["tq2", "tq3", "tq4", "tbq4_0"])
def test_the_look_up_by_permutations_gives_the_centroids_of_any_codes(name):
    """The PTX itself, run here on every byte: each part's levels, as `level_of` finds them, as FP16 centroids."""
    layout = layout_of(KVSpec(name).plan(1).k(0), 0, 128, torch.device("cpu"))
    bits, words = layout.bits, [word & 0xFFFFFFFF for word in layout.words.tolist()]
    ptx = {2: lookup._FOUR, 3: lookup._EIGHT, 4: lookup._SIXTEEN}[bits].value
    tiles, parts = {2: (1, 4), 3: (3, 8), 4: (1, 2)}[bits]
    drawn = torch.randint(0, 256, (300, tiles, 4), generator=torch.Generator().manual_seed(0))
    drawn[:256, 0, 0], drawn[:256, -1, 3] = torch.arange(256), torch.arange(256).flip(0)
    for octets in drawn:
        given = [int.from_bytes(bytes(tile), "little") for tile in octets.tolist()]
        given += [word for word in words for _ in range(4)]  # each is given once for each of four bytes
        registers = ran(ptx, {f"${2 * parts + index}": value for index, value in enumerate(given)})
        for part in range(parts):
            if bits == 3:  # two tiles of two bits, then one of the third
                level = octets[part % 2] >> (2 * (part // 2)) & 3 | (octets[2] >> part & 1) << 2
            else:
                level = octets[0] >> (bits * part) & (2**bits - 1)
            found = torch.tensor([registers[f"${2 * part + pair}"] for pair in range(2)]).int().view(torch.float16)
            assert torch.equal(found, layout.centroids.half()[level])
