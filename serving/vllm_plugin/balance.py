"""Uneven channels of K and V of the model that vLLM serves: scaled as they are stored, or told of, or refused.

vLLM holds the weights, so nothing is folded into them: K and V are multiplied by powers of two before they are stored, queries
and attention's output by the inverse. The scales come from the checkpoint's attention tensors, read once a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.logger import init_logger

from haarkv.engine.collapse import Guard
from haarkv.models import balance
from haarkv.models.balance import Moments, Scales, Scaling
from haarkv.models.parallel import kv_heads_of
from haarkv.serving.vllm_plugin import ALLOW_COLLAPSE, BALANCE
from haarkv.serving.vllm_plugin.chosen import plan_of, spec_of
from haarkv.tq_ops.errors import InputError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")


def scales_here(vllm_config: VllmConfig) -> Mapping[int, Scales]:
    """Scales [H, D] fp32 of this rank's KV heads, K's and V's, of each layer that is uneven; None leaves a side as it is.

    Raises:
        InputError: as `judged`.
    """
    scaling, parallel = judged(vllm_config), vllm_config.parallel_config
    if not scaling.scales or parallel.tensor_parallel_size == 1:
        return scaling.scales
    from vllm.distributed import get_tensor_model_parallel_rank

    rank, size = get_tensor_model_parallel_rank(), parallel.tensor_parallel_size

    def of_rank(scales: Tensor | None) -> Tensor | None:
        return None if scales is None else scales[kv_heads_of(len(scales), rank, size)]

    return {layer: (of_rank(k), of_rank(v)) for layer, (k, v) in scaling.scales.items()}


def judged(vllm_config: VllmConfig, allow: str = f"{ALLOW_COLLAPSE} true") -> Scaling:
    """What balance does to the model that vLLM is to serve, and whether text would suffer all the same, which is logged.

    Args:
        allow: what to say to serve it even so.
    Raises:
        InputError: by its weights, text of this model would be garbage; it names the layers and says what to use instead.
    """
    model, options = vllm_config.model_config, vllm_config.additional_config
    # Learned coordinates know the channels as they are.
    if vllm_config.load_config.load_format == "dummy" or spec_of(vllm_config).calibration is not None:
        return Scaling({}, (), {})
    wanted, plan = options.get(BALANCE, True), plan_of(vllm_config)
    scaling = balance.scaling_of(_moments(model.model), balance.where_lossy(plan, wanted))
    if scaling.uneven:
        logger.info("%s; %s false leaves them as they are", balance.describe(scaling.uneven), BALANCE)
    allowed = bool(options.get(ALLOW_COLLAPSE))
    guard = Guard(plan, scaling.moments, model.get_head_size() ** -0.5, not wanted, allowed, insist=allow)
    guard.at_load(partial(logger.warning, "%s"))
    return scaling


@cache
def _moments(model: str) -> Mapping[int, tuple[Moments, Moments]]:
    try:
        return balance.moments_of(model)
    except InputError as error:
        logger.info("channels of K and V are left as they are, for the weights of %s are not understood: %s", model, error)
        return {}
