"""Keys by stretches: what is stored does not depend on which stretch a key lies in, and attention is what it would be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.formats.stretches import STRETCH, RopeShift
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

DIM, HEADS, QUERIES = 64, 2, 6
CALIBRATION = synthetic.calibration(1, HEADS, DIM)
ROPE_SHIFT = CALIBRATION.format(4).rope_shift(0)
TOKENS = 2 * STRETCH + 60
SPECS = [
    KVSpec("k=lr4,v=tq4", calibration=CALIBRATION), KVSpec("k=lr3,v=tq3", tail=40, sink=3, calibration=CALIBRATION),
    KVSpec("k=lr5,v=bf16", calibration=CALIBRATION),
]  # fmt: skip


def text(tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [T, heads, D] fp32 after RoPE, of keys that are alike before it."""
    generator = torch.Generator().manual_seed(seed)
    k = ROPE_SHIFT.redo(synthetic.vectors(CALIBRATION.k[0], tokens, generator), torch.arange(tokens)).transpose(0, 1)
    q, v = (torch.randn(tokens, heads, DIM, generator=generator) for heads in (QUERIES, HEADS))
    return q / 8, k.contiguous(), v


def run(ops, spec: KVSpec, sizes: list[int], dtype: torch.dtype, newest: int) -> tuple[Tensor, PagedKVCache]:
    """Store a text of one sequence piece by piece; attention [n, heads, D] of the newest pieces."""
    cache = PagedKVCache(spec.plan(1), KVShape(HEADS, DIM), num_blocks=40, num_rows=1, block_size=64, chunk=4096)
    paging, outputs, begin = PagedSequences(40, 64, num_rows=1), [], 0
    sequence, (q, k, v) = paging.add(), text(sum(sizes))
    for number, size in enumerate(sizes):
        part, batch = slice(begin, begin := begin + size), paging.batch([sequence], [size])
        ops.store_kv(k[part], v[part], cache.view(0, batch))
        if number >= len(sizes) - newest:
            outputs.append(ops.paged_attention(q[part].to(dtype), cache.view(0, batch), DIM**-0.5).float())
    return torch.cat(outputs), cache


# -- What is stored --------------------------------------------------------------------------------------------------------
def test_turning_is_rope_by_the_start_of_the_stretch():
    """Against complex numbers in float64; what RoPE does not turn stays, and the first stretch stays as it is."""
    x, positions = torch.randn(3, 5, 20, dtype=torch.float64), torch.tensor([0, 1023, 1024, 3000, 9999])
    turns = RopeShift((1.0, 0.3, 0.01))
    z = torch.complex(x[..., :3], x[..., 3:6])
    angles = (positions // 1024 * 1024).unsqueeze(1) * torch.tensor(turns.inv_freq, dtype=torch.float64)
    z = z * torch.polar(torch.ones_like(angles), -angles)
    unrotated = turns.undo(x, positions)
    torch.testing.assert_close(unrotated.double(), torch.cat([z.real, z.imag, x[..., 6:]], -1), rtol=1e-5, atol=1e-6)
    assert torch.equal(unrotated[:, :2], x[:, :2].float())
    torch.testing.assert_close(turns.redo(unrotated, positions), x.float(), rtol=1e-5, atol=1e-6)


def test_a_key_is_stored_alike_in_every_stretch():
    """A text that is said again two stretches later stores the same levels, but where FP32 rounds across a boundary."""
    cache = PagedKVCache(SPECS[0].plan(1), KVShape(HEADS, DIM), num_blocks=40, block_size=64)
    paging = PagedSequences(40, 64)
    sequence, (_, k, v) = paging.add(), text(100)
    later = ROPE_SHIFT.redo(k.transpose(0, 1), torch.full((100,), 2 * STRETCH)).transpose(0, 1).contiguous()
    cache.view(0, paging.batch([sequence], [100])).write(k, v)
    cache.view(0, paging.batch([sequence], [2 * STRETCH - 100])).write(*torch.zeros(2, 2 * STRETCH - 100, HEADS, DIM))
    batch = paging.batch([sequence], [100])
    cache.view(0, batch).write(later, v)
    fields = cache.kv[0].k.fields
    first, again = (fields["codes"][slots // 64, :, slots % 64] for slots in (torch.arange(100), batch.slot_mapping))
    assert (first == again).float().mean() > 0.999
    dequantized = cache.kv[0].read(batch.block_table)[0][0, :, 2 * STRETCH : 2 * STRETCH + 100]
    off = (dequantized - later.transpose(0, 1)).norm(dim=-1) / later.transpose(0, 1).norm(dim=-1)
    assert off.median() < 0.2


# -- Attention ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kv)
def test_attention_of_the_reference_is_that_over_what_is_restored(spec):
    """In float64, keys turned by hand."""
    q, k, v = text()
    output, _ = run(reference, spec, [TOKENS - 1, 1], torch.float32, 1)
    kv_format = spec.plan(1).k(0)
    positions = torch.arange(TOKENS)
    keys = ROPE_SHIFT.redo(
        kv_format.dequantize(kv_format.quantize(ROPE_SHIFT.undo(k.transpose(0, 1), positions), 0), 0), positions
    )
    values = spec.plan(1).v(0)
    values = values.dequantize(values.quantize(v.transpose(0, 1), 0), 0)
    exact = (positions >= TOKENS - (spec.tail or 0)) | (positions < spec.sink)
    near = (k.transpose(0, 1).bfloat16(), v.transpose(0, 1).bfloat16())
    keys, values = (
        torch.where(exact[:, None], window_part.double(), x.double())
        for window_part, x in zip(near, (keys, values), strict=True)
    )
    logits = torch.einsum("hgd,htd->hgt", q[-1].double().view(HEADS, -1, DIM), keys) * DIM**-0.5
    expected = (logits.softmax(-1) @ values).flatten(0, 1)
    torch.testing.assert_close(output[0].double(), expected, rtol=1e-4, atol=1e-4)
