"""Attention of one layer over packed codes beside others over bf16: decode steps and prompts; and storing new tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from haarkv.benchmarks.decode_cost import Case
from haarkv.benchmarks.gpu import data, peers
from haarkv.benchmarks.gpu.device import Call, captured, copies, copying, time_of
from haarkv.benchmarks.gpu.log import Log, Row
from haarkv.benchmarks.gpu.sizes import Prompt, Sizes
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.cuda import layout
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.reads import unsupported
from haarkv.tq_ops.table import OpTable, with_ops

FORMAT = "tq4"
COPY = "copy"
BEST = "best"
_FEWEST_CALLS = 4
_TRUE_ROWS = 64
_NOT_ATTENTION = 2.0**-4
"""An output that is off by more is not attention's, and its time says nothing. The checks know the true bounds."""


Attend = Callable[[Tensor, PagedKVCache, int, Batch, float], Tensor]
"""As an op table's `paged_attention`."""


def step_ops(device: torch.device) -> OpTable:
    """The GPU's op table as a decode step runs it: nothing in it waits for the device."""
    from haarkv.tq_ops.cuda import ops

    return with_ops(cast(OpTable, ops), {"store_kv": partial(ops.append, fault=ops.new_fault(device))})


def triton_beside(device: torch.device) -> Attend | None:
    """Attention by the Triton kernels, where the op table takes CUDA C++ instead; None where it takes them itself."""
    from haarkv.tq_ops.cuda import nvrtc, ops

    return None if device.type != "cuda" or nvrtc.missing() else ops.triton_attention


