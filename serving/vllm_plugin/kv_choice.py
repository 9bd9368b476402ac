"""Formats of each layer's pages, from `--additional-config`, which vLLM hands to all processes; each reads its files once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from haarkv.engine import plans
from haarkv.models.catalog import open_source, read_config
from haarkv.models.families import FAMILIES
from haarkv.models.hf_config import parse_config
from haarkv.models.parallel import kv_heads_of
from haarkv.serving.vllm_plugin import CALIBRATION, FORMAT, KV, PLAN, SINK, SKIP_LAYERS, TAIL
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

Pair = tuple[KVFormat, KVFormat]
"""K's format and V's."""

_SLIDING, _FULL, _STATE = "sliding_attention", "full_attention", "linear_attention"
_HYBRIDS = tuple(kind for kind, of in FAMILIES.items() if "linear_key_head_dim" in of.defaults and not kind.endswith("_next"))
"""Families with Gated DeltaNet; Qwen3-Next was not tried."""
_DRAFT_PREFIXES = ("draft_model.", "mtp.")
"""Layer name prefixes of a draft model and of Qwen3.5's MTP."""


def spec_from(options: Mapping[str, Any]) -> KVSpec:
    """The requested cache, from the content of `--additional-config`."""
    return _spec(_text(options))


def kv_plan(vllm_config: VllmConfig) -> KVPlan:
    """The plan for all KV heads of the model's own layers; those with sliding windows stay with vLLM, in BF16."""
    plan = _plan(_text(vllm_config.additional_config), shape_signature(vllm_config), None)
    if not (sliding := sliding_layers(vllm_config.model_config)):
        return plan
    return replace(plan, layers=tuple(exact_pair() if layer in sliding else pair for layer, pair in enumerate(plan.layers)))


def sliding_layers(model: ModelConfig) -> tuple[int, ...]:
    """Layers with a sliding window beside full attention; () if none, or if the config names no layer types."""
    return () if model.get_sliding_window() is None else _kind_layers(model, _SLIDING)


def state_layers(model: ModelConfig) -> tuple[int, ...]:
    """Layers with a state in place of K and V in a Qwen3.5; else ()."""
    is_known = getattr(model.hf_text_config, "model_type", None) in _HYBRIDS
    return _kind_layers(model, _STATE) if model.is_hybrid and is_known else ()


def _kind_layers(model: ModelConfig, kind: str) -> tuple[int, ...]:
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    return tuple(layer for layer, layer_kind in enumerate(kinds) if layer_kind == kind) if set(kinds) == {kind, _FULL} else ()


def layer_formats(vllm_config: VllmConfig, layer_name: str) -> Pair:
    """Formats of this rank's KV heads of a layer; a draft's layers are stored in `KV`."""
    if is_of_draft(vllm_config, layer_name):
        return default_pair()
    return _plan_here(vllm_config).layers[_index_in(layer_name)]


def is_of_draft(vllm_config: VllmConfig, layer_name: str) -> bool:
    """Whether a layer is a draft's: some are numbered from 0 too, an EAGLE head's from the last on."""
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return layer_name.startswith(_DRAFT_PREFIXES) or _index_in(layer_name) >= layers


def _index_in(layer_name: str) -> int:
    from vllm.model_executor.models.utils import extract_layer_index

    return extract_layer_index(layer_name)


def default_pair() -> Pair:
    """K and V in `KV`."""
    return formats.parse(KV)


def exact_pair() -> Pair:
    """K and V in BF16."""
    return formats.parse("bf16")


