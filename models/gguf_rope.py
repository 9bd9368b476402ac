"""RoPE's scaling from a GGUF file, as the entries of a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor

from haarkv.models.rope import Llama3Scaling
from haarkv.tq_ops.errors import InputError

_KEYS = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_NEUTRAL = {"finetuned": None, "attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
"""Further keys and the value with which each changes nothing; None: whatever it is."""
_AS_TRAINED = 8192
_LEAST_ERROR = 1e-4


def scaling_entries(path: Path, architecture: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling`, where a file asks for one; {} if it does not.

    Raises:
        InputError: a part of it that no `config.json` can say, by name.
    """
    prefix = f"{architecture}.rope.scaling."
    said = {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
    factor = said.pop("factor", None) or entries.get(f"{architecture}.rope.scale_linear")
    kind = said.pop("type", "linear" if factor else "none")  # llama.cpp's own default
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return {}
    found: dict[str, Any] = {"rope_type": kind} | ({} if factor is None else {"factor": factor})
    for key, value in said.items():
        if key in _KEYS:
            found[_KEYS[key]] = value
        elif key not in _NEUTRAL or _NEUTRAL[key] not in (None, value):
            raise InputError(f"{path}: {prefix}{key} is {shown(value)}, which this project does not build")
    return {"rope_scaling": found}


def llama3_entries(path: Path, factors: Tensor, theta: float) -> dict[str, Any]:
    """`rope_scaling` of a Llama 3, whose frequencies are divided by factors.

    Short waves have 1, long ones the same large factor, and between them 1/factor grows as the frequency does: a line, whose
    two ends are all that Llama 3's four numbers say.

    Args:
        factors: [D/2] fp32.
    Raises:
        InputError: they are none of Llama 3's.
    """
    half = len(factors)
    plain = 1.0 / (theta ** (torch.arange(half, dtype=torch.float64) / half))
    factors = factors.double()
    largest = float(factors.max())
    if not (math.isfinite(largest) and float(factors.min()) > 0):
        raise InputError(f"{path}: rope_freqs.weight has factors that RoPE cannot be divided by")
    if largest == 1.0 == float(factors.min()):
        return {}
    between = (factors > 1.0) & (factors < largest)
    blend = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
    if len(blend) < 2:  # nothing to lay a line through: the numbers of all Llamas that there are
        low, high = 1.0, 4.0
    else:
        turns = _AS_TRAINED * plain[between] / (2 * math.pi)
        slope = float((blend[-1] - blend[0]) / (turns[-1] - turns[0]))
        low = float(turns[0] - blend[0] / slope) if slope > 0 else 0.0
        low, high = (float(f"{bound:.6g}") for bound in (low, low + 1 / slope if slope > 0 else 0.0))
    found = {"factor": largest, "low_freq_factor": low, "high_freq_factor": high}
    if 0 < low < high:
        scaling = Llama3Scaling(largest, low, high, _AS_TRAINED)
        error = (plain.float() / scaling.scaled(plain.float(), theta) / factors - 1).abs().max()
        if float(error) <= _LEAST_ERROR:
            return {"rope_scaling": found | {"rope_type": "llama3", "original_max_position_embeddings": _AS_TRAINED}}
    raise InputError(f"{path}: rope_freqs.weight holds factors that are none of Llama 3's RoPE, the one that is built")
