"""What of a layer looks at other tokens: its tensors and its forward, by the class of its declaration.

To add one, declare it (`models.config.Mixer`), and name its `MixerKind` in `MIXERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import Attention, Mixer, Norm, Rope
from haarkv.models.delta_net import DeltaNet, delta_tensors, remember
from haarkv.models.tensors import Axis, LayerWeights, StoredTensor
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable


@dataclass(frozen=True)
class Step:
    """One forward, as its layers see it.

    Attributes:
        rope: cos and sin [T, dims / 2] fp32 of the batch's positions, of each embedding that its layers use.
    """

    ops: OpTable
    cache: PagedKVCache
    batch: Batch
    rope: Mapping[Rope, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MixerKind:
    """A mixer's two halves.

    Attributes:
        tensors: of its declaration, the layer's norm and hidden_size: every tensor by field.
        mix: x [T, hidden] normed, the layer's weights, its declaration, its norm, its index and the step -> [T, hidden] fp32,
            what is added to the hidden state. Of several ranks, this one's part of the sum.
    """

    tensors: Callable[[Any, Norm, int], dict[str, StoredTensor]]
    mix: Callable[[Tensor, LayerWeights, Any, Norm, int, Step], Tensor]


def attention_tensors(mixer: Attention, norm: Norm, hidden_size: int) -> dict[str, StoredTensor]:
    """Projections, norms of heads and biases of an `Attention`."""
    hidden = Axis(hidden_size, "hidden")
    queries = Axis(mixer.heads.q_size, "q", cut=True, unit=mixer.head_dim)
    keys = Axis(mixer.heads.kv_size, "kv", cut=True, unit=mixer.head_dim, shared=True)
    # Each head's gate lies behind its query.
    with_gates = Axis(2 * queries.size, "q", cut=True, unit=2 * queries.unit) if mixer.gated else queries
    rows = {"q": with_gates, "k": keys, "v": keys}
    tensors = {f"{x}_proj": StoredTensor(f"self_attn.{x}_proj.weight", (axis, hidden)) for x, axis in rows.items()}
    if mixer.head_norms:
        tensors |= {
            f"{x}_norm": StoredTensor(f"self_attn.{x}_norm.weight", (Axis(mixer.head_dim),), plus_one=norm.plus_one)
            for x in "qk"
        }
    tensors["o_proj"] = StoredTensor("self_attn.o_proj.weight", (hidden, queries))
    if mixer.bias:
        tensors |= {f"{x}_bias": StoredTensor(f"self_attn.{x}_proj.bias", (axis,)) for x, axis in rows.items()}
    return tensors


def attend(x: Tensor, weights: LayerWeights, mixer: Attention, norm: Norm, index: int, step: Step) -> Tensor:
    """Softmax attention over what the cache stores, the new tokens' K and V included; see `MixerKind.mix`.

    Rounding points: those of `tq_ops.reference`; biases are added in FP32; q is rounded once, after RoPE. What is gated is
    rounded once more, after its gate, which is FP32.
    """
    ops, rope = step.ops, step.rope[mixer.rope]

    def projected(side: str) -> Tensor:
        y = ops.linear(x, weights.matrix(f"{side}_proj"))
        if mixer.bias:
            y = y + weights[f"{side}_bias"]
        return y.view(len(x), -1, mixer.head_dim)

    def turned(y: Tensor, side: str) -> Tensor:
        if mixer.head_norms:
            y = ops.rms_norm(y, weights[f"{side}_norm"], norm.eps)
        if mixer.rope.dims == mixer.head_dim:
            return ops.rope(y, *rope)
        first, rest = torch.split(y, [mixer.rope.dims, mixer.head_dim - mixer.rope.dims], dim=-1)
        return torch.cat([ops.rope(first, *rope), rest], dim=-1)

    q = projected("q")
    if mixer.gated:
        q, gate = q.view(len(x), mixer.num_heads, 2, mixer.head_dim).unbind(2)
    q, k, v = turned(q, "q"), turned(projected("k"), "k"), projected("v")
    attended = _stored_and_attended(q.to(x.dtype), k, v, index, step, mixer.scale).flatten(1)
    if mixer.gated:
        attended = ops.sigmoid_mul(gate.flatten(1), attended.float(), x.dtype)
    return ops.linear(attended, weights.matrix("o_proj"))


def _stored_and_attended(q: Tensor, k: Tensor, v: Tensor, index: int, step: Step, scale: float) -> Tensor:
    """Store new K and V, then attend: all tokens at once, or in pieces where a layer's ring has too little room."""
    cache, ops = step.cache, step.ops
    out: Tensor | None = None
    for tokens, batch in cache.pieces(index, step.batch):
        some = (q, k, v) if tokens is None else (q[tokens], k[tokens], v[tokens])
        with cache.with_room(index, batch):
            ops.store_kv(*some[1:], cache, index, batch)
            attended = ops.paged_attention(some[0], cache, index, batch, scale)
        if tokens is None:
            return attended
        out = attended.new_empty(len(q), *attended.shape[1:]) if out is None else out
        out[tokens] = attended
    assert out is not None
    return out


MIXERS: dict[type, MixerKind] = {
    Attention: MixerKind(attention_tensors, attend),
    DeltaNet: MixerKind(delta_tensors, remember),
}
"""Every mixer, by the class of its declaration."""


def kind_of(mixer: Mixer) -> MixerKind:
    """The halves of a declared mixer.

    Raises:
        ValueError: nothing runs such a mixer.
    """
    kind = MIXERS.get(type(mixer))
    if kind is None:
        raise ValueError(f"nothing here runs a layer that mixes tokens by {type(mixer).__name__}")
    return kind
