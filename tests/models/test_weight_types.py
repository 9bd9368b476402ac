"""Weights that stay in the blocks of their file: everything computes what it computes with the restored tensors."""

from dataclasses import replace
from functools import cache

import bounds
import gguf
import pytest
import torch
from family_models import folder_of, model_vocabulary, saved
from gguf_files import convert

import tq
from haarkv.executors.base import verify
from haarkv.executors.catalog import create
from haarkv.models.balance import balance, fold_scales
from haarkv.models.base import new_cache
from haarkv.models.catalog import load_model, open_source, read_config
from haarkv.models.checkpoint import load_weights, stored_tensors
from haarkv.models.fused import fuse
from haarkv.models.parallel import Split
from haarkv.models.weights import checkpoint_tensors, fingerprint, weight_bytes
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.weight import Blocks, backing_tensor, dense

NAMES = ("llama_tied", "qwen2", "qwen3_moe", "gemma3", "qwen3_5", "qwen3_5_moe")
TOKENS = torch.arange(40) * 7 % 300
__all__ = ["folder_of", "saved"]


@pytest.fixture(scope="module")
def file_of(folder_of):
    """GGUF files by name of the model and kind of its blocks, each written once."""

    @cache
    def get(name, kind="Q8_0"):
        return convert(folder_of(name), folder_of(name) / f"{kind}.gguf", kind, vocabulary=model_vocabulary(name))

    return get


def chunked_logits(executor, kv="fp32"):
    """Of a prompt in two chunks and a decode step."""
    cache, paging = new_cache(executor.config, KVSpec(kv).plan(executor.config.num_layers), sequences=1, tokens=64)
    sequence = paging.add()
    parts = [(0, 30), (30, 39), (39, 40)]
    rows = [verify(executor, TOKENS[a:b], paging.batch([sequence], [b - a]), cache).clone() for a, b in parts]
    return torch.cat(rows)


def distance(ours, theirs, name, dtype):
    """Relative; in BF16 with experts that of the median token: rounding sends a few through another expert."""
    if "moe" in name and dtype == "bfloat16":
        return ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median()
    return (ours - theirs).norm() / theirs.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", "float32"), ("Q5_1", "bfloat16")])
def test_blocks_multiply_as_what_is_restored_from_them(file_of, name, kind, dtype):
    block_model, dense_model = (load_model(file_of(name, kind), dtype, keep_blocks=keep) for keep in (True, False))
    assert isinstance(block_model.weights.layers[-1].matrix("q_proj"), Blocks)
    assert isinstance(block_model.weights.embedding, Blocks)
    assert block_model.dtype == dense_model.dtype
    plan = KVSpec("fp32").plan(block_model.config.num_layers)
    ours, theirs = (chunked_logits(create("reference", model, plan, None)) for model in (block_model, dense_model))
    # Blocks are multiplied as FP32 numbers; what is restored as a file loads has the model's dtype.
    assert torch.equal(ours, theirs) == (dtype == "float32")
    assert distance(ours, theirs, name, dtype) <= bounds.BLOCK_LOGITS[dtype]
    # The kernels of `cpu` round activations, and no weights.
    fast = chunked_logits(create("cpu", block_model, plan, None))
    assert not torch.equal(fast, ours)
    assert distance(fast, ours, name, dtype) <= bounds.BLOCK_LOGITS[dtype]


def test_fused_layers_restore_blocks_as_they_are_packed(file_of):
    ours, theirs = (fuse(load_model(file_of("qwen2"), keep_blocks=keep), torch.device("cpu")) for keep in (True, False))
    torch.testing.assert_close(*(dict(one.weights.named_tensors()) for one in (ours, theirs)), rtol=0, atol=0)


def test_bytes_are_those_of_the_file(file_of):
    path = file_of("llama_tied")
    model = load_model(path, keep_blocks=True)
    file_bytes = sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
    assert model.weights.nbytes == file_bytes < load_model(path, "bfloat16").weights.nbytes
    tensors = open_source(path).tensors()
    assert sum(one.nbytes for one in tensors.values()) == file_bytes
    # A file is mapped once: what two models share are its pages. Where the order of rows is another, each has a copy.
    first, second = (load_model(path, keep_blocks=True).weights.layers[0] for _ in range(2))
    shared = {name for name in first if _same_memory(first, second, name)}
    assert shared >= {"v_proj", "o_proj", "up_proj", "down_proj"}
    assert not shared & {"q_proj", "k_proj"}


def _same_memory(one, other, field):
    return backing_tensor(one.matrix(field)).data_ptr() == backing_tensor(other.matrix(field)).data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_the_fingerprint_is_that_of_the_restored_model(file_of, name):
    block_digest, dense_digest = (
        fingerprint(load_model(file_of(name), keep_blocks=keep).weights.named_tensors()) for keep in (True, False)
    )
    assert block_digest == dense_digest


