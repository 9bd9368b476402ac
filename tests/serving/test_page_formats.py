"""What pages hold beside `tq4`: any pair of formats, learned coordinates of a rank's heads, and layers that differ."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheLayout, UniformTypeKVCacheSpecs
from vllm.v1.worker.gpu_worker import Worker as VllmsWorker
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_configs import configure
from vllm_paged import (
    Shape,
    Worker,
    configuration,
    in_forward,
    own_cache,
    packed_spec,
    plain_spec,
    qkv,
    rotated_metadata,
    vllm_metadata,
)

from haarkv.models.catalog import TINY, load_model, read_config
from haarkv.models.weights import fingerprint
from haarkv.serving.vllm_plugin import CPU_WORKER, GPU_WORKER, backend, kv_choice, limits, pages
from haarkv.serving.vllm_plugin.backend import RotatedAttention
from haarkv.tq_ops import formats
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.cuda.layout import READS as ON_GPU
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

pytestmark = pytest.mark.vllm_short

SHAPE, LAYERS = Shape(), 6
MODEL_SHAPE = ModelShape.uniform(LAYERS, SHAPE.kv_heads, SHAPE.head_dim, 256, 4096)
MIXED_FORMATS = ("k=lr4,v=tq3", "bf16", "k=lr4,v=tq3", "tq3", "k=tq8,v=tq3", "k=lr3,v=tq3")
"""As `tq plan` writes them, layer by layer."""


def synthetic_calibration() -> formats.Calibration:
    return synthetic.calibration(LAYERS, SHAPE.kv_heads, SHAPE.head_dim)


def batches():
    """A prompt of two sequences, and a step in which one of them goes on beside a third."""
    paging = PagedSequences(SHAPE.num_blocks, SHAPE.block_size, torch.randperm(12, generator=torch.Generator()).tolist())
    a, b, c = (paging.add() for _ in range(3))
    return [paging.batch([a, b], [33, 7]), paging.batch([b, c], [1, 20])]


# -- Layers that differ --------------------------------------------------------------------------------------------------
def plan_in(folder: Path) -> Path:
    """A plan of learned and other formats with its calibration, in one file."""
    plan = KVPlan(tuple(formats.parse(kv, synthetic_calibration()) for kv in MIXED_FORMATS))
    file = CalibrationFile(synthetic_calibration(), MODEL_SHAPE, "0123456789abcdef", {}, plan_file.dumps(plan, MODEL_SHAPE))
    path = folder / "plan.safetensors"
    calibration_file.save(path, file)
    return path


class PlainWorker:
    """What vLLM's worker says of the layers before ours does."""

    def get_kv_cache_spec(self):
        context = self.vllm_config.compilation_config.static_forward_context
        return {name: packed_spec(SHAPE) if module.ours else plain_spec(SHAPE) for name, module in context.items()}


class AWorker(pages.OwnPages, PlainWorker):
    def __init__(self, config) -> None:
        self.vllm_config = config


def layer(ours: bool = True) -> SimpleNamespace:
    """A layer of the model, of our backend or of vLLM's own."""
    impl = RotatedAttention(SHAPE.heads, SHAPE.head_dim, SHAPE.softmax_scale, SHAPE.kv_heads)
    return SimpleNamespace(ours=ours, impl=impl, get_attn_backend=lambda: backend.RotatedAttentionBackend if ours else object)


@pytest.fixture
def no_context(monkeypatch):
    """Our stand-in for a configuration where vLLM's own is wanted."""
    monkeypatch.setattr(pages, "set_current_vllm_config", lambda _: pytest.MonkeyPatch().context())


def layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


@pytest.mark.usefixtures("no_context")
def test_each_layer_has_pages_of_its_own_size_and_a_draft_those_of_tq4(tmp_path):
    config = configuration(haarkv_kv_plan=str(plan_in(tmp_path)))
    names = [*map(layer_name, range(LAYERS)), layer_name(LAYERS), "draft_model.model.layers.0.self_attn.attn"]
    config.compilation_config.static_forward_context |= {name: layer() for name in names}
    config.compilation_config.static_forward_context["model.layers.0.other"] = layer(ours=False)
    specs = AWorker(config).get_kv_cache_spec()
    sizes = [specs[name].state_content_size_bytes for name in names]
    assert sizes == [66 + 50, 512, 66 + 50, 100, 130 + 50, 50 + 50, 132, 132]
    assert specs["model.layers.0.other"] == plain_spec(SHAPE)
    # The same bytes as a cache of our own takes.
    expected = kv_choice.kv_plan(config).bytes_per_token(KVShape(SHAPE.kv_heads, 128)) * SHAPE.block_size
    assert sum(specs[name].page_size_bytes for name in names[:LAYERS]) == expected