def tail_tokens(packed: int, exact: int, block_size: int) -> int:
    """Tokens of a BF16 block: the largest power of two that fits into a packed block of the shared pool, at least 16.

    Args:
        packed: bytes of a packed block, all layers.
        exact: bytes of one BF16 token, all layers that keep some.
        block_size: tokens of a packed block.
    """
    most = max(16, min(packed // exact, block_size))
    return int(1 << (most.bit_length() - 1))


def content_bytes(pair: Pair, head_dim: int, v_dim: int | None = None) -> int:
    """Bytes of K and V of one token and KV head."""
    k_format, v_format = pair
    return int(k_format.bytes_per_vector(head_dim) + v_format.bytes_per_vector(v_dim or head_dim))


def shape_signature(vllm_config: VllmConfig) -> ModelShape:
    """The model's shape, by which plans identify it."""
    model = vllm_config.model_config
    if model.is_hybrid:
        return _hybrid_shape(model.model)
    uniform = ModelShape.uniform(
        model.get_total_num_hidden_layers(), model.get_total_num_kv_heads(), model.get_head_size(), model.get_hidden_size(),
        model.get_vocab_size(),
    )  # fmt: skip
    return replace(uniform, declaration=plans.declaration_in(getattr(model.hf_text_config, "to_dict", dict)()))


@cache
def _hybrid_shape(model: str) -> ModelShape:
    # vLLM's configuration has one shape for all layers. Weights are vLLM's business.
    source = open_source(model)
    return plans.shape_signature(parse_config(source.settings_path, source.settings()) if source else read_config(model))


def _plan_here(vllm_config: VllmConfig) -> KVPlan:
    """The plan of this rank's KV heads."""
    options_text, shape = _text(vllm_config.additional_config), shape_signature(vllm_config)
    size = vllm_config.parallel_config.tensor_parallel_size
    if size == 1:
        return _plan(options_text, shape, None)
    from vllm.distributed import get_tensor_model_parallel_rank

    heads = kv_heads_of(vllm_config.model_config.get_total_num_kv_heads(), get_tensor_model_parallel_rank(), size)
    return _plan(options_text, shape, (heads.start, heads.stop))


def _text(options: Mapping[str, Any]) -> str:
    """What `--additional-config` says of the cache, as text, by which files that were read are remembered."""
    ours = {key: options[key] for key in (FORMAT, CALIBRATION, PLAN, SKIP_LAYERS, TAIL, SINK) if key in options}
    try:
        return json.dumps(ours, sort_keys=True)
    except TypeError:
        raise InputError(f"--additional-config takes texts, numbers and lists, not {ours}") from None


@cache
def _spec(options_text: str) -> KVSpec:
    options = json.loads(options_text)
    for key in (FORMAT, CALIBRATION, PLAN):
        if not isinstance(options.get(key), str | None):
            raise InputError(f"{key} is a text, not {options[key]!r}")
    skip_layers = options.get(SKIP_LAYERS, [])
    if not isinstance(skip_layers, list) or not all(type(layer) is int for layer in skip_layers):
        raise InputError(f"{SKIP_LAYERS} is a list of layers, not {skip_layers!r}")
    for key in (TAIL, SINK):
        if (count := options.get(key)) is not None and type(count) is not int:
            raise InputError(f"{key} is a number of tokens, not {count!r}")
    if (plan := options.get(PLAN)) is not None:
        others = [key for key in (FORMAT, CALIBRATION, SKIP_LAYERS, SINK) if options.get(key)]
        if others := others + [TAIL] * (options.get(TAIL) is not None):
            raise InputError(f"{PLAN} sets the whole cache; leave out {others[0]}")
        return plan_file.load(plan)
    calibration, settings = options.get(CALIBRATION), {"tail": options.get(TAIL), "sink": options.get(SINK) or 0}
    base = KVSpec() if calibration is None else calibration_file.load(calibration).spec
    spec = replace(base, kv=options.get(FORMAT) or KV, skip_layers=tuple(skip_layers), **settings)
    formats.parse(spec.kv, spec.calibration)  # an unknown format is told of before anything else
    return spec


@cache
def _plan(options_text: str, shape: ModelShape, heads: tuple[int, int] | None) -> KVPlan:
    spec = _spec(options_text)
    plan = spec.plan(shape.num_layers, shape)
    plan.require_layout(shape.layers)
    return spec.heads(slice(*heads)).plan(shape.num_layers) if heads and spec.calibration else plan
