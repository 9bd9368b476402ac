"""Bytes that other implementations produced, reproduced to the byte, and what they restore, to the bit."""

import bounds
import numpy as np
import pytest
import torch
from levels import compare_levels

from haarkv.codebooks import hadamard_signs
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats import NonFiniteVectorError
from haarkv.tq_ops.formats.compared import HadamardTBQ4, Kivi
from haarkv.tq_ops.formats.packing import pack_stream, unpack_stream
from haarkv.tq_ops.formats.rotated import TurboQuant, TurboQuant4Seed, codebook_on
from haarkv.tq_ops.kv.residual_window import ResidualWindow

BOUNDARIES = codebook_on(128, torch.device("cpu")).boundaries


def rows(golden, head_dim):
    data = golden("common_rows")
    return torch.from_numpy(data[f"d{head_dim}"]), data["kind"]


def in_vectors(array, per_vector):
    """Rows put together: a golden of blocks serves every head_dim that is made of them. [N, n] -> [N / k, k * n]."""
    return array[len(array) % per_vector :].reshape(-1, per_vector * array.shape[-1])


def round_trip(name, x):
    """(bytes, restored) of vectors."""
    kv_format = formats.get(name)
    fields = kv_format.quantize(x, 0)
    return kv_format.to_bytes(fields).numpy(), kv_format.dequantize(fields, 0).numpy()


def same_bits(ours, theirs):
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def fp16_overflows(packed, block, at):
    """[rows] bool: which rows hold an FP16 infinity at byte `at` of a block."""
    scales = np.ascontiguousarray(packed.reshape(len(packed), -1, block)[:, :, at : at + 2]).view("<f2")[..., 0]
    return ~np.isfinite(scales).all(axis=1)


def refuses(name, x):
    for row in x:
        with pytest.raises(NonFiniteVectorError):
            formats.get(name).quantize(row[None], 0)


# -- tq4 -------------------------------------------------------------------------------------------------------------------
def golden_rows(golden, layer):
    data = golden(f"turboquant_qwen3_14b/quant_layer{layer}")
    return data, torch.from_numpy(data["x"]), data["kind"]


@pytest.mark.parametrize("layer", [0, 1])
def test_seed_levels_norms_and_values_equal_the_device_golden(golden, published_rotation, layer):
    data, x, kind = golden_rows(golden, layer)
    finite = torch.from_numpy(np.isfinite(data["npugolden_decode_scale"]))
    assert set(kind[~finite.numpy()]) == {"scaled_1e+30"}
    seed = TurboQuant4Seed(published_rotation)
    fields = seed.quantize(x[finite], layer)
    theirs = torch.from_numpy(data["npugolden_decode_idx"])[finite]
    rotated = torch.from_numpy(data["npugolden_decode_xrot"])[finite]
    comparison = compare_levels(fields["codes"], theirs, rotated, BOUNDARIES, bounds.ROTATED_FP32)
    assert comparison.unexplained == 0
    assert comparison.match > 0.9999
    np.testing.assert_allclose(fields["norm"].numpy(), data["npugolden_decode_scale"][finite.numpy()], rtol=3e-7)
    equal = (fields["codes"] == theirs).all(-1).numpy()
    assert equal.sum() >= len(equal) - 2
    dequantized = seed.dequantize(fields, layer).numpy()
    golden_restored = data["kernel_emulated_dequant_bf16_as_f32"][finite.numpy()]
    # Equal to the bit here; elsewhere a value may fall to the other side of its last BF16 rounding.
    np.testing.assert_allclose(dequantized[equal], golden_restored[equal], rtol=2**-7)


@pytest.mark.parametrize("layer", [0, 1])
def test_tq4_packs_the_golden_bytes(golden, published_rotation, layer):
    data, x, _ = golden_rows(golden, layer)
    norm = x.double().norm(dim=-1).numpy()
    ordinary = (norm > 0.1) & (norm < 1e18)  # the published 1e-6 inside the norm moves no level, and no square overflows
    assert ordinary.sum() >= 340
    tq4 = TurboQuant(4, "", published_rotation)
    codes = tq4.quantize(x, layer)["codes"]
    level, theirs = tq4.unpack(codes), torch.from_numpy(data["npugolden_decode_idx"])
    rotated = torch.from_numpy(data["npugolden_decode_xrot"])
    comparison = compare_levels(level[ordinary], theirs[ordinary], rotated[ordinary], BOUNDARIES, bounds.ROTATED_FP32)
    assert comparison.unexplained == 0
    equal = (level == theirs).all(-1).numpy() & ordinary
    assert equal.sum() >= ordinary.sum() - 2
    np.testing.assert_array_equal(codes.numpy()[equal], data["packed_halfhalf_from_decode_idx"][equal])