real_config = partial(configure, TINY, block_size=SHAPE.block_size)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC], ids=lambda layout: layout.name)
@pytest.mark.usefixtures("no_context")
def test_vllm_lays_out_layers_of_different_pages_without_padding_and_each_reads_its_own(tmp_path, layout):
    """Groups, layout and memory by vLLM's own code; every byte of another layer stays as it was."""
    ours = configuration(haarkv_kv_plan=str(plan_in(tmp_path)))
    names = [layer_name(index) for index in range(LAYERS)]
    layers = {name: layer() for name in names}
    ours.compilation_config.static_forward_context |= layers
    specs, config = AWorker(ours).get_kv_cache_spec(), real_config()
    config.cache_config.kv_cache_layout = layout.name
    groups = get_kv_cache_groups(config, specs)
    assert isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs)
    assert len(groups) == 1
    block = sum(spec.page_size_bytes for spec in specs.values())
    kv_config = get_kv_cache_config_from_groups(config, groups, block * SHAPE.num_blocks + block - 1)
    assert kv_config.num_blocks == SHAPE.num_blocks
    views = allocate_kv_cache(kv_config, torch.device("cpu"), layout, [SHAPE.block_size])
    ops, caches = CpuOps(), {}
    for index, name in enumerate(names):
        pair = kv_choice.layer_formats(ours, name)
        assert formats.describe(*pair) == MIXED_FORMATS[index]
        layers[name].impl.store_in(pair)
        caches[index] = own_cache(pair, index, SHAPE)
    for step, batch in enumerate(batches()):
        metadata = rotated_metadata(vllm_metadata(batch))
        inputs = {index: qkv(len(batch.positions), 10 * step + index) for index in caches}
        for index, name in enumerate(names):
            _, k, v = inputs[index]
            with in_forward({name: metadata}):
                layers[name].impl.do_kv_cache_update(SimpleNamespace(layer_name=name), k, v, views[name], batch.slot_mapping)
            ops.store_kv(k, v, caches[index].view(index, batch))
        for index, name in enumerate(names):  # once all are stored
            q, k, v = inputs[index]
            out = layers[name].impl.forward(SimpleNamespace(layer_name=name), q, k, v, views[name], metadata, q.clone())
            assert torch.equal(out, ops.paged_attention(q, caches[index].view(index, batch), SHAPE.softmax_scale)), index


def test_a_page_without_room_names_the_worker_that_gives_it():
    pair = formats.parse("tq8")
    worker = Worker(SHAPE, (0,), KVCacheLayout.LBHNC)
    worker.impls[0].store_in(pair)
    _, k, v = qkv(40, 0)
    with pytest.raises(ValueError, match=r"4224 bytes, and tq8 takes 8320; .* --worker-cls .*RotatedCpuWorker$"):
        worker.store(0, k, v, batches()[0].slot_mapping)


def test_a_page_may_have_room_to_spare():
    """As where vLLM does not say which layer it asks for, and pages are those of the largest."""
    pair, index = formats.parse("tq3"), 2
    worker, exact = (Worker(SHAPE, (index,), KVCacheLayout.LBHNC, pair if has_pair else None) for has_pair in (False, True))
    worker.impls[index].store_in(pair)
    [batch, _] = batches()
    q, k, v = qkv(40, 0)
    for each in (worker, exact):
        each.store(index, k, v, batch.slot_mapping)
    outs = [each.attend(index, q, k, v, rotated_metadata(vllm_metadata(batch))) for each in (worker, exact)]
    assert torch.equal(*outs)


