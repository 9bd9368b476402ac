"""The ONNX executor against the reference; its memory is the model's and the cache's own; what it refuses."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from at_length import MORE, pairwise_cases, rest
from block_weights import in_blocks, random_blocks
from op_contract.caches import cache_tensors
from small_models import CONFIGS, decode, new_cache, new_paging, prefill, random_tokens, resize_config, small_model
from small_models import SMALL as CONFIG

from haarkv.codebooks import haar_rotation
from haarkv.executors import catalog
from haarkv.executors.onnx import OnnxExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats.rotated import RotatedFormat, Transform
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.weight import dense
from haarkv.validation.layers.runner import validate

pytest.importorskip("onnxruntime", reason="needs the onnx extra")
TQ4 = formats.get("tq4")


def make_plan(config, kv_format=TQ4, **rest):
    return KVPlan(((kv_format, kv_format),) * config.num_layers, **rest)


def make_spec(kv, config=CONFIG, seed=0, **rest):
    """A plan whose learned keys, if it has any, are made up."""
    synthetic_calibration = (
        calibration(config.num_layers, config.heads.num_kv_heads, config.heads.head_dim, seed=seed) if "lr" in kv else None
    )
    return KVSpec(kv, calibration=synthetic_calibration, **rest)


FP32, BF16 = torch.float32, torch.bfloat16


def require_valid(model, plan, prompts, executor=None):
    """The validator passes, and each layer's output is as near as its dtype allows."""
    report = validate(ReferenceExecutor(model), executor or OnnxExecutor(model), model, prompts, 2, plan)
    assert report.passed, report.first_divergence
    lowest = min(row.hidden_cos for row in report.rows if row.mode == "teacher-forced")
    assert lowest >= (0.99999 if model.dtype == FP32 else 0.9999)


LEARNED_FORMATS = ("k=lr2,v=tq3", "k=lr3,v=tq2", "k=lr4,v=tq4", "k=lr5,v=tq8")


# The rest runs with `make test-long`.
@pytest.mark.parametrize(
    ("kv", "dtype", "name", "window"),
    [
        *(("tq4", FP32, name, (None, 0)) for name in CONFIGS),
        *pairwise_cases(
            MORE, [*LEARNED_FORMATS, "k=tq6,v=tq5", "k=tq3,v=tq8", "k=tq2,v=tq6"], [FP32, BF16], ["gqa5_d128"], [(None, 0)]
        ),
        *rest(MORE, product(["k=lr4,v=tq4"], [FP32], CONFIGS, [(None, 0)]), lambda i, _: i == 0),
        # Chunks, a ring that starts over, decode, drafts that are taken back; sinks that are also among the newest.
        *pairwise_cases(MORE, ["tq4", "k=lr3,v=tq4"], [FP32, BF16], ["gqa5_d128"], [(5, 2), (None, 3), (40, 30)]),
        *rest(
            MORE, product(["tq4", "k=lr3,v=tq4"], [FP32, BF16], ["gqa5_d128"], [(3, 0), (1, 0)]), lambda i, _: i == 0
        ),
    ],
)  # fmt: skip
def test_every_layer_is_the_references(kv, dtype, name, window):
    """Every head_dim, K and V each in its own format, tokens in BF16."""
    config, (tail, sink) = CONFIGS[name], window
    longer = 60 if tail or sink else 0
    prompts = [random_tokens(config, 20 + longer, 1), random_tokens(config, 5, 2)]
    plan = make_spec(kv, config, tail=tail, sink=sink).plan(config.num_layers)
    require_valid(small_model(config, dtype=dtype), plan, prompts)


def test_a_plan_of_layers_that_differ_and_a_cache_of_another_calibration():
    """One executor, two caches: each is read by its own coordinates."""
    model = small_model(CONFIG)
    executor, prompts = OnnxExecutor(model), [random_tokens(CONFIG, 20, 1)]
    for seed in (0, 9):
        spec = make_spec("k=lr4,v=tq4", seed=seed, layers={1: "k=lr2,v=tq8", 2: "tq3"})
        require_valid(model, spec.plan(CONFIG.num_layers), prompts, executor)


def test_k_and_v_behind_two_rotations():
    """A format outside the registry, with other matrices than `tq4`'s."""
    others = Transform(lambda layer, dim: haar_rotation(9 + layer, dim))
    custom_format = RotatedFormat("own", "", 4, lambda dim: replace(TQ4.description(dim), transform=others))
    for pair in ((custom_format, TQ4), (custom_format, custom_format)):
        require_valid(small_model(CONFIG), KVPlan((pair,) * CONFIG.num_layers), [random_tokens(CONFIG, 20, 1)])


def test_two_formats_of_one_name_are_not_mistaken_for_one_another():
    custom_formats = [RotatedFormat("own", "", bits, formats.get(f"tq{bits}").description) for bits in (2, 4)]
    cache = PagedKVCache(KVPlan((tuple(custom_formats),) * CONFIG.num_layers), CONFIG.kv_shapes, num_blocks=2)
    paging = new_paging(cache)
    with pytest.raises(ValueError, match="two formats of one graph have the same name"):
        prefill(OnnxExecutor(small_model(CONFIG)), cache, paging, [paging.add()], [[1, 2, 3]])