def test_a_copy_on_another_device_has_all_of_it(file_of):
    model, _ = balance(load_model(file_of("qwen2"), keep_blocks=True))
    meta_blocks = model.weights.layers[0].matrix("q_proj").to(torch.device("meta"))
    assert meta_blocks.device.type == "meta"
    scaled_blocks = model.weights.layers[0].matrix("q_proj") * torch.full((384, 1), 2.0)
    assert scaled_blocks.to(torch.device("meta")).row_scales.device.type == "meta"
    assert scaled_blocks.nbytes == scaled_blocks.data.nbytes + 4 * 384


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3_moe"])
def test_a_rank_has_its_part_in_blocks_where_they_end_there(file_of, name):
    """What it restores is counted as numbers."""
    config, source = read_config(file_of(name)), open_source(file_of(name))
    specs = checkpoint_tensors(config)
    whole = dict(stored_tensors(source.path, source.tensors(), specs, torch.float32))
    for rank in range(2):
        split = Split(config, rank, 2)
        args = source.tensors(), specs, torch.float32, split
        parts = dict(stored_tensors(source.path, *args, keep_blocks=True))
        loaded = load_weights(source.path, args[0], config, torch.float32, split=split, keep_blocks=True)
        assert weight_bytes(*args, keep_blocks=True).total == loaded.nbytes
        for tensor_name, part in parts.items():
            assert torch.equal(dense(part), whole[tensor_name][split.slices(specs[tensor_name].axes)]), tensor_name
        assert isinstance(parts["model.layers.0.self_attn.o_proj.weight"], Blocks)  # 192 of 384 columns: whole blocks
        down = "mlp.experts.1.down_proj" if name == "qwen3_moe" else "mlp.down_proj"
        # 160 of 320 columns are five blocks; 48 of 96 are one and a half, and restored.
        assert isinstance(parts[f"model.layers.0.{down}.weight"], Blocks) == (name != "qwen3_moe")


@pytest.mark.parametrize("name", ["llama_tied", "qwen2"])
def test_balance_scales_blocks_as_it_scales_numbers(file_of, name):
    block_model, dense_model = (load_model(file_of(name), keep_blocks=keep) for keep in (True, False))
    uneven = torch.ones(2, 64)
    uneven[:, 5], uneven[1, 9] = 16.0, 0.125
    for side in "KV":
        ours, theirs = (fold_scales(model.weights.layers[0], side, uneven) for model in (block_model, dense_model))
        # Twice: scales meet scales.
        ours, theirs = fold_scales(ours, side, uneven), fold_scales(theirs, side, uneven)
        assert isinstance(ours.matrix("q_proj"), Blocks)
        for field in theirs:
            assert torch.equal(ours[field], theirs[field]), (side, field)
    assert balance(block_model)[1].uneven == balance(dense_model)[1].uneven


def test_a_damaged_block_is_named(file_of):
    model = load_model(file_of("llama_tied"), keep_blocks=True)
    faulty_blocks = model.weights.layers[1].matrix("up_proj")
    data = faulty_blocks.data.clone()
    data[3, :2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # the scale of a block becomes NaN
    layers = list(model.weights.layers)
    layers[1] = layers[1].map(lambda field, weight: replace(faulty_blocks, data=data) if field == "up_proj" else weight)
    model = replace(model, weights=replace(model.weights, layers=tuple(layers)))
    for executor in ("reference", "cpu"):
        with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds nan at \[3, 0\]"):
            chunked_logits(create(executor, model, KVSpec("fp32").plan(3), None))


@pytest.mark.parametrize("executor", ["reference", "cpu"])
def test_a_session_keeps_what_its_executor_multiplies_with(file_of, executor):
    def load_session(keep):
        return tq.load(file_of("llama_tied"), executor=executor, kv="tq4", allow_collapse=True, keep_blocks=keep)

    block_session, dense_session, by_itself = load_session(True), load_session(False), load_session(None)
    first, *others = (
        s.generate(["a b c"], max_new_tokens=12).completions[0] for s in (block_session, dense_session, by_itself)
    )
    assert all(other.token_ids == first.token_ids for other in others)
    assert block_session.weight_bytes < dense_session.weight_bytes / 3
    assert by_itself.weight_bytes == (block_session if executor == "cpu" else dense_session).weight_bytes
    assert (
        block_session.weights == dense_session.weights == by_itself.weights
    )  # what is remembered of one holds for the others


def test_types_stay_by_name(file_of):
    model = load_model(file_of("llama_tied", "Q5_1"), keep_blocks=("Q8_0",))
    assert not any(isinstance(weight, Blocks) for _, weight in model.weights.named_tensors())
    model = load_model(file_of("llama_tied", "Q5_1"), keep_blocks=("Q8_0", "Q5_1"))
    assert {weight.type.name for _, weight in model.weights.named_tensors() if isinstance(weight, Blocks)} == {"Q5_1"}
