"""Attention of one layer over packed codes beside others over bf16: decode steps and prompts; and storing new tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor

from haarkv.benchmarks.attention import stored_copies
from haarkv.benchmarks.cases import Case, as_rows, first_layer, heads, random_kv, random_queries, scale, token_bytes
from haarkv.benchmarks.gpu import peers
from haarkv.benchmarks.gpu.device import FORMAT, Call, Prompt, Sizes, captured, copies, time_of
from haarkv.benchmarks.gpu.log import Log, Row
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.cuda import layout
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.reads import unsupported
from haarkv.tq_ops.table import OpTable, with_ops

COPY, BEST = "copy", "best"
_FEWEST_CALLS = 4
_TRUE_ROWS, _TRUE_SEQUENCES = 64, 2  # tokens of a prompt, and sequences of a step, whose attention is also computed exactly
_NOT_ATTENTION = 2.0**-4
"""An output that is off by more is not attention's, and its time says nothing. The checks know the true bounds."""

Attend = Callable[[Tensor, PagedKVCache, int, Batch, float], Tensor]
"""As an op table's `paged_attention`."""
Make = Callable[[], tuple[Call, Tensor | None]]
"""Gives a call, and what its first rows should be; None where nothing returns."""


def step_ops(device: torch.device) -> OpTable:
    """The GPU's op table as a decode step runs it: nothing in it waits for the device."""
    from haarkv.tq_ops.cuda import ops

    return with_ops(cast(OpTable, ops), {"store_kv": partial(ops.append, fault=ops.new_fault(device))})


def triton_beside(device: torch.device) -> Attend | None:
    """Attention by the Triton kernels, where the op table takes CUDA C++ instead; None where it takes them itself."""
    from haarkv.tq_ops.cuda import nvrtc, ops

    return None if device.type != "cuda" or nvrtc.missing() else ops.triton_attention


