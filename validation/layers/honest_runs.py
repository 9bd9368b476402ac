"""Honest runs of one layer, op by op and as a whole: the figures with which the judge compares an executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import LayerView, PagedKVCache
from haarkv.tq_ops.table import OP_NAMES, OpTable, with_ops
from haarkv.tq_ops.weight import Weight
from haarkv.validation.layers.forward import Call, LayerRecord
from haarkv.validation.layers.judge import Values, hidden_figures, stored_figures
from haarkv.validation.layers.null import (
    RunRows,
    Slips,
    Sums,
    add_sums,
    by_figure,
    num_honest_runs,
    number_figures,
    repeat_rows,
    repeated_batch,
    resample_runs,
    split_runs,
    stacked,
)  # fmt: skip
from haarkv.validation.layers.parts import KV, Snapshot, load, snapshot, take, vector_parts, without_unread
from haarkv.validation.layers.reference import Reference, keep

T = TypeVar("T")
HonestCache = dict[tuple[str, str, int, int], Any]
"""(what was found, phase, step, layer) -> results of honest runs."""
STEEPER = "softmax 1 % too steep"


def _cached(find: Callable[[HonestRuns, LayerRecord], T]) -> Callable[[HonestRuns, LayerRecord], T]:
    """Honest runs that a validation computes once for each layer of each forward."""

    def run(self: HonestRuns, record: LayerRecord) -> T:
        key = find.__name__, record.forward.phase, record.forward.step, record.index
        if key not in self.honest_cache:
            self.honest_cache[key] = find(self, record)
        result: T = self.honest_cache[key]
        return result

    return run


class HonestRuns:
    """Runs layers of the reference as other correct devices may compute them. Results are added to `honest_cache`."""

    def __init__(self, reference: Reference, honest_cache: HonestCache | None = None) -> None:
        self.reference = reference
        self.honest_cache: HonestCache = {} if honest_cache is None else honest_cache
        self._scratch = reference.cache.empty_like(reference.cache.device)
        self._readable: tuple[Call, Snapshot] | None = None

    @_cached
    def layer_sums(self, record: LayerRecord) -> tuple[Sums, Mapping[str, Tensor]]:
        """The sums of sixteen honest runs of a whole layer, and `Null.reach`."""
        # With a recurrent state tokens are not independent, so runs cannot be drawn token by token: compute all sixteen.
        reference = self.reference
        runs = num_honest_runs(len(record.hidden_in) if record.kv is not None else 1, reference.model.dtype)
        aside = _Aside(reference, self._scratch, record, runs)
        table = reference.honest(_place(record), runs, len(record.hidden_in), aside.ops)
        cache = (
            self._scratch if record.kv is None else cast(PagedKVCache, _AtOnce(reference.as_read(record, record.new_fields)))
        )
        span, batch = range(record.index, record.index + 1), repeated_batch(record.batch, runs)
        before = repeat_rows(record.hidden_in, runs)
        hidden = reference.model.layers(before, span, batch, cache, table)
        slips = {name: repeat_rows(by, runs) for name, by in self.slips(record).items()}
        hidden_rows = split_runs(hidden_figures(before, repeat_rows(record.hidden_out, runs), hidden, slips), runs)
        reach = aside.reach()
        return resample_runs({**aside.rows(reach), **hidden_rows}), reach

    def slips(self, record: LayerRecord) -> Slips:
        """Changes of hidden states by known mistakes: in the attention of each KV head, and in the MLP."""
        return {} if record.kv is None else self._layer_slips(record)[0]

    @_cached
    def _layer_slips(self, record: LayerRecord) -> tuple[Slips, Slips]:
        """`slips`; also the change of attention's result if its softmax is 1 % too steep."""
        reference, ops, heads = self.reference, self.reference.ops, self._kv_heads(record.index)
        cache = reference.as_read(record, record.new_fields)
        gates = {
            id(weight)
            for name, _, weight in reference.model.weights.layers[record.index].named_tensors()
            if "gate_proj" in name
        }

        by_scale: dict[float, tuple[Tensor, ...]] = {}
        start: list[Tensor] = []
        """Results of the ops before attention. They are the same in all runs, so only the first computes them."""

        def run_with(ops: OpTable = ops, **op_overrides: Any) -> Tensor:
            table, results = with_ops(ops, op_overrides), iter(start)

            def after_start(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
                return lambda *args: op(*args) if (result := next(results, None)) is None else result

            others = {name: after_start(getattr(table, name)) for name in OP_NAMES if name != "paged_attention"}
            return reference.rerun_layer(cache, record, with_ops(table, {**others, "store_kv": keep}), exact=True)

        def in_head(faulty_head: int | None = None, larger: float = 1.0, steeper: float = 1.0) -> Any:
            """Attention that is wrong in one head. The right and the steeper result are computed once for all heads."""

            def paged_attention(q: Tensor, at: LayerView, scale: float) -> Tensor:
                for factor in {1.0, steeper} - by_scale.keys():
                    by_scale[factor] = ops.paged_attention(q, at, scale * factor).chunk(heads, 1)
                parts = [by_scale[steeper][h] * larger if h == faulty_head else by_scale[1.0][h] for h in range(heads)]
                return torch.cat(parts, 1)

            return paged_attention

        def linear(x: Tensor, weight: Weight) -> Tensor:
            return ops.linear(x, weight) * (1.01 if id(weight) in gates else 1.0)

        right = run_with(reference.recorder.ops, paged_attention=in_head())
        ahead = [call.op for call in record.calls if call.op != "store_kv"].index("paged_attention")
        start += (call.result for call in reference.recorder.take_calls()[:ahead])
        slips = {"the gate 1 % too large": run_with(paged_attention=in_head(), linear=linear) - right}
        for name, larger, steeper in (("attention 1 % too large", 1.01, 1.0), (STEEPER, 1.0, 1.01)):
            each = [run_with(paged_attention=in_head(head, larger, steeper)) - right for head in range(heads)]
            slips |= {f"{name} @{head}": by for head, by in enumerate(each)} | {name: torch.stack(each).sum(0)}
        return slips, {STEEPER: torch.cat(by_scale[1.01], 1) - torch.cat(by_scale[1.0], 1)}

    # -- Ops -------------------------------------------------------------------------------------------------------------
    @_cached
    def op_sums(self, record: LayerRecord) -> Sums:
        """The sums of sixteen honest runs of a layer's ops, each op alone."""
        each = (resample_runs(self._op(call, record, 1000 * place)) for place, call in enumerate(record.calls))
        return reduce(add_sums, each, {})

    def _op(self, call: Call, record: LayerRecord, salt: int) -> RunRows:
        x = call.args[0]
        runs = num_honest_runs(
            len(x) if call.op != "gated_delta" else 1, x.dtype if call.op == "paged_attention" else torch.float32
        )
        aside = _Aside(self.reference, self._scratch, record, runs)
        table = self.reference.honest(_place(record) + salt, runs, op_overrides=aside.ops)
        if call.op == "paged_attention":
            load(self._scratch, record.index, self.readable(call, record))
        result = getattr(table, call.op)(
            *(replace(arg, cache=self._scratch) if isinstance(arg, LayerView) else arg for arg in call.args)
        )
        rows = aside.rows({})
        if result is not None:
            rows = {**rows, **split_runs(self.figures(call, record, result, {}, runs), runs)}
        return rows

    def figures(self, call: Call, record: LayerRecord, result: Any, part_fields: Snapshot, runs: int = 1) -> Values:
        """Figures of an op's result (the rows of `runs` runs), and of the fields that it stored."""
        if part_fields:
            yield from stored_figures(
                self.reference.cache, record.index, record.batch, record.new_fields, part_fields, record.kv
            )
        if result is not None:
            attends = call.op == "paged_attention"
            heads = self._kv_heads(record.index) if attends else 0
            slips = self._layer_slips(record)[1] if attends else {}
            wide = {name: repeat_rows(by, runs) for name, by in slips.items()}
            yield from number_figures(call.stage, repeat_rows(call.result, runs), result, heads, wide)

    def _kv_heads(self, index: int) -> int:
        """Number of KV heads of a layer with K and V."""
        return self.reference.cache.kv[index].shape.num_kv_heads

    def readable(self, call: Call, record: LayerRecord) -> Snapshot:
        """The layer's cache before an attention call, with poison in all places that attention must not read."""
        if self._readable is None or self._readable[0] is not call:
            cache, batch, now = self.reference.cache, record.batch, snapshot(self.reference.cache, record.index)
            self._readable = call, without_unread(cache, record.index, now, batch, batch.seq_lens, call.args[0])
        return self._readable[1]


def _place(record: LayerRecord) -> int:
    """Seed of the noise: a different one for each layer and step."""
    return 1 + record.index + 10**7 * record.forward.step


class _AtOnce:
    """A cache for reading only: it accepts any number of queries."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def open(self, layer: int, batch: Batch) -> AbstractContextManager[LayerView]:
        return nullcontext(self._cache.view(layer, batch))

    def run(self, layer: int, batch: Batch, op: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        return op(self._cache.view(layer, batch), *rows)


class _Aside:
    """Collects what honest runs of a layer store: `ops` write one run after the other to a scratch cache."""

    def __init__(self, reference: Reference, scratch: PagedKVCache, record: LayerRecord, runs: int) -> None:
        self._reference, self._scratch, self._record, self._runs = reference, scratch, record, runs
        self._stored: list[Snapshot] = []
        self._kv: KV | None = None
        self.ops: dict[str, Callable[..., Any]] = {"store_kv": self._store_kv, "gated_delta": self._gated_delta}

    def _store_kv(self, k: Tensor, v: Tensor, at: LayerView) -> None:
        scratch, layer, batch, runs, self._kv = self._scratch, at.layer, self._record.batch, self._runs, (k, v)
        load(scratch, layer, self._record.before)
        for run in range(runs):
            with scratch.open(layer, batch) as view:
                self._reference.ops.store_kv(k[run::runs], v[run::runs], view)
            self._stored.append(take(scratch, layer, batch))

    def _gated_delta(self, *args: Any) -> Tensor:
        results, batch, layer = [], self._record.batch, self._record.index
        for run in range(self._runs):
            load(self._scratch, layer, self._record.before)
            x, a, b = (rows[run :: self._runs] for rows in args[:3])
            results.append(
                self._reference.ops.gated_delta(x, a, b, args[3], args[4], args[5], self._scratch.view(layer, batch))
            )
            self._stored.append(take(self._scratch, layer, batch))
        return torch.stack(results, 1).flatten(0, 1)

    def reach(self) -> dict[str, Tensor]:
        """As `Null.reach`."""
        record, runs = self._record, self._runs
        if self._kv is None or record.kv is None:
            return {}
        k, v = (ours - repeat_rows(theirs, runs) for ours, theirs in zip(self._kv, record.kv, strict=True))
        batch, reach = repeated_batch(record.batch, runs), {}
        for part in vector_parts(self._reference.cache, record.index):
            lengths = part.kv_format.length(part.vectors_to_store(k, v, batch).transpose(0, 1), record.index)
            reach[part.name] = lengths.view(len(lengths), lengths.shape[1] // runs, runs).amax(-1)
        return reach

    def rows(self, reach: Mapping[str, Tensor]) -> RunRows:
        """Figures of the stored fields of all runs; {} if the ops stored nothing."""
        record, runs, cache = self._record, self._runs, self._reference.cache
        if not self._stored:
            return {}
        if record.kv is None:
            args = cache, record.index, record.batch, record.new_fields
            return stacked([by_figure(stored_figures(*args, one, None)) for one in self._stored])
        # All runs in one comparison: one by one they take a tenth of a validation.
        theirs = {
            part: {name: torch.stack([one[part][name] for one in self._stored], 1).flatten(0, 1) for name in fields}
            for part, fields in record.new_fields.items()
        }
        ours = {
            part: {name: repeat_rows(tensor, runs) for name, tensor in fields.items()}
            for part, fields in record.new_fields.items()
        }
        k, v = (repeat_rows(x, runs) for x in record.kv)
        wide = {part: lengths.repeat_interleave(runs, -1) for part, lengths in reach.items()}
        batch = repeated_batch(record.batch, runs)
        return split_runs(stored_figures(cache, record.index, batch, ours, theirs, (k, v), wide), runs)