# -- manthan3 --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head_dim", [64, 128])
def test_manthan3(golden, head_dim):
    x, kind = rows(golden, head_dim)
    theirs = golden(f"manthanquant/manthan_d{head_dim}")
    finite = np.isfinite(theirs["radii"])
    assert set(kind[~finite]) == {"scaled_1e+30"}
    refuses("manthan3", x[~finite])
    packed, dequantized = round_trip("manthan3", x[finite])
    assert len(packed) == 366
    np.testing.assert_array_equal(packed[:, :4].copy().view("<f4")[:, 0], theirs["radii"][finite])
    np.testing.assert_array_equal(packed[:, 4:], theirs["packed"][finite])
    same_bits(dequantized, theirs["decoded"][finite])


def test_manthan3_packing(golden):
    theirs = golden("manthanquant/packing_d16")
    packed = pack_stream(torch.from_numpy(theirs["indices"]), 3)
    np.testing.assert_array_equal(packed.numpy(), theirs["packed"])
    np.testing.assert_array_equal(unpack_stream(packed, 3).numpy(), theirs["indices"])
    assert pack_stream(torch.arange(8, dtype=torch.uint8), 3).numpy().tobytes() == bytes.fromhex("88C6FA")


# -- Blocks ----------------------------------------------------------------------------------------------------------------
BLOCKS = [("tq3_0", 14, 12), ("tbq4_0", 66, 0), ("q4_0", 18, 0), ("q8_0", 34, 0)]
"""A format, bytes of a block, and where its scale lies in it."""


def golden_blocks(golden, name, file):
    """Its bytes of the rows of a head_dim, and what they restore; None where no origin said that."""
    if name.startswith("t"):
        data = golden(f"{name}/{name}_d{file}")
        return data["packed"], data["dequant"]
    data = golden("gguf/q4_0_q8_0")
    return data[f"{name}_d{file}"], data.get(f"{name}_d{file}_dequant")


@pytest.mark.parametrize(
    ("file", "head_dim", "name", "block", "at"),
    [
        (file, head_dim, *of_format)
        for file, head_dim in ((32, 32), (32, 64), (32, 256), (64, 64), (128, 128), (128, 256))
        for of_format in BLOCKS
        if file in {"tq3_0": (32, 128), "tbq4_0": (128,)}.get(of_format[0], (32, 64, 128))
    ],
)
def test_blocks(golden, name, block, at, file, head_dim):
    together = head_dim // file
    x = torch.from_numpy(in_vectors(rows(golden, file)[0].numpy(), together))
    packed, dequantized = golden_blocks(golden, name, file)
    theirs = in_vectors(packed, together)
    overflows = fp16_overflows(theirs, block, at)
    assert overflows.sum() > 0
    refuses(name, x[overflows])
    ours, numbers = round_trip(name, x[~overflows])
    assert len(ours) >= 355 // together
    np.testing.assert_array_equal(ours, theirs[~overflows])
    if dequantized is not None:
        same_bits(numbers, in_vectors(dequantized, together)[~overflows])


def test_tq3_0_with_fused_multiply_add_differs_in_signs_at_a_block_maximum_only(golden):
    """The one exemption: the residual there is the rounding error of d, and a compiler may round it otherwise."""
    x, _ = rows(golden, 32)
    theirs = golden("tq3_0/tq3_0_d32")
    fused = theirs["packed_native_fma"]
    overflows = fp16_overflows(theirs["packed"], 14, 12)
    packed, _ = round_trip("tq3_0", x[~overflows])
    different = packed != fused[~overflows]
    assert different[:, 8:12].any(axis=1).sum() > 100
    assert not different[:, :8].any()
    assert not different[:, 12:].any()
    sign_flips = np.unpackbits((packed ^ fused[~overflows])[:, 8:12], axis=1, bitorder="little").astype(bool)
    signs = np.array([1.0 if s > 0 else -1.0 for s in hadamard_signs("tq3_0").tolist()])
    hadamard = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(32)] for i in range(32)])
    y = np.abs((x[~overflows].double().numpy() * signs) @ hadamard)
    at_maximum = y >= y.max(axis=1, keepdims=True) * (1 - 1e-5)
    assert not (sign_flips & ~at_maximum).any()


