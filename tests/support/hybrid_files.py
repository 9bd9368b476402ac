"""Hybrids as GGUF files: small ones that transformers wrote, and the one that ships."""

import shutil
from functools import cache

import pytest
import torch
from gguf_files import byte_vocabulary, convert
from transformers_judge import saved_random

from haarkv.executors.base import verify
from haarkv.executors.cpu import CpuExecutor
from haarkv.models.caches import new_cache
from haarkv.models.catalog import path_of
from haarkv.tq_ops.kv.plan import KVSpec

SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
MODELS = {"dense": ("Qwen3_5Text", {}), "experts": ("Qwen3_5MoeText", EXPERTS)}
VOCABULARY = byte_vocabulary(pre="qwen35", special=tuple(f"<|{number}|>" for number in range(38)))
TOKENS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders that transformers wrote, by name, each written once."""
    return cache(lambda name: saved_random(tmp_path_factory.mktemp(name), MODELS[name][0], SHAPE | MODELS[name][1]))


@pytest.fixture(scope="module")
def in_gguf(tmp_path_factory):
    """As llama.cpp's converter would write it, its drafting layer behind the others."""
    folder = tmp_path_factory.mktemp("hybrid")
    shutil.copytree(path_of("tiny-hybrid"), folder / "said", ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))
    vocabulary = byte_vocabulary(pre="qwen35", special=("<|end|>",))
    return convert(folder / "said", folder / "m.gguf", vocabulary=vocabulary)


def logits_of(model, tokens):
    """[T, vocab] on `cpu`, nothing rounded."""
    cache, paging = new_cache(model.config, KVSpec("fp32").plan(model.config.num_layers), sequences=1, tokens=len(tokens))
    return verify(CpuExecutor(model), torch.tensor(tokens), paging.batch([paging.add()], [len(tokens)]), cache)
