"""Learned keys: their bytes by a slow path in float64, and what they cost in error."""

import itertools

import pytest
import torch
from learned_slow import GOLDEN_BITS, codes, slow
from op_contract.caches import synthetic_keys
from small_models import SMALL, resize_config

from haarkv.engine.plans import plan_for
from haarkv.models.parallel import Split
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

HEADS, DIM = 2, 128
SYNTHETIC = calibration(heads=HEADS, dim=DIM)


def basis_vectors(basis_set, layer, tokens):
    return synthetic_keys(basis_set.k[layer], tokens, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", GOLDEN_BITS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bytes_are_those_of_the_slow_path(dim, bits):
    basis_set = calibration(heads=HEADS, dim=dim)
    x, kv_format = basis_vectors(basis_set, 1, 4), basis_set.format(bits)
    fields = kv_format.quantize(x, 1)
    assert {name: (f.dtype, f.shape) for name, f in kv_format.fields(dim).items()} == {
        "codes": (torch.uint8, (dim * bits // 8,)),
        "scale": (torch.float16, ()),
    }
    dequantized = kv_format.dequantize(fields, 1)
    different = 0
    for head, token in itertools.product(range(HEADS), range(4)):
        expected = slow(x[head, token], basis_set.k[1], head, bits)
        code_bytes = fields["codes"][head, token].tolist()
        differ = sum(a != b for a, b in zip(code_bytes, codes(expected.levels, bits), strict=True))
        different += differ
        if not differ:
            assert kv_format.levels(fields)[head, token].tolist() == expected.levels
            assert float(fields["scale"][head, token]) == pytest.approx(expected.scale, rel=2**-10)
            torch.testing.assert_close(dequantized[head, token].double(), expected.restored, rtol=2**-7, atol=2**-7)
    assert different <= 2  # ties that FP32 breaks the other way


def test_the_mean_zeros_and_large_vectors():
    kv_format, x = SYNTHETIC.format(3), basis_vectors(SYNTHETIC, 1, 4)
    x[0, 0], x[0, 1], x[1, 2] = SYNTHETIC.k[1].mean[0], 0.0, 1e30
    fields = kv_format.quantize(x, 1)
    assert fields["scale"].isfinite().all()
    assert torch.equal(kv_format.dequantize(fields, 1)[0, 0], SYNTHETIC.k[1].mean[0])
    x[1, 3, 5] = torch.nan
    with pytest.raises(NonFiniteError, match=r"\[1, 3\]"):
        kv_format.quantize(x, 1)


def test_names_need_a_calibration_and_are_of_keys():
    assert formats.get("lr3", "k", SYNTHETIC) is SYNTHETIC.format(3)
    with pytest.raises(InputError, match=r"lr3 stores keys only; values have nothing to learn\. Write k=lr3,v=tq3"):
        formats.parse("lr3", SYNTHETIC)
    for bits in (0, 6, 64):
        with pytest.raises(InputError, match=rf"there is no lr{bits}: learned keys take lr2, lr3, lr4, lr5"):
            formats.get(f"lr{bits}", "k", SYNTHETIC)
    with pytest.raises(InputError, match="learned of vectors of 128 numbers, not 64"):
        SYNTHETIC.format(4).fields(64)
    with pytest.raises(InputError, match="takes a head_dim that 32 divides, and this model's is 48"):
        calibration(heads=2, dim=48).format(4)
    with pytest.raises(InputError, match="the calibration is of 2 layers, and this model has 3"):
        KVSpec("k=lr3,v=tq4", calibration=SYNTHETIC).plan(3)


def test_a_rank_stores_its_heads_as_the_whole_does():
    whole = calibration(heads=4, seed=9)
    x = basis_vectors(whole, 1, 30)
    spec, config = KVSpec("k=lr4,v=tq3", calibration=whole), resize_config(SMALL, num_layers=2, num_heads=8, num_kv_heads=4)
    fields = whole.format(4).quantize(x, 1)
    for rank in range(2):
        split = Split(config, rank, 2)
        ours = plan_for(spec, config, split).k(1).quantize(x[split.kv_heads(1)], 1)
        assert all(torch.equal(ours[name], fields[name][split.kv_heads(1)]) for name in fields)
    with pytest.raises(InputError, match="lr4 was learned of 4 KV heads, and this model has 2"):
        plan_for(spec, split.part)
    with pytest.raises(InputError, match="learned of 4 KV heads"):
        PagedKVCache(spec.plan(2), KVShape(2, DIM), num_blocks=1)
