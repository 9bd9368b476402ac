"""`gated_delta` against its formula in float64, and the states that it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.recurrent import StateShape
from haarkv.tq_ops.kv.shapes import SequencePlace
from haarkv.validation.layers.null import Figure, number_figures
from op_contract.caches import LAYER
from op_contract.cases import Case

_VERSIONS = 4
Outcome = tuple[Tensor, list[dict[str, Tensor]]]
"""A result [T, Hv, dv], and of each sequence the tensors of its state by name."""


@dataclass(frozen=True)
class Delta(Case):
    """`gated_delta` of new tokens over states that have seen others."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    stored_lengths: tuple[int, ...]
    new: tuple[int, ...]
    taps: int = 4
    small: bool = True
    dtype: torch.dtype = field(default=torch.float32, init=False)
    op: str = field(default="gated_delta", init=False)

    def __str__(self) -> str:
        heads = f"{self.value_heads}of{self.key_heads}x{self.key_dim}x{self.value_dim}-taps{self.taps}"
        return f"{self.op}-{heads}-{len(self.new)}x{max(self.stored_lengths)}+{max(self.new)}"

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def inputs(self, tokens: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, a and b of new tokens. The first head forgets all, the last one nothing for long."""
        generator, count = torch.Generator().manual_seed(seed), sum(tokens)
        x = torch.randn(count, self.channels, generator=generator)
        a, b = (2 * torch.randn(count, self.value_heads, generator=generator) for _ in "ab")
        a[:, 0] += 5.0
        a[:, -1] -= 6.0
        return x, a, b

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(5)
        conv = torch.randn(self.channels, 1, self.taps, generator=generator) / 2
        a_log, dt_bias = torch.randn(2, self.value_heads, generator=generator)
        return conv, a_log, dt_bias

    def new_cache(self, rows: int, versions: int, device: torch.device | str) -> tuple[PagedKVCache, PagedSequences]:
        """Room for some sequences of one layer's states."""
        shapes = (("conv", (self.taps - 1, self.channels)), ("delta", (self.value_heads, self.key_dim, self.value_dim)))
        state = StateShape(tuple((name, shape, torch.float32) for name, shape in shapes), versions)
        cache = PagedKVCache(
            KVSpec("fp32").plan(LAYER + 1), (None,) * (LAYER + 1), num_blocks=64 * rows, num_rows=rows, block_size=8,
            device=device, states={LAYER: state},
        )  # fmt: skip
        return cache, PagedSequences(cache.num_blocks, 8, num_rows=rows)

    def batches(self, device: torch.device) -> tuple[PagedKVCache, PagedSequences, Batch]:
        """A cache whose states have seen `stored_lengths`, and the batch of new tokens; each row belonged to a sequence that
        has ended.
        """
        cache, paging = self.new_cache(len(self.new) + 1, _VERSIONS, device)

        def run(ids: list[int], tokens: tuple[int, ...], seed: int) -> None:
            some = [(one, n) for one, n in zip(ids, tokens, strict=True) if n]
            if some:
                batch = paging.batch(*zip(*some, strict=True)).to(device)
                x, a, b = (tensor.to(device) for tensor in self.inputs(tuple(n for _, n in some), seed))
                conv, a_log, dt_bias = (tensor.to(device) for tensor in self.weights)
                reference.gated_delta(x, a, b, conv, a_log, dt_bias, cache.view(LAYER, batch))

        old_sequences = [paging.add() for _ in range(cache.num_rows)]
        run(old_sequences, (2,) * cache.num_rows, 7)
        for one in old_sequences:
            paging.free(one)
        ids = [paging.add() for _ in (0, *self.new)][:0:-1]
        run(ids, self.stored_lengths, 1)
        return cache, paging, paging.batch(ids, self.new).to(device)

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        cache, _, batch = self.batches(device)
        tensors = (tensor.to(device) for tensor in (*self.inputs(self.new, 2), *self.weights))
        return *tensors, cache.view(LAYER, batch)

    def expected(self) -> Tensor:
        """The formula in float64, of whole sequences from their first token on."""
        before, after = self.inputs(tuple(n for n in self.stored_lengths if n), 1), self.inputs(self.new, 2)
        older, newer = 0, 0
        out = []
        for old_count, new in zip(self.stored_lengths, self.new, strict=True):
            whole = (
                torch.cat([x[older : older + old_count], y[newer : newer + new]]).double()
                for x, y in zip(before, after, strict=True)
            )
            out.append(self._sequence(*whole)[old_count:])
            older, newer = older + old_count, newer + new
        return torch.cat(out)

    def _sequence(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        conv, a_log, dt_bias = (tensor.double() for tensor in self.weights)
        x = torch.nn.functional.conv1d(x.T[None], conv, groups=self.channels, padding=self.taps - 1)[0].T[: len(x)]
        x = x / (1 + torch.exp(-x))
        keys = self.key_heads * self.key_dim
        q, k, v = (
            part.view(len(x), -1, dim)
            for part, dim in zip(
                torch.split(x, [keys, keys, self.value_heads * self.value_dim], dim=1),
                (self.key_dim, self.key_dim, self.value_dim),
                strict=True,
            )
        )
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        decay, write_gate = torch.exp(-a_log.exp() * torch.log(1 + torch.exp(a + dt_bias))), 1 / (1 + torch.exp(-b))
        out = torch.zeros(len(x), self.value_heads, self.value_dim, dtype=torch.float64)
        for head in range(self.value_heads):
            memory, key = (
                torch.zeros(self.value_dim, self.key_dim, dtype=torch.float64),
                head * self.key_heads // self.value_heads,
            )
            for t in range(len(x)):
                memory = memory * decay[t, head]
                memory = memory + torch.outer((v[t, head] - memory @ k[t, key]) * write_gate[t, head], k[t, key])
                out[t, head] = memory @ q[t, key] / self.key_dim**0.5
        return out

    def outcome(self, result: Tensor, arguments: tuple[Any, ...]) -> Outcome:
        """The result, and each sequence's state after the call, version by version."""
        at = arguments[6]
        places = zip(at.batch.rows.tolist(), at.batch.seq_lens.tolist(), strict=True)
        states = [at.state.take(SequencePlace((), row), length) for row, length in places]
        return result.cpu(), [{name: tensor.cpu() for name, tensor in state.items()} for state in states]

    def right(self) -> Outcome:
        return self.expected().float(), super().right()[1]

    def fault(self, expected: Outcome, outcome: Outcome) -> str | None:
        """A dtype, a shape, or a state of other tokens."""
        for number, (theirs, ours) in enumerate(zip(expected[1], outcome[1], strict=True)):
            if not torch.equal(ours["seen"], theirs["seen"]):
                return f"sequence {number} has seen {ours['seen'].tolist()} tokens, not {theirs['seen'].tolist()}"
            if not torch.equal(ours["conv"], theirs["conv"]):
                return f"sequence {number} does not keep the convolution's last inputs"
        return super().fault(expected[0], outcome[0])

    def figures(self, expected: Outcome, outcome: Outcome) -> Iterator[tuple[Figure, Tensor]]:
        """Of the output [T, Hv, dv] and of the states [versions, Hv, dk, dv], by head."""
        left, states = (
            torch.cat([state["delta"].flatten(2) for state in by_sequence]) for _, by_sequence in (expected, outcome)
        )
        yield from number_figures(self.op, expected[0], outcome[0], self.value_heads)
        yield from number_figures("delta_state", left, states, self.value_heads)