class Attention:
    """The parts that time one layer, with `step_ops`, and with attention by the Triton kernels where these take others."""

    def __init__(self, sizes: Sizes, device: torch.device, ops: OpTable, log: Log, triton: Attend | None = None) -> None:
        self.sizes, self.device, self.ops, self.log = sizes, device, ops, log
        self.config, self._triton = sizes.config, triton

    def decode(self) -> None:
        """Decode attention: one new token a sequence, all of whose tokens are stored."""
        for case in self.sizes.attention:
            self._compared(f"{case.batch} x {case.context}", vars(case), partial(self._decode, case))

    def prefill(self) -> None:
        """Attention of a prompt's new tokens, behind what is stored already."""
        for prompt in self.sizes.prefill:
            self._compared(f"{prompt.new} behind {prompt.stored}", prompt._asdict(), partial(self._prefill, prompt))

    def append(self) -> None:
        """Quantizing and storing new tokens, beside writing them as bf16."""
        count = min(8, self.sizes.most_copies)
        for case in self.sizes.append:
            name, row = f"{case.batch} x {case.context} new", {"batch": case.batch, "new": case.context}
            k, v = random_kv(self.config, case, self.device)

            def ours(case: Case = case, k: Tensor = k, v: Tensor = v) -> tuple[Call, None]:
                cache, batch = stored_copies(
                    KVSpec(FORMAT).plan(1), self.config, Case(case.batch, 1), k, v, count, case.context
                )
                new_k, new_v = as_rows(k), as_rows(v)
                return (lambda number: self.ops.store_kv(new_k, new_v, cache, number % count, batch)), None

            def dense(k: Tensor = k, v: Tensor = v) -> tuple[Call, None]:
                new = torch.stack([x.transpose(1, 2).flatten(0, 1) for x in (k, v)])
                slots = torch.randperm(new.shape[1], generator=torch.Generator().manual_seed(3)).to(self.device)
                store = torch.zeros(count, *new.shape, dtype=new.dtype, device=self.device)
                return (lambda number: store[number % count].index_copy_(1, slots, new)), None

            self._time(f"{name} {FORMAT}", ours, count, {**row, "who": FORMAT, "side": "ours"})
            self._time(f"{name} bf16 index_copy", dense, count, {**row, "who": "bf16 index_copy", "side": "peer"})

    def _decode(self, case: Case, name: str) -> None:
        k, v = random_kv(self.config, case, self.device)
        q = random_queries(self.config, case.batch, self.device)
        half_bytes, tokens, shape = 2.0 * k.numel() * k.itemsize, case.batch * case.context, vars(case)
        exact = self._exact(q[:_TRUE_SEQUENCES].unsqueeze(1), k[:_TRUE_SEQUENCES], v[:_TRUE_SEQUENCES])
        for kv in self._formats() if case in self.sizes.every_format else (FORMAT,):
            plan = KVSpec(kv).plan(1)
            nbytes = tokens * token_bytes(*first_layer(plan, self.config))[0]
            count = copies(nbytes, self.sizes)
            if kv == FORMAT:
                self._copy(f"{name} {COPY}", nbytes, shape)
            for who, attend in ((kv, self.ops.paged_attention), (f"{kv} triton", self._triton)):
                if attend is not None:
                    make = partial(self._ours, attend, kv, case, k, v, q, count, 1)
                    self._time(f"{name} {who}", make, count, {**shape, "who": who, "side": "ours", "bytes": nbytes})
        self._copy(f"{name} bf16 {COPY}", half_bytes, shape)
        for peer in peers.decode(q, k, v, partial(copies, sizes=self.sizes)):
            row = {**shape, "who": peer.name, "side": "peer", "bytes": half_bytes}
            self._peer(f"{name} {peer.name}", peer, exact, copies(half_bytes, self.sizes), row)

    def _prefill(self, prompt: Prompt, name: str) -> None:
        shape, length = heads(self.config), prompt.new + prompt.stored
        k, v = random_kv(self.config, Case(1, length), self.device)
        q = random_queries(self.config, prompt.new, self.device)
        seen = prompt.new * prompt.stored + prompt.new * (prompt.new + 1) // 2
        row = {**prompt._asdict(), "flops": 4.0 * shape.q * shape.dim * seen}
        make = partial(self._ours, self.ops.paged_attention, FORMAT, Case(1, length), k, v, q, 1, prompt.new)
        self._time(f"{name} {FORMAT}", make, 1, {**row, "who": FORMAT, "side": "ours"})
        exact = self._exact(q[-_TRUE_ROWS:].unsqueeze(0), k, v)
        for peer in peers.prefill(q, k, v):
            self._peer(f"{name} {peer.name}", peer, exact, 1, {**row, "who": peer.name, "side": "peer"})

    def _ours(
        self, attend: Attend, kv: str, case: Case, k: Tensor, v: Tensor, q: Tensor, count: int, new: int
    ) -> tuple[Call, Tensor | None]:
        """Attention of each sequence's last new tokens, and the reference's of those that are compared."""
        stored = Case(case.batch, case.context - new + 1)
        cache, batch = stored_copies(KVSpec(kv).plan(1), self.config, stored, k, v, count, new)
        for layer in range(count):
            self.ops.store_kv(as_rows(k[:, :, -new:]), as_rows(v[:, :, -new:]), cache, layer, batch)
        few, rows = (min(case.batch, _TRUE_SEQUENCES), 1) if new == 1 else (1, min(new, _TRUE_ROWS))
        chosen = slice(few) if new == 1 else slice(-rows, None)  # of a prompt there is one sequence
        part = Batch(
            positions=batch.positions[chosen], slot_mapping=batch.slot_mapping[chosen], block_table=batch.block_table[:few],
            seq_lens=batch.seq_lens[:few], rows=batch.rows[:few],
            query_start_loc=torch.arange(0, few * rows + 1, rows, dtype=torch.int32, device=self.device),
        )  # fmt: skip
        wanted = reference.paged_attention(q[chosen].float(), cache, 0, part, scale(self.config))
        return (lambda number: attend(q, cache, number % count, batch, scale(self.config))), wanted

    def _exact(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention in FP32, [B * new, Hq, D]: q [B, new, Hq, D], whose tokens are the last of those in K and V."""
        new, length, group = q.shape[1], k.shape[2], q.shape[2] // k.shape[1]
        rows = q.float().transpose(1, 2).reshape(len(q), -1, group, new, q.shape[3])
        logits = torch.einsum("bhgtd,bhsd->bhgts", rows, k.float()) * scale(self.config)
        hidden = torch.ones(new, length, dtype=torch.bool, device=q.device).triu(length - new + 1)
        out = torch.einsum("bhgts,bhsd->bhgtd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v.float())
        return out.flatten(1, 2).transpose(1, 2).flatten(0, 1)

    def _formats(self) -> Iterator[str]:
        """Formats that the kernels read, `tq4` first."""
        yield FORMAT
        for name in formats.names():
            if name != FORMAT and not unsupported(layout.READS, KVSpec(name).plan(1), self.config.kv_shapes[:1]):
                yield name

    def _time(self, key: str, make: Make, count: int, row: Row) -> None:
        """Measure a call, copies of whose data take turns, and add times to its row; `bytes` and `flops` become rates."""
        if not self.log.wants(key):
            return
        with self.log.attempt(key) as filled, torch.inference_mode():
            filled |= row
            call, wanted = make()
            result = call(0)
            if wanted is not None:
                assert isinstance(result, Tensor)
                filled["off"] = off(result, wanted, last="new" in row)
                if not filled["off"] <= _NOT_ATTENTION:  # NaN is not, either
                    raise RuntimeError(f"its result is off by {filled['off']:.3g} of the largest: not attention")
            calls = max(count, 1 if self.sizes.dry else _FEWEST_CALLS)
            filled |= time_of(captured(call, calls, self.device), calls, self.device, self.sizes)
            for name, rate in (("bytes", "tb_s"), ("flops", "tflops")):
                if name in row:
                    filled[rate] = row[name] / filled["us"] / 1e6

    def _peer(self, key: str, peer: peers.Peer, exact: Tensor, count: int, row: Row) -> None:
        if not peer.absent:
            self._time(key, lambda: (peer.make(), exact), count, row)
        elif self.log.wants(key):
            self.log.add(key, **row, missing=peer.absent)

    def _copy(self, key: str, nbytes: float, row: Row) -> None:
        """A plain copy that moves so many bytes in all, half of them read and half written."""
        count = copies(nbytes, self.sizes)

        def make() -> tuple[Call, None]:
            source = torch.ones(count, max(1, int(nbytes / 2)), dtype=torch.uint8, device=self.device)
            target = torch.zeros_like(source)
            return (lambda number: target[number % count].copy_(source[number % count])), None

        self._time(key, make, count, {**row, "who": "copy of as many bytes", "side": "copy", "bytes": nbytes})

    def _compared(self, name: str, shape: Row, measure: Callable[[str], None]) -> None:
        """Measure a case: its best peer, how much longer that takes than ours, and how near ours is to a copy."""
        if not self.log.wants(f"{name} {BEST}"):
            return
        with self.log.attempt(f"{name} {BEST}") as best:
            measure(name)
            rows = [row for key, row in self.log.results.items() if key.startswith(f"{name} ")]
            ours = {row["who"]: row["us"] for row in rows if row.get("side") == "ours"}
            others = sorted((row["us"], row["who"]) for row in rows if row.get("side") == "peer")
            best |= {**shape, "ours_us": ours}
            if others:
                best |= {"best": others[0][1], "best_us": others[0][0]}
                best["gain"] = {who: others[0][0] / us for who, us in ours.items()}
            if (copied := self.log.results.get(f"{name} {COPY}")) and FORMAT in ours:
                best |= {"copy_us": copied["us"], "of_copy": copied["us"] / ours[FORMAT]}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def off(result: Tensor, wanted: Tensor, last: bool = False) -> float:
    """The largest error of a result's first rows, or of its last, by the largest number wanted.

    Args:
        result: of all sequences, in any shape that has them first.
        wanted: [rows, Hq, D].
    """
    rows = result.float().reshape(-1, *wanted.shape[1:])
    chosen = rows[-len(wanted) :] if last else rows[: len(wanted)]
    return float((chosen - wanted).abs().max() / wanted.abs().max())
