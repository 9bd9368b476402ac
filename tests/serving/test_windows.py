"""Models in which some layers attend to a window: vLLM keeps these, full attention is packed, and the text is vLLM's own."""

from __future__ import annotations

import math
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm_configs import assert_refused, configure, write
from vllm_judge import prompts
from vllm_server import Answer, serving

from haarkv.models.catalog import TINY
from haarkv.serving.vllm_plugin.backend import with_content
from haarkv.serving.vllm_plugin.kv_choice import kv_plan, sliding_layers
from haarkv.serving.vllm_plugin.pages import fit_windows

WINDOW, LAYERS = 64, ["sliding_attention", "sliding_attention", "full_attention"] * 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "head_dim": 64,
    "intermediate_size": 512, "num_hidden_layers": len(LAYERS), "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "dtype": "bfloat16",
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "sliding_window": WINDOW, "layer_types": LAYERS,
}  # fmt: skip
PROMPTS = prompts(12, (130, 200, 300, 700))
NEW_TOKENS = 24


def checkpoint(folder: Path, **overrides: object) -> str:
    """Random weights, the same for every config."""
    write(folder, {**CONFIG, **overrides})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    draw, hidden = torch.Generator().manual_seed(0), 256
    shapes = {"model.embed_tokens": (4096, hidden), "model.norm": (hidden,)}
    for layer in range(len(LAYERS)):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (256, hidden), "self_attn.k_proj": (128, hidden), "self_attn.v_proj": (128, hidden),
                "self_attn.o_proj": (hidden, 256), "mlp.gate_proj": (512, hidden), "mlp.up_proj": (512, hidden),
                "mlp.down_proj": (hidden, 512), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            }.items()
        }  # fmt: skip
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=draw) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def error(ours: list[Answer], theirs: list[Answer]) -> float:
    """Of the median answer: how far log-probabilities of the likeliest tokens are apart at most, on average over positions.

    Positions after the same tokens count; one where no token is among the likeliest of both is infinitely far.
    """
    means = []
    for a, b in zip(ours, theirs, strict=True):
        gaps = []
        for place, (one, other) in enumerate(zip(a.candidates, b.candidates, strict=True)):
            if a.token_ids[:place] == b.token_ids[:place]:
                our_logprobs, their_logprobs = dict(one), dict(other)
                gaps.append(
                    max(
                        (
                            abs(our_logprobs[token] - their_logprobs[token])
                            for token in our_logprobs.keys() & their_logprobs.keys()
                        ),
                        default=math.inf,
                    )
                )
        means.append(statistics.mean(gaps))
    return statistics.median(means)


@pytest.mark.vllm_server
def test_the_text_is_that_of_vllms_own_cache_and_that_of_another_window_is_not(tmp_path, record_property):
    model, other = checkpoint(tmp_path / "model"), checkpoint(tmp_path / "other", sliding_window=WINDOW - 16)
    answers, tokens = {}, {}
    for name, folder, kv in (("bf16", model, "bf16"), ("tq8", model, "tq8"), ("tq4", model, "tq4"), ("other", other, "bf16")):
        with serving(tmp_path / f"{name}.log", kv=kv, model=folder, cache_bytes=2**25) as server:
            answers[name] = server.complete(PROMPTS, NEW_TOKENS)
            # The second time prompts are known; a window's first blocks are gone.
            assert server.complete(PROMPTS, NEW_TOKENS) == answers[name] or name == "bf16"
            tokens[name] = server.kv_tokens()
    off = {name: error(answers["bf16"], answers[name]) for name in ("tq8", "tq4", "other")}
    record_property("errors", str(off))
    record_property("tokens", str(tokens))
    print(off, tokens)
    assert off["tq8"] < off["tq4"] < off["other"] / 4
    assert tokens["tq4"] > 1.2 * tokens["bf16"]


@pytest.mark.vllm_short
def test_layers_with_a_window_stay_with_vllm(tmp_path):
    config = configure(write(tmp_path / "model", CONFIG))
    assert sliding_layers(config.model_config) == (0, 1, 3, 4)
    assert config.attention_config.backend_per_kind == {"sliding_window": AttentionBackendEnum.CPU_ATTN}
    assert [k.name for k, _ in kv_plan(config).layers] == ["bf16", "bf16", "tq4"] * 2


@pytest.mark.vllm_short
def test_what_was_not_tried_with_windows_is_refused(tmp_path):
    folder = write(tmp_path / "model", CONFIG)
    drafts = {"method": "draft_model", "model": str(TINY), "num_speculative_tokens": 2}
    reason = "speculative decoding by draft_model is not supported with sliding windows; by ngram it is"
    assert_refused(folder, reason, speculative_config=drafts)
    one_table = {"disable_hybrid_kv_cache_manager": True}
    reason = "--disable-hybrid-kv-cache-manager was not tried with sliding windows; leave it out"
    assert_refused(folder, reason, **one_table)


@pytest.mark.vllm_short
@pytest.mark.parametrize(("content", "block"), [(68, 32), (132, 64), (256, 128), (20, 32)])
def test_blocks_of_windows_are_as_large_as_fits_a_packed_page(content, block):
    """K and V of one token and KV head of 64 in bf16 take 256 bytes; `content` packed."""
    shape = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    packed, sliding = with_content(FullAttentionSpec(**shape), content), SlidingWindowSpec(**shape, sliding_window=64)
    specs = fit_windows({"full": packed, "window": sliding})
    assert specs == {"full": packed, "window": SlidingWindowSpec(**{**shape, "block_size": block}, sliding_window=64)}
    assert specs["window"].page_size_bytes <= packed.page_size_bytes or block == 32
