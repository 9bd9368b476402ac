"""vLLM's configuration of models that are nothing but a config.json, and what it says of those that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

WINDOW, LAYERS = 64, ["sliding_attention", "sliding_attention", "full_attention"] * 2
WINDOW_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "head_dim": 64,
    "intermediate_size": 512, "num_hidden_layers": len(LAYERS), "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "dtype": "bfloat16",
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "sliding_window": WINDOW, "layer_types": LAYERS,
}  # fmt: skip
"""A config.json of which some layers attend to a window."""


def write(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def configure(folder: Path, backend: str | None = "CUSTOM", **options: object) -> VllmConfig:
    """vLLM's configuration for a folder; a config.json is enough, unless `load_format` asks for weights."""
    options = {"load_format": "dummy", "max_model_len": 128, **options}
    args = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, attention_backend=backend, enforce_eager=True,
        kv_cache_memory_bytes=2**24, **options,
    )  # fmt: skip
    return args.create_engine_config()


def assert_refused(folder: Path, reason: str, **options: object) -> None:
    with pytest.raises(ValidationError) as error:
        configure(folder, **options)
    [only] = error.value.errors()
    assert str(only["ctx"]["error"]) == f"a tq4 KV cache cannot serve {folder}: {reason}"
