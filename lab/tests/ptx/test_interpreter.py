"""What executes PTX in the tests of the GPU kernels: instructions against plain arithmetic, and faults that it must report."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from lab.ptx import LaunchFault, Memory, Unknown, execute, far

U32 = np.uint32


def text(body: str, params: int = 2, shared: int = 0) -> str:
    parameters = ", ".join(f".param .u64 p{i}" for i in range(params))
    loads = "\n".join(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(params))
    return f"""
.version 8.0
.target sm_80
.address_size 64
{f".shared .align 16 .b8 tile[{shared}];" if shared else ""}
.visible .entry kernel({parameters})
{{
    .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<40>; .reg .f32 %f<8>; .reg .b64 %rd<20>;
    {loads}
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    {body}
    ret;
}}
"""


def run(body: str, *arrays: np.ndarray, programs: int = 1, threads: int = 32, shared: int = 0, **how) -> None:
    memory = Memory()
    args = [memory.place(f"array{i}", array) for i, array in enumerate(arrays)]
    execute(text(body, len(arrays), shared), "kernel", [programs], [threads], args, memory, **how)


MINE = "mul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd0, %rd10; add.s64 %rd12, %rd1, %rd10;"
"""%rd11 and %rd12: this thread's number of the first and of the second array."""


def each(body: str, values: np.ndarray) -> np.ndarray:
    """%r2 of 32 values becomes %r3."""
    output = np.zeros(32, U32)
    run(f"{MINE} ld.global.b32 %r2, [%rd11]; {body} st.global.b32 [%rd12], %r3;", values.view(U32), output)
    return output


VALUES = np.random.default_rng(0).integers(0, 2**32, 32, dtype=U32)


def permute_bytes(x: int, selector: int) -> int:
    octets = [*x.to_bytes(4, "little"), *0x80FF017F.to_bytes(4, "little")]
    selection = [octets[selector >> 4 * i & 7] for i in range(4)]
    return int.from_bytes(
        [(0xFF if p & 0x80 else 0) if selector >> 4 * i & 8 else p for i, p in enumerate(selection)], "little"
    )


def to_signed(x: int, bits: int = 32) -> int:
    return (x & (1 << bits) - 1) - ((x >> (bits - 1) & 1) << bits)