# -- Who takes which coordinates -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_takes_the_coordinates_of_its_heads(tmp_path, monkeypatch, ranks):
    """Of two KV heads; four ranks hold each of them twice."""
    config = configuration(ranks=ranks, haarkv_kv_plan=str(plan_in(tmp_path)))
    whole = synthetic_calibration().k[2].mean
    for rank in range(ranks):
        monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda rank=rank: rank)
        k_format, _ = kv_choice.layer_formats(config, layer_name(2))
        mean = k_format.description(128).transform.coordinates(2).mean
        expected = {1: whole, 2: whole[rank : rank + 1], 4: whole[rank // 2 : rank // 2 + 1]}[ranks]
        assert torch.equal(mean, expected)


# -- What is refused -----------------------------------------------------------------------------------------------------
OPTIONS = {
    "groups": ({"haarkv_kv": "kivi2"}, "a kivi2 KV cache cannot serve .*: kivi2 is here to compare with"),
    "no such file": ({"haarkv_kv_plan": "/nowhere/plan.json"}, "/nowhere/plan.json"),
    "no such layer": ({"haarkv_kv_skip_layers": [6]}, "there is no layer 6; the model has 6, counted from 0"),
    "no list": ({"haarkv_kv_skip_layers": "0"}, "haarkv_kv_skip_layers is a list of layers, not '0'"),
    "no text": ({"haarkv_kv": 4}, "haarkv_kv is a text, not 4"),
    "no JSON": ({"haarkv_kv_plan": Path("p")}, "--additional-config takes texts, numbers and lists"),
    "twice": ({"haarkv_kv_plan": "p", "haarkv_kv": "tq3"}, "haarkv_kv_plan sets the whole cache; leave out haarkv_kv"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_cache_that_cannot_be_served_is_refused(name):
    options, reason = OPTIONS[name]
    with pytest.raises(ValueError, match=reason):
        real_config(additional_config=options)


def test_a_plan_of_another_model_is_refused_by_its_shape_its_weights_or_its_context(tmp_path):
    def build_config(shape=MODEL_SHAPE, weights="0123456789abcdef", context=None, **options: object) -> VllmConfig:
        calibration = formats.Calibration(synthetic_calibration().k, "", context)
        path = tmp_path / "other.safetensors"
        calibration_file.save(path, CalibrationFile(calibration, shape, weights))
        kv_choice._spec.cache_clear()
        kv_choice._plan.cache_clear()
        return real_config(additional_config={"haarkv_kv": "k=lr3,v=tq4", "haarkv_calibration": str(path)}, **options)

    with pytest.raises(ValueError, match="calibration was made for another model: 6 layers of 2 KV heads of 128, hidden 99"):
        build_config(ModelShape.uniform(LAYERS, 2, 128, 99, 4096))
    with pytest.raises(ValueError, match="up to 127 tokens, and this server takes up to 128; give --max-model-len 127,"):
        build_config(context=127)
    build_config(context=128)  # made-up weights fit any
    with pytest.raises(ValueError, match=r"other weights \(fingerprint 0123456789abcdef; this model's is [0-9a-f]{16}"):
        build_config(load_format="auto")
    build_config(weights=fingerprint(load_model("tiny").weights.named_tensors()), load_format="auto")


def test_what_only_other_kernels_read_is_refused(monkeypatch):
    config = real_config(additional_config={"haarkv_kv": "bf16"})
    assert limits._cache(config) is None
    monkeypatch.setattr(limits, "reads_here", lambda: ON_GPU)
    assert re.fullmatch("the GPU kernels read tq4, .*, not bf16", limits._cache(config))


@pytest.mark.parametrize(("size", "is_refused"), [(16, False), (128, False), (48, True), (2048, True)])
def test_blocks_that_a_stretch_ends_in_are_refused(monkeypatch, size, is_refused):
    """Those that were asked for, and those that vLLM chose itself."""
    pair, config = formats.parse("k=lr4,v=tq3", synthetic_calibration()), configuration()
    config.cache_config = SimpleNamespace(block_size=size)
    words = f"lr4 takes blocks that divide 1,024 tokens, not of {size}; give --block-size 128"
    monkeypatch.setattr(limits, "_weights", lambda _: None)
    for plan, expected in ((KVPlan((pair,) * 6), words if is_refused else None), (KVSpec("tq4").plan(6), None)):
        monkeypatch.setattr(limits, "kv_plan", lambda _, plan=plan: plan)
        assert limits._cache(config) == expected
    if is_refused:
        monkeypatch.setattr(backend, "require_supported", lambda _: None)
        monkeypatch.setattr(backend, "layer_formats", lambda *_: pair)
        config.compilation_config = SimpleNamespace(static_forward_context={layer_name(3): None})
        with pytest.raises(ValueError, match=words):
            backend.RotatedMetadataBuilder(plain_spec(Shape(block_size=size)), [layer_name(3)], config, torch.device("cpu"))


def test_kv_heads_that_ranks_cannot_share_are_refused():
    config = real_config()
    assert limits._cache(config) is None
    config.parallel_config.tensor_parallel_size = 3
    assert limits._cache(config) == "its 2 KV heads can be neither split evenly over 3 ranks nor held by as many each"


def test_the_platform_chooses_the_worker_that_knows_each_layers_pages():
    assert real_config().parallel_config.worker_cls == "haarkv.serving.vllm_plugin.cpu.RotatedCpuWorker"
    assert read_config("tiny").num_layers == LAYERS
    for name in (CPU_WORKER, GPU_WORKER):  # that of a GPU has not run
        worker = resolve_obj_by_qualname(name)
        assert issubclass(worker, VllmsWorker)
        assert worker.get_kv_cache_spec is pages.OwnPages.get_kv_cache_spec
    assert KVSpec("tq4").plan(LAYERS) == kv_choice.kv_plan(real_config())
