"""What a Hugging Face model's weights say of its K and V: how to balance them, and what a cache would lose."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from haarkv.engine.collapse import LEAST_TOKENS, MOST_TOKENS, Guard, Loss, channel_loss, describe
from haarkv.engine.plans import worth_saying
from haarkv.models import balance
from haarkv.models.balance import Moments, Scales, Uneven, key_moments, value_moments
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.warn import warn
from tq.hf.config import head_dims

_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:self_attn\.([qkvo]_proj|[qk]_norm)|(input)_layernorm)\.(weight|bias)")
_NEEDED = {"input_norm", "q_proj", "k_proj", "v_proj", "o_proj"}


def layers_of(model: Any) -> dict[int, dict[str, Tensor]]:
    """Each layer's tensors by the fields of a family's weights; layers that name theirs in another way are left out."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in model.named_parameters():
        if match := _NAME.fullmatch(name):
            layer, attention, norm, kind = match.groups()
            part = "input_norm" if norm else attention
            field_name = f"{part[0]}_bias" if kind == "bias" else part
            layers.setdefault(int(layer), {})[field_name] = tensor.detach()
    return {layer: tensors for layer, tensors in layers.items() if tensors.keys() >= _NEEDED}


def moments_of(model: Any, decoder: Any) -> dict[int, tuple[Moments, Moments]]:
    """K's and V's moments of each layer whose weights are understood.

    Args:
        decoder: the part of the model's config that describes the decoder.
    """
    moments = {}
    for layer, tensors in layers_of(model).items():
        k_dim, v_dim = head_dims(decoder, layer)
        heads = tensors["k_proj"].shape[0] // k_dim
        if _understood(tensors, heads, k_dim, v_dim):
            moments[layer] = key_moments(tensors, heads, k_dim, _turned(decoder, k_dim)), value_moments(tensors, heads, v_dim)
    return moments


def _turned(decoder: Any, dim: int) -> int:
    """Channels of a head that RoPE turns."""
    parameters = getattr(decoder, "rope_parameters", None) or {}
    return int(dim * (parameters.get("partial_rotary_factor") or getattr(decoder, "partial_rotary_factor", None) or 1))


def _understood(tensors: Mapping[str, Tensor], heads: int, k_dim: int, v_dim: int) -> bool:
    """Whether shapes are those of attention as it is meant here; weights that are packed or not here are none."""
    hidden = tensors["input_norm"].shape
    if any(x.is_meta or not x.is_floating_point() for x in tensors.values()) or k_dim != v_dim:
        return False
    if any(tensors[name].shape[1:] != hidden for name in ("q_proj", "k_proj", "v_proj")):
        return False
    rows = {name: tensors[name].shape[0] for name in ("q_proj", "k_proj", "v_proj")}
    whole = rows["k_proj"] == rows["v_proj"] == heads * k_dim and rows["q_proj"] % rows["k_proj"] == 0
    norms = {"q_norm", "k_norm"} & tensors.keys()
    both = len(norms) != 1 and all(tensors[name].shape == (k_dim,) for name in norms)
    return whole and both and tensors["o_proj"].shape[1] == rows["q_proj"]


@dataclass
class Watch:
    """Tells in one line what a cache loses of the first tokens, when its last layer has seen them.

    Args:
        last: the last layer that is watched.
    """

    last: int
    _losses: list[Loss] = field(default_factory=list)
    _over: bool = False

    def look(self, layer: int, sink: int, sides: Iterable[tuple[str, KVFormat, Tensor, Tensor | None]]) -> None:
        """Judge a layer's first vectors.

        Args:
            sink: first vectors that stay as they are.
            sides: "K" or "V", the format, the vectors [B, H, n, D] and the scales.
        """
        if self._over:
            return
        for side, kv_format, x, scales in sides:
            if kv_format.lossy and x.shape[2] >= LEAST_TOKENS:
                first = x[0, :, :MOST_TOKENS].float()
                scaled = first if scales is None else first * scales.to(x.device).unsqueeze(1)
                try:
                    loss = channel_loss(kv_format, layer, side, scaled, sink)
                except NonFiniteError:  # storing them says so, and where
                    continue
                self._losses += [loss] if loss and loss.suffers else []
        if layer == self.last:
            self._over = True
            if self._losses:
                warn(describe(self._losses))


def balance_of(
    model: Any, decoder: Any, plan: KVPlan, *, wanted: bool, allow_collapse: bool
) -> tuple[Mapping[int, Scales], tuple[Uneven, ...]]:
    """Scales of each layer that is uneven, after a look at what the cache would lose with them.

    Args:
        model: whose weights are read where they are.
        decoder: the part of its config that describes the decoder.
        plan: of the cache.
        wanted: False scales nothing.
        allow_collapse: warn where text would be garbage, instead of refusing.
    Raises:
        InputError: text would be garbage; it names the layers, and says what to use instead.
    """
    scaling = balance.scaling_of(moments_of(model, decoder), balance.where_lossy(plan, wanted))
    if worth_saying(scaling.uneven):
        warn(f"{balance.describe(scaling.uneven)}; balance=False leaves them as they are")
    Guard(plan, scaling.moments, head_dims(decoder, 0)[0] ** -0.5, not wanted, allow_collapse).at_load(warn)
    return scaling.scales, scaling.uneven
