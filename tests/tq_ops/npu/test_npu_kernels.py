"""Scope 2a on the device: what is stored is the format's, bit for bit; every byte is restored to its centroids."""

import pytest
import torch
from npu_programs import MEAN_AT, needs_pypto, store_case

from haarkv.codebooks import cubic
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.formats.learned import COLUMNS
from haarkv.tq_ops.formats.packing import unpack_columns
from haarkv.tq_ops.npu.learned import Layout, level_cubic
from haarkv.tq_ops.npu.program import HEAD_DIM, order_arguments
from haarkv.tq_ops.npu.sides import READS, fixed_sides
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator

pytest.importorskip("pypto", reason="PyPTO is not installed")
from look_up_kernel import levels, look_up, restore_keys

pytestmark = needs_pypto


@pytest.fixture(scope="module")
def simulator():
    with Simulator() as simulator:
        yield simulator


def long(*case):
    return pytest.param(*case, marks=pytest.mark.npu_long)


@pytest.mark.parametrize(
    ("name", "tokens", "kv_heads"),
    [
        *((name, 20, 2) for name in fixed_sides(128)), ("tq4", 5, 8), long("tq4", 1, 2),
        ("lr4", 20, 2), *(long(f"lr{bits}", 20, 2) for bits in (2, 3, 5)),
    ],
)  # fmt: skip
def test_every_field_is_stored_as_the_format_has_it(simulator, name, tokens, kv_heads):
    """All that the program writes, and all else in the cache, to the last bit; an FP32 norm but for it: sums differ.

    A vector that is the mean of learned keys stores scale 0.
    """
    v = formats.get("tq4" if name.startswith("lr") else name)
    case = store_case(tokens, kv_heads, pair=(formats.get(name, "k", synthetic.calibration()), v))
    sides = zip("kv", (case.program.k, case.program.v), strict=True)
    assert set(case.goldens) == {a.name for prefix, side in sides for a in side.arguments(prefix) if a.output}
    simulator.run(case.program, order_arguments(case.program, case.tensors), Mode.NUMBERS)
    for field, golden in case.goldens.items():
        assert golden.any()
        rtol = 2.0**-22 if golden.dtype == torch.float32 else 0.0
        torch.testing.assert_close(case.tensors[field], golden, rtol=rtol, atol=0, msg=field)
    if name.startswith("lr"):
        slot = int(case.tensors["slot"][MEAN_AT])
        assert case.tensors["k_scale"].view(-1, 2, 128)[slot // 128, 0, slot % 128] == 0


# -- Look-ups ----------------------------------------------------------------------------------------------------------------
OTHERS = [pytest.param(*case, marks=pytest.mark.npu_long) for case in ((64, 4), (256, 1), (HEAD_DIM, 1))]


@pytest.mark.parametrize(("head_dim", "blocks"), [(HEAD_DIM, 2), *OTHERS])
def test_every_byte_gives_the_fp16_of_its_two_centroids(head_dim, blocks, simulator):
    """At any head_dim those of 128: they differ by a factor, which is in the scale."""
    rows = blocks * 128
    codes = torch.arange(rows).view(-1, 1).mul(3).add(torch.arange(head_dim // 2)).remainder(256).to(torch.uint8)
    book = torch.tensor(READS.built_in(HEAD_DIM).centroids)
    expected = book[torch.cat([codes & 15, codes >> 4], 1).long()].half()
    out = torch.full((rows, head_dim), 7.0).half()
    simulator.run(look_up(rows, head_dim), [codes.view(torch.int8), out], Mode.NUMBERS)
    assert len(codes.unique()) == 256
    assert torch.equal(out, expected)


def test_numbers_beside_a_boundary_are_on_their_side_of_it(simulator):
    """The next FP32 numbers, both zeros, the least number there is, and numbers whose product is beyond FP32."""
    boundaries = torch.tensor(READS.built_in(HEAD_DIM).boundaries)
    near_boundaries = torch.cat([boundaries, *(boundaries.nextafter(torch.tensor(way * torch.inf)) for way in (-1, 1))])
    ends = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 1e30, -1e30, 3e38, -3e38])
    generator = torch.Generator().manual_seed(0)
    x = torch.cat(
        [near_boundaries, ends, torch.randn(16 * 128 - len(near_boundaries) - len(ends), generator=generator) / 8]
    ).view(16, 128)
    out = torch.full_like(x, -1.0)
    simulator.run(levels(), [x, out], Mode.NUMBERS)
    assert torch.equal(out, torch.bucketize(x, boundaries, right=True).float())
    assert len(out.unique()) == 16


# -- Learned keys ------------------------------------------------------------------------------------------------------------
# The rest runs with `make test-npu`.
SOME = [bits if bits in (3, 4) else pytest.param(bits, marks=pytest.mark.npu_long) for bits in COLUMNS]


@pytest.mark.parametrize("bits", SOME)
def test_every_byte_of_learned_keys_gives_the_centroids_of_its_levels(simulator, bits):
    """Within 2**-10: three roundings to FP16, where the reference has FP32. Rows between hold anything finite."""
    layout = Layout(COLUMNS[bits])
    # Each byte of a vector runs through all values, the two of a unit by different steps.
    step = torch.arange(layout.nbytes(HEAD_DIM)) % 2 * 36 + 1
    for half in (0, 128):
        codes = ((torch.arange(128).unsqueeze(1) + half) * step + torch.arange(len(step))).to(torch.uint8)
        out = torch.full((layout.width(HEAD_DIM), 128), float("nan")).half()
        simulator.run(restore_keys(layout), [codes.view(torch.int8), out], Mode.NUMBERS)
        levels = unpack_columns(codes, layout.columns).long().chunk(8, -1)
        expected = torch.cat([cubic.centroids(width)[part] for width, part in zip(layout.widths, levels, strict=True)], -1)
        factor = torch.tensor([level_cubic(width).factor for width in layout.widths]).repeat_interleave(16)
        ours = out.float()[layout.rows(HEAD_DIM)].T * factor
        assert ((ours - expected).abs() <= 2.0**-10 * expected.abs()).all()
        assert out.isfinite().all()
