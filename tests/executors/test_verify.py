"""Several new tokens checked in one forward: logits after each, and a cache, as if they had come one by one."""

from importlib.util import find_spec

import pytest
import torch
from small_models import SMALL, cache_tensors, decode, new_cache, new_paging, prefill, resized, small_model

from haarkv.executors import catalog
from haarkv.executors.base import verify
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.weights import EMBEDDING
from haarkv.tq_ops.kv.plan import KVSpec

CONFIG = resized(SMALL, num_layers=2, num_heads=4, head_dim=64)
PROMPTS, NEW = [[1, 2, 3, 4, 5], [6, 7]], [[8, 9, 10, 11], [12, 13]]


def open_cpu(model):
    return catalog.create("cpu", model, KVSpec("tq4").plan(model.config.num_layers))


def open_onnx(model):
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    return catalog.create("onnx", model, KVSpec("tq4").plan(model.config.num_layers))


def open_cuda(model):
    if not find_spec("triton"):
        pytest.skip("Triton is not installed")
    from haarkv.executors.cuda import CudaExecutor

    return CudaExecutor(model, interpreted=not torch.cuda.is_available())


OPEN = {"reference": ReferenceExecutor, "cpu": open_cpu, "onnx": open_onnx, "cuda": open_cuda}
CASES = [
    ("reference", "float32", KVSpec("tq4", tail=3, sink=1)), ("reference", "float32", KVSpec("kivi2")),
    ("cpu", "float32", KVSpec("tq4")), ("cpu", "bfloat16", KVSpec("k=tq5,v=tq3", tail=3, sink=1)),
    ("onnx", "float32", KVSpec("tq4")), ("onnx", "float32", KVSpec("k=tq6,v=tq4", tail=3, sink=1)),
    pytest.param("cuda", "float32", KVSpec("tq4", tail=2, sink=1), marks=pytest.mark.cuda_long),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "spec"), CASES, ids=lambda of: of.kv if isinstance(of, KVSpec) else of)
def test_logits_after_each_token_are_those_of_one_by_one(name, dtype, spec):
    model = small_model(resized(CONFIG, num_layers=1) if name == "cuda" else CONFIG, dtype=getattr(torch, dtype))
    executor = OPEN[name](model)
    caches = [new_cache(model.config, spec, block_size=128) for _ in "ab"]
    one_by_one, together = ((cache, new_paging(cache)) for cache in caches)
    expected: list[list[torch.Tensor]] = [[], []]
    for cache, paging in (one_by_one, together):
        prefill(executor, cache, paging, [paging.add(), paging.add()], PROMPTS)
    for step in range(4):
        rows = [row for row in (0, 1) if step < len(NEW[row])]
        found = decode(executor, *one_by_one, rows, [NEW[row][step] for row in rows])
        for row, logits in zip(rows, found, strict=True):
            expected[row].append(logits)
    cache, paging = together
    ids = torch.tensor([token for row in NEW for token in row])
    logits = verify(executor, ids, paging.batch([0, 1], [4, 2]), cache)
    wanted = torch.stack([*expected[0], *expected[1]])
    assert logits.shape == wanted.shape
    if executor.batches_alike:
        assert torch.equal(logits, wanted)
        for (*place, one), (*_, other) in zip(cache_tensors(one_by_one[0]), cache_tensors(cache), strict=True):
            assert torch.equal(one, other), place
    else:
        # Sums in another order may move a level of the cache.
        torch.testing.assert_close(logits, wanted, rtol=0.02, atol=0.02)
    assert executor.batches_alike == (name == "cpu")


@pytest.mark.parametrize("name", OPEN)
def test_the_weights_of_an_executor_are_what_it_multiplies_with(name):
    executor = OPEN[name](small_model(CONFIG))
    named = dict(executor.weights.named())
    assert named[EMBEDDING].device == executor.device
    assert named[EMBEDDING].shape == (CONFIG.vocab_size, CONFIG.hidden_size)
