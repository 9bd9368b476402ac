"""A decode step on a GPU: how much is launched, that nothing in it waits, and that fused layers compute what others do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from op_tables import LAYER, Case, cache_tensors, filled, poisoned_cache, relative, windows_of
from small_models import SMALL, random_tokens, resized, small_model

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models import fused
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats import made_up
from haarkv.tq_ops.fused import Composed, Heads
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import with_ops
from haarkv.validation import bounds
from haarkv.validation.layers.compare import compare_tokens
from haarkv.validation.layers.runner import validate

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from step_launches import META, executor_on_meta, launches

from haarkv.executors.cuda import CudaExecutor
from haarkv.tq_ops.cuda import nvrtc, ops
from haarkv.tq_ops.cuda.fused import CudaFused
from haarkv.tq_ops.cuda.layout import layout_of

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
FP32, BF16 = torch.float32, torch.bfloat16
TQ4 = KVSpec("tq4")
FAMILIES = {
    "qwen3": {}, "llama": {"model_type": "llama"}, "qwen2": {"model_type": "qwen2", "qkv_bias": True},
}  # fmt: skip


def config_of(family: str, **changed):
    return replace(SMALL, **{"num_heads": 4, "head_dim": 64, "num_layers": 2} | FAMILIES[family] | changed)


# -- Launches ----------------------------------------------------------------------------------------------------------
def added_by_a_layer(config, monkeypatch, prompts, spec=TQ4, **options) -> tuple[list[str], list[str]]:
    """What a layer adds to a decode step, in order, and what a step of one layer launches beside it."""
    steps = []
    for layers in (1, 2):
        model = small_model(resized(config, num_layers=layers), dtype=BF16)
        if spec.calibration:
            spec = replace(spec, calibration=made_up.calibration(layers, config.heads.num_kv_heads, config.heads.head_dim))
        options = dict.fromkeys(options, spec.plan(layers))
        steps.append(launches(executor_on_meta(model, monkeypatch, **options), spec, prompts, monkeypatch)[1])
    one, two = steps
    added, begin = len(two) - len(one), one.index("mm")
    assert two[:begin] + two[begin + added :] == one
    return two[begin : begin + added], one[:begin] + one[begin + added :]


@pytest.mark.parametrize("attention", [["decode"], ["attend_kernel", "merge_kernel"]], ids=["nvrtc", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompts", [[40], [40, 7, 1]])
def test_a_layer_of_a_decode_step_is_nine_launches_or_ten_without_nvrtc(monkeypatch, family, prompts, attention):
    monkeypatch.setattr(nvrtc, "missing", lambda: None if attention == ["decode"] else "it is not there")
    layer, around = added_by_a_layer(config_of(family), monkeypatch, prompts)
    assert layer == [
        "mm", "prologue_kernel", *attention, "mm", "add_norm_kernel", "mm", "silu_mul_kernel", "mm", "add_norm_kernel",
    ]  # fmt: skip
    # Embedding, cos and sin, the first norm, the head and whether all is finite; seven that fill the buffers of the graph.
    assert len(around) <= 20
    assert {"rms_norm_kernel", "mm"} <= set(around)


@pytest.mark.parametrize("attention", [["decode"], ["attend_kernel", "merge_kernel"]], ids=["nvrtc", "triton"])
def test_tokens_in_bf16_take_one_launch_more(monkeypatch, attention):
    monkeypatch.setattr(nvrtc, "missing", lambda: None if attention == ["decode"] else "it is not there")
    spec = KVSpec("tq4", tail=5, sink=2)
    layer, around = added_by_a_layer(config_of("qwen3"), monkeypatch, [40, 7, 1], spec)
    assert layer[1 : 4 + (len(attention) > 1)] == ["prologue_kernel", "window_kernel", *attention]
    assert len(layer) == 9 + len(attention)
    assert len(around) <= 21  # the rows are copied, too


@pytest.mark.parametrize("kept", [{}, {"tail": 5, "sink": 2}], ids=str)
@pytest.mark.parametrize(
    ("kv", "attention"), [("k=lr96,v=lr64", ["decode"]), ("k=lr80,v=lr48", ["attend_kernel", "merge_kernel"])]
)
def test_learned_nibbles_launch_what_others_do(monkeypatch, kept, kv, attention):
    """Some numbers of them `decode.takes` leaves to Triton."""
    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    config = config_of("qwen3")
    spec = KVSpec(kv, calibration=made_up.calibration(2, config.heads.num_kv_heads, 64), **kept)
    layer, _ = added_by_a_layer(config, monkeypatch, [40, 7, 1], spec)
    before = ["mm", "prologue_kernel", *(["window_kernel"] if kept else []), *attention]
    assert layer[: len(before)] == before
    assert len(layer) == 6 + len(before)


def test_folded_rotations_launch_no_more(monkeypatch):
    plain, _ = added_by_a_layer(config_of("qwen3"), monkeypatch, [40])
    assert added_by_a_layer(config_of("qwen3"), monkeypatch, [40], folded=None)[0] == plain


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [TQ4, KVSpec("tq4", tail=5, sink=2)], ids=["packed", "tail"])
def test_nothing_between_token_ids_and_logits_waits_for_the_device(monkeypatch, family, dtype, spec):
    """On a device without numbers; `launches` would raise."""
    model = small_model(config_of(family), dtype=dtype)
    prefill, decode = launches(executor_on_meta(model, monkeypatch), spec, [40, 7, 1], monkeypatch)
    assert prefill.count("prologue_kernel") == decode.count("prologue_kernel") == 2


@pytest.mark.parametrize(
    "wait", [lambda x: x.item(), lambda x: bool(x > 0), lambda x: x.tolist(), lambda x: x.nonzero(), lambda x: x.cpu()]
)
def test_that_device_would_show_a_wait(wait):
    with pytest.raises((RuntimeError, NotImplementedError)):
        wait(torch.zeros((), device=META))


# -- Packed weights ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_are_the_models_own_and_there_once(family):
    model = small_model(config_of(family))
    whole = fused.fuse(model, torch.device("cpu"))
    for (name, ours), (same, theirs) in zip(whole.model.weights.named(), model.weights.named(), strict=True):
        assert name == same
        assert torch.equal(ours, theirs)
    ours = [tensor for _, tensor in whole.model.weights.named()]
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in ours}
    assert sum(held.values()) == model.weights.nbytes
    for layer, packed in zip(whole.model.weights.layers, whole.packed, strict=True):
        tensors = {field: tensor for field, _, tensor in layer.named()}
        assert torch.equal(packed.qkv_proj, torch.cat([tensors[f"{x}_proj"] for x in "qkv"]))
        assert torch.equal(packed.gate_up_proj, torch.cat([tensors["gate_proj"], tensors["up_proj"]]))
        assert {packed.qkv_proj.data_ptr(), packed.gate_up_proj.data_ptr()} <= set(held)


def test_a_packed_model_is_taken_as_it_is():
    whole = fused.fuse(small_model(config_of("qwen2")), torch.device("cpu"))
    again = fused.fuse(whole.model, torch.device("cpu"))
    for (_, ours), (_, theirs) in zip(again.model.weights.named(), whole.model.weights.named(), strict=True):
        assert ours.data_ptr() == theirs.data_ptr()
    for ours, theirs in zip(again.packed, whole.packed, strict=True):
        assert ours.qkv_proj.data_ptr() == theirs.qkv_proj.data_ptr()
        assert torch.equal(ours.qkv_proj, theirs.qkv_proj)
        assert torch.equal(ours.heads.bias, theirs.heads.bias)


def test_models_without_a_fused_layer_say_so_in_words():
    assert fused.unsupported(config_of("qwen3")) is fused.unsupported(config_of("qwen2")) is None
    experts = resized(SMALL, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    assert "qwen3_moe layer has router, has experts" in fused.unsupported(experts)


# -- The fused ops -----------------------------------------------------------------------------------------------------
PLAIN, BIASED, NORMED = (False, False), (True, False), (False, True)
CASES = [
    (Case("tq4", 64, 2, 2, 8, (6, 9), (4, 1)), PLAIN),
    (Case("tq4", 64, 1, 3, 8, (2, 9), (1, 4)), BIASED),
    (Case("tq4", 128, 5, 2, 128, (3, 130, 0), (1, 1, 1)), NORMED),
    (Case("tq4", 256, 2, 1, 24, (7,), (1,)), BIASED),
    (Case("k=tq4,v=tbq4_0", 128, 1, 1, 8, (0,), (3,)), NORMED),
    (Case("k=tbq4_0,v=tq4", 128, 3, 1, 16, (5,), (2,)), PLAIN),
    (Case("k=tq3,v=tq2", 64, 2, 2, 16, (5, 0), (2, 1)), NORMED),
    (Case("tq4", 64, 2, 2, 8, (0, 9), (5, 1), tail=3, sink=2), BIASED),
    (Case("k=tq4,v=tq3", 128, 5, 2, 16, (3, 40, 0), (1, 1, 1), tail=9, sink=4), NORMED),
    (Case("k=lr80,v=lr48", 64, 2, 2, 8, (9, 0), (2, 1), tail=3, sink=2), BIASED),
]


def everything_in(made: PagedKVCache) -> list[torch.Tensor]:
    return [*(tensor for *_, tensor in cache_tensors(made)), *windows_of(made)]


def given_to_attention(case: Case, dtype: torch.dtype, biased: bool, normed: bool):
    """Two caches of equal content whose new slots are not written yet, and the arguments of `attention`."""
    made, batch = filled(case)
    generator = torch.Generator().manual_seed(3)
    heads, dim = case.kv_heads * case.group, case.head_dim
    width = (heads + 2 * case.kv_heads) * dim

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    block, offset = batch.slot_mapping // case.block_size, batch.slot_mapping % case.block_size
    for _, _, name, tensor in cache_tensors(made):
        tensor[block, :, offset] = float("nan") if name == "scale" else 255
    for window in filter(None, made.kept(LAYER)):
        window.write(torch.full((len(batch.positions), case.kv_heads, dim), float("nan")), batch)
    copy = poisoned_cache(case, DEVICE)
    for ours, theirs in zip(everything_in(copy), everything_in(made), strict=True):
        ours.copy_(theirs)
    norms = [(drawn(dim) * 0.3 + 1).to(dtype) for _ in range(2)] if normed else [None, None]
    made_of = Heads(heads, dtype, drawn(width).to(dtype) if biased else None, *norms, eps=1e-6)
    angle = drawn(len(batch.positions), dim // 2) * 3
    return made, copy, drawn(len(batch.positions), width), made_of, (angle.cos(), angle.sin()), batch


def moved(heads: Heads) -> Heads:
    return replace(heads, **{name: t.to(DEVICE) for name, t in vars(heads).items() if isinstance(t, torch.Tensor)})


@pytest.mark.parametrize(
    ("case", "made_of", "dtype"),
    [
        pytest.param(*case, dtype, marks=[] if GPU or number % 2 == (dtype == BF16) else pytest.mark.cuda_long)
        for number, case in enumerate(CASES)
        for dtype in (FP32, BF16)
    ],
    ids=str,
)
def test_attention_with_all_before_it_equals_the_ops_one_by_one(case, made_of, dtype):
    """`made_of`: whether there is a bias, and whether heads are normed."""
    made, copy, qkv, heads, rope, batch = given_to_attention(case, dtype, *made_of)
    scale = case.head_dim**-0.5
    seen = {}

    def store(k, v, *rest):
        seen.update(k=k, v=v)
        reference.store_kv(k, v, *rest)

    wanted = Composed(with_ops(reference, {"store_kv": store})).attention(qkv, heads, rope, made, LAYER, batch, scale)
    fault = ops.new_fault(DEVICE)
    on_device = [x.to(DEVICE) for x in rope]
    ours = CudaFused(fault).attention(
        qkv.to(DEVICE), moved(heads), (on_device[0], on_device[1]), copy, LAYER, batch.to(DEVICE), scale
    )
    ops.raise_fault(fault, copy, batch)
    assert (ours.dtype, ours.shape) == (dtype, wanted.shape)
    block, offset = batch.slot_mapping // case.block_size, batch.slot_mapping % case.block_size
    for side in ("k", "v"):
        mine, other = ({n: t.cpu() for n, t in getattr(c, f"{side}_fields")(LAYER).items()} for c in (copy, made))
        new = [{name: t[block, :, offset] for name, t in fields.items()} for fields in (other, mine)]
        kv_format = getattr(made, f"{side}_format")(LAYER)
        compared, length = compare_tokens(kv_format, LAYER, *new, seen[side], bounds.LAYER_FP32.kv_noise)
        assert compared.unexplained == 0
        assert compared.match > 0.999
        assert length <= bounds.LAYER_FP32.length
        for name, tensor in mine.items():
            untouched = torch.ones(tensor.shape[:3], dtype=torch.bool)
            untouched[block, :, offset] = False
            assert torch.equal(tensor[untouched].view(torch.uint8), other[name][untouched].view(torch.uint8))
    for mine, other in zip(windows_of(copy), windows_of(made), strict=True):
        # K and V as two computations of them round to BF16: here and there to the other neighbour. NaN stays where it was.
        torch.testing.assert_close(mine.cpu(), other, rtol=2.0**-7, atol=1e-6, equal_nan=True)
        assert (mine.cpu().view(torch.int16) != other.view(torch.int16)).float().mean() <= bounds.OP_TABLE_BF16_DIFFERENT
    shape = (len(qkv), heads.num_heads, case.head_dim)
    within = (bounds.LAYER_FP32 if dtype == FP32 else bounds.LAYER_BF16).attention
    assert relative(ours.view(shape), wanted.view(shape)) <= within


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_queries_are_rounded_once_before_they_are_rotated(dtype):
    case = Case("tq4", 128, 4, 2, 8, (0,), (9,))
    _, copy, qkv, heads, rope, batch = given_to_attention(case, dtype, False, False)
    q = qkv.view(9, -1, 128)[:, : heads.num_heads]
    wanted, _ = ops.rotate(reference.rope(q, *rope).to(dtype).to(DEVICE), layout_of(copy.k_format(LAYER), LAYER, 128, DEVICE))
    given = qkv.to(DEVICE), moved(heads), (rope[0].to(DEVICE), rope[1].to(DEVICE))
    _, (ours, _) = ops.rotate_and_append(*given, copy, LAYER, batch.to(DEVICE), ops.new_fault(DEVICE))
    assert ours.dtype == wanted.dtype
    off = ((ours - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)).flatten()
    # Of a query that was not rounded to BF16, each vector would be 1e-3 off.
    assert off.median() <= (1e-6 if dtype == FP32 else 1e-4)


@pytest.mark.parametrize(
    ("kv", "kept"),
    [("tq4", {}), ("tq4", {"tail": 3, "sink": 2}), ("k=lr80,v=lr64", {"tail": 3, "sink": 2})],
    ids=str,
)
def test_dead_rows_store_nothing_and_a_refused_vector_is_noted(kv, kept):
    case = Case(kv, 64, 2, 3, 8, (0, 0), (1, 1), **kept)
    _, copy, qkv, heads, rope, batch = given_to_attention(case, BF16, False, False)
    before = [tensor.clone() for tensor in everything_in(copy)]
    rest = ([x.to(DEVICE) for x in rope], copy, LAYER)
    fault = ops.new_fault(DEVICE)
    dead = replace(batch, slot_mapping=torch.full_like(batch.slot_mapping, -1)).to(DEVICE)
    ops.rotate_and_append((qkv * torch.nan).to(DEVICE), moved(heads), *rest, dead, fault)
    ops.raise_fault(fault, copy, batch)
    for was, tensor in zip(before, everything_in(copy), strict=True):
        assert torch.equal(was.view(torch.uint8), tensor.view(torch.uint8))
    # V of token 1, KV head 2: the last head of all.
    qkv[1, -3] = torch.inf
    _, window = copy.kept(LAYER)
    kept_before = window.vectors[batch.rows[1]].view(torch.uint8).clone() if window is not None else None
    ops.rotate_and_append(qkv.to(DEVICE), moved(heads), *rest, batch.to(DEVICE), fault)
    with pytest.raises(NonFiniteError, match=r"layer 1: V of token 1 of the batch .*, KV head 2 is not finite"):
        ops.raise_fault(fault, copy, batch)
    # It was left out of what stays in BF16 as well, and its neighbours were not.
    if window is not None:
        now = window.vectors[batch.rows[1]].view(torch.uint8)
        assert [torch.equal(head, was) for head, was in zip(now, kept_before, strict=True)] == [False, False, True]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("width", [48, 1056])
def test_residual_and_norm_in_one_equal_the_two(dtype, width):
    hidden, update = 4 * torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0))
    weight = torch.rand(width, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = Composed(reference).add_norm(hidden.to(dtype), update, weight, 1e-6)
    given = [x.to(DEVICE) for x in (hidden.to(dtype), update, weight)]
    ours = CudaFused(ops.new_fault(DEVICE)).add_norm(*given, 1e-6)
    assert torch.equal(ours[0].cpu(), wanted[0])
    assert relative(ours[1], wanted[1]) <= (bounds.LAYER_FP32.op if dtype == FP32 else bounds.LAYER_BF16.rounded_op)
    if dtype == BF16:  # the norm is of the rounded sum: of another, a sixth of its numbers would be others
        assert (ours[1].cpu() != wanted[1]).float().mean() <= bounds.OP_TABLE_BF16_DIFFERENT


# -- Whole layers ------------------------------------------------------------------------------------------------------
ONE_HEAD = {"num_heads": 2, "num_kv_heads": 1}
"""Half of the interpreter's work."""


