"""Formats of others, whose bytes nothing compared: loops over single numbers, edges, where they run, and docs/formats.md."""

import numpy as np
import pytest
import rival_oracles as slow
import torch
from format_rows import fresh_rows
from places import ROOT
from small_models import SMALL, new_cache, new_paging, resize_config

from haarkv.codebooks import lloyd_max
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import NonFiniteVectorError
from haarkv.tq_ops.formats.packing import unpack_parts
from haarkv.tq_ops.kv.plan import KVSpec
from lab.rivals import ROWS, register

BY_NAME = {k_format.name: (k_format, v_format) for k_format, v_format in ROWS}
EVERY = [(name, side) for name in BY_NAME for side in "kv"]


@pytest.fixture(autouse=True)
def registered_formats(monkeypatch):
    """Their names, for one test: other tests of this process may count the names of the product."""
    monkeypatch.setattr(formats, "BY_NAME", dict(formats.BY_NAME))
    register()


def get(name, side):
    return BY_NAME[name][side == "v"]


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("side", ["k", "v"])
def test_the_rotation_before_q4_0_equals_the_slow_path(side, head_dim):
    x, kv_format = fresh_rows(head_dim, 3), get("q4_0_rot", side)
    fields = kv_format.quantize(x, 0)
    packed, dequantized = kv_format.to_bytes(fields).numpy(), kv_format.dequantize(fields, 0).numpy()
    assert packed.shape[1] == kv_format.bytes_per_vector(head_dim)
    with np.errstate(all="ignore"):
        for row, ours, numbers in zip(x.numpy(), packed, dequantized, strict=True):
            assert ours.tobytes() == slow.encode_q4_0_rot(list(row), side)
            np.testing.assert_array_equal(numbers, slow.decode_q4_0_rot(ours.tobytes(), head_dim, side))


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("side", ["k", "v"])
def test_vllms_preset_equals_the_slow_path(side, head_dim):
    x, kv_format, book = fresh_rows(head_dim, 5), get("vllm_nc4", side), lloyd_max(4, head_dim, "published")
    fields = kv_format.quantize(x, 0)
    packed, dequantized = kv_format.to_bytes(fields).numpy(), kv_format.dequantize(fields, 0).numpy()
    assert packed.shape[1] == kv_format.bytes_per_vector(head_dim)
    with np.errstate(all="ignore"):
        for row, ours, numbers in zip(x.numpy(), packed, dequantized, strict=True):
            assert ours.tobytes() == slow.encode_vllm_nc4(list(row), side, book.boundaries.tolist())
            np.testing.assert_array_equal(
                numbers, slow.decode_vllm_nc4(ours.tobytes(), head_dim, side, book.centroids.tolist())
            )


