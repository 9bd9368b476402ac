"""The ONNX executor against the reference; its memory is the model's and the cache's own; whom it refuses."""

import pytest
import torch
from bases import calibration
from onnx_graphs import CONFIG, small_model
from small_models import CONFIGS, cache_tensors, decode, new_cache, new_paging, prefill, random_tokens, resized

from haarkv.executors import catalog, onnx
from haarkv.executors.onnx import OnnxExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.validation.layers.runner import validate

TQ4 = formats.get("tq4")


def plan_of(config, kv_format=TQ4, **rest):
    return KVPlan(((kv_format, kv_format),) * config.num_layers, **rest)


def validated(config, dtype, plan=None):
    model = small_model(config, dtype=dtype)
    prompts = [random_tokens(config, 20, 1), random_tokens(config, 5, 2)]
    report = validate(ReferenceExecutor(model), OnnxExecutor(model), model, prompts, 2, plan or plan_of(config))
    assert report.passed, report.first_divergence
    # Third nibbles are so fine that two free runs in BF16 drift apart by more than a level of theirs.
    judged = (row for row in report.rows if plan is None or dtype == torch.float32 or row.mode == "teacher-forced")
    assert sum(row.unexplained for row in judged) == 0
    return min(row.hidden_cos for row in report.rows if row.mode == "teacher-forced")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_layer_is_the_references_in_fp32(name):
    assert validated(CONFIGS[name], torch.float32) >= 0.99999


def test_every_layer_is_within_bf16_of_the_references():
    assert validated(CONFIG, torch.bfloat16) >= 0.9999


@pytest.mark.parametrize("kv", ["k=lr5,v=tq3", "lr96"])
def test_learned_nibbles_are_the_references(kv):
    made_up = calibration(CONFIG.num_layers, CONFIG.heads.num_kv_heads, CONFIG.heads.head_dim)
    plan = KVSpec(kv, calibration=made_up).plan(CONFIG.num_layers)
    assert validated(CONFIG, torch.float32, plan) >= 0.99999
    assert validated(CONFIG, torch.bfloat16, plan) >= 0.9999


def test_a_plan_of_layers_that_differ_and_a_cache_of_another_calibration():
    """One executor, two caches: each is read by its own coordinates."""
    model = small_model(CONFIG)
    shape = (CONFIG.num_layers, CONFIG.heads.num_kv_heads, CONFIG.heads.head_dim)
    executor, prompts = OnnxExecutor(model), [random_tokens(CONFIG, 20, 1)]
    for seed in (0, 9):
        spec = KVSpec("lr64", layers={1: "k=lr4,v=tq4"}, calibration=calibration(*shape, seed=seed))
        report = validate(ReferenceExecutor(model), executor, model, prompts, 1, spec.plan(CONFIG.num_layers))
        assert report.passed, report.first_divergence


def test_learned_and_fixed_places_in_one_plan_are_refused():
    made_up = calibration(CONFIG.num_layers, CONFIG.heads.num_kv_heads, CONFIG.heads.head_dim)
    plan = KVSpec("k=lr3,v=tq4", calibration=made_up).plan(CONFIG.num_layers)
    assert OnnxExecutor.supports(CONFIG, plan) == "its graphs take learned nibbles at every place or at none"


@pytest.fixture(scope="module")
def executor():
    return OnnxExecutor(small_model(CONFIG))


def test_blocks_in_any_order_and_companions_change_nothing(executor):
    """Several blocks a sequence, so that the block table decides what is read."""
    prompts = [random_tokens(CONFIG, count, count) for count in (19, 3, 30)]

    def forwards(order, rows):
        cache = new_cache(CONFIG)
        paging = new_paging(cache, order)
        sequences = [paging.add() for _ in rows]
        found = [prefill(executor, cache, paging, sequences, [prompts[row] for row in rows])]
        found += [decode(executor, cache, paging, sequences, [7] * len(rows)) for _ in range(2)]
        return torch.stack(found, dim=1)

    together = forwards([5, 2, 9, 0, 11, 1, 3, 10, 4, 6, 7, 8], [0, 1, 2])
    for row in range(3):
        torch.testing.assert_close(together[row : row + 1], forwards(None, [row]), rtol=0, atol=3e-5)


def test_graphs_are_given_the_caches_and_the_models_own_memory(monkeypatch):
    model = small_model(CONFIG)
    bound = {}
    original = OnnxExecutor._bind

    def watched(self, bind, tensors):
        bound.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
        return original(self, bind, tensors)

    monkeypatch.setattr(OnnxExecutor, "_bind", watched)
    cache = new_cache(CONFIG)
    paging = new_paging(cache)
    prefill(OnnxExecutor(model), cache, paging, [paging.add()], [[1, 2, 3]])
    for layer, side, name, tensor in cache_tensors(cache):
        assert bound[f"layers.{layer}.{side}_{name}"] == tensor.data_ptr()
    for name, tensor in model.weights.named():
        assert bound[name] == tensor.data_ptr()


def test_what_is_not_finite_is_named_and_nothing_is_stored():
    model = small_model(CONFIG)
    model.weights.layers[1]["v_proj"][200:, 3] = torch.inf
    cache = new_cache(CONFIG)
    paging = new_paging(cache)
    with pytest.raises(NonFiniteError, match=r"layer 1: V of token 0 of the batch \(slot 0\), KV head 1 is not finite"):
        prefill(OnnxExecutor(model), cache, paging, [paging.add()], [[1, 2, 3]])
    assert all(not tensor.any() for _, _, _, tensor in cache_tensors(cache))


def test_logits_that_are_not_finite_are_an_error():
    model = small_model(CONFIG)
    model.weights.lm_head[5, 5] = torch.nan
    cache = new_cache(CONFIG)
    paging = new_paging(cache)
    with pytest.raises(NonFiniteError, match="logits are not finite on onnx"):
        prefill(OnnxExecutor(model), cache, paging, [paging.add()], [[1, 2, 3]])


# -- Refusals ------------------------------------------------------------------------------------------------------------
def create(config, plan, device=None):
    return catalog.create("onnx", small_model(config), plan, device)


def test_other_formats_windows_and_head_dims_are_refused():
    with pytest.raises(InputError, match="its graphs read tq4, not q8_0"):
        create(CONFIG, plan_of(CONFIG, formats.get("q8_0")))
    with pytest.raises(InputError, match="leave out the tail and the sinks"):
        create(CONFIG, plan_of(CONFIG, sink=4))
    other = resized(CONFIG, head_dim=32)
    with pytest.raises(InputError, match="head_dim of 64, 128 or 256, not 32"):
        create(other, plan_of(other))


@pytest.mark.parametrize(("word", "package"), [("cuda", "onnxruntime-gpu"), ("cann", "onnxruntime-cann")])
def test_a_provider_that_is_not_installed_names_its_package(monkeypatch, word, package):
    monkeypatch.setattr(onnx.ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(InputError, match=f"pip install {package} "):
        create(CONFIG, plan_of(CONFIG), word)


def test_a_provider_whose_device_is_absent_and_an_unknown_one_are_refused(monkeypatch):
    monkeypatch.setattr(onnx.ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch has no cuda device"):
        create(CONFIG, plan_of(CONFIG), "cuda")
    with pytest.raises(InputError, match="unknown provider 'tpu'; choose from cpu, cuda, cann"):
        create(CONFIG, plan_of(CONFIG), "tpu")
