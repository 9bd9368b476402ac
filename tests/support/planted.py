"""`tiny` with planted faults, on disk and in memory; what plants them is `outliers`."""

import json
import shutil
from dataclasses import replace
from functools import cache

import outliers
import torch
from safetensors.torch import save_file

from haarkv.models.catalog import TINY, load_model
from haarkv.models.text import load_tokenizer
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec


@cache
def tiny():
    return load_model("tiny")


@cache
def text():
    """Held-out text of `tiny`."""
    return next(text for text in held_out_texts().values() if len(text) > 20_000)


@cache
def token_ids(count):
    return tuple(load_tokenizer("tiny", tiny().config).encode(text())[:count])


@cache
def tiny_qwen2():
    """`tiny` as a Qwen2: its norms of Q and K are fixed where they are on average, its biases are 0."""
    return outliers.without_norms(tiny(), "qwen2", *outliers.measured_rms(tiny(), token_ids(128)))


def run(model, ids, ops=reference, kv="bf16"):
    """Logits [T, vocab] after each of some tokens."""
    config = model.config
    blocks = -(-len(ids) // 128)
    plan = KVSpec(kv).plan(config.num_layers)
    cache = PagedKVCache(plan, config.kv_shapes, num_blocks=blocks, states=config.state_shapes)
    paging = PagedSequences(blocks, 128)
    batch = paging.batch([paging.add()], [len(ids)])
    with torch.inference_mode():
        hidden = model.layers(model.embed(torch.tensor(ids)), range(config.num_layers), batch, cache, ops)
        return model.head(hidden, ops)


def dead_head(model, head=0):
    """A KV head whose V is 0 in every layer: its query heads give nothing. The function differs."""
    dim = model.config.heads.head_dim
    rows = torch.ones(model.config.heads.kv_size)
    rows[head * dim : (head + 1) * dim] = 0.0

    def change(field, tensor):
        return tensor * rows[:, None].to(tensor.dtype) if field == "v_proj" else tensor

    layers = tuple(layer.map(change) for layer in model.weights.layers)
    return replace(model, weights=replace(model.weights, layers=layers))


def save_tiny(model, folder):
    """Write a model made of `tiny` as a checkpoint folder, which must not be there."""
    folder.mkdir(parents=True)
    settings = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    if settings["model_type"] != model.config.model_type:
        del settings["architectures"]  # readers know it by the model type
    settings |= {"model_type": model.config.model_type, "hidden_size": model.config.hidden_size, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, folder / name)
    save_file({name: tensor.contiguous() for name, tensor in model.weights.named_tensors()}, folder / "model.safetensors")
    return folder
