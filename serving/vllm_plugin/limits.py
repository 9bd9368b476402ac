"""Refusals at server start, and balance.

vLLM holds the weights, so balance multiplies K and V by powers of two before storing, queries and output by the inverse.
Scales come from the checkpoint's attention tensors, read once a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.logger import init_logger

from haarkv.engine.collapse import Guard
from haarkv.models import balance
from haarkv.models.balance import Moments, Scales, Scaling
from haarkv.models.catalog import weights_fingerprint
from haarkv.models.parallel import kv_heads_of
from haarkv.serving.vllm_plugin import ALLOW_COLLAPSE, BALANCE, FORMAT, KV, PLAN
from haarkv.serving.vllm_plugin.kv_choice import kv_plan, shape_signature, sliding_layers, spec_from, state_layers
from haarkv.tq_ops.cpu import layout as cpu_layout
from haarkv.tq_ops.cuda import layout as cuda_layout
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.stretches import STRETCH
from haarkv.tq_ops.kv.kernel_support import ELSEWHERE, KernelSupport, readable, unsupported, wrong_head_dim
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")

_STATES, _WINDOWS, _TAIL = "layers that keep a state", "sliding windows", "a tail in BF16"
# Drafts that were run, by what is kept beside packed pages. vLLM keeps attention layers that they bring in BF16, by its own
# backend, unless it is told otherwise. With states its own code ends where a step checks fewer drafts than the one before
# kept, as steps of n-grams do.
_DRAFTS = {None: ("ngram", "draft_model", "eagle3"), _STATES: ("mtp",), _WINDOWS: ("ngram",), _TAIL: ("ngram", "eagle3")}
_WITHOUT_TAIL = "take a cache without, such as k=tq6,v=tq4"
_FULL_ATTENTION = "full attention is served, and on a CPU windows of some of the layers, where layer_types names them"
_HYBRIDS = "of these, Qwen3.5 is served, on CPUs"


def require_supported(vllm_config: VllmConfig) -> None:
    """Refuse, by a one-line ValueError, a model or options that the cache cannot serve."""
    model = vllm_config.model_config
    if model is not None and (reason := _model(vllm_config) or _options(vllm_config) or _cache(vllm_config)):
        options = vllm_config.additional_config
        cache = f"the KV cache of {options[PLAN]}" if options.get(PLAN) else f"a {options.get(FORMAT, KV)} KV cache"
        raise ValueError(f"{cache} cannot serve {model.model}: {reason}")


def reads_here() -> KernelSupport:
    """What the kernels of vLLM's device read."""
    return cpu_layout.READS if _on_cpu() else cuda_layout.READS


def _model(vllm_config: VllmConfig) -> str | None:
    model = vllm_config.model_config
    if model.use_mla:
        return "it has multi-head latent attention (MLA), which caches one latent vector and no K and V"
    if (model.is_hybrid or model.is_attention_free) and (reason := _states(vllm_config)):
        return reason
    if model.is_encoder_decoder:
        return "it is an encoder-decoder model; decoders alone are served"
    if model.runner_type != "generate":
        return "it generates no text; pooling models keep no KV cache"
    if (window := model.get_sliding_window()) is not None and not (sliding_layers(model) and _on_cpu()):
        return f"it has sliding-window attention (of {window} tokens); {_FULL_ATTENTION}"
    if model.attention_chunk_size is not None:
        return "it has chunked local attention; full attention alone is served"
    if cap := getattr(model.hf_text_config, "attn_logit_softcapping", None):
        return f"its attention caps logits at {cap}, which the kernels do not"
    return wrong_head_dim(reads_here(), model.get_head_size())


def _states(vllm_config: VllmConfig) -> str | None:
    if not state_layers(vllm_config.model_config):
        return f"it is a hybrid model with layers that keep a state and no K and V; {_HYBRIDS}"
    if not _on_cpu():
        return "models with layers that keep a state are served on CPUs alone"
    try:
        shape_signature(vllm_config)
    except InputError as error:
        return f"its layers are not known: {error}"
    return None


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.device_type == "cpu")


def _cache(vllm_config: VllmConfig) -> str | None:
    model, plan = vllm_config.model_config, kv_plan(vllm_config)
    if names := [kv_format.name for kv_format in plan.formats if kv_format.to_compare]:
        return f"{names[0]} is here to compare with, which `tq eval` does; serve one of {', '.join(readable(reads_here()))}"
    if plan.has_windows and not _on_cpu():
        return f"a tail or sinks in BF16 are served on CPUs alone; {_WITHOUT_TAIL}"
    if reason := unsupported(reads_here(), plan, shape_signature(vllm_config).layers):
        return reason.removesuffix(ELSEWHERE)
    if (size := vllm_config.cache_config.block_size) and (reason := blocks_misfit(enumerate(k for k, _ in plan.layers), size)):
        return reason
    heads, size = model.get_total_num_kv_heads(), vllm_config.parallel_config.tensor_parallel_size
    if heads % size and size % heads:
        return f"its {heads} KV heads can be neither split evenly over {size} ranks nor held by as many each"
    if plan.context is not None and model.max_model_len > plan.context:
        return (
            f"the calibration holds for sequences of up to {plan.context:,} tokens, and this server takes up to "
            f"{model.max_model_len:,}; give --max-model-len {plan.context}, or calibrate with longer windows"
        )
    return _weights(vllm_config)