def test_tbq4_0_tables(golden):
    tables = golden("tbq4_0/tables")
    np.testing.assert_array_equal(hadamard_signs("tbq4_0/before").numpy(), tables["s1"])
    np.testing.assert_array_equal(hadamard_signs("tbq4_0/after").numpy(), tables["s2"])
    np.testing.assert_array_equal(np.array(HadamardTBQ4.centroids, np.float32), tables["centroids"])
    np.testing.assert_array_equal(np.array(HadamardTBQ4.boundaries, np.float32), tables["midpoints"])


def test_tbq4_0_in_the_rotated_domain(golden):
    """What attention with q rotated once would meet: q itself, and K as centroid times scale."""
    data = golden("tbq4_0/rotated_domain_attention")
    tbq4 = HadamardTBQ4()
    q, *sides = (torch.from_numpy(data[name]) for name in "qkv")
    k_fields, v_fields = (tbq4.quantize(x, 0) for x in sides)
    for side, fields in (("k", k_fields), ("v", v_fields)):
        np.testing.assert_array_equal(tbq4.to_bytes(fields).numpy(), data[f"{side}_packed"])
    same_bits(tbq4._rotate(q.unsqueeze(-2), "tbq4_0/before", "tbq4_0/after").flatten(-2).numpy(), data["q_rotated"])
    stored_k = torch.tensor(tbq4.centroids)[tbq4.levels(k_fields).int()] * k_fields["scale"].float()
    same_bits(stored_k.numpy(), data["k_rotated_domain"])
    # As the reference attends: in the model's own domain. FP32 sums over 200 tokens in another order; results are of size 0.1.
    heads = torch.arange(10) // 5
    keys, values = (tbq4.dequantize(fields, 0)[heads] for fields in (k_fields, v_fields))
    out = torch.einsum("hs,hsd->hd", (torch.einsum("hd,hsd->hs", q, keys) / 128**0.5).softmax(-1), values)
    for theirs in ("out_fused_f32", "out_dequant_f64"):
        np.testing.assert_allclose(out.numpy(), data[theirs], atol=2e-6)


# -- fp8 -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_fp8_e4m3(golden, head_dim):
    x, _ = rows(golden, head_dim)
    packed, _ = round_trip("fp8_e4m3", x)
    np.testing.assert_array_equal(packed, golden("ml_dtypes/fp8_e4m3")[f"d{head_dim}"])


def test_fp8_e4m3_at_every_number_every_tie_and_beside_it(golden):
    data = golden("ml_dtypes/fp8_e4m3")
    packed, dequantized = round_trip("fp8_e4m3", torch.from_numpy(data["edge_x"]))
    np.testing.assert_array_equal(packed, data["edge"])
    same_bits(dequantized, data["edge_dequant"])
    assert len(set(packed.flatten().tolist())) == 254


# -- KIVI ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "file",
    ["keys_B1H2D128S64", "keys_B2H4D64S32", "values_B1H2S32D128g128", "values_B1H2S32D128g64", "values_B1H2S48D64g32"],
)
def test_kivi(golden, file):
    data, keys = golden(f"kivi_sycl/{file}"), file.startswith("keys")
    kv_format, x = Kivi(2, int(data["group_size"]), keys=keys), torch.from_numpy(data["x"])
    fields = kv_format.quantize(x.transpose(-1, -2) if keys else x, 0)
    np.testing.assert_array_equal(fields["codes"].numpy(), data["packed"])
    same_bits(fields["scale"].numpy(), data["scales"])
    same_bits(fields["zero"].numpy(), data["zeros"])
    dequantized = kv_format.dequantize(fields, 0)
    same_bits((dequantized.transpose(-1, -2).contiguous() if keys else dequantized).numpy(), data["dequant"])


