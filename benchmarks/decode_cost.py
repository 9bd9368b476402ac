"""Least work of a forward, and how far a measured time is from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from haarkv.benchmarks.cases import Case as Case
from haarkv.benchmarks.cases import visible_tokens
from haarkv.benchmarks.timing import Machine, Spread
from haarkv.models.base import DecoderModel
from haarkv.models.config import Attention, Experts, ModelConfig


@dataclass(frozen=True)
class Cost:
    """Least bytes of weights, KV and other tensors, and operations, of one run."""

    weights: float
    kv: float
    rest: float
    flops: float

    @property
    def nbytes(self) -> float:
        """Bytes in all."""
        return self.weights + self.kv + self.rest


@dataclass(frozen=True)
class CostRow:
    """One variant in one case.

    Attributes:
        kind: attention, store, step or prompt.
        who: executor and KV format, or a peer.
        spread: its times; None for the reason in `note`.
        compiled: seconds of compilation by program, in no figure.
    """

    kind: str
    who: str
    case: Case
    cost: Cost
    machine: Machine
    spread: Spread | None = None
    note: str = ""
    compiled: Mapping[str, float] | None = None
    peer: bool = False

    @property
    def ms(self) -> float | None:
        return None if self.spread is None else self.spread.ms

    def figures(self) -> dict[str, Any]:
        """Figures of a time: GB/s, share of a copy's, floor and its multiple."""
        floor = self.machine.floor_ms(self.cost.nbytes, self.cost.flops)
        if self.spread is None:
            return {"floor_ms": floor}
        ms, gbps = self.spread.ms, self.cost.nbytes / self.spread.ms / 1e6
        figures = {**asdict(self.spread), "gbps": gbps, "of_copy": gbps / self.machine.copy_gbps, "floor_ms": floor,
                 "of_floor": ms / floor}  # fmt: skip
        if self.kind == "step":
            figures["ms_per_token"] = ms / self.case.batch
        if self.kind == "prompt":
            figures["tokens_per_s"] = 1e3 * self.case.batch * self.case.context / ms
        return figures

    def as_json(self) -> dict[str, Any]:
        """For a JSON line."""
        values = {name: getattr(self, name) for name in ("kind", "who", "note", "compiled")}
        values |= asdict(self.case) | {"cost": asdict(self.cost)} | self.figures()
        return {name: value for name, value in values.items() if value not in (None, "")}


def attention_flops(mixer: Attention, pairs: float) -> float:
    """Operations of both products of a layer for `pairs` of query and key."""
    return 4 * pairs * mixer.num_heads * mixer.head_dim


def pairs_seen(mixer: Attention, tokens: int) -> float:
    """Pairs of query and key in a prompt."""
    most = visible_tokens(mixer.window, tokens)
    return most * (most + 1) / 2 + (tokens - most) * most


def attention_cost(config: ModelConfig, case: Case, kv_bytes: float, item: int) -> Cost:
    """Decode attention of the first layer; `kv_bytes` of one token's K and V, all heads, `item` bytes of a number of q."""
    mixer, shape = config.layers[0].attention, config.attentions[0].heads
    keys = case.batch * visible_tokens(mixer.window, case.context)
    return Cost(0, keys * kv_bytes, 2 * case.batch * shape.num_heads * shape.head_dim * item, attention_flops(mixer, keys))


def store_cost(config: ModelConfig, case: Case, kv_bytes: float) -> Cost:
    """Storing one token of each sequence in one layer, without the format's arithmetic."""
    shape = config.attentions[0].heads
    return Cost(0, case.batch * kv_bytes, 8 * case.batch * shape.num_kv_heads * shape.head_dim, 0)


def _products(model: DecoderModel, layer: int, tokens: int) -> tuple[int, int]:
    """Bytes of a layer's matrices that `tokens` read, and multiplications a token; experts as distinct as possible."""
    mlp = model.config.layers[layer].mlp
    share = mlp.per_token / mlp.count if isinstance(mlp, Experts) else 0.0
    read = multiplications = 0.0
    for field, _, weight in model.weights.layers[layer].named_tensors():
        if len(weight.shape) == 2:
            expert = field.startswith("experts.")
            read += weight.nbytes * (min(1.0, tokens * share) if expert else 1.0)
            multiplications += weight.shape.numel() * (share if expert else 1.0)
    return round(read), round(multiplications)


def step_cost(model: DecoderModel, case: Case, kv_bytes: Sequence[float], new: int = 1) -> Cost:
    """A forward with the logits of each last token, without the arithmetic of recurrent states.

    Args:
        kv_bytes: of one token's K and V in each layer, all heads.
        new: tokens of each sequence: 1 for a decode step, the context for a prompt.
    """
    config, head, tokens = model.config, model.weights.lm_head, case.batch * new
    products = [_products(model, layer, tokens) for layer in range(config.num_layers)]
    read, multiplications = map(sum, zip(*products, strict=True))
    windows = [shape.window if shape else 0 for shape in config.kv_shapes]
    kv = sum(max(visible_tokens(window, case.context), new) * nbytes for window, nbytes in zip(windows, kv_bytes, strict=True))
    # A state is read and written.
    kv += sum(2 * shape.nbytes // shape.versions for shape in config.state_shapes.values())
    pairs = [(mixer, pairs_seen(mixer, case.context) - pairs_seen(mixer, case.context - new)) for mixer in config.attentions]
    flops = 2.0 * (tokens * multiplications + case.batch * head.shape.numel())
    flops += case.batch * sum(attention_flops(mixer, count) for mixer, count in pairs)
    return Cost(read + head.nbytes, case.batch * kv, 4 * case.batch * config.vocab_size, flops)