@pytest.mark.parametrize(
    ("family", "dtype", "steps"),
    [
        ("qwen3", BF16, 1),
        pytest.param("qwen2", BF16, 0, marks=pytest.mark.cuda_long),
        pytest.param("llama", FP32, 0, marks=pytest.mark.cuda_long),
    ],
)
def test_the_validator_passes_every_family_layer_by_layer(family, dtype, steps):
    model = small_model(config_of(family, **ONE_HEAD), dtype=dtype)
    prompts = [random_tokens(model.config, n, seed=n) for n in (3, 2)[: 1 + steps]]
    candidate = CudaExecutor(model, interpreted=not GPU)
    report = validate(ReferenceExecutor(model), candidate, model, prompts, steps, KVSpec("tq4").plan(2))
    assert report.passed, report.first_divergence
    assert sum(row.unexplained for row in report.rows) == 0


@pytest.mark.cuda_long
def test_a_fault_of_a_fused_op_is_found_in_its_layer(monkeypatch):
    """Also where the table's ops, which the validator replays, are sound: layer 1 leaves out its second residual."""
    model, calls = small_model(config_of("qwen3", **ONE_HEAD)), []
    sound = CudaFused.add_norm

    def faulty(self, hidden, update, weight, eps):
        calls.append(weight)
        return sound(self, hidden, update * 0 if weight is final else update, weight, eps)

    candidate = CudaExecutor(model, interpreted=not GPU)
    final = candidate._model.weights.final_norm
    monkeypatch.setattr(CudaFused, "add_norm", faulty)
    report = validate(ReferenceExecutor(model), candidate, model, [[1, 2]], 0, KVSpec("tq4").plan(2))
    assert calls
    assert (report.first_divergence.layer, report.first_divergence.stage) == (1, "attention_mlp")
    assert "each op by itself is right" in report.first_divergence.detail


