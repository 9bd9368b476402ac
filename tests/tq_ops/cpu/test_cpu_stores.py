"""Formats whose every rounding is fixed: the C++ stores the reference's bytes, and refuses what the reference refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.cpu import layout
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.reads import misfit
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.table import OpTable

LAYER = 1
# Of which a scale or a radius may be too large to be stored.
EXACT = ("tq3_0", "tbq4_0", "manthan3", "q4_0_rot", "q4_0", "q8_0")
SIZES = (1.0, 1e-8, 1e-25, 1e-40, 40.0, 1e3, 2e3, 1.4e4, 5e4, 5e5, 1e7, 1e17, 3e18, 1e38)


def vectors(tokens: int, head_dim: int) -> Tensor:
    """[T, 3, D] fp32: normal ones, and some whose levels and scales are decided by ties, zeros and single numbers."""
    draw = torch.Generator().manual_seed(head_dim)
    x = torch.randn(tokens, 3, head_dim, generator=draw)
    x[0, 0], x[0, 1], x[0, 2] = 0.0, -0.0, 1.0
    x[1] = torch.randint(-2, 3, (3, head_dim), generator=draw).float()
    x[2, :, 1:] = 0.0
    x[3, :, 3:] *= 1e-6
    x[4] = x[4].abs()
    x[5, 0, 7] = 50.0
    return x


def stored(ops: OpTable, kv: str, x: Tensor) -> tuple[list[Tensor], str | None]:
    """Bytes of K and V, and what the op says against them."""
    cache = PagedKVCache(KVSpec(kv).plan(LAYER + 1), KVShape(3, x.shape[-1]), num_blocks=4, block_size=16)
    paging = PagedSequences(cache.num_blocks, cache.block_size, order=[3, 1, 0, 2])
    error = None
    try:
        ops.store_kv(x, x.flip(0), cache, LAYER, paging.batch([paging.add()], [len(x)]))
    except NonFiniteError as refused:
        error = str(refused)
    fields = [*cache.k_fields(LAYER).values(), *cache.v_fields(LAYER).values()]
    return [field.contiguous().view(torch.uint8) for field in fields], error


@pytest.fixture
def asked(monkeypatch):
    """What the reference was asked to store meanwhile."""
    found, store = [], reference.store_kv

    def store_kv(*given):
        found.append(given)
        store(*given)

    monkeypatch.setattr(reference, "store_kv", store_kv)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv", EXACT)
def test_bytes_are_the_references_at_every_size(kv, head_dim, dtype, asked):
    """The reference itself stores nothing but names what cannot be stored; each format meets both."""
    if kv == "tbq4_0" and head_dim == 64:
        pytest.skip("it has no layout for this")
    refused = 0
    for size in SIZES:
        x = (size * vectors(40, head_dim)).to(dtype)
        expected, error = stored(reference, kv, x)
        asked.clear()
        ours, our_error = stored(CpuOps(), kv, x)
        assert our_error == error, size
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)), size
        assert bool(asked) == (error is not None), size
        refused += error is not None
    assert 0 < refused < len(SIZES)


@pytest.mark.parametrize(("d", "refused"), [(65504.0, False), (65519.0, False), (65520.0, True)])
def test_a_scale_is_refused_from_where_it_rounds_to_infinity(d, refused, asked):
    """A block whose largest number is 127 times that, of `q8_0`."""
    x = torch.zeros(1, 3, 64)
    x[0, 1, 40] = 127 * d
    _, error = stored(CpuOps(), "q8_0", x)
    assert (error is not None) == bool(asked) == refused


@pytest.mark.parametrize("kv", EXACT)
def test_one_token_gets_the_bytes_that_it_gets_in_a_prompt(kv):
    x = vectors(30, 128)
    whole, _ = stored(CpuOps(), kv, x)
    cache = PagedKVCache(KVSpec(kv).plan(LAYER + 1), KVShape(3, 128), num_blocks=4, block_size=16)
    paging = PagedSequences(cache.num_blocks, cache.block_size, order=[3, 1, 0, 2])
    sequence, ops = paging.add(), CpuOps("portable")
    for token in range(len(x)):
        ops.store_kv(x[token : token + 1], x.flip(0)[token : token + 1], cache, LAYER, paging.batch([sequence], [1]))
    fields = [*cache.k_fields(LAYER).values(), *cache.v_fields(LAYER).values()]
    assert all(torch.equal(a.contiguous().view(torch.uint8), b) for a, b in zip(fields, whole, strict=True))


@pytest.mark.parametrize("kv", ["tq3_0", "tbq4_0"])
def test_the_origins_bytes_are_stored(golden, kv):
    """Vectors that a format refuses left out."""
    x, theirs = (torch.from_numpy(of) for of in (golden("common_rows")["d128"], golden(f"{kv}/{kv}_d128")["packed"]))
    found = 0
    for row, wanted in zip(x, theirs, strict=True):
        ours = stored_bytes(kv, row)
        if ours is not None:
            found += 1
            assert torch.equal(ours, wanted)
    assert found > 300


def stored_bytes(kv: str, row: Tensor) -> Tensor | None:
    """Of one vector, in its origin's layout; None if it is refused."""
    cache = PagedKVCache(KVSpec(kv).plan(1), KVShape(1, len(row)), num_blocks=1)
    paging = PagedSequences(1, cache.block_size)
    try:
        CpuOps().store_kv(row.view(1, 1, -1), row.view(1, 1, -1), cache, 0, paging.batch([paging.add()], [1]))
    except NonFiniteError:
        return None
    return cache.k_format(0).to_bytes({name: field[0, 0, 0] for name, field in cache.k_fields(0).items()})


def test_which_formats_the_reference_stores():
    """`tq4_seed` keeps an FP32 norm, to the last bit of torch's own sum and root."""
    read = [name for name in formats.names() if misfit(layout.READS, formats.get(name), 128) is None]
    assert [name for name in read if layout.tables(formats.get(name), 0, 128) is None] == ["tq4_seed"]
