"""What a benchmark serves, and how its servers keep K and V.

The model is a checkpoint as it is, or a Qwen3's true shapes with few of its layers and random weights. A storage is a format,
a pair of them, learned coordinates, or a plan's file.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from haarkv.engine.plans import shape_of
from haarkv.models.catalog import TINY, path_of, read_config
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import made_up
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, calibration_of
from haarkv.tq_ops.kv.plan import KVSpec

_WORDS = 4096  # of the tokenizer that random weights are served with; ids from there on mean nothing


class Served(NamedTuple):
    """A model folder for vLLM, what it is for people, and the flags of vLLM that it needs."""

    folder: Path
    config: ModelConfig
    said: str
    flags: tuple[str, ...] = ()


def model_folder(name: str, layers: int | None, scratch: Path) -> Served:
    """A model by name as a folder; for `random:SIZE` one is made in `scratch`, a config of so many layers without weights.

    Raises:
        InputError: no such model, or layers that it does not have.
    """
    folder, config = path_of(name), read_config(name, layers)
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
    shape = config.attentions[0].heads
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16",
        "hidden_size": config.hidden_size, "intermediate_size": config.common.mlp.width,
        "num_hidden_layers": config.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "vocab_size": config.vocab_size,
        "rope_theta": config.common.attention.rope.theta, "rms_norm_eps": config.final_norm.eps, "hidden_act": "silu",
        "tie_word_embeddings": config.tied, "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False, "use_sliding_window": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


_ANY_WEIGHTS = "0" * 16
"""The fingerprint of made-up coordinates: they belong to random weights, which are not compared."""


class Storage(NamedTuple):
    """One way to keep K and V: what rows call it, and the flags of `tq serve` that ask for it."""

    name: str
    flags: tuple[str, ...]


def names_in(text: str) -> list[str]:
    """Formats with commas between: `bf16,tq4,k=lr4,v=tq3` names three. One that is none is refused."""
    names = list(dict.fromkeys(part.strip() for part in re.split(r",(?!\s*v=)", text)))
    for name in names:
        formats.parse(name, made_up.calibration())  # of any model: which formats there are does not depend on it
    return names


def storages(
    names: Sequence[str],
    plans: Sequence[Path],
    calibration: Path | None,
    config: ModelConfig,
    scratch: Path,
    *,
    random: bool,
) -> list[Storage]:
    """What is asked for, in order: formats, with a file of `tq calibrate` for `lrB`, then files of `tq plan`.

    Args:
        scratch: a folder for made-up coordinates: they take as long as learned ones, and random weights fit any.
        random: whether the weights are.
    Raises:
        InputError: learned formats of a model with weights, without a calibration; or a file that does not fit.
    """
    found: list[tuple[Storage, KVSpec]] = []
    for name in names:
        if not formats.needs_calibration(name):
            found.append((Storage(name, ("--kv", name)), KVSpec(name)))
            continue
        if calibration is None and not random:
            raise InputError(f"{name} needs coordinates of this model; give --calibration FILE")
        calibration = calibration or _made_up(config, scratch)
        spec = replace(calibration_file.load(calibration).spec, kv=name)
        found.append((Storage(name, ("--kv", name, "--calibration", str(calibration))), spec))
    found += [(Storage(file.stem, ("--kv-plan", str(file))), plan_file.load(file)) for file in plans]
    for _, spec in found:
        spec.plan(config.num_layers, shape_of(config))
    return [storage for storage, _ in found]


def _made_up(config: ModelConfig, scratch: Path) -> Path:
    _, kv_heads, dim = config.attentions[0].heads
    calibration = made_up.calibration(config.num_layers, kv_heads, dim)
    path = scratch / "made-up.safetensors"
    file = CalibrationFile(calibration_of(calibration.k), shape_of(config), _ANY_WEIGHTS)
    path.write_bytes(calibration_file.dumps(file))
    return path
