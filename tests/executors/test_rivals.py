"""Formats that are here to compare with: `cpu` runs them by the reference's own ops, and others refuse them by name."""

import pytest
import torch
from small_models import SMALL, new_cache, new_paging, resize_config, small_model

from haarkv.executors import catalog
from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import read_config
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.cpu.layout import READS
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.kernel_support import readable
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.layers.runner import validate

RIVALS = [name for name in formats.names() if formats.get(name).to_compare]
CONFIG = resize_config(SMALL, head_dim=128)
MODEL = small_model(CONFIG)
TINY = read_config("tiny")
PLANS = [
    *map(KVSpec, RIVALS), KVSpec("tq4_seed"), KVSpec("k=kivi2,v=tq4", tail=40, sink=3),
    KVSpec("tq4", layers={1: "k=q8_0,v=fp8_e4m3"}),
]  # fmt: skip


def test_each_format_is_one_of_those_or_the_kernels_of_the_cpu_read_it():
    """But for the published one, which the NPU's programs read."""
    assert "q8_0" in RIVALS
    assert set(formats.names()) == {*RIVALS, *readable(READS), "tq4_seed"}
    assert not {*RIVALS, "tq4_seed"} & {*readable(READS)}


def step(ops, spec):
    """What is stored of a prompt and a step by an op table, and attention to it."""
    cache = new_cache(CONFIG, spec, num_blocks=6, block_size=128)
    paging, generator, outputs = new_paging(cache), torch.Generator().manual_seed(0), []
    ids = [paging.add(), paging.add()]
    for sizes in ([60, 40], [10, 64], [1, 1]):
        batch, heads = paging.batch(ids, sizes), CONFIG.heads
        k, v = torch.randn(2, sum(sizes), heads.num_kv_heads, 128, generator=generator)
        ops.store_kv(k, v, cache.view(1, batch))
        q = torch.randn(sum(sizes), heads.num_heads, 128, generator=generator)
        outputs.append(ops.paged_attention(q, cache.view(1, batch), 128**-0.5))
    return [*outputs, *cache.kv[1].k.fields.values(), *cache.kv[1].v.fields.values()]


@pytest.mark.parametrize("spec", PLANS, ids=str)
def test_on_a_cpu_they_run_by_the_references_ops(spec):
    """To its bits; the layers around them by the kernels."""
    plan = spec.plan(CONFIG.num_layers)
    assert catalog.refusal("cpu", CONFIG, [plan]) is None
    assert not CpuExecutor(MODEL).batch_invariant(plan)  # the reference's sums change with the batch
    ours, theirs = (step(ops, spec) for ops in (CpuOps(), reference))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("executor", ["cuda", "npu", "onnx"])
def test_elsewhere_they_are_refused_by_name(executor):
    pytest.importorskip({"cuda": "triton", "onnx": "onnx"}.get(executor, "torch"))
    for name in RIVALS:
        refusal = catalog.refusal(executor, TINY, [KVSpec(name).plan(TINY.num_layers)])
        assert f"not {name}; --executor cpu and reference run every format" in refusal
        assert "\n" not in refusal


@pytest.mark.parametrize("name", RIVALS)
def test_there_is_nothing_to_validate(name):
    executor = ReferenceExecutor(MODEL)
    with pytest.raises(InputError, match=f"^{name} is here to compare with: .* nothing to validate"):
        validate(executor, executor, MODEL, [[1, 2, 3]], 0, KVSpec(name).plan(CONFIG.num_layers))
