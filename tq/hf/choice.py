"""The cache of a transformers model where none is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AutoTokenizer, PreTrainedModel

from haarkv.engine.plans import WITH_CALIBRATION
from haarkv.models.catalog import read_config, stream_tensors
from haarkv.models.weights import fingerprint
from haarkv.tq_ops.errors import InputError, warn
from haarkv.tq_ops.formats.learned import LEAST_DIM
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.planning.auto import TOKENS
from haarkv.validation.planning.choice_cache import cache_for
from haarkv.validation.planning.common_text import samples
from tq.hf.calibrate import calibrate
from tq.hf.config import cache_layers, decoder_config, head_dims

_EXACT_KEYS = replace(WITH_CALIBRATION, kv="k=bf16,v=tq4")
"""Where keys cannot be learned."""
_SPECS: WeakKeyDictionary[PreTrainedModel, tuple[str, KVSpec]] = WeakKeyDictionary()
"""Of models in memory, with the weights that each was chosen for."""


def choose(config: Any, model: PreTrainedModel | None, tokenizer: Any = None) -> KVSpec:
    """What `tq generate` takes for the folder or Hub id in `config`; a model with other weights than those is learned from.

    Args:
        tokenizer: of `model`; by default that of its folder or Hub id.
    Raises:
        InputError: without a model, this machine has no folder to read.
    """
    name = str(getattr(config, "_name_or_path", None) or "")
    if model is None:
        try:
            return cache_for(name)
        except InputError as error:
            raise InputError(
                f"no cache can be chosen by a config alone: {error}; give TQCache(config, model=model), or a format as kv"
            ) from error
    weights = fingerprint(model.state_dict().items())
    known_weights, spec = _SPECS.get(model, ("", KVSpec()))
    if known_weights != weights:
        spec = cache_for(name) if weights == _stored_weights(name) else _learned(model, tokenizer, name)
        _SPECS[model] = weights, spec
    return spec


def _stored_weights(name: str) -> str:
    """The fingerprint of a model's files; "" if they cannot be read here."""
    try:
        return fingerprint(stream_tensors(name, read_config(name), torch.bfloat16), streamed=True)
    except InputError:
        return ""


def _learned(model: PreTrainedModel, tokenizer: Any, name: str) -> KVSpec:
    """`WITH_CALIBRATION`, with coordinates from the model's own attention on the built-in text; nothing is measured."""
    try:
        _require_learnable(model.config)
        file = calibrate(model, [_text(model, tokenizer, name)])
        if file.calibration.context is not None:
            raise InputError(f"its keys could be learned only up to {file.calibration.context:,} positions")
    except InputError as error:
        warn(f"K stays in bf16, and V in tq4: {error}")
        return _EXACT_KEYS
    return replace(file.spec, kv=WITH_CALIBRATION.kv, tail=WITH_CALIBRATION.tail, sink=WITH_CALIBRATION.sink)


def _require_learnable(config: Any) -> None:
    decoder = decoder_config(config)
    for layer in range(len(cache_layers(decoder))):
        if (dim := head_dims(decoder, layer)[0]) % LEAST_DIM:
            raise InputError(f"learned keys take a head_dim that {LEAST_DIM} divides, and this model's is {dim}")


def _text(model: PreTrainedModel, tokenizer: Any, name: str) -> list[int]:
    if tokenizer is None and name:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError, ImportError):
            tokenizer = None
    if tokenizer is None:
        raise InputError("to learn its keys, give the model's tokenizer as well, tokenizer=tokenizer")
    positions = getattr(decoder_config(model.config), "max_position_embeddings", None) or TOKENS
    token_ids = samples(tokenizer, min(TOKENS, positions))
    if max(token_ids) >= model.get_input_embeddings().weight.shape[0]:
        raise InputError("its tokenizer has more tokens than the model")
    return token_ids
