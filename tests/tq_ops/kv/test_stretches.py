"""Keys by stretches: what is stored does not depend on which stretch a key lies in, and attention is what it would be."""

from __future__ import annotations

import pytest
import torch
from op_contract.caches import synthetic_keys

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


# -- Attention ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kv)
def test_attention_of_the_reference_is_that_over_what_is_restored(spec):
    """In float64, keys turned by hand; before RoPE they are alike."""
    generator, plan, positions = torch.Generator().manual_seed(0), spec.plan(1), torch.arange(TOKENS)
    k = ROPE_SHIFT.redo(synthetic_keys(CALIBRATION.k[0], TOKENS, generator), positions)
    q, v = torch.randn(1, QUERIES, DIM, generator=generator) / 8, torch.randn(HEADS, TOKENS, DIM, generator=generator)
    cache = PagedKVCache(plan, KVShape(HEADS, DIM), num_blocks=40, num_rows=1, block_size=64, chunk=4096)
    paging = PagedSequences(40, 64, num_rows=1)
    sequence = paging.add()
    for part in (slice(TOKENS - 1), slice(TOKENS - 1, TOKENS)):
        view = cache.view(0, paging.batch([sequence], [len(positions[part])]))
        reference.store_kv(*(x[:, part].transpose(0, 1).contiguous() for x in (k, v)), view)
    output = reference.paged_attention(q, view, DIM**-0.5)
    turned = plan.k(0).dequantize(plan.k(0).quantize(ROPE_SHIFT.undo(k, positions), 0), 0)
    keys, values = ROPE_SHIFT.redo(turned, positions), plan.v(0).dequantize(plan.v(0).quantize(v, 0), 0)
    exact = (positions >= TOKENS - (spec.tail or 0)) | (positions < spec.sink)
    keys, values = (
        torch.where(exact[:, None], x.bfloat16().double(), restored.double())
        for x, restored in zip((k, v), (keys, values), strict=True)
    )
    logits = torch.einsum("hgd,htd->hgt", q[0].double().view(HEADS, -1, DIM), keys) * DIM**-0.5
    expected = (logits.softmax(-1) @ values).flatten(0, 1)
    torch.testing.assert_close(output[0].double(), expected, rtol=1e-4, atol=1e-4)
