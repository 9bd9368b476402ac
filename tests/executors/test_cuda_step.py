"""A decode step on a GPU: how much is launched, that nothing in it waits, and that fused layers compute what others do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import bounds
import pytest
import torch
from cuda_caches import DEVICE, attention_bound, check_stored, everything_in, on_device
from op_contract.caches import bf16_windows
from op_tables import LAYER, Case, filled, relative
from small_models import small_model

from haarkv.models import fused
from haarkv.models.config import Experts
from haarkv.tq_ops import reference
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import Heads, with_ops

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from cuda_models import MODELS, family_config, family_model, qwen_moe
from step_launches import META, executor_on_meta, launches

from haarkv.tq_ops.cuda import decode, ops
from haarkv.tq_ops.cuda.ops import CudaFusedOps

GPU = DEVICE.type == "cuda"
FP32, BF16 = torch.float32, torch.bfloat16
TQ4, TAIL = KVSpec("tq4"), KVSpec("tq4", tail=5, sink=2)


FAMILIES = ("qwen3", "llama", "qwen2", "gemma")


# -- Launches ----------------------------------------------------------------------------------------------------------
ONE, RAGGED = [40], [40, 7, 1]
TRITON, NVRTC = ["attend_kernel", "merge_kernel"], ["decode"]


def layer_kernels(spec: KVSpec, attention: list[str]) -> list[str]:
    """What a layer launches: nine, ten where Triton attends, one more for tokens in BF16."""
    before = ["mm", "prologue_kernel", *(["window_kernel"] if spec.tail else []), *attention]
    return [*before, "mm", "norm_kernel", "mm", "gated_mul_kernel", "mm", "norm_kernel"]


@pytest.mark.parametrize(
    ("family", "spec", "prompts", "compiles", "attention"),
    [
        ("llama", TQ4, ONE, True, NVRTC), ("gemma", TQ4, RAGGED, True, NVRTC), ("gemma", TQ4, RAGGED, False, TRITON),
        ("qwen2", TAIL, RAGGED, True, NVRTC), ("qwen3", TAIL, RAGGED, False, TRITON),
        # Learned keys of head_dim 64 `decode.takes` leaves to Triton.
        ("wide", KVSpec("k=lr3,v=tq3", tail=5, sink=2), RAGGED, True, NVRTC),
        ("qwen3", KVSpec("k=lr4,v=tq4"), RAGGED, True, TRITON),
    ],
    ids=lambda given: given.kv + "-kept" * bool(given.tail) if isinstance(given, KVSpec) else str(given),
)  # fmt: skip
def test_a_layer_of_a_decode_step_is_nine_launches_or_ten_without_nvrtc(
    monkeypatch, family, spec, prompts, compiles, attention
):
    """What two more layers add, in order. Learned keys, windows and norms behind take no launch of their own."""
    monkeypatch.setattr(decode, "nvrtc_missing", lambda: None if compiles else "it is not there")
    steps = []
    for layers in (2, 4):  # of a Gemma every second has a window
        model = small_model(family_config(family, num_layers=layers), dtype=BF16)
        if spec.kv.startswith("k=lr"):
            heads = model.config.heads
            spec = replace(spec, calibration=synthetic.calibration(layers, heads.num_kv_heads, heads.head_dim))
        steps.append(launches(executor_on_meta(model, monkeypatch), spec, prompts, monkeypatch)[1])
    two, four = steps
    expected = layer_kernels(spec, attention)
    # The slots and blocks of a Gemma's rings are reckoned once a step, behind the first product.
    others = [name for name in four if name not in expected]
    assert others == [name for name in two if name not in expected]
    assert len(four) - len(two) == 2 * len(expected)
    begin = four.index("mm")
    assert [name for name in four[begin:] if name in expected][: 4 * len(expected)] == 4 * expected
    # Embedding, cos and sin, the first norm, the head and whether all is finite; seven that fill the buffers of the graph, and
    # the rows where something is kept by them. A Gemma scales embeddings, has cos and sin twice, and places tokens in rings.
    assert len(two) - 2 * len(expected) <= (50 if family == "gemma" else 21)


EXPERTS = ["choose_kernel", "zeros", "order_kernel", "expert_kernel", "expert_kernel", "share_kernel"]
EXPERT_KERNELS = [name for name in EXPERTS if name != "zeros"]
DELTA = ["delta_inputs_kernel", "delta_rule_kernel"]


@pytest.mark.parametrize(
    ("make_model", "dtype", "spec", "kernels"),
    [
        *(
            (partial(family_model, family), dtype, spec, 2 * ["prologue_kernel"])
            for family, dtype, spec in (
                ("qwen3", BF16, TQ4), ("llama", FP32, TAIL), ("qwen2", BF16, TAIL), ("gemma", FP32, TQ4),
            )
        ),
        (MODELS["hybrid"], BF16, TQ4, 2 * DELTA), (MODELS["experts"], BF16, TQ4, EXPERT_KERNELS),
        (MODELS["hybrid with experts"], BF16, TQ4, [*DELTA, *EXPERT_KERNELS, *EXPERT_KERNELS]),
    ],
)  # fmt: skip
def test_nothing_between_token_ids_and_logits_waits_for_the_device(monkeypatch, make_model, dtype, spec, kernels):
    """On a device without numbers; `launches` would raise."""
    for names in launches(executor_on_meta(make_model(dtype=dtype), monkeypatch), spec, RAGGED, monkeypatch):
        assert [name for name in names if name in kernels] == kernels


def test_a_layer_of_a_decode_step_of_qwen3_with_experts_is_thirteen_launches(monkeypatch):
    """Seven in place of a dense layer's three between its last norms."""
    monkeypatch.setattr(decode, "nvrtc_missing", lambda: None)
    one, two = (launches(executor_on_meta(qwen_moe(BF16, n), monkeypatch), TQ4, [20, 3], monkeypatch)[1] for n in (1, 2))
    expected = ["mm", "prologue_kernel", "decode", "mm", "norm_kernel", "mm", *EXPERTS, "norm_kernel"]
    assert len(expected) == len(two) - len(one) == 13
    begin = two.index("mm")
    assert two[begin : begin + 26] == 2 * expected


