"""What the host hands to the NPU programs of learned keys, stretches and windows; what it refuses; faults planted there."""

from dataclasses import replace

import pytest
import torch
from npu_layers import CONFIG, fill_cache, learned_spec
from small_models import resize_config, small_model

from haarkv.codebooks import cubic
from haarkv.codebooks.learned import learn
from haarkv.executors import catalog, npu
from haarkv.executors.npu import NpuExecutor
from haarkv.models.qwen3_14b.npu import inputs, programs
from haarkv.models.qwen3_14b.npu.compile import plan_programs
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.formats.learned import COLUMNS, Calibration
from haarkv.tq_ops.formats.packing import Column, Part, pack_columns
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.npu import learned
from haarkv.tq_ops.npu.device import SimRunner
from haarkv.tq_ops.npu.sides import layer_sides, turn_table, turns_of_tokens, window_shape

CPU = torch.device("cpu")
LONG = resize_config(CONFIG, max_position_embeddings=4096)
SMALLER = resize_config(LONG, num_heads=4)
WINDOW_OPTIONS = [{"tail": 20, "sink": 3}, {"tail": 1}, {"sink": 70}, {"tail": 300, "sink": 70}]


# -- Learned keys ------------------------------------------------------------------------------------------------------------
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


def test_layers_run_by_their_own_formats_and_coordinates_are_handed_over_once(monkeypatch):
    """Coordinates are the same tensors in every call; a fixed format has rows that nothing reads."""
    constants, calls = [], []

    class Runner(SimRunner):
        def __init__(self):
            pass

        def constant(self, tensor):
            constants.append(tensor)
            return tensor

        def call(self, program, tensors):
            by_name = dict(zip((argument.name for argument in program.arguments), tensors, strict=True))
            widths = [by_name[argument.name].shape[1] for argument in program.k.arguments("k")]
            calls.append((program.k.name, program.v.name, widths, by_name))

    monkeypatch.setattr(npu, "open_runner", lambda _: Runner())
    spec = replace(learned_spec(CONFIG), layers={1: "k=bf16,v=tq4_seed"})
    executor = catalog.create("npu", small_model(CONFIG, dtype=torch.bfloat16), spec.plan(2), "sim")
    for _ in range(2):
        cache, paging, sequences = fill_cache(CONFIG, spec, [3], seed=1)
        executor.layers(torch.zeros(1, 128, dtype=torch.bfloat16), range(2), paging.batch(sequences, [1]), cache)
    assert [call[:3] for call in calls] == 2 * [("lr4", "tq4", [64, 128]), ("bf16", "tq4_seed", [128, 128])]
    assert [len(tensors["k_forward"]) for *_, tensors in calls] == [256, 1, 256, 1]
    for (*_, first), (*_, second) in zip(calls[:2], calls[2:], strict=True):
        for name in ("k_forward", "k_rows"):
            assert first[name] is second[name]
            assert len(first[name]) == 1 or any(first[name] is one for one in constants)


# -- Stretches ---------------------------------------------------------------------------------------------------------------
def test_keys_of_tokens_are_turned_by_where_their_stretch_begins():
    key_turns = synthetic.calibration().format(4).rope_shift(0)
    positions = torch.tensor([0, 1023, 1024, 2047, 2048, 70_000])
    cos, sin = turns_of_tokens(key_turns, positions).split(64, 1)
    x = torch.randn(6, 128)
    turned_keys = torch.cat([x[:, :64] * cos + x[:, 64:] * sin, x[:, 64:] * cos - x[:, :64] * sin], 1)
    assert torch.equal(turned_keys, key_turns.undo(x, positions))
    assert torch.equal(turned_keys[:2], x[:2])
    assert not torch.equal(turned_keys[2], x[2])


def test_rows_that_turn_keys_back_are_made_once():
    """Of 1 and 0 where it is not known how keys turn."""
    plan, still = learned_spec(SMALLER).plan(2), learned_spec(SMALLER, turning=False).plan(2)
    _, paging, sequences = fill_cache(SMALLER, learned_spec(SMALLER), [1023], seed=1)
    batch = paging.batch(sequences, [2])
    program = programs.prefill_program(SMALLER, *layer_sides(plan, 0))
    tiling = inputs.tile(batch, program, (torch.zeros(2, 64), torch.zeros(2, 64)))
    rows = inputs.back_argument(tiling, plan, 0)["back"]
    assert rows is inputs.back_argument(tiling, plan, 1)["back"]
    assert torch.equal(rows[:2], turn_table(plan.k(0).rope_shift(0), rows.device)[:2])
    assert inputs.back_argument(tiling, still, 0)["back"][:2].tolist() == [[1.0] * 64 + [0.0] * 64] * 2


def test_keys_that_turn_in_part_are_refused_by_name():
    calibration = synthetic.calibration()
    bases = tuple(replace(basis, inv_freq=basis.inv_freq[:32]) for basis in calibration.k)
    part = KVSpec("k=lr4,v=tq4", calibration=replace(calibration, k=bases)).plan(2)
    assert NpuExecutor.supports(SMALLER, learned_spec(SMALLER).plan(2)) is None
    message = "its programs turn all 128 numbers of a key, and lr4 turns 64 of them"
    assert NpuExecutor.supports(SMALLER, part) == message
    with pytest.raises(InputError, match=message):
        plan_programs(SMALLER, ["decode"], part)


# -- Tokens in BF16 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("window_options", WINDOW_OPTIONS, ids=str)
def test_every_tile_keeps_its_own_tokens_where_the_reference_does(window_options):
    """Also with several sequences in one tile and several tiles: by plain loops over the pairs."""
    spec = KVSpec("tq4", **window_options)
    for new in ([1] * 18, [5, 64, 64]):
        config = resize_config(CONFIG, num_heads=4)
        stored_tokens = [3] * len(new)
        cache, paging, sequences = fill_cache(config, spec, stored_tokens[:3], seed=1)
        cache = type(cache)(cache.plan, cache.shapes, num_blocks=32)
        paging = type(paging)(32, 128)
        sequences = [paging.add() for _ in new]
        build = programs.decode_program if max(new) == 1 else programs.prefill_program
        shape = window_shape(cache.plan, 0)
        program = build(config, *layer_sides(cache.plan, 0), shape)
        batch = paging.batch(sequences, new)
        rope = torch.zeros(sum(new), 64), torch.zeros(sum(new), 64)
        tiling = inputs.tile(batch, program, rope)
        arguments = inputs.window_arguments(program, tiling, cache, 0)
        k, _ = cache.kv[0].windows
        x = torch.randn(sum(new), 2, 128)
        by_row = tiling.spread(x).bfloat16()
        ours = arguments["k_kept"].clone()
        for tile, count in enumerate(arguments["tile_keeps"].tolist()):
            for i in range(2 * tile * program.rows, 2 * tile * program.rows + count):
                token, place = tile * program.rows + int(arguments["keep_token"][i]), int(arguments["keep_row"][i])
                for head in range(2):
                    ours[place + head * shape.window] = by_row[token, head]
        k.write(x, batch)
        assert torch.equal(ours, k.vectors.view(-1, 128))
        assert arguments["kept_seen"].shape == (tiling.rows * program.attention.group, shape.span)


def test_a_layer_without_loss_keeps_nothing():
    plan = KVSpec("tq4", tail=8, layers={1: "bf16"}).plan(2)
    assert NpuExecutor.supports(CONFIG, plan) is None
    assert window_shape(plan, 0).window == 72
    assert window_shape(plan, 1) is None
