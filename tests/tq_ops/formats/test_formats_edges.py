"""What formats refuse, and what they do at zero and at the ends of FP32 and of FP16."""

import pytest
import torch
from places import ROOT
from torch.utils._python_dispatch import TorchDispatchMode

from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import NonFiniteVectorError, compared, rotated
from haarkv.tq_ops.formats.packing import unpack_parts

EVERY = [
    (name, side) for name in formats.names() for side in "kv" if side == "k" or formats.get(name, "v") is not formats.get(name)
]
LOSSY = [(name, side) for name, side in EVERY if name not in ("bf16", "fp32")]
DOCS = ROOT / "docs" / "formats.md"


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(name, side, count, head_dim=128, seed=0):
    """(format, Gaussian [N, D] or, of keys that come in groups, [N, G, D])."""
    kv_format = formats.get(name, side)
    group = kv_format.group_tokens
    return kv_format, gaussian(count, *([group] if group > 1 else []), head_dim, seed=seed)


# -- Names -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "side", "head_dim", "message"),
    [
        ("tbq4_0", "k", 96, "tbq4_0 stores blocks of 128 values and cannot hold head_dim 96"),
        ("tq3_0", "k", 80, "tq3_0 stores blocks of 32 values and cannot hold head_dim 80"),
        ("manthan3", "k", 100, "manthan3 packs 8 coordinates in 3 bytes and cannot hold head_dim 100"),
        ("kivi2", "v", 80, "kivi2 groups 32 channels of V and cannot hold head_dim 80"),
        ("tq3", "k", 100, "tq3 packs 8 coordinates together and needs a head_dim that 8 divides, not 100"),
        ("tq4", "k", 65, "tq4 packs 2 coordinates together and needs an even head_dim, not 65"),
    ],
)
def test_a_head_dim_that_a_format_cannot_hold_is_refused(name, side, head_dim, message):
    for attempt in (formats.get(name, side).fields, formats.get(name, side).bytes_per_vector):
        with pytest.raises(InputError) as excinfo:
            attempt(head_dim)
        assert str(excinfo.value) == message


@pytest.mark.parametrize("spec", ["tq9", "", "k=tq4", "k=tq4,k=bf16", "k=tq4,v=tq9", "k=tq4,v=bf16,x=bf16", "k=tq4 v=bf16"])
def test_unknown_formats_are_refused(spec):
    with pytest.raises(InputError, match=r"unknown KV format|cannot read"):
        formats.parse(spec)


def test_keys_must_come_in_whole_groups():
    for shape in ((31, 64), (33, 64), (64,)):
        with pytest.raises(InputError, match="groups of 32"):
            formats.get("kivi2").quantize(torch.zeros(shape), 0)


# -- Zero, tiny, huge --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "side"), EVERY)
def test_zeros_come_back_as_zeros(name, side):
    kv_format, x = vectors(name, side, 3)
    for zero in (x * 0, x * -0.0):
        dequantized = kv_format.dequantize(kv_format.quantize(zero, 0), 0)
        if name == "tq4_seed":
            assert 0 < dequantized.norm(dim=-1).max() < 1.1e-3  # as published
        else:
            assert not dequantized.any()


@pytest.mark.parametrize(("name", "side"), EVERY)
def test_any_finite_vector_is_restored_finite_or_refused(name, side):
    """FP32 from its smallest denormal to its largest number. What is refused is too large, never too small."""
    for power in (-149, -145, -130, -126, -100, -60, -34, -24, -14, 0, 10, 15, 16, 20, 40, 64, 100, 126):
        kv_format, x = vectors(name, side, 2)
        x = (x.double() * 2.0**power).clamp(-3.4e38, 3.4e38).float()
        try:
            fields = kv_format.quantize(x, 0)
        except NonFiniteVectorError:
            assert power >= 12
            continue
        assert torch.isfinite(kv_format.dequantize(fields, 0)).all()
        assert all(torch.isfinite(t).all() for t in fields.values() if t.is_floating_point())


@pytest.mark.parametrize("name", ["tq3_0", "q4_0", "q8_0", "tbq4_0"])
def test_a_scale_is_refused_exactly_from_where_it_rounds_to_infinity(name):
    """65520 lies halfway between FP16's largest number and the next power of two, and rounds to infinity."""
    kv_format = formats.get(name)
    unit = torch.zeros(2, 128)
    unit[:, 5] = 1.0
    # The scale of a one-hot vector of length 1, to FP32's precision, from a scale that FP16 holds well.
    per_unit = {"tq3_0": 0.17677669 / 1.510, "q4_0": 1 / 8, "q8_0": 1 / 127}.get(name)
    if per_unit is None:
        level = kv_format.levels(kv_format.quantize(unit, 0))[0]
        per_unit = 1 / torch.tensor(kv_format.centroids)[level.long()].norm().item()
    below, above = 65519.0 / per_unit, 65521.0 / per_unit
    assert kv_format.quantize(unit * below, 0)[{"tq3_0": "gamma"}.get(name, "scale")].abs().max() == 65504
    unit[1] *= above
    with pytest.raises(NonFiniteVectorError) as excinfo:
        kv_format.quantize(unit, 0)
    assert excinfo.value.index == (1,)


