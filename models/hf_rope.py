"""Rotary parameters from a Hugging Face `config.json`: theta, scaling and the positions that they reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from reprlib import repr as shown
from typing import TYPE_CHECKING

from haarkv.models.config import Rope, RopeScaling
from haarkv.models.rope import LinearScaling, Llama3Scaling, YarnScaling, yarn_attention_factor
from haarkv.tq_ops.errors import InputError

if TYPE_CHECKING:
    from haarkv.models.hf_config import HFConfig


@dataclass(frozen=True)
class FoundRope:
    """What a config says of RoPE.

    Attributes:
        positions: that the model may be run with.
        part: of each head that is turned.
    """

    theta: float
    scaling: RopeScaling | None
    positions: int
    part: float = 1.0

    def on(self, head_dim: int) -> Rope:
        """The embedding of heads with `head_dim` coordinates."""
        return Rope(self.theta, int(head_dim * self.part), self.scaling)


def read_rope(
    file: HFConfig, positions: int, default_theta: float = 1e4, kind_of_layer: str = "", default_part: float | None = None
) -> FoundRope:
    """Read rotary parameters. transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling`.

    Args:
        positions: the config's `max_position_embeddings`. YaRN is often switched on without raising it, and transformers
            then runs longer texts all the same: the result has as many positions as the factor reaches.
        default_part: of each head that is turned, where the family has such a part and the config does not say it; None:
            the family turns whole heads, and a config that says otherwise is refused.
        kind_of_layer: whose part of `rope_parameters` is meant, where these are told apart by `layer_types`.
    Raises:
        InputError: a scaling that is not built, by name, or an entry of it that cannot be.
    """
    old, new = file.part("rope_scaling"), file.part("rope_parameters")
    if kind_of_layer and kind_of_layer in new.raw:
        new = new.part(kind_of_layer)
    rope = old if old.raw else new
    kind = next((rope.raw[key] for key in ("rope_type", "type") if rope.raw.get(key) is not None), "default")
    if not isinstance(kind, str):
        raise InputError(f"{file.path}: rope_type {shown(kind)} is not a string")
    theta = (rope if rope.raw.get("rope_theta") is not None else file).number("rope_theta", default_theta)
    partial = rope.raw.get("partial_rotary_factor") or file.raw.get("partial_rotary_factor") or default_part or 1
    if default_part is not None and not (isinstance(partial, int | float) and 0 < partial <= 1):
        raise InputError(f"{file.path}: partial_rotary_factor {shown(partial)} is no part of a head")
    file.refuse(
        {
            f"RoPE on a part of each head (partial_rotary_factor {shown(partial)})": partial != 1 and default_part is None,
            f"rope scaling {shown(kind)} (built are {', '.join(_READERS)})": kind != "default" and kind not in _READERS,
        }
    )
    if kind == "default":
        return FoundRope(theta, None, positions, partial)
    # A config may state the trained length beside its rotary parameters; transformers then prefers that one.
    outer = file.raw.get("original_max_position_embeddings") is not None
    original = (file if outer else rope).count("original_max_position_embeddings", positions)
    scaling = _READERS[kind](rope, positions, original)
    if isinstance(scaling, YarnScaling):
        if theta <= 1:
            raise InputError(f"{file.path}: rope_theta {theta:g} must be above 1 for YaRN, which divides by its logarithm")
        positions = max(positions, round(scaling.factor * original))
    return FoundRope(theta, scaling, positions, partial)


def _linear(rope: HFConfig, positions: int, original: int) -> RopeScaling:  # noqa: ARG001
    return LinearScaling(rope.number("factor"))


def _llama3(rope: HFConfig, positions: int, original: int) -> RopeScaling:  # noqa: ARG001
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise InputError(f"{rope.path}: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
    return Llama3Scaling(rope.number("factor"), low, high, original)


def _yarn(rope: HFConfig, positions: int, original: int) -> RopeScaling:
    factor = rope.number("factor", positions / original)
    scales = [rope.number(key) if rope.raw.get(key) not in (None, 0) else None for key in ("mscale", "mscale_all_dim")]
    attention = rope.number("attention_factor", yarn_attention_factor(factor, *scales))
    fast, slow = rope.number("beta_fast", 32), rope.number("beta_slow", 1)
    return YarnScaling(factor, original, attention, fast, slow, rope.raw.get("truncate") is None or rope.flag("truncate"))


_READERS: dict[str, Callable[[HFConfig, int, int], RopeScaling]] = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