@pytest.mark.parametrize(
    "wait", [lambda x: x.item(), lambda x: bool(x > 0), lambda x: x.tolist(), lambda x: x.nonzero(), lambda x: x.cpu()]
)
def test_that_device_would_show_a_wait(wait):
    with pytest.raises((RuntimeError, NotImplementedError)):
        wait(torch.zeros((), device=META))


# -- Packed weights ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_are_the_models_own_and_there_once(family):
    model = small_model(family_config(family))
    whole = fused.fuse(model, torch.device("cpu"))
    for (name, ours), (same_name, theirs) in zip(whole.weights.named_tensors(), model.weights.named_tensors(), strict=True):
        assert name == same_name
        assert torch.equal(ours, theirs)
    ours = [tensor for _, tensor in whole.weights.named_tensors()]
    storage_sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in ours}
    assert sum(storage_sizes.values()) == model.weights.nbytes
    again = fused.fuse(whole, torch.device("cpu"))  # which is taken as it is
    for layer, packed, second_packed in zip(whole.weights.layers, whole.packed, again.packed, strict=True):
        assert torch.equal(packed.qkv_proj, torch.cat([layer[f"{x}_proj"] for x in "qkv"]))
        assert torch.equal(packed.gate_up_proj, torch.cat([layer["gate_proj"], layer["up_proj"]]))
        assert {packed.qkv_proj.data_ptr(), packed.gate_up_proj.data_ptr()} <= set(storage_sizes)
        assert (second_packed.qkv_proj.data_ptr(), second_packed.gate_up_proj.data_ptr()) == (
            packed.qkv_proj.data_ptr(), packed.gate_up_proj.data_ptr(),
        )  # fmt: skip
        assert packed.heads.bias is second_packed.heads.bias is None or torch.equal(
            packed.heads.bias, second_packed.heads.bias
        )
    for (_, second_packed), theirs in zip(again.weights.named_tensors(), ours, strict=True):
        assert second_packed.data_ptr() == theirs.data_ptr()


def test_models_without_a_fused_layer_say_so_in_words():
    assert {fused.unsupported(family_config(family)) for family in FAMILIES} == {None}
    config = family_config("qwen3")
    layer = config.layers[1]
    for other, says in (
        (replace(layer, mlp=Experts(4, 2, 16, shared=8)), "layer 1 of this qwen3 model is another than it knows: shared is 8"),
        (replace(layer, mixer=replace(layer.mixer, rope=replace(layer.mixer.rope, dims=32))), "dims is 32"),
    ):
        assert says in fused.unsupported(replace(config, layers=(layer, other)))