class Attention:
    """The parts that time one layer.

    Args:
        ops: from `step_ops`.
        triton: decode attention by the Triton kernels, where `ops` takes others; it is timed beside them.
    """

    def __init__(self, sizes: Sizes, device: torch.device, ops: OpTable, log: Log, triton: Attend | None = None) -> None:
        self.sizes, self.device, self.ops, self.log = sizes, device, ops, log
        self.config, self._triton = sizes.config, triton

    def decode(self) -> None:
        """Decode attention: one new token a sequence, all of whose tokens are stored."""
        for case in self.sizes.attention:
            case_name = f"{case.batch} x {case.context}"
            if not self.log.wants(f"{case_name} {BEST}"):
                continue
            with self.log.attempt(f"{case_name} {BEST}") as best:
                best |= vars(case)
                self._decode(case, case_name)
                best |= self._compared(case_name)
            self._free()

    def _decode(self, case: Case, name: str) -> None:
        k, v = data.kv_of(self.config, case.batch, case.context, self.device)
        q = data.queries(self.config, case.batch, 1, self.device)
        half_bytes, shape = 2.0 * k.numel() * k.itemsize, vars(case)
        names = self._formats() if case in self.sizes.every_format else (FORMAT,)
        plans = {kv: KVSpec(kv).plan(1) for kv in names}
        tokens = case.batch * case.context
        nbytes = {kv: tokens * plan.bytes_per_token(k.shape[1], k.shape[3]) for kv, plan in plans.items()}
        self._copy(f"{name} {COPY}", nbytes[FORMAT], shape)
        for kv, plan in plans.items():
            count = copies(nbytes[kv], self.sizes)

            def ours(attend: Attend, plan: KVPlan = plan, count: int = count) -> tuple[Call, Tensor | str]:
                held = data.stored(plan, k, v, count)

                def call(number: int) -> Tensor:
                    return attend(q, held.cache, 0, held.batches[number % count], self.config.attentions[0].scale)

                return call, self._of_reference(q, held.cache, held.batches[0], 1)

            for who, attend in (("", self.ops.paged_attention), (" triton", self._triton)):
                if attend is not None:
                    row = {**shape, "who": f"{kv}{who}", "side": "ours", "bytes": nbytes[kv]}
                    self._time(f"{name} {kv}{who}", partial(ours, attend), count, row)
        self._copy(f"{name} bf16 {COPY}", half_bytes, shape)
        few = min(case.batch, data.DISTINCT)
        truth = self._exact(q[:few].unsqueeze(1), k[:few], v[:few])
        count = copies(half_bytes, self.sizes)
        for peer in peers.decode(q, k, v, partial(copies, sizes=self.sizes)):
            row = {**shape, "who": peer.name, "side": "peer", "bytes": half_bytes}
            self._peer(f"{name} {peer.name}", peer, truth, count, row)

    def prefill(self) -> None:
        """Attention of a prompt's new tokens, behind what is stored already."""
        for prompt in self.sizes.prefill:
            name = f"{prompt.new} behind {prompt.stored}"
            if not self.log.wants(f"{name} {BEST}"):
                continue
            with self.log.attempt(f"{name} {BEST}") as best:
                best |= vars(prompt)
                self._prefill(prompt, name)
                best |= self._compared(name)
            self._free()

    def _prefill(self, prompt: Prompt, name: str) -> None:
        config, length = self.config, prompt.new + prompt.stored
        k, v = data.kv_of(config, 1, length, self.device)
        q = data.queries(config, 1, prompt.new, self.device)
        seen = prompt.new * prompt.stored + prompt.new * (prompt.new + 1) // 2
        shape = {**vars(prompt), "flops": 4.0 * config.heads.num_heads * config.heads.head_dim * seen}
        last = q[-_TRUE_ROWS:]

        def ours() -> tuple[Call, Tensor | str]:
            held = data.stored(KVSpec(FORMAT).plan(1), k, v, 1, prompt.new)
            call = partial(self.ops.paged_attention, q, held.cache, 0, held.batches[0], config.attentions[0].scale)
            return (lambda _number: call()[-len(last) :]), self._of_reference(last, held.cache, held.batches[0], len(last))

        self._time(f"{name} {FORMAT}", ours, 1, {**shape, "who": FORMAT, "side": "ours"})
        truth = self._exact(last.unsqueeze(0), k, v)
        for peer in peers.prefill(q, k, v):
            made = replace(peer, make=partial(_last_rows, peer.make, len(last)))
            self._peer(f"{name} {peer.name}", made, truth, 1, {**shape, "who": peer.name, "side": "peer"})

    def append(self) -> None:
        """Quantizing and storing new tokens, beside writing them as bf16."""
        for case in self.sizes.append:
            batch, new = case.batch, case.context
            name, row = f"{batch} x {new} new", {"batch": batch, "new": new}
            k, v = data.kv_of(self.config, batch, new, self.device)
            rows_k, rows_v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v))
            count = min(8, self.sizes.most_copies)

            def ours(k: Tensor = k, v: Tensor = v, new: int = new, count: int = count) -> tuple[Call, Tensor | str]:
                held = data.stored(KVSpec(FORMAT).plan(1), k, v, count, new)
                new_k, new_v = (x.transpose(1, 2).flatten(0, 1).float() for x in (k, v))
                return (lambda number: self.ops.store_kv(new_k, new_v, held.cache, 0, held.batches[number % count])), ""

            def dense(k: Tensor = rows_k, v: Tensor = rows_v, count: int = count) -> tuple[Call, Tensor | str]:
                slots = torch.randperm(count * len(k), generator=torch.Generator().manual_seed(3)).to(self.device)
                store = torch.zeros(2, count * len(k), *k.shape[1:], dtype=k.dtype, device=self.device)

                def call(number: int) -> None:
                    at = slots[number % count * len(k) :][: len(k)]
                    store[0].index_copy_(0, at, k)
                    store[1].index_copy_(0, at, v)

                return call, ""

            for who, make, side in ((FORMAT, ours, "ours"), ("bf16 index_copy", dense, "peer")):
                if self.log.wants(f"{name} {who}"):
                    self._time(f"{name} {who}", make, count, {**row, "who": who, "side": side})
            self._free()

    # -- One measurement -----------------------------------------------------------------------------------------------
    def _time(self, key: str, make: Callable[[], tuple[Call, Tensor | str]], count: int, row: Row) -> None:
        """Measure a call and write its row.

        Args:
            make: gives the call and what it should return: numbers, or why they are not known, or "" where nothing returns.
            count: copies of its data that take turns.
            row: what is known before; `bytes` and `flops` become rates.
        """
        if not self.log.wants(key):
            return
        with self.log.attempt(key) as filled, torch.inference_mode():
            filled |= row
            call, wanted = make()
            result = call(0)
            if isinstance(wanted, Tensor):
                assert isinstance(result, Tensor)
                filled["off"] = off(result, wanted)
            elif wanted:
                filled["off_unknown"] = wanted
            if not filled.get("off", 0.0) <= _NOT_ATTENTION:  # NaN is not, either
                raise RuntimeError(f"its result is off by {filled['off']:.3g} of the largest: not attention")
            calls = max(count, 1 if self.sizes.dry else _FEWEST_CALLS)
            filled |= time_of(captured(call, calls, self.device), calls, self.device, self.sizes)
            for name, rate in (("bytes", "tb_s"), ("flops", "tflops")):
                if name in row:
                    filled[rate] = row[name] / filled["us"] / 1e6

    def _peer(self, key: str, peer: peers.Peer, truth: Tensor, count: int, row: Row) -> None:
        if not peer.absent:
            self._time(key, lambda: (peer.make(), truth), count, row)
        elif self.log.wants(key):
            self.log.add(key, **row, missing=peer.absent)

    def _copy(self, key: str, nbytes: float, row: Row) -> None:
        def make() -> tuple[Call, Tensor | str]:
            return copying(nbytes, self.device, self.sizes)[0], ""

        who = "copy of as many bytes"
        self._time(key, make, copies(nbytes, self.sizes), {**row, "who": who, "side": "copy", "bytes": nbytes})

    def _compared(self, name: str) -> Row:
        """The best of the others in a case, how much longer it takes than ours, and how near ours is to a copy."""
        rows = [row for key, row in self.log.results.items() if key.startswith(f"{name} ")]
        ours = {row["who"]: row["us"] for row in rows if row.get("side") == "ours"}
        others = sorted((row["us"], row["who"]) for row in rows if row.get("side") == "peer")
        found: Row = {"ours_us": ours}
        if others:
            found |= {"best": others[0][1], "best_us": others[0][0]}
            found["gain"] = {who: others[0][0] / us for who, us in ours.items()}
        if (copied := self.log.results.get(f"{name} {COPY}")) and FORMAT in ours:
            found |= {"copy_us": copied["us"], "of_copy": copied["us"] / ours[FORMAT]}
        return found

    # -- What is true --------------------------------------------------------------------------------------------------
    def _of_reference(self, q: Tensor, cache: PagedKVCache, batch: Batch, new: int) -> Tensor | str:
        """The reference's attention of the last `new` tokens of the first sequences, or why it could not be computed."""
        few = min(len(batch.seq_lens), data.DISTINCT)
        chosen = slice(few) if new == 1 else slice(-new, None)  # of a prompt there is one sequence
        part = Batch(
            positions=batch.positions[chosen],
            slot_mapping=batch.slot_mapping[chosen],
            block_table=batch.block_table[:few],
            seq_lens=batch.seq_lens[:few],
            query_start_loc=torch.arange(0, few * new + 1, new, dtype=torch.int32, device=self.device),
            rows=batch.rows[:few],
        )
        try:
            scale = self.config.attentions[0].scale
            return reference.paged_attention(q[: few * new].float(), cache, 0, part, scale)
        except Exception as error:  # a figure without this column is better than none
            return f"{type(error).__name__}: {error}"

    def _exact(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention in FP32, [B * new, Hq, D]: q [B, new, Hq, D], whose tokens are the last of those in K and V."""
        new, length, group = q.shape[1], k.shape[2], q.shape[2] // k.shape[1]
        rows = q.float().transpose(1, 2).reshape(len(q), -1, group, new, q.shape[3])
        logits = torch.einsum("bhgtd,bhsd->bhgts", rows, k.float()) * self.config.attentions[0].scale
        hidden = torch.ones(new, length, dtype=torch.bool, device=q.device).triu(length - new + 1)
        out = torch.einsum("bhgts,bhsd->bhgtd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v.float())
        return out.flatten(1, 2).transpose(1, 2).flatten(0, 1)

    def _formats(self) -> Iterator[str]:
        """Formats that the kernels read, `tq4` first."""
        yield FORMAT
        for name in formats.names():
            if name != FORMAT and not unsupported(layout.READS, KVSpec(name).plan(1), self.config.heads.head_dim):
                yield name

    def _free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _last_rows(make: Callable[[], Callable[[int], Tensor]], rows: int) -> Callable[[int], Tensor]:
    """A call whose result [..., T, Hq, D] is the last tokens' alone: a view, which costs nothing."""
    call = make()
    return lambda number: call(number).flatten(0, -3)[-rows:]


def off(result: Tensor, wanted: Tensor) -> float:
    """The largest error of a result, by the largest number wanted.

    Args:
        result: of all sequences, in any shape that has them first; one, or a multiple of `DISTINCT`.
        wanted: of the first `DISTINCT` sequences, whose numbers the others repeat.
    """
    wanted = wanted.flatten().float()
    rows = result.float().reshape(-1, wanted.numel())
    return float((rows - wanted).abs().max() / wanted.abs().max())