def test_kivi_flush_rule_after_every_token(golden):
    """100 tokens at once, then 60 one by one: what is quantized when, and what the cache then holds."""
    data = golden("kivi_sycl/flush_trace_G16_R32_D64_pre100_tot160")
    keys, values = Kivi(2, 16, keys=True), Kivi(2, 16, keys=False)
    k, v = (torch.from_numpy(data[name])[0, 0] for name in ("k_in", "v_in"))
    shape = {"num_rows": 1, "num_kv_heads": 1, "head_dim": 64, "device": torch.device("cpu")}
    window = ResidualWindow(tail=31, sink=0, group=16, ring=0, **shape)  # which says what a query sees in groups
    stored_keys, stored_values, quantized = [], [], 0
    for row in data["trace_total_quant_res_kivibytes_fp32bytes"].tolist():
        total = row[0]
        while quantized < window.first_recent(total - 1):
            tokens = slice(quantized, quantized + 16)
            stored_keys.append(keys.quantize(k[tokens], 0))
            stored_values.append(values.quantize(v[tokens], 0))
            quantized += 16
        residual_tokens = total - quantized
        nbytes = (
            sum(t.nbytes for fields in (*stored_keys, *stored_values) for t in fields.values()) + 2 * residual_tokens * 64 * 4
        )
        assert [total, quantized, residual_tokens, nbytes, 2 * total * 64 * 4] == row
        assert 32 - 16 <= residual_tokens <= 32 - 1
    for name, stored_groups, origin in (("k", stored_keys, keys), ("v", stored_values, values)):
        for field, theirs in (("codes", "packed"), ("scale", "scales"), ("zero", "zeros")):
            ours = torch.stack([fields[field] for fields in stored_groups]).numpy()
            np.testing.assert_array_equal(ours, data[f"{name}_{theirs}"][:, 0, 0])
        dequantized = torch.cat([origin.dequantize(fields, 0) for fields in stored_groups])
        whole = torch.cat([dequantized, (k if name == "k" else v)[quantized:]]).contiguous()
        same_bits(whole.numpy(), data[f"{name}_full"][0, 0])


@pytest.mark.parametrize("side", ["k", "v"])
def test_the_original_kivi_differs_by_ties_alone(golden, side):
    """It rounds half to even and adds nothing to the scale; its words hold our bytes, for keys sixteen tokens to a word."""
    data = golden("kivi_original/kv_2bit_fp32_g32")
    kivi2 = formats.get("kivi2", side=side)
    # Our groups are [..., 32 tokens, D] of keys, [..., D] of values; to compare, a group is the last axis of either.
    x = torch.from_numpy(data[side])
    fields = kivi2.quantize(x.unflatten(2, (2, 32)) if side == "k" else x, 0)
    groups = x.unflatten(2, (2, 32)).transpose(-1, -2) if side == "k" else x.unflatten(-1, (4, 32))
    words = data[f"{side}_code"].view(np.uint8).reshape(1, 2, -1, 128 if side == "k" else 8, 4)
    if side == "k":  # [.., 4 words of 16 tokens, channels, bytes] -> [.., groups, channels, words and bytes]
        theirs = words.reshape(1, 2, 2, 2, 128, 4).transpose(0, 1, 2, 4, 3, 5).reshape(1, 2, 2, 128, 8)
    else:
        theirs = words.reshape(1, 2, 64, 32)
    ours, theirs = (
        unpack_stream(torch.tensor(a), 2).int().reshape(groups.shape).numpy() for a in (fields["codes"].numpy(), theirs)
    )
    # Where they differ, the number lies half a step between the two, as it must for the rounding rule to matter.
    different = ours != theirs
    assert 0 < different.sum() < 40
    scale, low = (data[f"{side}_{name}"].reshape(fields["scale"].shape)[..., None] for name in ("scale", "mn"))
    np.testing.assert_array_equal(((groups.numpy() - low) / scale)[different] % 1, 0.5)
    np.testing.assert_array_equal(ours[different], theirs[different] + 1)
    np.testing.assert_allclose(fields["scale"].numpy()[..., None], scale, rtol=1e-6)
    same_bits(fields["zero"].numpy()[..., None], low)
