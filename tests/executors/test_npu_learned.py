"""Learned keys on the NPU programs: what the host hands over, and faults planted in the coordinates."""

from dataclasses import replace

import pytest
import torch
from npu_layers import CONFIG, fill_cache, learned_spec
from small_models import resize_config, small_model

from haarkv.codebooks import cubic
from haarkv.codebooks.learned import learn
from haarkv.executors import catalog, npu
from haarkv.executors.npu import NpuExecutor
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.formats.learned import COLUMNS, Calibration
from haarkv.tq_ops.formats.packing import Column, Part, pack_columns
from haarkv.tq_ops.npu import learned
from haarkv.tq_ops.npu.device import SimRunner
from haarkv.tq_ops.npu.sides import layer_sides

CPU = torch.device("cpu")
ONE_LAYER = resize_config(CONFIG, num_layers=1)


# -- What the host hands over ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", COLUMNS)
def test_levels_by_their_places_are_the_bytes_of_the_format(bits):
    """What the cube adds up: every level at its place, and one that two bytes share in both."""
    layout = learned.Layout(COLUMNS[bits])
    generator = torch.Generator().manual_seed(0)
    level = torch.cat([torch.randint(0, 2**width, (50, 16), generator=generator) for width in layout.widths], 1)
    upper = learned.level_rows(layout, 128)[learned.LEVEL_ROWS.index("upper")]
    assert bool(upper.any()) == bool(layout.lower_pieces) == (bits > 3)
    levels = torch.cat([level.float(), (level * upper).floor()], 1) if layout.lower_pieces else level.float()
    byte = levels @ learned.byte_places(layout, 128).float()
    assert torch.equal(byte, pack_columns(level.to(torch.uint8), layout.columns).float())


@pytest.mark.parametrize("width", cubic.WIDTHS)
def test_boundaries_that_a_program_tries_lie_beside_the_value(width):
    """The inverse of the cubic is off by less than half a level, and one comparison settles the rest: no table, no steps."""
    column = Column(1, (Part(0, width, 0), *(Part(eighth, 1, 0) for eighth in range(1, 8))))
    by_name = dict(zip(learned.LEVEL_ROWS, learned.level_rows(learned.Layout((column,)), 8)[:, 0].double(), strict=True))
    value = torch.cat([torch.linspace(-5, 5, 100_001), cubic.boundaries(width)]).double()
    shrunk = (value * by_name["shrink"]).clamp(-1, 1)
    inverse = sum(by_name[f"inverse{i}"] * shrunk ** (2 * i + 1) for i in range(4))
    k = inverse.round()
    assert k.abs().max() == by_name["most"]
    boundary = k * (by_name["linear"] + by_name["cubed"] * k**2)
    level = k + (value >= boundary - 1e-6) + by_name["most"]
    assert torch.equal(level.long(), torch.bucketize(value, cubic.boundaries(width).double() - 1e-6, right=True))
    m = 2 * torch.arange(2**width) + 1 - 2**width
    assert torch.allclose((m * (by_name["a"] + by_name["b"] * m**2)).float(), cubic.centroids(width), atol=0, rtol=2e-7)


def test_lifts_keep_queries_by_rows_no_longer_than_the_queries():
    """Otherwise FP16 might not hold them; a power of two changes no number. Rows between coordinates are zero."""
    kv_format = synthetic.calibration().format(4)
    coordinates = kv_format.description(128).transform.coordinates(1)
    tensors, layout = learned.domain_tensors(kv_format, 128, 1, CPU), learned.learned_layout(kv_format, 128)
    assert layout.width(128) == 192
    rows, lift = tensors["rows"].view(2, 192, 128), tensors["numbers"][2 * learned.LIFT :][:2, :1].unsqueeze(-1)
    assert (rows.norm(dim=-1) <= 1).all()
    assert (rows.norm(dim=-1).amax(1) > 0.5).all()
    factors = torch.tensor([learned.level_cubic(bits).factor for bits in layout.widths]).repeat_interleave(16).view(-1, 1)
    at = layout.rows(128)
    assert torch.equal((rows * lift)[:, at], coordinates.rows * factors)
    assert (rows.norm(dim=-1) > 0).sum() == 2 * 128


def test_channels_that_queries_hardly_have_leave_products_with_queries_all_their_bits(monkeypatch):
    """Rows are 1e7 there, and 10 or less elsewhere. Heads' norms of four layers of Gemma 3 270M have zeros."""
    generator = torch.Generator().manual_seed(0)
    channel = torch.logspace(0, 1, 128, dtype=torch.float64)
    channel[::16] *= 1e-8
    q, k = (torch.randn(4096, 128, generator=generator, dtype=torch.float64) for _ in "qk")
    q, k = q * channel, k @ torch.randn(128, 128, generator=generator, dtype=torch.float64)
    basis = learn((q.T @ q)[None], (k.T @ k)[None], torch.zeros(1, 128))
    assert basis.back.abs().max() > 1e6 * basis.back[..., 1].abs().max()
    kv_format, queries = Calibration((basis,), "faint channels").format(5), q[:256].to(torch.bfloat16).float()

    def off():
        learned.domain_tensors.cache_clear()
        products = queries @ learned.domain_tensors(kv_format, 128, 0, CPU)["rows"].T
        return ((products.half().float() - products).norm(dim=-1) / products.norm(dim=-1)).max(), products.abs().max()

    error, largest = off()
    assert error < 2**-11
    assert largest < 2**6
    monkeypatch.setattr(learned, "_HEADROOM", torch.inf)
    assert off()[0] > 2**-6


def test_every_width_of_learned_keys_is_taken_and_values_are_not():
    for bits in COLUMNS:
        spec = learned_spec(CONFIG, f"k=lr{bits},v=bf16")
        assert NpuExecutor.supports(CONFIG, spec.plan(2)) is None
        k, v = layer_sides(spec.plan(2), 0)
        assert (k.name, k.vectors.width, v.layout) == (f"lr{bits}", 16 * bits, None)
    with pytest.raises(InputError, match="stores keys only"):
        learned_spec(CONFIG, "lr4").plan(2)


def test_coordinates_are_handed_over_once(monkeypatch):
    """They never change: each layer's are the same tensors in every call, and a fixed format has rows that nothing reads."""
    constants, calls = [], []

    class Runner(SimRunner):
        def __init__(self):
            pass

        def constant(self, tensor):
            constants.append(tensor)
            return tensor

        def call(self, program, tensors):
            names = [argument.name for argument in program.arguments]
            calls.append({name: tensors[names.index(name)] for name in names if name[2:] in ("forward", "rows")})

    monkeypatch.setattr(npu, "open_runner", lambda _: Runner())
    spec = replace(learned_spec(CONFIG), layers={1: "tq4"})
    executor = catalog.create("npu", small_model(CONFIG, dtype=torch.bfloat16), spec.plan(2), "sim")
    for _ in range(2):
        cache, paging, sequences = fill_cache(CONFIG, spec, [3], seed=1)
        executor.layers(torch.zeros(1, 128, dtype=torch.bfloat16), range(2), paging.batch(sequences, [1]), cache)
    assert [len(arguments["k_forward"]) for arguments in calls] == [256, 1, 256, 1]
    for first, second in zip(calls[:2], calls[2:], strict=True):
        assert all(first[name] is second[name] for name in first)
        assert all(any(tensor is one for one in constants) for tensor in first.values() if len(tensor) > 1)
