"""Small models of every family, as transformers writes them and as GGUF files: one table for all tests of loading."""

from functools import cache

import pytest
import torch
from gguf_files import LLAMA3, SHAPE, YARN, byte_vocabulary
from small_models import text_logits
from transformers_judge import saved_random

from haarkv.executors.cpu import CpuExecutor

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
GEMMA3 = {
    "num_key_value_heads": 1,
    "num_hidden_layers": 7,
    "sliding_window": 40,
    "query_pre_attn_scalar": 64,
    "hidden_size": 96,
}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}
MODELS = {
    "qwen3": ("Qwen3", {"num_attention_heads": 10, "head_dim": 128, "rope_theta": 1e6}),
    "qwen3_one_kv_head": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 256, "rope_theta": 5e5}),
    "qwen3_tied": ("Qwen3", {
        "num_attention_heads": 4, "num_key_value_heads": 4, "rope_theta": 1e4, "tie_word_embeddings": True}),
    "qwen3_yarn": ("Qwen3", {"rope_parameters": YARN}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe_plain_sums": ("Qwen3Moe", EXPERTS | {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "llama": ("Llama", {"rope_theta": 5e5, "rms_norm_eps": 1e-5}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None, "rope_parameters": LINEAR}),
    "mistral_window": ("Mistral", {"sliding_window": 40, "rope_theta": 1e6}),
    "qwen2": ("Qwen2", {"rope_theta": 1e6}),
    "qwen2_yarn": ("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1, "rope_parameters": YARN}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}),
    "gemma": ("Gemma", {}),
    "gemma3": ("Gemma3Text", GEMMA3),
    "gemma3_scaled": ("Gemma3Text", GEMMA3 | {"query_pre_attn_scalar": 48, "rope_parameters": {
        "full_attention": LINEAR | {"factor": 8.0, "rope_theta": 1e6}, "sliding_attention": LINEAR}}),
}  # fmt: skip
"""Name -> class of transformers, and what its config says beside SHAPE."""
DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 48,
    "linear_value_head_dim": 32,
}  # fmt: skip
SHARED = EXPERTS | {"shared_expert_intermediate_size": 64}
HYBRIDS = {
    "qwen3_5": ("Qwen3_5Text", DELTA | {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]}}),
    "qwen3_5_tied_3_taps": ("Qwen3_5Text", DELTA | {"tie_word_embeddings": True, "linear_conv_kernel_dim": 3,
        "full_attention_interval": 2, "linear_num_value_heads": 2}),
    "qwen3_5_moe": ("Qwen3_5MoeText", DELTA | SHARED),
    "qwen3_next": ("Qwen3Next", DELTA | SHARED),
    "qwen3_next_plain_sums": ("Qwen3Next", DELTA | SHARED | {"norm_topk_prob": False, "num_experts_per_tok": 3,
        "linear_value_head_dim": 64}),
}  # fmt: skip
"""The same, of families with layers of Gated DeltaNet."""
IN_FILES = (
    "llama", "llama_tied", "llama3", "mistral", "qwen2", "qwen3_yarn", "qwen3_moe", "gemma3", "qwen3_5", "qwen3_5_moe"
)  # fmt: skip
"""Those that `convert` writes as GGUF files."""
TOKENS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def model_vocabulary(name):
    """Of as many tokens as the model has, for a GGUF file."""
    return byte_vocabulary("qwen35", special=tuple(f"<|{n}|>" for n in range(38))) if name in HYBRIDS else byte_vocabulary()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder and transformers model by name, each written once."""

    @cache
    def get(name):
        folder, (family, entries) = tmp_path_factory.mktemp(name), (MODELS | HYBRIDS)[name]
        return folder, saved_random(folder, family, SHAPE | entries)

    return get


@pytest.fixture(scope="module")
def folder_of(saved):
    """The folder alone."""
    return lambda name: saved(name)[0]


def cpu_logits(model, tokens):
    """[T, vocab] on `cpu`, nothing rounded."""
    return text_logits(CpuExecutor(model), tokens)
