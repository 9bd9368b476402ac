"""Every op table: the contract that all share, then what only some inputs show."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from learned_slow import GOLDEN_BITS, other_than_golden
from op_contract import suite
from op_contract.caches import Attention, Store, cache_tensors
from op_contract.cases import Plain
from op_contract.suite import CPU, CUDA, REFERENCE, TABLES
from op_tables import LAYER, Case, every_storing_table, every_table, open_table
from op_tables import TABLES as CPU_TABLES
from places import ROOT
from torch import Tensor

from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats.rotated import RotatedFormat
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.table import OP_NAMES
from haarkv.validation.faults.base import instead, table_with
from haarkv.validation.faults.ops import ATTENTION, LINEAR, NORM, ROPE, STORE, SWIGLU, steeper
from haarkv.validation.faults.states import DELTA

CASES = suite.ATTENTION


# -- The contract ------------------------------------------------------------------------------------------------------
OP_BY_KERNEL = {"bf16": "linear", "by_tiles": "paged_attention", "rotate_pairs": "paged_attention"}


def own_ops(isa):
    """The ops that an instruction set has kernels of its own for: all, but `amx` those that it replaces."""
    if isa != "amx":
        return set(OP_NAMES)
    source = (ROOT / "tq_ops/cpu/csrc/amx.cpp").read_text(encoding="utf-8")
    return {OP_BY_KERNEL[kernel] for kernel in re.findall(r"\bkernels\.(\w+) = ", source)}


def own_cases(table):
    """Those of ops that no table before it has the very kernel of; one where the table cannot run, which says so."""
    cases = suite.cases(table)
    if table.missing():
        return cases[:1]
    isa = table.name.removeprefix("cpu-")
    if isa not in library.ISAS:
        return cases
    return [case for case in cases if case.op in own_ops(isa)]


NAMED_CASES = set(suite.named_cases())
BY_FORMAT = list(dict.fromkeys(case.cache.kv for case in suite.format_cases(CUDA)))


def length_marks(table, case, cases):
    """Marks: of a GPU's kernels in the interpreter, what runs in BF16 too runs in FP32 at length only.

    So does every format in two of its three head_dims, others with each format, and what takes the interpreter seconds.
    """
    if table is not CUDA or torch.cuda.is_available() or not isinstance(case, Attention | Store):
        return []
    if case not in NAMED_CASES:
        turn = BY_FORMAT.index(case.cache.kv) % len(suite.HEAD_DIMS)
        return [] if case.head_dim == suite.HEAD_DIMS[turn] else [pytest.mark.cuda_long]
    twin = isinstance(case, Attention) and case.dtype == torch.float32 and replace(case, dtype=torch.bfloat16) in cases
    # Wide tiles, but for one beside a tail.
    many = isinstance(case, Attention) and case.cache.group * max(case.cache.new) >= 72 and not case.cache.tail
    return [pytest.mark.cuda_long] if twin or many else []


@pytest.mark.parametrize(
    ("table", "case"),
    [
        pytest.param(t, c, id=f"{t.name}-{c}", marks=length_marks(t, c, found))
        for t in TABLES
        for found in (own_cases(t),)
        for c in found
    ],
)
def test_every_op_does_what_the_reference_does(table, case):
    open_table(table)
    ((_, finding),) = suite.run(table, [case])
    assert finding.passed, finding


def test_kernels_that_are_shared_are_known():
    assert own_ops("amx") == {"linear", "paged_attention"}


def test_every_op_of_every_table_has_cases_and_every_format_that_a_table_reads():
    for table in TABLES:
        cases = suite.cases(table)
        assert {case.op for case in cases} == set(OP_NAMES), table.name
        for kv, head_dim in (("tq4", 64), ("tq4", 128), ("tq4", 256), ("tq3", 128)):
            for op in ("store_kv", "paged_attention"):
                assert any(c.op == op and c.head_dim == head_dim and kv in c.cache.kv for c in cases), (table.name, op, kv)


def changes_input(call):
    result = call.again()
    call.x.mul_(1.001)
    return result


def writes_another_layer(call):
    call.again()
    call.again(layer=0)


def stores_no_scale(call):
    call.again()
    place, size = call.batch.slot_mapping, call.cache.block_size
    call.at.kv.k.fields["scale"][place // size, :, place % size] = torch.nan


def seen_one_token_too_few(call):
    result = call.again()
    call.at.state.counts.sub_(1)
    return result


def leaves_no_number(call):
    result = call.again()
    call.at.state.tensors["delta"][call.batch.rows] = torch.nan
    return result


# What the table of planted faults has no row of: too small for a whole layer, or of the contract alone.
SINGLE_RANK = {
    "linear": {"2e-5 too large": lambda call: call.again() * (1 + 2e-5), "of BF16": lambda call: call.again().bfloat16()},
    "rms_norm": {"another eps": lambda call: call.again(eps=1e-3), "its input is changed": changes_input},
    "sigmoid_mul": {"gate and up exchanged": lambda call: call.again(gate=call.up, up=call.gate)},
    "store_kv": {"a layer too many": writes_another_layer, "no scale": stores_no_scale},
    "paged_attention": {"1 % steeper": steeper(1.01), "not rounded": lambda call: call.again(q=call.q.float())},
    "gated_delta": {
        "seen one too few": seen_one_token_too_few, "no number": leaves_no_number,
        "keys of another length": lambda call: call.again(x=call.x * 1.001),
        "written in full": lambda call: call.again(b=torch.full_like(call.b, 30.0)),
    },
}  # fmt: skip
TABLE = {
    "linear": LINEAR, "rms_norm": NORM, "rope": ROPE, "silu_mul": SWIGLU, "paged_attention": ATTENTION,
    "store_kv": {name: wrong for name, (_, wrong) in STORE.items()},
    "gated_delta": {name: wrong for name, (_, wrong) in DELTA.items()},
}  # fmt: skip
CASE_BY_OP = {
    "linear": Plain("linear", (2, 64, 8), torch.float32), "rms_norm": Plain("rms_norm", (2, 64), torch.float32),
    "rope": Plain("rope", (4, 2, 64), torch.float32), "silu_mul": Plain("silu_mul", (2, 64), torch.bfloat16),
    "sigmoid_mul": Plain("sigmoid_mul", (2, 64), torch.float32), "gated_delta": suite.DELTAS[0], "store_kv": Store(CASES[3]),
    "paged_attention": Attention(CASES[3], torch.float32),
}  # fmt: skip
CASE_BY_FAULT = {"of BF16": Plain("linear", (2, 64, 8), torch.bfloat16), "not rounded": Attention(CASES[3], torch.bfloat16)}
UNSEEN_FAULTS = {"K and V's directions cut off, not rounded", "V rounded to BF16", "rolled back one step too few"}
"""What the contract does not see: its case has too few vectors, or takes no tokens back. `tq validate` sees these."""
FAULTS = [
    (op, name, wrong)
    for rows in (TABLE, SINGLE_RANK)
    for op, of in rows.items()
    for name, wrong in of.items()
    if name not in UNSEEN_FAULTS
]


@pytest.mark.parametrize(("op", "name", "wrong"), FAULTS, ids=[f"{op}-{name.strip()}" for op, name, _ in FAULTS])
def test_the_contract_sees_a_fault(op, name, wrong):
    case = CASE_BY_FAULT.get(name, CASE_BY_OP[op])
    assert case.check(reference, torch.device("cpu")).passed
    assert not case.check(table_with(instead(op, wrong)), torch.device("cpu")).passed


def test_a_table_refuses_what_it_says_it_cannot_read():
    """A head_dim that it is not made for, in the same words; the reference reads every format that has it."""
    case = Case("tq4", 96, 1, 2, 128, (0,), (1,))
    reason = CPU[0].unsupported(case.plan, 96)
    assert REFERENCE.unsupported(case.plan, 96) is None
    q, at, scale = Attention(case, torch.float32).arguments(CPU[0].device)
    with pytest.raises(InputError) as error:
        open_table(CPU[0]).paged_attention(q, at, scale)
    assert str(error.value) == reason
    assert "head_dim" in str(CUDA.unsupported(case.plan, 96))


# -- Attention ---------------------------------------------------------------------------------------------------------


@every_table
def test_gates_that_are_not_ordinary_numbers(table):
    gate = torch.tensor([[float("nan"), float("inf"), -1e4, 1e30, 0.0]])
    ours = table.open().gelu_mul(gate, torch.ones_like(gate), torch.float32)[0]
    assert ours[0].isnan()
    assert ours[1:].tolist() == [float("inf"), pytest.approx(0, abs=1e-33), pytest.approx(1e30), 0.0]


# -- Quantize and append -----------------------------------------------------------------------------------------------
STORES = suite.STORES
FEW = Case("tq4", 128, 1, 9, 16, (0,), (9,))


def new_tokens(case: Case) -> tuple[PagedKVCache, Batch, Tensor, Tensor]:
    """An untouched cache, a batch for it, K and V."""
    k, v, at = Store(case).arguments(torch.device("cpu"))
    return at.cache, at.batch, k, v


@pytest.mark.parametrize("bits", GOLDEN_BITS)
@pytest.mark.parametrize("table", [REFERENCE, *CPU_TABLES, CUDA], ids=lambda table: table.name)
def test_every_table_stores_the_golden_bytes_of_learned_keys(table, bits, golden):
    assert not other_than_golden(open_table(table), golden("learned/lr"), bits, table.device)


@every_storing_table
@pytest.mark.parametrize(("side", "value"), [("k", float("nan")), ("k", -float("inf")), ("v", float("inf"))])
def test_a_vector_that_is_not_finite_is_named_as_the_reference_names_it_and_nothing_is_stored(table, side, value):
    ours, batch, k, v = new_tokens(FEW)
    before = [tensor.clone() for *_, tensor in cache_tensors(ours)]
    (k if side == "k" else v)[7, 8, 127] = value
    with pytest.raises(NonFiniteError) as error:
        table.open().store_kv(k, v, ours.view(LAYER, batch))
    with pytest.raises(NonFiniteError) as expected_error:
        reference.store_kv(k, v, new_tokens(FEW)[0].view(LAYER, batch))
    assert str(error.value) == str(expected_error.value)
    assert f"{side.upper()} of token 7" in str(error.value)
    for was, (*_, tensor) in zip(before, cache_tensors(ours), strict=True):
        assert torch.equal(was.view(torch.uint8), tensor.view(torch.uint8))


@every_storing_table
def test_a_value_on_a_boundary_gets_the_level_above_it(table):
    _, batch, k, v = new_tokens(STORES[1])
    tq4 = formats.get("tq4").description(128)
    middle = replace(tq4, boundaries=(*tq4.boundaries[:7], 0.0, *tq4.boundaries[8:]))
    kv_format = RotatedFormat("tq4_middle", "", 4, lambda _: middle)
    plan = KVPlan(((kv_format, kv_format),) * (LAYER + 1))
    ours = PagedKVCache(plan, KVShape(STORES[1].kv_heads, 128), num_blocks=5)
    table.open().store_kv(torch.zeros_like(k), torch.zeros_like(v), ours.view(LAYER, batch))
    block, offset = batch.slot_mapping // ours.block_size, batch.slot_mapping % ours.block_size
    assert (ours.kv[LAYER].k.fields["codes"][block, :, offset] == 0x88).all()


@every_storing_table
def test_a_scale_beyond_fp16_is_its_largest_number_and_codes_are_those_of_the_direction(table):
    ours, batch, k, v = new_tokens(FEW)
    other = new_tokens(FEW)[0]
    table.open().store_kv(k, v, other.view(LAYER, batch))
    table.open().store_kv(k * 2.0**100, v, ours.view(LAYER, batch))
    block, offset = batch.slot_mapping[1:] // 16, batch.slot_mapping[1:] % 16  # the first is a zero among its heads
    (codes, scale), (expected, _) = (
        [x[block, :, offset] for x in kv_cache.kv[LAYER].k.fields.values()] for kv_cache in (ours, other)
    )
    assert torch.equal(codes, expected)
    assert (scale == 65504).all()


@every_storing_table
@pytest.mark.parametrize("slot", [-1, 16 * 3])
def test_a_slot_outside_the_cache_is_refused(table, slot):
    ours, batch, k, v = new_tokens(FEW)
    batch.slot_mapping[3] = slot
    with pytest.raises(IndexError):
        table.open().store_kv(k, v, ours.view(LAYER, batch))
