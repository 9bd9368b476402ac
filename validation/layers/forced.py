"""A layer on trial, teacher-forced: fed the reference's input and cache, op by op where it has ops, and as a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import Weight
from haarkv.validation import bounds
from haarkv.validation.layers.forward import MadeLayer
from haarkv.validation.layers.judge import (
    Values,
    guilty_head,
    hidden_figures,
    in_whole,
    judge_strays,
    stored_figures,
    verdicts,
)
from haarkv.validation.layers.null import (
    Figure,
    Null,
    Numbers,
    Rows,
    Slips,
    Sums,
    added,
    by_figure,
    collected,
    computed,
    drawn,
    of_numbers,
    of_runs,
    repeated,
)
from haarkv.validation.layers.parts import Stored, load, snapshot, take
from haarkv.validation.layers.record import Call, replay
from haarkv.validation.layers.reference import Reference, keep
from haarkv.validation.layers.report import Measured, Verdict, first
from haarkv.validation.layers.states import STATE, compare_states, state_of
from haarkv.validation.layers.trial import WITHIN_ROUNDING, Outcome, Repeats, Run, Strays, Trial
from haarkv.validation.layers.windows import without_unread

_FEW = 8
"""New tokens of a sequence up to which a layer runs again over another state."""


Known = dict[tuple[str, str, int, int], Any]
"""What honest runs of a layer gave, by drive (or "slips"), phase, step and layer."""


@dataclass(frozen=True)
class Judged:
    """What was found of one layer.

    Attributes:
        verdicts: of its ops, then of the whole.
        share: how many times what honest runs allow its worst figure is.
        expected: hidden states [T, hidden] that the candidate's are held against: what the reference makes of the K and V
            that the candidate stored.
        run: the candidate's.
    """

    verdicts: list[Verdict]
    share: float
    expected: Tensor
    run: Run


class Forced:
    """Runs and judges layers one by one.

    Args:
        trial: the candidate.
        ops: its op table; None if its layers are programs.
        repeats: runs of each layer beside the first, to be held against it.
        known: what honest runs of the same forwards gave before; is added to.
    Attributes:
        over_others: layers that ran over another state than their own as well, and gave what follows from it.
    """

    def __init__(
        self, reference: Reference, trial: Trial, ops: OpTable | None, repeats: int = 0, known: Known | None = None
    ) -> None:
        self.reference, self.trial, self.ops = reference, trial, ops
        self._known: Known = {} if known is None else known
        self.rounds = reference.model.dtype != torch.float32
        self.repeats = Repeats(repeats)
        self.over_others = 0
        self.nulls: dict[str, dict[int, Null]] = {drive: defaultdict(Null) for drive in ("ops", "layers")}
        self._scratch = reference.cache.empty_like(reference.cache.device)

    def layer(self, made: MadeLayer, bad: Stored) -> Judged:
        """Run and judge one layer.

        Args:
            bad: what the places of its tokens hold before.
        """
        found = self._ops(made, bad)
        run = self.run(made, bad)
        unstable = self.repeats.of_layer(run, lambda: self.run(made, bad))
        judged = self.judge(made, run, self.null(made))
        ops_fail = any(verdict.fails for verdict in found)
        if self.ops is not None and not ops_fail:
            judged = replace(judged, verdicts=[in_whole(verdict) for verdict in judged.verdicts])
        if unstable is None and any(verdict.fails for verdict in judged.verdicts):
            unstable = self.repeats.confirmed(run, lambda: self.run(made, bad))
        if unstable is not None:
            wrong = next((v.stage for v in judged.verdicts if v.fails), None)
            detail = unstable.detail if wrong else f"{unstable.detail}, {WITHIN_ROUNDING}"
            return replace(judged, verdicts=[*found, replace(unstable, stage=wrong or unstable.stage, detail=detail)])
        if made.kv is None and not ops_fail:
            judged = replace(judged, verdicts=[*judged.verdicts, *self._over_another(made, judged)])
        return replace(judged, verdicts=[*found, *judged.verdicts])

    def run(self, made: MadeLayer, bad: Stored) -> Run:
        """One run of a layer, from the reference's input and cache."""
        self.trial.load(made.index, made.before)
        return self.trial.run(made.hidden_in, made.index, bad, made.batch)

    def judge(self, made: MadeLayer, run: Run, null: Null, room: float = 1.0) -> Judged:
        """What a run of a layer got right.

        Args:
            room: how many times what the null allows is no fault.
        """
        cache, batch, result = self.reference.cache, made.batch, run.outcome.result
        broken = judge_strays(run.strays, made.index) + _broken_state(cache, made, run.stored)
        if run.outcome.problem:
            broken.insert(0, Verdict.broken("call", run.outcome.problem))
        stored = collected(stored_figures(cache, made.index, batch, made.stored, run.stored, made.kv))
        expected = made.hidden_out
        differing = _differing(made.stored, run.stored, stored)
        if differing and made.kv is not None and self.reference.records:
            # Ties are not the candidate's fault; what follows is held against the reference over what the candidate stored.
            expected = self.reference.given(made, run.stored)
        differing += [] if torch.equal(expected, result) else ["attention_mlp"]
        slips = self._slips(made) if room == 1.0 else {}
        sums = {**stored, **collected(hidden_figures(made.hidden_in, expected, result, slips))}
        excesses = {figure: excess / room for figure, excess in null.excesses(sums, self.rounds).items()}
        found = verdicts(excesses, differing)
        found = [
            replace(v, head=guilty_head(expected, result, slips))
            if v.fails and v.stage == "attention_mlp" else v
            for v in found
        ]  # fmt: skip
        if room == 1.0 and not broken and not any(verdict.fails for verdict in found):
            null.add(sums)
        return Judged([*broken, *found], max(excesses.values(), default=0.0), expected, run)

    def totals(self) -> tuple[list[Verdict], list[Measured]]:
        """What shows over all forwards together, and every figure of that."""
        found: list[Verdict] = []
        measured = []
        for drive, nulls in self.nulls.items():
            for layer, null in sorted(nulls.items()):
                excesses = null.total_excesses(self.rounds)
                judged = verdicts(excesses, [f.stage for f in excesses], together=True)
                found += [replace(verdict, layer=layer) for verdict in judged if verdict.fails]
                measured += [
                    Measured(drive, layer, figure.stage, figure.head, figure.kind, excess)
                    for figure, excess in excesses.items()
                ]
        return found, measured

    # -- Whole layers ----------------------------------------------------------------------------------------------------
    def null(self, made: MadeLayer) -> Null:
        """What sixteen honest runs of a layer give."""
        null = self.nulls["layers"][made.index]
        null.runs = self._remembered(made, "layers", lambda: self._honest_layers(made))
        return null

    def _honest_layers(self, made: MadeLayer) -> list[Sums]:
        # What one token leaves in a state moves all that follow.
        runs = computed(len(made.hidden_in) if made.kv is not None else 1)
        found = [self._honest_layer(made, ops) for ops in self.reference.honest(made, runs)]
        before, ours = (repeated(x, runs) for x in (made.hidden_in, made.hidden_out))
        slips = {name: repeated(by, runs) for name, by in self._slips(made).items()}
        hidden = of_runs(hidden_figures(before, ours, torch.cat([out for out, _ in found]), slips), runs)
        return drawn([{**stored, **others} for (_, stored), others in zip(found, hidden, strict=True)])

    def _remembered(self, made: MadeLayer, what: str, find: Callable[[], Any]) -> Any:
        """What was found of a layer's forward, now or before."""
        key = what, made.forward.phase, made.forward.step, made.index
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def _honest_layer(self, made: MadeLayer, table: OpTable) -> tuple[Tensor, Rows]:
        """Hidden states after one honest run, and the figures of what it stored."""
        reference, cache, batch, index = self.reference, self.reference.cache, made.batch, made.index
        load(self._scratch, index, made.before)
        if made.kv is None:
            out = reference.model.layers(made.hidden_in, range(index, index + 1), batch, self._scratch, table)
        else:
            out = reference.over(reference.as_read(made, made.stored), made, self._storing_aside(table))
        return out, by_figure(stored_figures(cache, index, batch, made.stored, take(self._scratch, index, batch), made.kv))

    def _storing_aside(self, table: OpTable) -> OpTable:
        """A table that stores into the scratch cache, and leaves the one that attention reads as it is."""

        def store_kv(k: Tensor, v: Tensor, _cache: PagedKVCache, layer: int, batch: Batch) -> None:
            with self._scratch.with_room(layer, batch):
                table.store_kv(k, v, self._scratch, layer, batch)

        return with_ops(table, {"store_kv": store_kv})

    def _slips(self, made: MadeLayer) -> Slips:
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

    def _over_another(self, made: MadeLayer, judged: Judged) -> list[Verdict]:
        """The layer again over other states of as many tokens: one that keeps a state elsewhere finds the old one.

        Forwards of a few tokens are run so; the verdict says whether the state that a layer reads changes what it gives.
        """
        few = int(made.batch.query_start_loc.diff().max()) <= _FEW
        if not few or not self.reference.records or any(verdict.fails for verdict in judged.verdicts):
            return []
        other = self.reference.over_another_state(made)
        if other is None:
            return []
        null = self.nulls["layers"][made.index]
        # Where all is forgotten at once, the state that is read does not matter.
        apart = collected(hidden_figures(made.hidden_in, made.hidden_out, other.hidden_out, {}))
        matters = max(null.excesses(apart, self.rounds).values()) > 1
        again = self.judge(other, self.run(other, {STATE: {}}), null, bounds.FREE)
        wrong = first(again.verdicts)
        if wrong is None or not wrong.fails:
            self.over_others += matters
            return []
        detail = (
            f"over another state of as many tokens, as when a prefix is reused, it goes on from the old one: {wrong.detail}"
        )
        return [replace(wrong, stage="state_read", detail=detail)]

    # -- Ops -------------------------------------------------------------------------------------------------------------
    def _ops(self, made: MadeLayer, bad: Stored) -> list[Verdict]:
        """Every recorded op, run by the candidate's table on the reference's own inputs."""
        if self.ops is None:
            return []
        null = self.nulls["ops"][made.index]
        steeper, null.runs = self._remembered(made, "ops", lambda: self._honest_ops(made))
        broken: list[Verdict] = []
        figures: list[tuple[Figure, Tensor]] = []
        differing: list[str] = []
        for place, call in enumerate(made.calls):
            run = self._op_run(call, made, bad)
            if wrong := self._broken(call, made, run):
                broken += wrong
                continue
            of_op = list(self._op_figures(call, made, run.outcome.result, run.stored, steeper.get(place, {})))
            figures += of_op
            same = run.outcome.result is None or torch.equal(call.result, run.outcome.result)
            differing += [] if same else [call.stage]
            if run.stored:
                seen = collected(pair for pair in of_op if pair[0].stage != call.stage)
                differing += _differing(made.stored, run.stored, seen)
        sums = collected(figures)
        found = verdicts(null.excesses(sums, self.rounds), differing)
        found = [self._confirmed(verdict, made, bad) if verdict.fails else verdict for verdict in found]
        if not broken and not any(verdict.fails for verdict in found):
            null.add(sums)
        return [*broken, *found]

    def _confirmed(self, verdict: Verdict, made: MadeLayer, bad: Stored) -> Verdict:
        """A fault of an op, or that the op differs from itself."""
        calls = [call for call in made.calls if verdict.stage in (call.stage, *_STAGES.get(call.op, ()))]
        if not calls:
            return verdict
        unstable = self.repeats.confirmed(self._op_run(calls[0], made, bad), lambda: self._op_run(calls[0], made, bad))
        return replace(unstable, stage=verdict.stage) if unstable is not None else verdict

    def _op_run(self, call: Call, made: MadeLayer, bad: Stored) -> Run:
        assert self.ops is not None
        trial, batch, index = self.trial, made.batch, made.index
        writes = call.op in ("store_kv", "gated_delta")
        if writes:
            trial.load(index, made.before)
            trial.put(index, batch, bad)
        elif call.op == "paged_attention":
            trial.load(index, self._readable(call, made))
        result, intact = replay(call, self.ops, trial.executor.device, trial.cache, self.reference.recorder)
        strays: Strays = {}
        stored: Stored = {}
        if writes:
            strays, stored = trial.strays(range(index, index + 1), batch), take(trial.cache, index, batch)
        elif call.op == "paged_attention" and trial.strays(range(0), batch):
            intact = False
        return Run(Outcome(result, "" if intact else "changed"), strays, stored)

    def _honest_ops(self, made: MadeLayer) -> tuple[dict[int, Slips], list[Sums]]:
        """What a steeper softmax changes each attention by, by its place among the calls; and the figures of honest runs."""
        tables = self.reference.honest(made)
        steeper: dict[int, Slips] = {}
        runs: list[dict[Figure, Numbers]] = [{} for _ in tables]
        for place, call in enumerate(made.calls):
            self._load(call, made)
            if call.op == "paged_attention":
                steeper[place] = self._steeper(call)
            some = tables[: computed(len(call.args[0]) if call.op != "gated_delta" else 1)]
            for number, sums in enumerate(drawn(self._honest_rows(call, made, some, steeper.get(place, {})))):
                runs[number] = dict(added(runs[number], sums))
        return steeper, list(runs)

    def _honest_rows(self, call: Call, made: MadeLayer, tables: Sequence[OpTable], slips: Slips) -> list[Rows]:
        """Figures of an op's honest runs."""
        results, stored = zip(*(self._honest_op(call, made, table) for table in tables), strict=True)
        rows = [by_figure(self._op_figures(call, made, None, of_run, {})) for of_run in stored]
        if call.op == "store_kv":
            return rows
        runs = len(tables)
        one = replace(call, result=repeated(call.result, runs))
        numbers = self._op_figures(one, made, torch.cat(results), {}, {name: repeated(by, runs) for name, by in slips.items()})
        return [{**of_stored, **others} for of_stored, others in zip(rows, of_runs(numbers, runs), strict=True)]

    def _load(self, call: Call, made: MadeLayer) -> None:
        """Give the scratch cache what a recorded op found in its own."""
        if call.op in ("store_kv", "gated_delta"):
            load(self._scratch, made.index, made.before)
        elif call.op == "paged_attention":
            load(self._scratch, made.index, self._readable(call, made))

    def _honest_op(self, call: Call, made: MadeLayer, table: OpTable) -> tuple[Any, Stored]:
        """One honest run of an op over the scratch cache: its result, and what it stored."""
        if call.op == "gated_delta":
            self._load(call, made)
        result = getattr(table, call.op)(*(self._scratch if isinstance(arg, PagedKVCache) else arg for arg in call.args))
        return result, take(self._scratch, made.index, made.batch) if call.op in ("store_kv", "gated_delta") else {}

    def _op_figures(self, call: Call, made: MadeLayer, result: Any, stored: Stored, slips: Slips) -> Values:
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

    def _broken(self, call: Call, made: MadeLayer, run: Run) -> list[Verdict]:
        """What is wrong with an op's run whatever the numbers are."""
        if run.outcome.problem:
            return [Verdict.broken(call.stage, "changed the inputs that it was given")]
        ours: Any = call.result
        result: Any = run.outcome.result
        if isinstance(result, str) or (ours is None) != (result is None):
            return [Verdict.broken(call.stage, f"returned {result!r}")]
        if isinstance(ours, Tensor) and (
            not isinstance(result, Tensor) or result.shape != ours.shape or result.dtype != ours.dtype
        ):
            got = f"{list(result.shape)} {result.dtype}" if isinstance(result, Tensor) else repr(result)
            return [Verdict.broken(call.stage, f"returned {got}, not {list(ours.shape)} {ours.dtype}")]
        strays = judge_strays(run.strays, made.index)
        return strays + (_broken_state(self.reference.cache, made, run.stored) if call.op == "gated_delta" else [])

    def _kv_heads(self, index: int) -> int:
        """Of a layer; 1 of one that keeps a state."""
        return 1 if state_of(self.reference.cache, index) is not None else self.reference.cache.shape(index).num_kv_heads

    def _readable(self, call: Call, made: MadeLayer) -> Stored:
        """The layer's cache as attention is given it: what it must not read is far from what it was."""
        cache, batch = self.reference.cache, made.batch
        return without_unread(cache, made.index, snapshot(cache, made.index), batch, batch.seq_lens, call.args[0])


STEEPER = "softmax 1 % too steep"
_STAGES = {
    "store_kv": ("store_kv.k", "store_kv.v", "window.k", "window.v", "sink.k", "sink.v"),
    "gated_delta": ("conv_state", "delta_state"),
}
"""Stages that show what an op stored."""


def _differing(ours: Stored, theirs: Stored, figures: Sums) -> list[str]:
    """Stages of what was stored that show another bit. A state has versions that nobody goes on from: its figures tell."""
    if STATE in ours:
        return [figure.stage for figure, sums in figures.items() if figure.kind == "energy" and sums[0] != 0]
    same = all(torch.equal(ours[part][name], theirs[part][name]) for part in ours for name in ours[part])
    return [] if same else [figure.stage for figure in figures]


def _broken_state(cache: PagedKVCache, made: MadeLayer, stored: Stored) -> list[Verdict]:
    """States that are missing, or of other tokens."""
    if (state := state_of(cache, made.index)) is None:
        return []
    found = compare_states(state, made.batch, made.stored[STATE], stored[STATE])
    return [Verdict.broken(one.stage, one.problem) for one in found if one.problem]