INTEGERS = {
    "prmt.b32 %r3, %r2, 0x80FF017F, 0x6240;": lambda x: permute_bytes(x, 0x6240),
    "prmt.b32 %r3, %r2, 0x80FF017F, 0xC4F1;": lambda x: permute_bytes(x, 0xC4F1),
    "mov.b32 %r4, 0x80FF017F; prmt.b32 %r3, %r2, %r4, %r2;": lambda x: permute_bytes(x, x & 0xFFFF),
    "bfe.u32 %r3, %r2, 5, 9;": lambda x: x >> 5 & 0x1FF,
    "bfe.s32 %r3, %r2, 5, 9;": lambda x: to_signed(x >> 5, 9) if x >> 5 & 0x1FF else 0,
    "bfe.s32 %r3, %r2, 28, 9;": lambda x: to_signed(x) >> 28,
    "bfi.b32 %r3, %r2, 0x12345678, 4, 12;": lambda x: 0x12345678 & ~0xFFF0 | (x & 0xFFF) << 4,
    "shl.b32 %r3, %r2, 32;": lambda x: 0,
    "shr.s32 %r3, %r2, 40;": lambda x: -1 if x >> 31 else 0,
    "mul.hi.s32 %r3, %r2, -77777;": lambda x: to_signed(x) * -77777 >> 32,
    "mul.hi.u32 %r3, %r2, 0xFFFF0001;": lambda x: x * 0xFFFF0001 >> 32,
    "cvt.s64.s32 %rd2, %r2; mul.hi.s64 %rd2, %rd2, 0x7000000000000001; cvt.u32.u64 %r3, %rd2;": (
        lambda x: to_signed(x) * 0x7000000000000001 >> 64
    ),
    "add.s16x2 %r3, %r2, 0x8001FFFF;": lambda x: (x + 0x80010000 & 0xFFFF0000) | (x + 0xFFFF & 0xFFFF),
    "mad.lo.s32 %r3, %r2, 99999, 7;": lambda x: x * 99999 + 7,
    "mad.wide.s32 %rd2, %r2, -5, 3; shr.u64 %rd2, %rd2, 32; cvt.u32.u64 %r3, %rd2;": lambda x: to_signed(x) * -5 + 3 >> 32,
    "div.s32 %r3, %r2, -7;": lambda x: -(abs(to_signed(x)) // 7) if to_signed(x) > 0 else abs(to_signed(x)) // 7,
    "rem.s32 %r3, %r2, 7;": lambda x: abs(to_signed(x)) % 7 * (1 if to_signed(x) > 0 else -1),
    "min.s32 %r3, %r2, -5;": lambda x: min(to_signed(x), -5),
    "popc.b32 %r3, %r2;": lambda x: x.bit_count(),
    "brev.b32 %r3, %r2;": lambda x: int(f"{x:032b}"[::-1], 2),
    "cvt.s64.s32 %rd2, %r2; shr.s64 %rd2, %rd2, 33; cvt.u32.u64 %r3, %rd2;": lambda x: to_signed(x) >> 33,
    "cvt.s32.s8 %r3, %r2;": lambda x: to_signed(x, 8),
    "{ .reg .b16 low, high; mov.b32 {low, high}, %r2; mov.b32 %r3, {high, low}; }": lambda x: x >> 16 | x << 16,
    "setp.lt.s32 %p1, %r2, 5; selp.b32 %r3, 1, 2, %p1;": lambda x: 1 if to_signed(x) < 5 else 2,
    "setp.lt.u32 %p1, %r2, 0x80000000; @%p1 mov.b32 %r3, 4; @!%p1 mov.b32 %r3, 9;": lambda x: 4 if x < 2**31 else 9,
    "shfl.sync.bfly.b32 %r3, %r2, 3, 31, -1;": lambda x: int(VALUES[int(np.flatnonzero(x == VALUES)[0]) ^ 3]),
    "redux.sync.max.s32 %r3, %r2, -1;": lambda x: int(VALUES.view(np.int32).max()),
}  # fmt: skip


@pytest.mark.parametrize("body", INTEGERS)
def test_integers(body):
    expected = [INTEGERS[body](int(x)) % 2**32 for x in VALUES]
    assert each(body, VALUES).tolist() == expected


def test_fma_rounds_once():
    """Products whose last bits only a fused sum keeps: against exact fractions."""
    a = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    b = (a.astype(np.float64) ** 2).astype(np.float32)
    output = each(
        "mov.b32 %f1, %r2; mul.f32 %f2, %f1, %f1; neg.f32 %f2, %f2; fma.rn.f32 %f3, %f1, %f1, %f2; mov.b32 %r3, %f3;", a
    )
    exact = [np.float32(float(Fraction(float(x)) ** 2 - Fraction(float(y)))) for x, y in zip(a, b, strict=True)]
    assert output.view(np.float32).tolist() == exact
    assert any(exact)


def test_half_floats():
    x = np.random.default_rng(3).standard_normal(32).astype(np.float32)
    output = each("mov.b32 %f1, %r2; cvt.rn.bf16x2.f32 %r3, %f1, 0f3F800000;", x)
    upper = (output & U32(0xFFFF0000)).view(np.float32)
    assert (output & U32(0xFFFF) == 0x3F80).all()
    assert (np.abs(upper - x) <= np.abs(x) * 2**-8).all()
    assert np.isnan(
        each("mov.b32 %f1, %r2; ex2.approx.ftz.f32 %f2, %f1; mov.b32 %r3, %f2;", np.full(32, np.nan, np.float32)).view(
            np.float32
        )
    ).all()


def test_bytes_become_bf16_numbers_as_compilers_make_them():
    """A byte beside the bits of 128 in BF16, less 128: the byte's number; and what needs more than FP32 is refused."""
    output = each(
        "sub.bf16x2 %r3, %r2, 0x43004300;", np.array([0x43004300 | x | (127 - x) << 16 for x in range(0, 128, 4)], U32)
    )
    low, high = ((output << U32(16)).view(np.float32), (output & U32(0xFFFF0000)).view(np.float32))
    assert low.tolist() == list(range(0, 128, 4))
    assert high.tolist() == [127 - x for x in range(0, 128, 4)]
    with pytest.raises(Unknown, match="far apart"):
        each("sub.bf16x2 %r3, %r2, 0x35803580;", np.full(32, 0x43004300, U32))


# -- Products ------------------------------------------------------------------------------------------------------------
PRODUCT = """
    .reg .b32 a<4>, b<2>; .reg .f32 d<4>;
    shl.b32 %r2, %r0, 4; mov.u32 %r3, tile; add.s32 %r2, %r2, %r3;
    mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd0, %rd10;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd11]; st.shared.v4.b32 [%r2], {%r4, %r5, %r6, %r7};
    and.b32 %r8, %r0, 15; mul.wide.u32 %rd10, %r8, 16; add.s64 %rd11, %rd1, %rd10;
    setp.lt.u32 %p1, %r0, 16;
    @%p1 ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd11]; @%p1 st.shared.v4.b32 [%r2+512], {%r4, %r5, %r6, %r7};
    bar.warp.sync -1;
    // A [16, 16]: matrices of rows 0-7 and 8-15, columns 0-7, then 8-15.
    and.b32 %r9, %r0, 15; shl.b32 %r9, %r9, 5; shr.u32 %r10, %r0, 4; shl.b32 %r10, %r10, 4;
    add.s32 %r9, %r9, %r10; add.s32 %r9, %r9, %r3;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {a0, a1, a2, a3}, [%r9];
    // B [16, 8], rows of 16 bytes: transposed as it is loaded.
    shl.b32 %r11, %r8, 4; add.s32 %r11, %r11, %r3;
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {b0, b1}, [%r11+512];
    MOVES
    mov.f32 d0, 0f3F800000;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d0, d1, d2, d3}, {a0, a1, a2, a3}, {b0, b1}, {d0, d0, d0, d0};
    // Row lane / 4, columns 2 * (lane % 4) and the next.
    shl.b32 %r12, %r0, 1; mul.wide.u32 %rd10, %r12, 4; add.s64 %rd11, %rd2, %rd10;
    st.global.v2.f32 [%rd11], {d0, d1}; st.global.v2.f32 [%rd11+256], {d2, d3};
"""


@pytest.mark.parametrize("moves", ["", "movmatrix.sync.aligned.m8n8.trans.b16 b0, b0; " * 2], ids=["loaded", "moved twice"])
def test_a_product_of_fragments_is_the_product(moves):
    generator = np.random.default_rng(4)
    a, b = (generator.standard_normal(shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    output = np.zeros((16, 8), np.float32)
    run(PRODUCT.replace("MOVES", moves), a, b, output, shared=1024)
    assert np.allclose(output, 1 + a.astype(np.float64) @ b, atol=1e-5)


# -- Threads that part, and barriers --------------------------------------------------------------------------------------
def test_threads_of_a_warp_take_loops_of_their_own_length():
    output = np.zeros(64, U32)
    body = """
        mov.b32 %r2, 0; mov.b32 %r3, 0;
    $again: setp.ge.u32 %p1, %r2, %r0; @%p1 bra $done;
        add.s32 %r3, %r3, %r2; add.s32 %r2, %r2, 1; bra.uni $again;
    $done: st.global.b32 [%rd12], %r3;
    """
    run(MINE + body, np.zeros(1, U32), output, threads=64)
    assert output.tolist() == [n * (n - 1) // 2 for n in range(64)]


EXCHANGE = """
    shl.b32 %r2, %r0, 2; mov.u32 %r3, tile; add.s32 %r2, %r2, %r3; st.shared.b32 [%r2], %r0;
    BARRIER
    xor.b32 %r4, %r2, DISTANCE; ld.shared.b32 %r5, [%r4]; st.global.b32 [%rd12], %r5;
"""


@pytest.mark.parametrize(("barrier", "distance", "says"), [
    ("bar.sync 0;", 128, None), ("bar.warp.sync -1;", 64, None),
    ("", 128, "no barrier between"), ("", 64, "no barrier between"),
    ("bar.warp.sync -1;", 128, "no barrier between"), ("fence.acq_rel.gpu;", 128, "no barrier between"),
])  # fmt: skip
def test_what_another_thread_wrote_is_read_after_a_barrier(barrier, distance, says):
    output = np.zeros(64, U32)
    body = MINE + EXCHANGE.replace("BARRIER", barrier).replace("DISTANCE", str(distance))
    if says:
        with pytest.raises(LaunchFault, match=says):
            run(body, output, output, threads=64, shared=256)
    else:
        run(body, np.zeros(1, U32), output, threads=64, shared=256)
        assert output.tolist() == [n ^ distance // 4 for n in range(64)]


def test_a_barrier_that_some_threads_never_reach_is_reported():
    with pytest.raises(LaunchFault, match="never reach"):
        run(
            "setp.lt.u32 %p1, %r0, 32; @%p1 bra $there; mov.u32 %r2, %r0; bar.sync 1; $there: bar.sync 0;",
            np.zeros(1),
            threads=64,
        )


COPY = """
    shl.b32 %r2, %r0, 4; mov.u32 %r3, tile; add.s32 %r2, %r2, %r3; mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd0, %rd10;
    cp.async.cg.shared.global [%r2], [%rd11], 16; cp.async.commit_group;
    WAIT
    ld.shared.b32 %r4, [%r2]; mul.wide.u32 %rd10, %r0, 4; add.s64 %rd12, %rd1, %rd10; st.global.b32 [%rd12], %r4;
"""


@pytest.mark.parametrize(("wait", "lands"), [("cp.async.wait_group 0;", True), ("cp.async.wait_group 1;", False), ("", False)])
def test_a_copy_lands_no_sooner_than_a_wait_asks(wait, lands):
    source, output = np.arange(128, dtype=U32), np.zeros(32, U32)
    run(COPY.replace("WAIT", wait), source, output, shared=512)
    assert output.tolist() == (source[::4].tolist() if lands else [0xFFFFFFFF] * 32)


# -- Memory -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("at", "says"), [
    (128, r"line \d+ \(ld.global.b32\), program 0, thread 0: 4 bytes at byte 128 of array0, which has 128"),
    (-4, "is byte -4 of array0"), (2, "not aligned"), (2**33, "byte"),
])  # fmt: skip
def test_an_access_outside_a_region_is_named(at, says):
    with pytest.raises(LaunchFault, match=says):
        run(f"ld.global.b32 %r2, [%rd0+{at}];", np.zeros(32, U32), np.zeros(1))


def test_bytes_between_those_of_a_view_are_out_of_bounds():
    access_mask = np.zeros(64, np.bool_)
    access_mask[:16] = access_mask[48:] = True
    memory, array = Memory(), np.zeros(64, np.uint8)
    address = memory.place("view", array, 0, 64, access_mask)
    execute(text("ld.global.b32 %r2, [%rd0+48];", 1), "kernel", [1], [32], [address], memory)
    with pytest.raises(LaunchFault, match="byte 16 of view, between the bytes that are its own"):
        execute(text("ld.global.b32 %r2, [%rd0+16];", 1), "kernel", [1], [32], [address], memory)


def test_an_offset_that_wraps_at_32_bits_is_out_of_bounds():
    """70,000 blocks of 33 KiB: the last lies beyond 2**31 bytes."""
    memory, blocks = Memory(), far(70_000 * 33_792)
    blocks[69_999 * 33_792] = 7
    args, output = [memory.place("cache", blocks)], np.zeros(1, np.uint8)
    args.append(memory.place("found", output))
    body = "mov.b32 %r2, 69999; {} add.s64 %rd4, %rd0, %rd3; ld.global.u8 %r3, [%rd4]; st.global.u8 [%rd1], %r3;"
    execute(text(body.format("mul.wide.s32 %rd3, %r2, 33792;")), "kernel", [1], [32], args, memory)
    assert output[0] == 7
    with pytest.raises(LaunchFault, match=r"byte -\d+ of cache"):
        execute(text(body.format("mul.lo.s32 %r2, %r2, 33792; cvt.s64.s32 %rd3, %r2;")), "kernel", [1], [32], args, memory)


@pytest.mark.parametrize(("at", "says"), [(0, None), (12, None), (16, "byte 16 of local memory, which has 16"), (2, "byte 2")])
def test_local_memory_is_each_threads_own(at, says):
    output = np.zeros(64, U32)
    body = f".local .align 16 .b8 own[16]; mov.u64 %rd2, own; st.local.u32 [%rd2+{at}], %r0;"
    body = f"{MINE} {body} ld.local.u32 %r2, [%rd2+{at}]; st.global.b32 [%rd12], %r2;"
    if says:
        with pytest.raises(LaunchFault, match=says):
            run(body, output, output, threads=64)
    else:
        run(body, np.zeros(1, U32), output, threads=64)
        assert output.tolist() == list(range(64))


@pytest.mark.parametrize(("value", "how", "says"), [
    ("%r1", {}, "two threads write different values"), ("%r1", {"together": 1}, "which thread 0 of program 0 wrote"),
    ("%r0", {"together": 1}, "two threads write different values"), ("5", {}, None),
])  # fmt: skip
def test_different_values_written_to_one_address_are_a_race(value, how, says):
    body, output = f"mov.b32 %r2, {value}; st.global.b32 [%rd0], %r2;", np.zeros(1, U32)
    if value == "%r1":
        body = "setp.eq.u32 %p1, %r0, 0; @!%p1 ret; " + body
    if says:
        with pytest.raises(LaunchFault, match=says):
            run(body, output, programs=3, **how)
    else:
        run(body, output, programs=3, **how)
        assert output[0] == 5


LAST = """
    setp.ne.u32 %p1, %r0, 0; @%p1 bra $end;
    mul.wide.u32 %rd10, %r1, 4; add.s64 %rd11, %rd0, %rd10; st.global.b32 [%rd11], %r1;
    FENCE
    atom.global.add.u32 %r2, [%rd1], 1;
    setp.ne.u32 %p2, %r2, 4; @%p2 bra $end;
    membar.gl;
    ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd0]; ld.global.b32 %r7, [%rd0+16];
    add.s32 %r3, %r3, %r4; add.s32 %r3, %r3, %r5; add.s32 %r3, %r3, %r6; add.s32 %r3, %r3, %r7; st.global.b32 [%rd2], %r3;
    $end:
"""


@pytest.mark.parametrize("how", [{}, {"together": 1}, {"together": 2, "order": "random"}, {"order": "descending"}], ids=str)
def test_the_last_program_may_read_what_the_others_wrote_before_a_fence(how):
    output = np.zeros(1, U32)
    run(LAST.replace("FENCE", "fence.acq_rel.gpu;"), np.zeros(5, U32), np.zeros(1, U32), output, programs=5, **how)
    assert output[0] == 10
    with pytest.raises(LaunchFault, match="nothing orders the two"):
        run(LAST.replace("FENCE", ""), np.zeros(5, U32), np.zeros(1, U32), output, programs=5, **how)


# -- What is not known ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("body", [
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;", "frobnicate.b32 %r2, %r3;",
    "add.rz.f16 %h0, %h1, %h2;",
    "add.cc.u32 %r2, %r3, %r4;",
    "lop3.b32 %r2, %r3, %r4, %r5, 0xE2;", "ld.b32 %r2, [%rd0];", "cvt.rzi.s32.f32 %r2, %f1;",
    "call (%r2), f, (%r3);", "ld.global.L3::magic.b32 %r2, [%rd0];",
])  # fmt: skip
def test_what_is_not_known_is_refused_and_never_skipped(body):
    with pytest.raises(Unknown):
        run(body, np.zeros(1), np.zeros(1))
