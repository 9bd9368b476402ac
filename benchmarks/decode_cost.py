"""What a decode step must do at least, and how far a measured time is from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from haarkv.benchmarks.decode_peers import LLAMA
from haarkv.benchmarks.timing import Machine, Spread
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig

Kind = Literal["attention", "store", "layer", "prompt", "step", "prefill"]


@dataclass(frozen=True)
class Case:
    """How many sequences, and how many tokens each of them has stored when the step is over."""

    batch: int
    context: int


@dataclass(frozen=True)
class Cost:
    """What one run must do at least.

    Attributes:
        weights, kv, rest: bytes read once; `rest` is what goes in and comes out.
        flops: multiplications and additions.
    """

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
        ms, low, high: median and extremes of the turns, in milliseconds.
        gbps: bytes of `cost` in 1e9 a second; `of_copy` is that relative to a copy.
        floor_ms: the least that this machine allows; `of_floor` is how many times as long it took.
        note: why there is no time.
        first_ms: the very first call, with whatever it compiled; part of no other figure.
        compiled: seconds that the executor's programs took to compile, by name, if it keeps programs; in no figure either.
        tokens: of a whole prompt, which is shorter than its context by the steps after it.
        runs: how many times `ms` is the median of, where not as many as were asked for.
        about: a peer's version, and how it was built.
    """

    kind: Kind
    who: str
    batch: int
    context: int
    ms: float | None
    low: float | None
    high: float | None
    cost: Cost
    gbps: float | None
    of_copy: float | None
    floor_ms: float
    of_floor: float | None
    note: str = ""
    first_ms: float | None = None
    compiled: Mapping[str, float] | None = None
    tokens: int | None = None
    runs: int | None = None
    about: str = ""

    @property
    def ms_per_token(self) -> float | None:
        """Of a whole step, which gives every sequence a token."""
        return self.ms / self.batch if self.ms is not None and self.kind == "step" else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of a whole prompt."""
        return 1e3 * self.tokens / self.ms if self.ms is not None and self.tokens is not None else None

    @property
    def peer(self) -> bool:
        """Whether it is someone else's."""
        return self.who.startswith(("sdpa ", "torch ", "hf ", f"{LLAMA} "))

    def as_json(self) -> dict[str, Any]:
        """For a JSON line."""
        values = {**asdict(self), "ms_per_token": self.ms_per_token, "tokens_per_s": self.tokens_per_s}
        return {key: value for key, value in values.items() if value not in (None, "")}


def attention_cost(config: ModelConfig, case: Case, kv_bytes: float, item: int) -> Cost:
    """Decode attention of one layer.

    Args:
        kv_bytes: of one token, K and V of all heads.
        item: bytes of a number of q.
    """
    rest = 2 * case.batch * config.heads.num_heads * config.heads.head_dim * item
    flops = 4 * case.batch * config.heads.num_heads * config.heads.head_dim * case.context
    return Cost(0, case.batch * case.context * kv_bytes, rest, flops)


def store_cost(config: ModelConfig, case: Case, kv_bytes: float) -> Cost:
    """Storing one new token of each sequence in one layer; what the format computes is not counted.

    Args:
        kv_bytes: of one stored token, K and V of all heads.
    """
    return Cost(0, case.batch * kv_bytes, 8 * case.batch * config.heads.num_kv_heads * config.heads.head_dim, 0)


def layer_cost(model: DecoderModel, case: Case, kv_bytes: float) -> Cost:
    """One call of one decoder layer in a decode step: a layer's share of the step, the head left out.

    Args:
        kv_bytes: of one token, K and V of one layer's heads.
    """
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
    attention = attention_cost(config, case, 0, 0).flops * config.num_layers
    nbytes = (others + round(experts * min(1.0, case.batch * share))) * weights.embedding.itemsize
    products = others + round(experts * share)
    return Cost(
        nbytes, case.batch * case.context * kv_bytes, 4 * case.batch * config.vocab_size, 2 * case.batch * products + attention
    )


def whole_prompt_cost(model: DecoderModel, tokens: int, kv_bytes: float) -> Cost:
    """A whole prompt of one sequence, with the logits after its last token: weights are read once, and every K and V.

    Args:
        kv_bytes: of one token, K and V of all layers and heads.
    """
    config, all_at_once = model.config, step_cost(model, Case(tokens, 0), 0)
    heads_left_out = 2 * (tokens - 1) * config.vocab_size * config.hidden_size
    pairs = tokens * (tokens + 1) / 2
    attention = 4 * config.num_layers * config.heads.num_heads * config.heads.head_dim * pairs
    return Cost(
        all_at_once.weights, tokens * kv_bytes, 4 * config.vocab_size, all_at_once.flops - heads_left_out + attention
    )  # fmt: skip


def row(kind: Kind, who: str, case: Case, cost: Cost, machine: Machine, taken: Spread | None, note: str = "") -> CostRow:
    """A row with its figures worked out."""
    floor = machine.floor_ms(cost.nbytes, cost.flops)
    if taken is None:
        return CostRow(kind, who, case.batch, case.context, None, None, None, cost, None, None, floor, None, note)
    gbps = cost.nbytes / taken.ms / 1e6
    figures = (taken.ms, taken.low, taken.high, cost, gbps, gbps / machine.copy_gbps, floor, taken.ms / floor)
    return CostRow(kind, who, case.batch, case.context, *figures, note, taken.first_ms)