def test_ties_of_even_steps():
    """Steps of exactly one: q8_0 rounds halves away from zero, q4_0 up, and of two largest values the first decides."""
    x = torch.zeros(32)
    x[:8] = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -126.5])
    q8_0 = formats.get("q8_0").quantize(x, 0)
    assert q8_0["scale"].item() == 1
    assert q8_0["codes"][:8].tolist() == [127, 1, 2, 3, -1, -2, -3, -127]
    x[:8] = torch.tensor([-8, 0.5, 1.5, -0.5, -1.5, 7.5, 8, -7.5])
    q4_0 = formats.get("q4_0")
    fields = q4_0.quantize(x, 0)
    assert fields["scale"].item() == 1
    assert unpack_parts(fields["codes"], 4)[:8].tolist() == [0, 9, 10, 8, 7, 15, 15, 1]
    assert q4_0.quantize(-x, 0)["scale"].item() == -1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("name", "side"), LOSSY)
def test_a_vector_that_is_not_finite_is_refused_with_its_index(name, side, bad):
    kv_format = formats.get(name, side)
    group = kv_format.group_tokens
    x = torch.ones(4, 3, *([group] if group > 1 else []), 128)
    index = (2, 1, 9) if group > 1 else (2, 1)
    x[(*index, 77)] = bad
    x[3, 2, ..., 5] = bad  # a later one is not the first
    with pytest.raises(NonFiniteVectorError) as excinfo:
        kv_format.quantize(x, 0)
    assert excinfo.value.index == index


# -- Fields, levels, choice --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("name", "side"), EVERY)
def test_bytes_are_what_the_fields_hold(name, side, head_dim):
    kv_format = formats.get(name, side)
    try:
        field_specs = kv_format.fields(head_dim)
    except InputError:
        assert (name, head_dim) in {("tbq4_0", 64), ("kivi2_g128", 64), ("kivi4_g128", 64)}
        return
    group = kv_format.group_tokens
    x = gaussian(3, 2, *([group] if group > 1 else []), head_dim)
    fields = kv_format.quantize(x, 1)
    assert {n: (t.dtype, t.shape[2:]) for n, t in fields.items()} == {n: (f.dtype, f.shape) for n, f in field_specs.items()}
    packed = kv_format.to_bytes(fields)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 2, group * kv_format.bytes_per_vector(head_dim))
    assert kv_format.dequantize(fields, 1).shape == x.shape
    assert kv_format.dequantize(fields, 1).dtype == torch.float32
    empty = kv_format.quantize(x[:0], 1)
    assert kv_format.dequantize(empty, 1).shape == x[:0].shape
    assert kv_format.to_bytes(empty).shape == packed[:0].shape


@pytest.mark.parametrize(("name", "side"), EVERY)
def test_nothing_leaves_the_device_of_the_vectors(name, side, monkeypatch):
    """On a device without numbers, which refuses to meet another; only whether all is finite cannot be asked there."""
    for module in (compared, rotated):
        monkeypatch.setattr(module, "require_finite", lambda x: None)
    kv_format, x = vectors(name, side, 4)
    x = x.to("meta")
    fields = kv_format.quantize(x, 0)
    tensors = [*fields.values(), kv_format.dequantize(fields, 0), kv_format.to_bytes(fields)]
    tensors += [levels] if (levels := kv_format.levels(fields)) is not None else []
    assert {tensor.device.type for tensor in tensors} == {"meta"}


class CountingOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("name", formats.names())
def test_no_format_goes_vector_by_vector(name, side):
    """The same number of tensor operations for two vectors and for a thousand, and no more than 300 a direction."""
    kv_format = formats.get(name, side)
    counts = []
    for count in (2, 2, 1000 // kv_format.group_tokens + 1):  # the first fills the tables
        x = gaussian(count * kv_format.group_tokens, 128)
        x = x.view(count, kv_format.group_tokens, 128) if kv_format.group_tokens > 1 else x
        with CountingOps() as ops:
            kv_format.dequantize(kv_format.quantize(x, 0), 0)
        counts.append(ops.count)
    assert counts[1] == counts[2] <= 600


# -- The page ---------------------------------------------------------------------------------------------------------------
def table(page, heading):
    """Rows of the first table below a heading of a page, by their first cell."""
    text = page.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def test_the_page_lists_every_format_with_its_bytes():
    rows = table(DOCS, "All formats")
    assert list(rows) == formats.names()
    for name, row in rows.items():
        for head_dim, cell in zip((64, 128, 256), row[:3], strict=True):
            try:
                sizes = {formats.get(name, side).bytes_per_vector(head_dim) for side in "kv"}
            except InputError:
                assert cell == "–"
            else:
                assert sizes == {float(size) for size in cell.split(" or ")}
        assert float(row[3]) == formats.get(name).bytes_per_vector(128) / 16