@pytest.mark.cuda_long
def test_a_fault_before_attention_is_found_where_it_stores_k(monkeypatch):
    model, sound = small_model(config_of("qwen3", **ONE_HEAD)), CudaFused.attention

    def faulty(self, qkv, heads, rope, *rest):
        return sound(self, qkv, heads, (rope[0], -rope[1]), *rest)

    monkeypatch.setattr(CudaFused, "attention", faulty)
    candidate = CudaExecutor(model, interpreted=not GPU)
    report = validate(ReferenceExecutor(model), candidate, model, [[1, 2, 3]], 0, KVSpec("tq4").plan(2))
    assert (report.first_divergence.layer, report.first_divergence.stage) == (0, "store_kv.k")
    assert "each op by itself is right" in report.first_divergence.detail


# -- With a GPU --------------------------------------------------------------------------------------------------------
@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_torch_sees_no_wait_in_a_step(dtype):
    """Torch's own watch over calls that wait, once what is made once is made."""
    model = small_model(config_of("qwen2"), dtype=dtype)
    shape = {"num_kv_heads": model.config.heads.num_kv_heads, "head_dim": model.config.heads.head_dim}
    ours, cache = CudaExecutor(model), PagedKVCache(KVSpec("tq4").plan(2), num_blocks=6, device=DEVICE, **shape)
    paging = PagedSequences(6, cache.block_size)
    ids = [paging.add(), paging.add()]
    prompts, last = paging.batch(ids, [3, 1]).to(DEVICE), paging.batch(ids, [1, 1]).to(DEVICE)
    tokens = torch.tensor([1, 2, 3, 4], device=DEVICE)

    @torch.inference_mode()
    def run() -> None:
        ours._all_sound(ours._run.prefill(tokens, prompts, cache))
        ours._step_on(cache)(tokens[:2], last)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