# -- Weights in blocks ---------------------------------------------------------------------------------------------------
# Wide enough for blocks of 256.
BLOCKY = resize_config(CONFIG, hidden_size=256, intermediate_size=256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_blocks_of_every_type_is_the_references(dtype):
    """Tokens and prompts; each layer has other types than the next, and blocks that are balanced have scales."""
    config = resize_config(BLOCKY, num_layers=4)
    model = in_blocks(small_model(config, dtype=dtype))
    scales = 2.0 ** torch.arange(-2, 2).repeat(config.heads.num_heads * config.heads.head_dim // 4)
    first = model.weights.layers[0].map(lambda field, weight: weight * scales if field == "o_proj" else weight)
    model = replace(model, weights=replace(model.weights, layers=(first, *model.weights.layers[1:])))
    executor, prompts = OnnxExecutor(model), [random_tokens(config, 20, 1), random_tokens(config, 5, 2)]
    assert len(executor._scopes.blocks) == 4 * 7 + 1
    require_valid(model, make_plan(config), prompts, executor)


def test_an_embedding_in_blocks_stays_in_the_file_and_its_rows_are_the_references():
    model = in_blocks(small_model(BLOCKY), ("Q4_1",))
    blocks = random_blocks("Q8_0", BLOCKY.vocab_size, BLOCKY.hidden_size)
    model = replace(model, weights=replace(model.weights, embedding=blocks))
    cache = new_cache(BLOCKY)
    paging = new_paging(cache)
    executor = OnnxExecutor(model)
    logits = [prefill(each, cache, paging, [paging.add()], [[1, 2, 3]]) for each in (executor, ReferenceExecutor(model))]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    assert {graph.embed for graph in executor._sessions} == {False}


def test_a_type_that_is_not_exact_in_codes_is_restored():
    model = in_blocks(small_model(BLOCKY), ("Q4_0",))
    other = random_blocks("Q4_0", 256, 256)
    other = replace(other, type=replace(other.type, name="NEW"))
    layer = model.weights.layers[0].map(lambda field, weight: other if field == "up_proj" else weight)
    model = replace(model, weights=replace(model.weights, layers=(layer, *model.weights.layers[1:])))
    executor = OnnxExecutor(model)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(executor._weights[name], dense(other))
    assert name not in executor._scopes.blocks
    require_valid(model, make_plan(BLOCKY), [random_tokens(BLOCKY, 9, 1)], executor)


# -- Texts of several stretches ------------------------------------------------------------------------------------------
LONG = resize_config(CONFIGS["gqa5_d128"], num_layers=2, num_heads=4, max_position_embeddings=4096)


def with_turns(base_calibration, change):
    """A calibration whose keys turn otherwise."""
    bases = tuple(replace(basis, inv_freq=change(basis.inv_freq)) for basis in base_calibration.k)
    return formats.Calibration(bases, base_calibration.digest)


TURNS = {
    "all": lambda inv_freq: inv_freq,
    "some numbers": lambda inv_freq: inv_freq[:10],
    "unknown": lambda inv_freq: inv_freq[:0],
}


@pytest.mark.parametrize(
    ("turns", "window_options"), pairwise_cases(MORE, list(TURNS), [{}, {"tail": 700, "sink": 2}]), ids=str
)
def test_chunks_that_begin_and_end_in_any_stretch(turns, window_options):
    """Past and new keys of one chunk lie in several stretches, other ones in each sequence; blocks cross their borders."""
    config = resize_config(CONFIGS["mha_d64"], num_layers=1, num_heads=2, num_kv_heads=2, max_position_embeddings=4096)
    spec = KVSpec("k=lr4,v=tq4", calibration=with_turns(calibration(1, 2, 64), TURNS[turns]), **window_options)
    model = small_model(config)
    executors = [ReferenceExecutor(model), OnnxExecutor(model)]
    caches = [new_cache(config, spec, num_blocks=60, block_size=96) for _ in executors]
    paging = new_paging(caches[0])
    sequences, errors, chunk = [paging.add(), paging.add()], [], 64 if window_options else 700
    for step, begin in enumerate(range(0, 2640, chunk)):
        counts = [min(chunk, 2640 - begin), min(chunk, 2640 - begin) // 2 + 1]
        tokens = torch.tensor(
            [token for row, count in enumerate(counts) for token in random_tokens(config, count, row + step)]
        )
        batch = paging.batch(sequences, counts)
        theirs, ours = (each.forward(tokens, batch, cache) for each, cache in zip(executors, caches, strict=True))
        errors.append(torch.linalg.vector_norm(ours - theirs, dim=-1) / torch.linalg.vector_norm(theirs, dim=-1))
        # Of a level beside a boundary later chunks would tell again and again. A number of the normed input that rounds to the
        # other BF16 neighbour moves a whole key, of which a level or two may fall to the other side; a stretch moves most.
        cache_contents = [[tensor for *_, tensor in cache_tensors(cache)] for cache in caches]
        assert sum((a != b).sum() for a, b in zip(*cache_contents, strict=True) if a.dtype == torch.uint8) <= 20 * (step + 1)
        for a, b in zip(*cache_contents, strict=True):
            b.copy_(a)
    # Tokens of a chunk that look at a key whose level fell to the other side may differ by more.
    error = torch.cat(errors).sort().values
    assert error[len(error) // 2] < 1e-5
    assert error[len(error) * 9 // 10] < 1e-3


def test_a_text_within_a_stretch_is_read_by_the_graph_that_turns_nothing():
    model = small_model(LONG)
    executor = OnnxExecutor(model)
    cache = new_cache(LONG, make_spec("k=lr4,v=tq4", LONG), num_blocks=20, block_size=128)
    paging = new_paging(cache)
    sequence = paging.add()
    prefill(executor, cache, paging, [sequence], [random_tokens(LONG, 1023)])
    decode(executor, cache, paging, [sequence], [1])
    decode(executor, cache, paging, [sequence], [1])
    others = new_cache(LONG, "tq4", num_blocks=20, block_size=128)
    again = new_paging(others)
    prefill(executor, others, again, [again.add()], [random_tokens(LONG, 1025)])
    assert [graph.has_stretches for graph in executor._sessions if graph.span] == [False, False, True, False]


# -- Tokens in BF16 ------------------------------------------------------------------------------------------------------
def test_memory_of_tokens_in_bf16_that_are_not_there_may_hold_anything():
    executor = OnnxExecutor(small_model(CONFIG))

    def forwards(left):
        cache = new_cache(CONFIG, make_spec("k=lr4,v=tq4", tail=5, sink=2))
        for window in (window for kv in cache.kv.values() for window in kv.windows):
            window.vectors.fill_(left)
        paging = new_paging(cache)
        sequences = [paging.add(), paging.add()]
        logits = [prefill(executor, cache, paging, sequences, [[1], [2, 3, 4, 5, 6, 7, 8]])]
        logits += [decode(executor, cache, paging, sequences, [9, 9]) for _ in range(3)]
        return torch.stack(logits)

    assert torch.equal(forwards(0.0), forwards(torch.nan))


def test_graphs_are_given_the_caches_and_the_models_own_memory(monkeypatch):
    model = small_model(CONFIG)
    bound = {}
    original = OnnxExecutor._bind

    def record_binding(self, bind, tensors):
        bound.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
        return original(self, bind, tensors)

    monkeypatch.setattr(OnnxExecutor, "_bind", record_binding)
    cache = new_cache(CONFIG, make_spec("tq4", tail=1))
    paging = new_paging(cache)
    prefill(OnnxExecutor(model), cache, paging, [paging.add()], [[1, 2, 3]])
    for layer, side, name, tensor in cache_tensors(cache):
        assert bound[f"layers.{layer}.{side}_{name}"] == tensor.data_ptr()
    for layer, kv in cache.kv.items():
        for side, window in zip("kv", kv.windows, strict=True):
            assert bound[f"layers.{layer}.{side}_kept"] == window.vectors.data_ptr()
    for name, tensor in model.weights.named_tensors():
        assert bound[name] == tensor.data_ptr()


def test_what_is_not_finite_is_named_and_nothing_is_stored():
    model = small_model(CONFIG)
    model.weights.layers[1]["v_proj"][200:, 3] = torch.inf
    cache = new_cache(CONFIG, make_spec("tq4", tail=1))
    paging = new_paging(cache)
    with pytest.raises(NonFiniteError, match=r"layer 1: V of token 0 of the batch \(slot 0\), KV head 1 is not finite"):
        prefill(OnnxExecutor(model), cache, paging, [paging.add()], [[1, 2, 3]])
    assert all(not tensor.any() for _, _, _, tensor in cache_tensors(cache))
    assert all(not window.vectors.any() for kv in cache.kv.values() for window in kv.windows)


def test_logits_that_are_not_finite_are_an_error():
    model = small_model(CONFIG)
    model.weights.lm_head[5, 5] = torch.nan
    cache = new_cache(CONFIG)
    paging = new_paging(cache)
    with pytest.raises(NonFiniteError, match="logits are not finite on onnx"):
        prefill(OnnxExecutor(model), cache, paging, [paging.add()], [[1, 2, 3]])


# -- Refusals ------------------------------------------------------------------------------------------------------------
def test_other_formats_windows_and_head_dims_are_refused():
    other = resize_config(CONFIG, head_dim=32)
    for config, kv, words in (
        (CONFIG, "q8_0", "its graphs read tq4, tq2, tq3, tq5, tq6 and tq8, not q8_0"),
        (other, "tq4", "head_dim of 64, 128 or 256, not 32"),
    ):
        assert words in catalog.refusal("onnx", config, [KVSpec(kv).plan(config.num_layers)])