def test_k_and_v_are_rotated_by_matrices_of_their_own():
    """A number spreads over the whole of K's vector, and over 64 of V's."""
    x = torch.zeros(1, 256)
    x[0, 70] = 1.0
    for side, first, last in (("k", 0, 256), ("v", 64, 128)):
        kv_format = get("q4_0_rot", side)
        codes = kv_format.quantize(x, 0)["codes"].view(-1, kv_format.block // 2)
        level = unpack_parts(codes, 4).flatten()
        assert (level != 8).nonzero().flatten().tolist() == list(range(first, last))


def tiles_of_tokens(head_dim):
    """[5, 128, D]: Gaussian, channels and tokens of all sizes, small (at the limit of the logarithms), coarse, constant."""
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn(5, 128, head_dim, generator=generator)
    x[1] *= torch.rand(head_dim, generator=generator) * 20
    x[1] *= torch.rand(128, 1, generator=generator) * 3 + 0.01
    x[2] *= 0.05
    x[3] = (x[3] * 2).round() / 2
    x[3, 40:60] = 0
    x[4] = 0.75
    return x


@pytest.mark.parametrize(("shape", "side"), [((2, 64), "k"), ((3, 32), "v"), ((4, 128), "k")])
def test_kvarn_equals_the_slow_path(side, shape):
    bits, head_dim = shape
    x, kv_format = tiles_of_tokens(head_dim), get(f"kvarn{bits}", side)
    fields = kv_format.quantize(x, 0)
    packed, dequantized = kv_format.to_bytes(fields).numpy(), kv_format.dequantize(fields, 0).numpy()
    assert packed.shape[1] / 128 == kv_format.bytes_per_vector(head_dim)
    for tile, ours, values in zip(x.numpy(), packed, dequantized, strict=True):
        theirs, margins = slow.encode_kvarn(tile, bits, side)
        size = head_dim * 128 * bits // 8
        level, expected = (
            np.array(slow.unpack_levels(data[:size], bits, head_dim * 128)) for data in (ours.tobytes(), theirs)
        )
        assert np.ravel(margins)[level != expected].max(initial=0) < 1e-6  # a tie that FP32 breaks the other way
        numbers = [np.frombuffer(data[size:], "<f2").astype(float) for data in (ours.tobytes(), theirs)]
        np.testing.assert_allclose(*numbers, rtol=2**-10, atol=2**-24)
        np.testing.assert_array_equal(values, slow.decode_kvarn(ours.tobytes(), bits, side, head_dim))


# -- Edges -------------------------------------------------------------------------------------------------------------------
def vectors(name, side, count):
    kv_format = get(name, side)
    group = kv_format.group_tokens
    x = torch.randn(count, *([group] if group > 1 else []), 128, generator=torch.Generator().manual_seed(0))
    return kv_format, x


@pytest.mark.parametrize(
    ("name", "side", "head_dim", "message"),
    [
        ("q4_0_rot", "k", 96, "q4_0_rot rotates 64 values at a time and cannot hold head_dim 96"),
        ("kvarn3", "v", 96, "kvarn3 needs a head_dim that is a power of two, 8 or more, not 96"),
        ("vllm_nc4", "k", 96, "vllm_nc4 needs a head_dim that is a power of two, not 96"),
        ("vllm_nc4", "v", 65, "vllm_nc4 packs 2 values together and needs an even head_dim, not 65"),
    ],
)
def test_a_head_dim_that_a_format_cannot_hold_is_refused(name, side, head_dim, message):
    with pytest.raises(InputError, match=message):
        formats.get(name, side).fields(head_dim)


@pytest.mark.parametrize(("name", "side"), EVERY)
def test_zeros_come_back_as_zeros_and_what_is_not_finite_is_refused(name, side):
    kv_format, x = vectors(name, side, 3)
    assert not kv_format.dequantize(kv_format.quantize(x * 0, 0), 0).any()
    bad = (2, 9) if kv_format.group_tokens > 1 else (2,)
    x[(*bad, 77)] = torch.nan
    with pytest.raises(NonFiniteVectorError) as excinfo:
        kv_format.quantize(x, 0)
    assert excinfo.value.index == bad


def test_tiles_are_of_128_tokens():
    for shape, side in (((127, 64), "k"), ((64, 128), "v"), ((128,), "k")):
        with pytest.raises(InputError, match="tiles of 128 tokens"):
            get("kvarn2", side).quantize(torch.zeros(shape), 0)


# -- Where they run ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kv", ["k=kvarn4,v=kvarn2", "q4_0_rot", "vllm_nc4"])
def test_the_executor_cpu_runs_them_by_the_references_ops(kv):
    """What the matrix measures with."""
    config = resize_config(SMALL, head_dim=128)
    outputs = []
    for ops in (CpuOps(), reference):
        cache = new_cache(config, KVSpec(kv), num_blocks=6, block_size=128)
        paging, generator, step_outputs = new_paging(cache), torch.Generator().manual_seed(0), []
        sequence = paging.add()
        for tokens in (60, 64, 40, 1):
            batch, heads = paging.batch([sequence], [tokens]), config.heads
            k, v = torch.randn(2, tokens, heads.num_kv_heads, 128, generator=generator)
            ops.store_kv(k, v, cache.view(1, batch))
            q = torch.randn(tokens, heads.num_heads, 128, generator=generator)
            step_outputs.append(ops.paged_attention(q, cache.view(1, batch), 128**-0.5))
        outputs.append([*step_outputs, *cache.kv[1].k.fields.values(), *cache.kv[1].v.fields.values()])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


# -- Pages -------------------------------------------------------------------------------------------------------------------
def table(page, heading):
    """Rows of the first table below a heading of a page, by their first cell."""
    text = (ROOT / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def test_the_page_lists_them_with_their_bytes():
    rows = table("docs/formats.md", "Formats of the laboratory")
    assert list(rows) == list(BY_NAME)
    for name, row in rows.items():
        for head_dim, cell in zip((64, 128, 256), row[:3], strict=True):
            sizes = {float(size) for size in cell.split(" or ")}
            assert {get(name, side).bytes_per_vector(head_dim) for side in "kv"} == sizes
        assert float(row[3]) == get(name, "k").bytes_per_vector(128) / 16


def test_the_log_tells_their_errors_of_a_round_trip():
    rows = table("benchmarks/LOG.md", "Round trips")
    x = torch.randn(2048, 128, generator=torch.Generator().manual_seed(0))
    for name, side in EVERY:
        kv_format, group = get(name, side), get(name, side).group_tokens
        grouped = x.view(-1, group, 128) if group > 1 else x
        error = kv_format.dequantize(kv_format.quantize(grouped, 0), 0).reshape(x.shape) - x
        error_share = float(error.square().sum() / x.square().sum())
        assert float(rows[f"{name}, {side.upper()}"][0]) == pytest.approx(error_share, rel=0.02), name
