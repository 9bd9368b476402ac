"""What a decode step must do at least, and how far a measured time is from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from haarkv.benchmarks.cases import Case as Case
from haarkv.benchmarks.cases import heads, seen
from haarkv.benchmarks.timing import Machine, Spread
from haarkv.models.base import DecoderModel
from haarkv.models.config import Attention, Experts, ModelConfig


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
        kind: what was measured: attention, store, layer, step, prompt.
        who: executor and KV format, or a peer.
        taken: its times; None for the reason in `note`.
        machine: that ran it, for the floor: the least that it allows.
        compiled: seconds that the executor's programs took to compile, by name, if it keeps programs; in no figure.
        tokens: of a whole prompt, which is shorter than its context by the steps after it.
        runs: how many times the median is of, where not as many as were asked for.
        about: a peer's version, and how it was built.
        peer: whether it is someone else's.
    """

    kind: str
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
    peer: bool = False

    @property
    def ms(self) -> float | None:
        """Median."""
        return None if self.taken is None else self.taken.ms

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


def attention_flops(mixer: Attention, pairs: float) -> float:
    """Operations of both products of a layer, for so many pairs of a query and a key that it sees."""
    return 4 * pairs * mixer.num_heads * mixer.head_dim


def pairs_seen(mixer: Attention, tokens: int) -> float:
    """Pairs of a query and a key in a prompt of so many tokens."""
    most = seen(mixer.window, tokens)
    return most * (most + 1) / 2 + (tokens - most) * most


def attention_cost(config: ModelConfig, case: Case, kv_bytes: float, item: int) -> Cost:
    """Decode attention of the first layer; `kv_bytes` of one token's K and V, all heads, and `item` of a number of q."""
    mixer, shape = config.layers[0].attention, heads(config)
    keys = case.batch * seen(mixer.window, case.context)
    return Cost(0, keys * kv_bytes, 2 * case.batch * shape.q * shape.dim * item, attention_flops(mixer, keys))


def store_cost(config: ModelConfig, case: Case, kv_bytes: float) -> Cost:
    """Storing one new token of each sequence in one layer, of `kv_bytes`; what the format computes is not counted."""
    shape = heads(config)
    return Cost(0, case.batch * kv_bytes, 8 * case.batch * shape.kv * shape.dim, 0)


def _products(model: DecoderModel, layer: int, batch: int) -> tuple[int, int]:
    """Bytes of a layer's matrices that some tokens read, as they are held, and the numbers that each token is multiplied with.

    Of experts, those of that many tokens, no two of them the same if they can.
    """
    mlp = model.config.layers[layer].mlp
    share = mlp.per_token / mlp.count if isinstance(mlp, Experts) else 0.0
    read = multiplied = 0.0
    for field, _, weight in model.weights.layers[layer].named():
        if len(weight.shape) == 2:
            expert = field.startswith("experts.")
            read += weight.nbytes * (min(1.0, batch * share) if expert else 1.0)
            multiplied += weight.shape.numel() * (share if expert else 1.0)
    return round(read), round(multiplied)


def layer_cost(model: DecoderModel, case: Case, kv_bytes: float) -> Cost:
    """One call of the first decoder layer; `kv_bytes` of a token's K and V in it."""
    config, item = model.config, model.dtype.itemsize
    read, multiplied = _products(model, 0, case.batch)
    attention = attention_cost(config, case, kv_bytes, item)
    rest = 2 * case.batch * config.hidden_size * item
    return Cost(read, attention.kv, rest, 2 * case.batch * multiplied + attention.flops)


def step_cost(model: DecoderModel, case: Case, kv_bytes: Sequence[float]) -> Cost:
    """A whole decode step; what recurrent states compute is not counted, and is little beside what they move.

    Args:
        kv_bytes: of one token's K and V in each layer, all heads.
    """
    config, weights = model.config, model.weights
    products = [_products(model, layer, case.batch) for layer in range(config.num_layers)]
    read, multiplied = map(sum, zip(*products, (weights.lm_head.nbytes, weights.lm_head.shape.numel()), strict=True))
    windows = [shape.window if shape else 0 for shape in config.kv_shapes]
    kv = sum(seen(window, case.context) * nbytes for window, nbytes in zip(windows, kv_bytes, strict=True))
    # A state is read and written.
    kv += sum(2 * shape.nbytes // shape.versions for shape in config.state_shapes.values())
    attention = sum(attention_flops(mixer, case.batch * seen(mixer.window, case.context)) for mixer in config.attentions)
    flops = 2 * case.batch * multiplied + attention
    return Cost(read, case.batch * kv, 4 * case.batch * config.vocab_size, flops)


def whole_prompt_cost(model: DecoderModel, tokens: int, kv_bytes: Sequence[float]) -> Cost:
    """A whole prompt of one sequence, with the logits after its last token: weights are read once, and every K and V.

    Args:
        kv_bytes: as `step_cost`.
    """
    config, all_at_once = model.config, step_cost(model, Case(tokens, 0), kv_bytes)
    heads_left_out = 2 * (tokens - 1) * config.vocab_size * config.hidden_size
    attention = sum(attention_flops(mixer, pairs_seen(mixer, tokens)) for mixer in config.attentions)
    flops = all_at_once.flops - heads_left_out + attention
    states = sum(2 * shape.nbytes // shape.versions for shape in config.state_shapes.values())
    return Cost(all_at_once.weights, tokens * sum(kv_bytes) + states, 4 * config.vocab_size, flops)