# -- The fused ops -----------------------------------------------------------------------------------------------------
def composed_attention(ops, qkv, heads, rope, at, softmax_scale):
    """As `FusedOps.attention`."""
    if heads.bias is not None:
        qkv = qkv + heads.bias
    shape = at.kv.shape
    split = [heads.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = torch.split(qkv.view(len(qkv), -1, shape.head_dim), split, dim=1)
    if heads.q_norm is not None:
        q, k = ops.rms_norm(q, heads.q_norm, heads.eps), ops.rms_norm(k, heads.k_norm, heads.eps)
    q, k = ops.rope(q, *rope), ops.rope(k, *rope)
    ops.store_kv(k, v, at)
    return ops.paged_attention(q.to(heads.dtype), at, softmax_scale).flatten(1)


def composed_add_norm(ops, hidden, update, weight, eps, post_norm=None):
    """As `FusedOps.add_norm`."""
    if post_norm is not None:
        update = ops.rms_norm(update, *post_norm)
    hidden = (hidden.float() + update).to(hidden.dtype)
    return hidden, ops.rms_norm(hidden, weight, eps)


PLAIN, BIASED, NORMED = (False, False), (True, False), (False, True)
CASES = [
    (Case("tq4", 64, 2, 2, 8, (6, 9), (4, 1)), PLAIN),
    (Case("tq4", 128, 5, 2, 128, (3, 130, 0), (1, 1, 1)), NORMED),
    (Case("tq4", 256, 2, 1, 24, (7,), (1,)), BIASED),
    (Case("tq4", 64, 2, 2, 8, (0, 9), (5, 1), tail=3, sink=2), BIASED),
    (Case("k=tq4,v=tq3", 128, 5, 2, 16, (3, 40, 0), (1, 1, 1), tail=9, sink=4), NORMED),
    (Case("k=lr3,v=tq3", 64, 2, 2, 8, (9, 0), (2, 1), tail=3, sink=2), BIASED),
    (Case("tq4", 64, 4, 1, 8, (70, 3), (4, 1), window=20), NORMED),
    (Case("tq4", 256, 4, 1, 128, (530,), (1,), window=512), NORMED),
]


def attention_args(case: Case, dtype: torch.dtype, has_bias: bool, has_norms: bool):
    """Two caches of equal content whose new slots are not written yet, and the arguments of `attention`."""
    cache, batch = filled(case)
    generator = torch.Generator().manual_seed(3)
    heads, dim = case.kv_heads * case.group, case.head_dim
    width = (heads + 2 * case.kv_heads) * dim

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    slots = cache.kv[LAYER].place(batch).slot_mapping
    for name, tensor in [*cache.kv[LAYER].k.fields.items(), *cache.kv[LAYER].v.fields.items()]:
        tensor[slots // case.block_size, :, slots % case.block_size] = float("nan") if name == "scale" else 255
    for window in filter(None, cache.kv[LAYER].windows):
        window.write(torch.full((len(batch.positions), case.kv_heads, dim), float("nan")), batch)
    copy = on_device(cache, case)
    norms = [(random_tensor(dim) * 0.3 + 1).to(dtype) for _ in range(2)] if has_norms else [None, None]
    head_weights = Heads(heads, dtype, random_tensor(width).to(dtype) if has_bias else None, *norms, eps=1e-6)
    angle = random_tensor(len(batch.positions), dim // 2) * 3
    return cache, copy, random_tensor(len(batch.positions), width), head_weights, (angle.cos(), angle.sin()), batch


def heads_on_device(heads: Heads) -> Heads:
    return replace(heads, **{name: t.to(DEVICE) for name, t in vars(heads).items() if isinstance(t, torch.Tensor)})


@pytest.mark.parametrize(
    ("case", "head_options", "dtype"),
    [(*case, dtype) for number, case in enumerate(CASES) for dtype in (FP32, BF16) if GPU or number % 2 == (dtype == BF16)],
    ids=str,
)
def test_attention_with_all_before_it_equals_the_ops_one_by_one(case, head_options, dtype):
    """`head_options`: whether there is a bias, and whether heads are normed."""
    cache, copy, qkv, heads, rope, batch = attention_args(case, dtype, *head_options)
    scale, stored_kv = case.head_dim**-0.5, {}

    def store(k, v, *rest):
        stored_kv.update(k=k, v=v)
        reference.store_kv(k, v, *rest)

    composed_attention(with_ops(reference, {"store_kv": store}), qkv, heads, rope, cache.view(LAYER, batch), scale)
    fault, on_device = ops.new_fault(DEVICE), tuple(x.to(DEVICE) for x in rope)
    ours = CudaFusedOps(fault).attention(
        qkv.to(DEVICE), heads_on_device(heads), on_device, copy.view(LAYER, batch.to(DEVICE)), scale
    )
    ops.raise_fault(fault, copy, batch)
    assert (ours.dtype, ours.shape) == (dtype, (len(qkv), heads.num_heads * case.head_dim))
    check_stored(copy, cache, stored_kv["k"], stored_kv["v"], batch, bounds.LAYER_FP32.kv_noise)
    for mine, other in zip(bf16_windows(copy), bf16_windows(cache), strict=True):
        # K and V as two computations of them round to BF16: here and there to the other neighbour. NaN stays where it was.
        torch.testing.assert_close(mine.cpu(), other, rtol=2.0**-7, atol=1e-6, equal_nan=True)
        assert (mine.cpu().view(torch.int16) != other.view(torch.int16)).float().mean() <= bounds.OP_TABLE_BF16_DIFFERENT
    # A level beside a boundary may have fallen to its other side, as was checked: attention is judged over the same codes.
    for mine, other in zip(everything_in(copy), everything_in(cache), strict=True):
        other.copy_(mine)
    nothing = with_ops(reference, {"store_kv": lambda *_: None})
    expected = composed_attention(nothing, qkv, heads, rope, cache.view(LAYER, batch), scale)
    shape = (len(qkv), heads.num_heads, case.head_dim)
    assert relative(ours.view(shape), expected.view(shape)) <= attention_bound(dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_queries_are_rounded_once_before_they_are_rotated(dtype):
    case = Case("tq4", 128, 4, 2, 8, (0,), (9,))
    _, copy, qkv, heads, rope, batch = attention_args(case, dtype, False, False)
    q = qkv.view(9, -1, 128)[:, : heads.num_heads]
    expected, *_ = ops.rotate(reference.rope(q, *rope).to(dtype).to(DEVICE), copy.view(LAYER, batch.to(DEVICE)))
    args = qkv.to(DEVICE), heads_on_device(heads), (rope[0].to(DEVICE), rope[1].to(DEVICE))
    _, (ours, *_) = ops.rotate_and_append(*args, copy.view(LAYER, batch.to(DEVICE)), ops.new_fault(DEVICE))
    assert ours.dtype == expected.dtype
    off = ((ours - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)).flatten()
    # Of a query that was not rounded to BF16, each vector would be 1e-3 off.
    assert off.median() <= (1e-6 if dtype == FP32 else 1e-4)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("width", [48, 1056])
@pytest.mark.parametrize("post_norm", [False, True])
def test_residual_and_norm_in_one_equal_the_two(dtype, width, post_norm):
    """Weights in FP32 as well, as 1 + w is beside a BF16 model."""
    hidden, update = 4 * torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(2, width, generator=torch.Generator().manual_seed(1))
    weight, update_weight = (weights if post_norm else weights.to(dtype)).unbind()
    expected = composed_add_norm(
        reference, hidden.to(dtype), update, weight, 1e-6, (update_weight, 1e-5) if post_norm else None
    )  # fmt: skip
    args = [x.to(DEVICE) for x in (hidden.to(dtype), update, weight)]
    ours = CudaFusedOps(ops.new_fault(DEVICE)).add_norm(*args, 1e-6, (update_weight.to(DEVICE), 1e-5) if post_norm else None)
    if post_norm:
        assert relative(ours[0], expected[0]) <= (bounds.LAYER_FP32.op if dtype == FP32 else bounds.LAYER_BF16.rounded_op)
    else:
        assert torch.equal(ours[0].cpu(), expected[0])
    assert relative(ours[1], expected[1]) <= (bounds.LAYER_FP32.op if dtype == FP32 else bounds.LAYER_BF16.rounded_op)
    if dtype == BF16 and not post_norm:  # the norm is of the rounded sum: of another, a sixth of its numbers would be others
        assert (ours[1].cpu() != expected[1]).float().mean() <= bounds.OP_TABLE_BF16_DIFFERENT
