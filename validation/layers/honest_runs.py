"""What honest runs of a layer show: op by op, and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import Weight
from haarkv.validation.layers.forward import MadeLayer
from haarkv.validation.layers.judge import Values, hidden_figures, stored_figures
from haarkv.validation.layers.null import (
    Figure,
    Numbers,
    Rows,
    Slips,
    Sums,
    added,
    by_figure,
    computed,
    drawn,
    of_numbers,
    of_runs,
    repeated,
)  # fmt: skip
from haarkv.validation.layers.parts import KV, Stored, load, snapshot, take
from haarkv.validation.layers.record import Call
from haarkv.validation.layers.reference import Reference, keep
from haarkv.validation.layers.states import state_of
from haarkv.validation.layers.windows import without_unread

Known = dict[tuple[str, str, int, int], Any]
"""What honest runs of a layer gave, by drive (or "slips"), phase, step and layer."""
STEEPER = "softmax 1 % too steep"


class HonestRuns:
    """Lets the reference run a layer as other devices may, and keeps what that gave.

    Args:
        known: what it gave before, of the same forwards; is added to.
    """

    def __init__(self, reference: Reference, known: Known | None = None) -> None:
        self.reference = reference
        self._known: Known = {} if known is None else known
        self._scratch = reference.cache.empty_like(reference.cache.device)

    def of_layer(self, made: MadeLayer) -> tuple[list[Sums], list[KV]]:
        """Of a layer as a whole; also by how much their K and V differ from the reference's."""
        runs: tuple[list[Sums], list[KV]] = self._remembered(made, "layers", lambda: self._layers(made))
        return runs

    def _layers(self, made: MadeLayer) -> tuple[list[Sums], list[KV]]:
        # What one token leaves in a state moves all that follow.
        runs = computed(len(made.hidden_in) if made.kv is not None else 1)
        hidden, stored, moves = zip(*(self._layer(made, ops) for ops in self.reference.honest(made, runs)), strict=True)
        moved = [kv for of_run in moves for kv in of_run]
        of_kv = [
            by_figure(stored_figures(self.reference.cache, made.index, made.batch, made.stored, each, made.kv, moved))
            for each in stored
        ]
        before, ours = (repeated(x, runs) for x in (made.hidden_in, made.hidden_out))
        slips = {name: repeated(by, runs) for name, by in self.slips(made).items()}
        of_hidden = of_runs(hidden_figures(before, ours, torch.cat(hidden), slips), runs)
        return drawn([{**one, **other} for one, other in zip(of_kv, of_hidden, strict=True)]), moved

    def _remembered(self, made: MadeLayer, what: str, find: Callable[[], Any]) -> Any:
        """What was found of a layer's forward, now or before."""
        key = what, made.forward.phase, made.forward.step, made.index
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def _layer(self, made: MadeLayer, table: OpTable) -> tuple[Tensor, Stored, list[KV]]:
        """One honest run: hidden states, what it stored, and by how much its K and V differ from the reference's."""
        reference, batch, index = self.reference, made.batch, made.index
        load(self._scratch, index, made.before)
        moved: list[KV] = []
        if made.kv is None:
            out = reference.model.layers(made.hidden_in, range(index, index + 1), batch, self._scratch, table)
        else:

            def store_aside(k: Tensor, v: Tensor, _cache: PagedKVCache, layer: int, batch: Batch) -> None:
                """Store into the scratch cache, and leave the one that attention reads as it is."""
                moved.append((k - made.k, v - made.v))
                with self._scratch.with_room(layer, batch):
                    table.store_kv(k, v, self._scratch, layer, batch)

            out = reference.over(reference.as_read(made, made.stored), made, with_ops(table, {"store_kv": store_aside}))
        return out, take(self._scratch, index, batch), moved

    def slips(self, made: MadeLayer) -> Slips:
        """What known mistakes in each KV head's attention, and in the MLP, change hidden states by."""
        if made.kv is None or not self.reference.records:
            return {}
        slips: Slips = self._remembered(made, "slips", lambda: self._layer_slips(made))
        return slips

    def _layer_slips(self, made: MadeLayer) -> Slips:
        reference, ops, heads = self.reference, self.reference.ops, self._kv_heads(made.index)
        cache = reference.as_read(made, made.stored)
        gates = {id(weight) for name, _, weight in reference.model.weights.layers[made.index].named() if "gate_proj" in name}

        by_scale: dict[float, tuple[Tensor, ...]] = {}

        def moved(**replaced: Any) -> Tensor:
            return reference.over(cache, made, with_ops(ops, {"store_kv": keep, **replaced}), exact=True)

        def in_head(chosen: int | None = None, larger: float = 1.0, steeper: float = 1.0) -> Any:
            """Attention that is otherwise in one head; attended once for all."""

            def paged_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> Tensor:
                for factor in {1.0, steeper} - by_scale.keys():
                    by_scale[factor] = ops.paged_attention(q, cache, layer, batch, scale * factor).chunk(heads, 1)
                parts = [by_scale[steeper][h] * larger if h == chosen else by_scale[1.0][h] for h in range(heads)]
                return torch.cat(parts, 1)

            return paged_attention

        def linear(x: Tensor, weight: Weight) -> Tensor:
            return ops.linear(x, weight) * (1.01 if id(weight) in gates else 1.0)

        right = moved(paged_attention=in_head())
        slips = {"the gate 1 % too large": moved(paged_attention=in_head(), linear=linear) - right}
        for name, larger, steeper in (("attention 1 % too large", 1.01, 1.0), (STEEPER, 1.0, 1.01)):
            each = [moved(paged_attention=in_head(head, larger, steeper)) - right for head in range(heads)]
            slips |= {f"{name} @{head}": by for head, by in enumerate(each)} | {name: torch.stack(each).sum(0)}
        return slips

    # -- Ops -------------------------------------------------------------------------------------------------------------
    def of_ops(self, made: MadeLayer) -> tuple[dict[int, Slips], list[Sums]]:
        """Of a layer's ops one by one; also what a steeper softmax changes each attention by, by its place among the calls."""
        found: tuple[dict[int, Slips], list[Sums]] = self._remembered(made, "ops", lambda: self._ops(made))
        return found

    def _ops(self, made: MadeLayer) -> tuple[dict[int, Slips], list[Sums]]:
        tables = self.reference.honest(made)
        steeper: dict[int, Slips] = {}
        runs: list[dict[Figure, Numbers]] = [{} for _ in tables]
        for place, call in enumerate(made.calls):
            self._load(call, made)
            if call.op == "paged_attention":
                steeper[place] = self._steeper(call)
            some = tables[: computed(len(call.args[0]) if call.op != "gated_delta" else 1)]
            for number, sums in enumerate(drawn(self._rows(call, made, some, steeper.get(place, {})))):
                runs[number] = dict(added(runs[number], sums))
        return steeper, list(runs)

    def _rows(self, call: Call, made: MadeLayer, tables: Sequence[OpTable], slips: Slips) -> list[Rows]:
        """Figures of an op's honest runs."""
        results, stored = zip(*(self._op(call, made, table) for table in tables), strict=True)
        rows = [by_figure(self.figures(call, made, None, of_run, {})) for of_run in stored]
        if call.op == "store_kv":
            return rows
        runs = len(tables)
        one = replace(call, result=repeated(call.result, runs))
        numbers = self.figures(one, made, torch.cat(results), {}, {name: repeated(by, runs) for name, by in slips.items()})
        return [{**of_stored, **others} for of_stored, others in zip(rows, of_runs(numbers, runs), strict=True)]

    def _load(self, call: Call, made: MadeLayer) -> None:
        """Give the scratch cache what a recorded op found in its own."""
        if call.op in ("store_kv", "gated_delta"):
            load(self._scratch, made.index, made.before)
        elif call.op == "paged_attention":
            load(self._scratch, made.index, self.readable(call, made))

    def _op(self, call: Call, made: MadeLayer, table: OpTable) -> tuple[Any, Stored]:
        """One honest run of an op over the scratch cache: its result, and what it stored."""
        if call.op == "gated_delta":
            self._load(call, made)
        result = getattr(table, call.op)(*(self._scratch if isinstance(arg, PagedKVCache) else arg for arg in call.args))
        return result, take(self._scratch, made.index, made.batch) if call.op in ("store_kv", "gated_delta") else {}

    def figures(self, call: Call, made: MadeLayer, result: Any, stored: Stored, slips: Slips) -> Values:
        """Figures of an op's result and of what it stored."""
        if stored:
            yield from stored_figures(self.reference.cache, made.index, made.batch, made.stored, stored, made.kv)
        if result is not None:
            heads = self._kv_heads(made.index) if call.op == "paged_attention" else 0
            yield from of_numbers(call.stage, call.result, result, heads, slips)

    def _steeper(self, call: Call) -> Slips:
        """What a softmax that is 1 % too steep changes attention over the scratch cache by."""
        q, _, layer, batch, scale = call.args
        over = partial(self.reference.ops.paged_attention, q.float(), self._scratch, layer, batch)
        return {STEEPER: over(1.01 * scale) - over(scale)}

    def _kv_heads(self, index: int) -> int:
        """Of a layer; 1 of one that keeps a state."""
        return 1 if state_of(self.reference.cache, index) is not None else self.reference.cache.shape(index).num_kv_heads

    def readable(self, call: Call, made: MadeLayer) -> Stored:
        """The layer's cache as attention is given it: what it must not read is far from what it was."""
        cache, batch = self.reference.cache, made.batch
        return without_unread(cache, made.index, snapshot(cache, made.index), batch, batch.seq_lens, call.args[0])
