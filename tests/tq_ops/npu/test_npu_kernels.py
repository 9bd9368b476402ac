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
from haarkv.tq_ops.npu.sides import READS, TQ4, fixed_sides
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator

pytest.importorskip("pypto", reason="PyPTO is not installed")
from look_up_kernel import levels, look_up, restore_keys

pytestmark = needs_pypto


@pytest.fixture(scope="module")
def simulator():
    with Simulator() as simulator:
        yield simulator


def check(simulator, case):
    """Every number that the program writes, and every other one in the cache, is the format's; an FP32 norm but for its last
    bit, as it may be summed otherwise."""
    simulator.run(case.program, order_arguments(case.program, case.tensors), Mode.NUMBERS)
    for name, golden in case.goldens.items():
        assert golden.any()
        rtol = 2.0**-22 if golden.dtype == torch.float32 else 0.0
        torch.testing.assert_close(case.tensors[name], golden, rtol=rtol, atol=0, msg=name)


@pytest.mark.parametrize(("tokens", "kv_heads"), [(20, 2), (5, 8), pytest.param(1, 2, marks=pytest.mark.npu_long)])
def test_codes_and_scales_are_those_of_the_format(simulator, tokens, kv_heads):
    check(simulator, store_case(tokens, kv_heads))


@pytest.mark.parametrize("name", [name for name in fixed_sides(128) if name != TQ4.name])
def test_the_fields_of_another_format_are_its_own(simulator, name):
    """Bytes of levels and numbers in BF16 and FP32 alike, to the last bit."""
    case = store_case(20, pair=(formats.get(name),) * 2)
    assert set(case.goldens) == {a.name for prefix in "kv" for a in fixed_sides(128)[name].arguments(prefix) if a.output}
    check(simulator, case)


@pytest.mark.parametrize("bits", [4, *(pytest.param(bits, marks=pytest.mark.npu_long) for bits in (2, 3, 5))])
def test_learned_keys_are_those_of_the_format(simulator, bits):
    """Levels of 1 to 6 bits, some of them in two bytes, rows of 32 to 80 bytes; a vector that is the mean stores scale 0."""
    case = store_case(20, pair=(synthetic.calibration().format(bits), formats.get("tq4")))
    assert case.program.k.vectors.width == 16 * bits
    check(simulator, case)
    slot = int(case.tensors["slot"][MEAN_AT])
    assert case.tensors["k_scale"].view(-1, 2, 128)[slot // 128, 0, slot % 128] == 0


def test_a_wrong_byte_is_seen(simulator):
    case = store_case(2)
    case.goldens["v_codes"][7, 3] ^= 1
    with pytest.raises(AssertionError, match="v_codes"):
        check(simulator, case)


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
