"""What is served in a benchmark: a checkpoint as it is, or a Qwen3's true shapes with few of its layers and random weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from haarkv.models.config import ModelConfig
from haarkv.models.catalog import TINY, folder_of, read_config
from haarkv.tq_ops.errors import InputError

_WORDS = 4096
"""Of the tokenizer that random weights are served with; ids from there on mean nothing."""


@dataclass(frozen=True)
class Served:
    """A model folder for vLLM.

    Attributes:
        said: what it is, for people.
        flags: of vLLM, that the folder needs.
    """

    folder: Path
    config: ModelConfig
    said: str
    flags: tuple[str, ...] = ()


def model_folder(name: str, layers: int | None, scratch: Path) -> Served:
    """A model by name as a folder; for `random:SIZE` one is made in `scratch`, a config without weights.

    Args:
        name: `tiny`, `random:SIZE` (0.6b … 32b) or a folder in Hugging Face format.
        layers: for `random:SIZE`, how many of its layers.
    Raises:
        InputError: no such model, or layers that it does not have.
    """
    folder, config = folder_of(name), read_config(name, layers)
    if folder is not None:
        return Served(folder.resolve(), config, f"{name}, {config.num_layers} layers")
    whole = read_config(name)
    if whole.model_type != "qwen3":
        raise InputError(f"only a dense Qwen3 is served with random weights, {name} is a {whole.model_type}")
    config = replace(config, vocab_size=scaled_vocabulary(whole.vocab_size, config.num_layers, whole.num_layers))
    made = scratch / f"{name.replace(':', '-')}-{config.num_layers}-layers"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(hf_config(config)), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / file, made / file)
    said = f"{name}, {config.num_layers} of {whole.num_layers} layers, {config.vocab_size:,} of {whole.vocab_size:,} words"
    return Served(made, config, f"{said}, random weights", ("--load-format", "dummy"))


def scaled_vocabulary(words: int, layers: int, of_layers: int) -> int:
    """As many words as give the head the share of a step that it has in the whole model; a multiple of 128."""
    return max(_WORDS, -(-words * layers // (of_layers * 128)) * 128)


def hf_config(config: ModelConfig) -> dict[str, object]:
    """Shapes as the `config.json` of a dense Qwen3 says them."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16",
        "hidden_size": config.hidden_size, "intermediate_size": config.common.mlp.width,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.heads.num_heads,
        "num_key_value_heads": config.heads.num_kv_heads, "head_dim": config.heads.head_dim, "vocab_size": config.vocab_size,
        "rope_theta": config.rope_theta, "rms_norm_eps": config.final_norm.eps, "hidden_act": "silu",
        "tie_word_embeddings": config.tied, "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False, "use_sliding_window": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