def blocks_misfit(keys: Iterable[tuple[int, KVFormat]], block_size: int) -> str | None:
    """Why blocks of this size cannot hold keys of (layer, format): a stretch would end within a block."""
    names = [k.name for layer, k in keys if k.rope_shift(layer)]
    if not names or STRETCH % block_size == 0:
        return None
    return f"{names[0]} takes blocks that divide {STRETCH:,} tokens, not of {block_size}; give --block-size {BLOCK_SIZE}"


def _weights(vllm_config: VllmConfig) -> str | None:
    """Why the weights do not fit the calibration; dummy weights fit any."""
    spec, model = spec_from(vllm_config.additional_config), vllm_config.model_config.model
    if not spec.weights or vllm_config.load_config.load_format == "dummy":
        return None
    try:
        weights = _fingerprint(model)
    except InputError as error:
        return f"its weights cannot be compared with those that the calibration was learned from: {error}"
    spec.require_weights(weights)
    return None


_fingerprint = cache(weights_fingerprint)


def _options(vllm_config: VllmConfig) -> str | None:
    cache, parallel, drafts = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.speculative_config
    if cache.cache_dtype != "auto":
        return f"--kv-cache-dtype {cache.cache_dtype} names another format; leave it out"
    if cache.kv_cache_dtype_skip_layers:
        return "--kv-cache-dtype-skip-layers is not supported; --kv-skip-layers leaves layers in BF16"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is not supported; --tensor-parallel-size is"
    if vllm_config.kv_transfer_config is not None:
        return "KV transfer and offloading are not supported; leave them out"
    own_blocks = _own_blocks(vllm_config)
    if drafts is not None and drafts.method not in _DRAFTS[own_blocks]:
        *all_but, last = _DRAFTS[own_blocks] or ("",)
        advice = f"by {' and '.join(filter(None, (', '.join(all_but), last)))} it is" if last else "leave it out"
        return (
            f"speculative decoding by {drafts.method} is not supported{f' with {own_blocks}' if own_blocks else ''}; {advice}"
        )
    if own_blocks == _STATES and drafts is not None and cache.enable_prefix_caching:
        return f"on a CPU vLLM cannot keep prefixes with drafts and {own_blocks}; give --no-enable-prefix-caching"
    if own_blocks and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return f"--disable-hybrid-kv-cache-manager was not tried with {own_blocks}; leave it out"
    if own_blocks == _WINDOWS and kv_plan(vllm_config).has_windows:  # vLLM's backend for windows lays pages out otherwise
        return f"{_TAIL} is not supported with {_WINDOWS}; {_WITHOUT_TAIL}"
    return None


def _own_blocks(vllm_config: VllmConfig) -> str | None:
    """What the model keeps beside packed blocks, by name."""
    model = vllm_config.model_config
    if state_layers(model):
        return _STATES
    if sliding_layers(model):
        return _WINDOWS
    return _TAIL if kv_plan(vllm_config).has_windows else None


# -- Uneven channels ---------------------------------------------------------------------------------------------------------


def scales_here(vllm_config: VllmConfig) -> Mapping[int, Scales]:
    """Scales [H, D] fp32 of K and V of this rank's heads, by uneven layer; None leaves a side. Refuses as `judge_collapse`."""
    scaling, parallel = judge_collapse(vllm_config), vllm_config.parallel_config
    if not scaling.scales or parallel.tensor_parallel_size == 1:
        return scaling.scales
    from vllm.distributed import get_tensor_model_parallel_rank

    rank, size = get_tensor_model_parallel_rank(), parallel.tensor_parallel_size

    def rank_scales(scales: Tensor | None) -> Tensor | None:
        return None if scales is None else scales[kv_heads_of(len(scales), rank, size)]

    return {layer: (rank_scales(k), rank_scales(v)) for layer, (k, v) in scaling.scales.items()}


def judge_collapse(vllm_config: VllmConfig, allow: str = f"{ALLOW_COLLAPSE} true") -> Scaling:
    """Balance for the model to serve; logs losses that text suffers from.

    Args:
        allow: the option that serves it all the same.
    Raises:
        InputError: text of this model would be garbage.
    """
    model, options = vllm_config.model_config, vllm_config.additional_config
    # Learned coordinates know the channels as they are.
    if vllm_config.load_config.load_format == "dummy" or spec_from(options).calibration is not None:
        return Scaling({}, (), {})
    balances, plan = options.get(BALANCE, True), kv_plan(vllm_config)
    scaling = balance.choose_scaling(_moments(model.model), balance.where_lossy(plan, balances))
    allows = bool(options.get(ALLOW_COLLAPSE))
    guard = Guard(plan, scaling.moments, model.get_head_size() ** -0.5, not balances, allows, insist=allow)
    guard.at_load(partial(logger.warning, "%s"))
    return scaling


@cache
def _moments(model: str) -> Mapping[int, tuple[Moments, Moments]]:
    try:
        return balance.checkpoint_moments(model)
    except InputError as error:
        logger.info("channels of K and V are left as they are, for the weights of %s are not understood: %s", model, error)
        return {}
