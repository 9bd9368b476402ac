"""What cannot be served is refused as vLLM makes its configuration, in one line; and who takes the backend."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from planted import outlier_channels, save_tiny
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention.selector import get_attn_backend
from vllm_configs import WINDOW_MODEL, assert_refused, configure, write
from vllm_paged import Shape, packed_spec, vllm_metadata
from vllm_soak import look_up_stand_ins

from haarkv.models.catalog import TINY, find_model, load_model
from haarkv.serving.serve import cache_options, serve
from haarkv.serving.vllm_plugin import SINK, TAIL
from haarkv.serving.vllm_plugin.backend import RotatedAttentionBackend, RotatedMetadataBuilder
from haarkv.serving.vllm_plugin.limits import scales_here
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences

QWEN = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
HYBRID = json.loads((find_model("tiny-hybrid") / "config.json").read_text(encoding="utf-8"))
SMALL = {
    "dtype": "bfloat16", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": QWEN["vocab_size"], "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip


def small(architecture: str, model_type: str, **more: object) -> dict[str, object]:
    return {**SMALL, "architectures": [architecture], "model_type": model_type, **more}


WINDOWS = "full attention is served, and on a CPU windows of some of the layers, where layer_types names them"
EAGLE = small("Eagle3Qwen3ForCausalLM", "qwen3", hidden_size=QWEN["hidden_size"])
MODELS = {
    "sliding_window": (
        {**QWEN, "use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 6},
        f"it has sliding-window attention (of 64 tokens); {WINDOWS}",
    ),
    "head_dim_96": ({**QWEN, "head_dim": 96}, "the CPU kernels are made for a head_dim of 64, 128 or 256, not 96"),
    "encoder_decoder": ({**QWEN, "is_encoder_decoder": True}, "it is an encoder-decoder model; decoders alone are served"),
}
# The first look at an architecture starts a process that imports it; vLLM keeps what it found.
FOREIGN = {
    "mla": (
        small(
            "DeepseekV2ForCausalLM", "deepseek_v2", kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=64,
            first_k_dense_replace=2, moe_layer_freq=1,
        ),
        "it has multi-head latent attention (MLA), which caches one latent vector and no K and V",
    ),
    "hybrid": (
        small(
            "FalconH1ForCausalLM", "falcon_h1", head_dim=128, mamba_d_ssm=64, mamba_d_state=16, mamba_n_heads=4,
            mamba_d_head=16, mamba_n_groups=1, mamba_chunk_size=128, mamba_d_conv=4,
        ),
        "it is a hybrid model with layers that keep a state and no K and V; of these, Qwen3.5 is served, on CPUs",
    ),
    "chunked": (
        small(
            "Llama4ForCausalLM", "llama4_text", head_dim=128, attention_chunk_size=64, intermediate_size_mlp=64,
            num_local_experts=1, num_experts_per_tok=1,
        ),
        "it has chunked local attention; full attention alone is served",
    ),
}  # fmt: skip


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
ITSELF = {"method": "draft_model", "model": str(TINY), "num_speculative_tokens": 2}
STATES, BF16_TAIL = "layers that keep a state", "a tail in BF16"
OPTIONS = {
    "fp8": ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 names another format; leave it out"),
    "skipped_layers": (
        {"kv_cache_dtype_skip_layers": ["0"]},
        "--kv-cache-dtype-skip-layers is not supported; --kv-skip-layers leaves layers in BF16",
    ),
    "decode_context": (
        {"decode_context_parallel_size": 5, "tensor_parallel_size": 10},
        "context parallelism is not supported; --tensor-parallel-size is",
    ),
    "kv_transfer": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "KV transfer and offloading are not supported; leave them out",
    ),
    "drafts_on_a_gpu": (
        {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "speculative decoding by ngram_gpu is not supported; by ngram, draft_model and eagle3 it is",
    ),
    "pooling": ({"runner": "pooling"}, "it generates no text; pooling models keep no KV cache"),
    **{
        f"{name} beside {key}": ({"additional_config": {key: 8}, **options}, reason)
        for key in (TAIL, SINK)
        for name, options, reason in (
            ("drafts", {"speculative_config": ITSELF},
             f"speculative decoding by draft_model is not supported with {BF16_TAIL}; by ngram and eagle3 it is"),
            ("one table", {"disable_hybrid_kv_cache_manager": True},
             f"--disable-hybrid-kv-cache-manager was not tried with {BF16_TAIL}; leave it out"),
        )
    },
}  # fmt: skip
WINDOW_OPTIONS = {
    "drafts": ({"speculative_config": ITSELF},
               "speculative decoding by draft_model is not supported with sliding windows; by ngram it is"),
    "one table": ({"disable_hybrid_kv_cache_manager": True},
                  "--disable-hybrid-kv-cache-manager was not tried with sliding windows; leave it out"),
    "tail": ({"additional_config": {TAIL: 8}},
             f"{BF16_TAIL} is not supported with sliding windows; take a cache without, such as k=tq6,v=tq4"),
}  # fmt: skip
STATE_OPTIONS = {
    "drafts": ({"speculative_config": NGRAM}, f"speculative decoding by ngram is not supported with {STATES}; by mtp it is"),
    "prefixes": ({"speculative_config": MTP, "enable_prefix_caching": True},
                 f"on a CPU vLLM cannot keep prefixes with drafts and {STATES}; give --no-enable-prefix-caching"),
}  # fmt: skip
SERVED_OPTIONS = {
    "plain": {},
    "tensor_parallel": {"tensor_parallel_size": 2},
    "ngram": {"speculative_config": NGRAM},
    "draft_model": {"speculative_config": ITSELF},
    "ngram beside a tail": {"speculative_config": NGRAM, "additional_config": {TAIL: 8, SINK: 4}},
    "no_prefix_caching": {"enable_prefix_caching": False},
    "float16": {"dtype": "float16"},
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(*row, id=name, marks=mark)
        for rows, mark in ((MODELS, pytest.mark.vllm_short), (FOREIGN, pytest.mark.slow)) for name, row in rows.items()
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(tmp_path, config, reason):
    assert_refused(write(tmp_path / "model", config), reason)


@pytest.mark.slow
def test_drafts_that_bring_attention_layers_are_served(tmp_path):
    drafts = write(tmp_path / "drafts", EAGLE)
    speculative = {"method": "eagle3", "model": str(drafts), "num_speculative_tokens": 2}
    configure(write(tmp_path / "model", QWEN), speculative_config=speculative)


@pytest.mark.vllm_short
@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [*((QWEN, *row) for row in OPTIONS.values()), *((WINDOW_MODEL, *row) for row in WINDOW_OPTIONS.values())],
    ids=[*OPTIONS, *(f"{name} with windows" for name in WINDOW_OPTIONS)],
)
def test_an_option_that_cannot_be_served_is_refused_by_name(tmp_path, config, options, reason):
    assert_refused(write(tmp_path / "model", config), reason, **options)


@pytest.mark.slow
def test_what_was_not_tried_with_states_is_refused(tmp_path, monkeypatch):
    look_up_stand_ins(monkeypatch)
    folder = write(tmp_path / "model", HYBRID)
    for options, reason in STATE_OPTIONS.values():
        assert_refused(folder, reason, **options)


@pytest.mark.vllm_short
@pytest.mark.parametrize("name", SERVED_OPTIONS)
def test_what_can_be_served_is_not_refused(tmp_path, name):
    configure(write(tmp_path / "model", QWEN), **SERVED_OPTIONS[name])


@pytest.mark.vllm_short
def test_without_the_flag_nothing_is_refused_and_vllm_keeps_its_own_backend(tmp_path):
    for name, (config, _) in MODELS.items():
        if name != "encoder_decoder":  # vLLM itself has no such Qwen3
            configure(write(tmp_path / name, config), backend=None)
    assert backend_class(configure(write(tmp_path / "model", QWEN), backend=None)).get_name() == "CPU_ATTN"


@pytest.mark.vllm_short
def test_with_the_flag_the_platform_chooses_our_backend(tmp_path):
    config = configure(write(tmp_path / "model", QWEN))
    assert type(current_platform).__name__ == "RotatedCpuPlatform"
    assert backend_class(config) is RotatedAttentionBackend


def backend_class(config: VllmConfig) -> type:
    load_general_plugins()
    with set_current_vllm_config(config):
        return get_attn_backend(128, torch.bfloat16, "auto")


@pytest.mark.vllm_short
def test_a_builder_makes_batches_and_refuses_what_was_changed_behind_its_back(tmp_path):
    config, shape = configure(write(tmp_path / "model", QWEN)), Shape()
    builder = RotatedMetadataBuilder(packed_spec(shape), ["model.layers.0.self_attn.attn"], config, torch.device("cpu"))
    paging = PagedSequences(4, 16)
    expected = paging.batch([paging.add(), paging.add()], [3, 20])
    assert torch.equal(builder.build(0, vllm_metadata(expected)).batch.positions, expected.positions)
    config.cache_config.cache_dtype = "fp8"
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8 names another format"):
        RotatedMetadataBuilder(packed_spec(shape), ["model.layers.0.self_attn.attn"], config, torch.device("cpu"))


@pytest.mark.vllm_short
def test_uneven_channels_are_balanced_or_refused_by_the_weights(tmp_path):
    uneven = outlier_channels(100)
    folder = save_tiny(uneven, tmp_path / "model")

    def config(**options: object) -> VllmConfig:
        return configure(folder, load_format="auto", additional_config=options)

    scales = scales_here(config())
    assert scales.keys() == set(range(6))
    for k, v in scales.values():
        assert k is not None
        assert v is not None
        assert (k < 0.1).sum(1).tolist() == [4, 4]
        assert (v < 0.1).sum(1).tolist() == [2, 2]
    reason = "garbage: K of layers 0 to 5 suffers in tq4"
    with pytest.raises(InputError, match=f"{reason}.*haarkv_allow_collapse true goes on"):
        scales_here(config(haarkv_balance=False))
    with pytest.raises(InputError, match=f"{reason}.*--allow-collapse goes on"):  # before anything is started
        serve(str(folder), cache_options(balance=False), ["--max-model-len", "128"])
    allowed_scales = scales_here(config(haarkv_balance=False, haarkv_allow_collapse=True))
    assert set(allowed_scales.values()) == {(None, None)}
    # One layer of six is warned of, as elsewhere.
    layers = list(load_model("tiny").weights.layers)
    layers[3] = uneven.weights.layers[3]
    folder = save_tiny(replace(uneven, weights=replace(uneven.weights, layers=tuple(layers))), tmp_path / "one")
    assert set(scales_here(config(haarkv_balance=False)).values()) == {(None, None)}
    folder = TINY
    assert set(scales_here(config()).values()) == {(None, None)}
