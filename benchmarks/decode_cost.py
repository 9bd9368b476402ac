"""What a decode step must do at least, and how far a measured time is from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from haarkv.benchmarks.cases import Case as Case
from haarkv.benchmarks.cases import Heads, every_layer, heads
from haarkv.benchmarks.timing import Machine, Spread
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig

Kind = Literal["attention", "store", "layer", "prompt", "step", "prefill"]
_OTHERS = ("sdpa ", "torch ", "hf ", "llama.cpp ")


@dataclass(frozen=True)
class Cost:
    """What one run must do at least: bytes of weights, of KV and of what goes in and comes out, and operations."""

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
        who: executor and KV format, or a peer.
        taken: its times; None for the reason in `note`.
        machine: that ran it, for the floor: the least that it allows.
        compiled: seconds that the executor's programs took to compile, by name, if it keeps programs; in no figure.
        tokens: of a whole prompt, which is shorter than its context by the steps after it.
        runs: how many times the median is of, where not as many as were asked for.
        about: a peer's version, and how it was built.
    """

    kind: Kind
    who: str
    case: Case
    cost: Cost
    machine: Machine
    taken: Spread | None
    note: str = ""
    compiled: Mapping[str, float] | None = None
    tokens: int | None = None
    runs: int | None = None
    about: str = ""

    @property
    def ms(self) -> float | None:
        """Median."""
        return None if self.taken is None else self.taken.ms

    @property
    def peer(self) -> bool:
        """Whether it is someone else's."""
        return self.who.startswith(_OTHERS)

    @property
    def floor_ms(self) -> float:
        """The least that the machine allows."""
        return self.machine.floor_ms(self.cost.nbytes, self.cost.flops)

    def over_best_peer(self, rows: Sequence[CostRow]) -> float | None:
        """How many times as fast it is as the fastest peer of its kind and case in the same run."""
        times = [r.ms for r in rows if r.peer and r.ms is not None and (r.kind, r.case) == (self.kind, self.case)]
        return min(times) / self.ms if times and self.ms else None

    def figures(self, rows: Sequence[CostRow] = ()) -> dict[str, Any]:
        """What follows from a time: bytes in 1e9 a second, that relative to a copy, the floor, and how many times it.

        Args:
            rows: of the same run, for `speed_up`.
        """
        if self.taken is None or self.ms is None:
            return {"floor_ms": self.floor_ms}
        gbps = self.cost.nbytes / self.ms / 1e6
        found = {
            **asdict(self.taken), "gbps": gbps, "of_copy": gbps / self.machine.copy_gbps, "floor_ms": self.floor_ms,
            "of_floor": self.ms / self.floor_ms, "speed_up": self.over_best_peer(rows),
        }  # fmt: skip
        if self.kind == "step":
            found["ms_per_token"] = self.ms / self.case.batch
        if self.tokens is not None:
            found["tokens_per_s"] = 1e3 * self.tokens / self.ms
        return found

    def as_json(self, rows: Sequence[CostRow] = ()) -> dict[str, Any]:
        """For a JSON line; arguments as `figures`."""
        names = ("kind", "who", "note", "compiled", "tokens", "runs", "about")
        values = {name: getattr(self, name) for name in names} | asdict(self.case) | {"cost": asdict(self.cost)}
        return {name: value for name, value in (values | self.figures(rows)).items() if value not in (None, "")}


def _attention(of: Heads, queries: float, keys: float) -> float:
    """Operations of both products of a layer, for so many queries with so many keys each."""
    return 4 * queries * of.q * of.dim * keys


def attention_cost(config: ModelConfig, case: Case, kv_bytes: float, item: int) -> Cost:
    """Decode attention of one layer; `kv_bytes` of one token's K and V, all heads, and `item` of a number of q."""
    of = heads(config)
    rest, flops = 2 * case.batch * of.q * of.dim * item, _attention(of, case.batch, case.context)
    return Cost(0, case.batch * case.context * kv_bytes, rest, flops)


def prompt_attention_cost(config: ModelConfig, case: Case, kv_bytes: float) -> Cost:
    """Causal attention of every token of a prompt in one layer; `kv_bytes` of one token's K and V, all heads."""
    of, queries = heads(config), case.batch * case.context
    return Cost(0, queries * kv_bytes, 4 * queries * of.q * of.dim, _attention(of, queries, (case.context + 1) / 2))


def store_cost(config: ModelConfig, case: Case, kv_bytes: float) -> Cost:
    """Storing one new token of each sequence in one layer, of `kv_bytes`; what the format computes is not counted."""
    of = heads(config)
    return Cost(0, case.batch * kv_bytes, 8 * case.batch * of.kv * of.dim, 0)


def layer_cost(model: DecoderModel, case: Case, kv_bytes: float) -> Cost:
    """One call of a decoder layer: its share of a step, the head left out; `kv_bytes` of a token's K and V in one layer."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    whole, item = step_cost(model, case, 0), model.weights.embedding.itemsize
    return Cost(
        (whole.weights - head * item) / config.num_layers, case.batch * case.context * kv_bytes,
        2 * case.batch * config.hidden_size * item, (whole.flops - 2 * case.batch * head) / config.num_layers,
    )  # fmt: skip


def step_cost(model: DecoderModel, case: Case, kv_bytes: float) -> Cost:
    """A whole decode step; of experts, those of as many tokens as there are sequences, no two of them the same if they can.

    Args:
        kv_bytes: of one token, K and V of all layers and heads.
    """
    config, weights = model.config, model.weights
    matrices = {name: t.numel() for name, t in weights.named() if t.ndim == 2 and "embed" not in name}
    experts = sum(count for name, count in matrices.items() if ".experts." in name)
    others = sum(matrices.values()) - experts + (weights.lm_head.numel() if config.tied else 0)
    share = config.num_experts_per_tok / config.num_experts if config.num_experts else 0.0
    attention = sum(_attention(of, case.batch, case.context) for of in every_layer(config))
    nbytes = (others + round(experts * min(1.0, case.batch * share))) * weights.embedding.itemsize
    flops = 2 * case.batch * (others + round(experts * share)) + attention
    return Cost(nbytes, case.batch * case.context * kv_bytes, 4 * case.batch * config.vocab_size, flops)


def whole_prompt_cost(model: DecoderModel, tokens: int, kv_bytes: float) -> Cost:
    """A whole prompt of one sequence, with the logits after its last token: weights are read once, and every K and V."""
    config, all_at_once = model.config, step_cost(model, Case(tokens, 0), 0)
    heads_left_out = 2 * (tokens - 1) * config.vocab_size * config.hidden_size
    attention = sum(_attention(of, tokens, (tokens + 1) / 2) for of in every_layer(config))
    flops = all_at_once.flops - heads_left_out + attention
    return Cost(all_at_once.weights, tokens * kv_bytes, 4 * config.vocab_size, flops)
