"""A layer on trial, teacher-forced: fed the reference's input and cache, op by op where it has ops, and as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.table import OpTable
from haarkv.validation import bounds
from haarkv.validation.bounds import LayerBounds
from haarkv.validation.layers import slack
from haarkv.validation.layers.block_steps import most
from haarkv.validation.layers.causes import explain, explain_attention
from haarkv.validation.layers.chance import chances_of_layer, chances_of_store
from haarkv.validation.layers.compare import compare_vectors
from haarkv.validation.layers.delta_causes import explain_delta, explain_delta_layer, of_sums
from haarkv.validation.layers.forward import MadeLayer
from haarkv.validation.layers.judge import (
    StoredComparison,
    beside,
    compare_both,
    judge_hidden,
    judge_op,
    judge_stored,
    together,
)
from haarkv.validation.layers.ledger import Ledger
from haarkv.validation.layers.parts import Stored, snapshot, take
from haarkv.validation.layers.record import Call, replay
from haarkv.validation.layers.reference import Reference
from haarkv.validation.layers.report import Verdict, first
from haarkv.validation.layers.states import STATE, state_of
from haarkv.validation.layers.three_way import errors_of_layer, errors_of_op, guilty_head
from haarkv.validation.layers.trial import WITHIN_ROUNDING, Outcome, Repeats, Run, Strays, Trial
from haarkv.validation.layers.windows import without_unread

_FEW = 8
"""New tokens of a sequence up to which a layer runs again over another state."""


@dataclass(frozen=True)
class Judged:
    """What was found of one layer.

    Attributes:
        verdicts: of its ops, then of the whole.
        compared: K and V.
        expected: hidden states [T, hidden] that the candidate's are held against: what the reference makes of the K and V
            that the candidate stored, where these differ by ties.
        result: the candidate's.
    """

    verdicts: list[Verdict]
    compared: StoredComparison
    expected: Tensor
    result: Tensor


class Forced:
    """Runs and judges layers one by one.

    Args:
        trial: the candidate.
        ops: its op table; None if its layers are programs.
        ledger: sums over the run; without one each number is judged by itself.
        repeats: runs of each layer beside the first, to be held against it.
        explains: layers whose faults are explained, the first that are found.
    Attributes:
        over_others: layers that ran over another state than their own as well, and gave what follows from it.
    """

    def __init__(
        self, reference: Reference, trial: Trial, ops: OpTable | None, limits: LayerBounds, ledger: Ledger | None,
        repeats: int = 0, explains: int = 0,
    ) -> None:  # fmt: skip
        self.reference, self.trial, self.ops, self.limits, self.ledger = reference, trial, ops, limits, ledger
        self.repeats, self.explains = Repeats(repeats), explains
        self.over_others = 0

    def layer(self, made: MadeLayer, bad: Stored) -> Judged:
        """Run and judge one layer.

        Args:
            bad: what the places of its tokens hold before.
        """
        verdicts = [verdict for call in made.calls for verdict in self._op(call, made, bad)]
        run = self.run(made, bad)
        unstable = self.repeats.of_layer(run, lambda: self.run(made, bad))
        judged = self.judge(made, run)
        if self.ops is not None and not any(verdict.fails for verdict in verdicts):
            judged = replace(judged, verdicts=[together(verdict) for verdict in judged.verdicts])
        if unstable is None and any(verdict.fails for verdict in judged.verdicts):
            unstable = self.repeats.confirmed(run, lambda: self.run(made, bad))
        if unstable is not None:
            wrong = next((v.stage for v in judged.verdicts if v.fails), None)
            detail = unstable.detail if wrong else f"{unstable.detail}, {WITHIN_ROUNDING}"
            return replace(judged, verdicts=[*verdicts, replace(unstable, stage=wrong or unstable.stage, detail=detail)])
        failing = first(judged.verdicts)
        alone = self.reference.records and not run.strays and not run.outcome.problem
        if failing and failing.fails and self.explains and alone and not any(verdict.fails for verdict in verdicts):
            self.explains -= 1
            if made.kv is None:
                because = explain_delta_layer(self.reference, made, run, failing)
            else:
                because = explain(self.reference, made, run, failing, partial(self._far, run))
            judged = replace(judged, verdicts=[because if one is failing else one for one in judged.verdicts])
        if made.kv is None and not any(verdict.fails for verdict in verdicts):
            judged = replace(judged, verdicts=[*judged.verdicts, *self._over_another(made, judged)])
        return replace(judged, verdicts=[*verdicts, *judged.verdicts])

    def _over_another(self, made: MadeLayer, judged: Judged) -> list[Verdict]:
        """The layer again over other states of as many tokens: who keeps a state of their own finds the old one.

        Forwards of a few tokens are run so; the verdict says whether the state that a layer reads changes what it gives.
        """
        few = int(made.batch.query_start_loc.diff().max()) <= _FEW
        if not few or not self.reference.records or any(verdict.fails for verdict in judged.verdicts):
            return []
        other = self.reference.over_another_state(made)
        if other is None:
            return []
        # Where all is forgotten at once, the state that is read does not matter.
        matters = compare_vectors(made.hidden_out, other.hidden_out, made.hidden_in).update > self.limits.update
        again = self.judge(other, self.run(other, {STATE: {}}))
        wrong = first(again.verdicts)
        if wrong is None or not wrong.fails:
            self.over_others += matters
            return []
        detail = (
            f"over another state of as many tokens, as when a prefix is reused, it goes on from the old one: {wrong.detail}"
        )
        return [replace(wrong, stage="state_read", detail=detail)]

    def run(self, made: MadeLayer, bad: Stored) -> Run:
        """One run of a layer, from the reference's input and cache."""
        self.trial.load(made.index, made.before)
        return self.trial.run(made.hidden_in, made.index, bad, made.batch)

    def judge(self, made: MadeLayer, run: Run) -> Judged:
        """What a run of a layer got right."""
        cache, outcome, index = self.reference.cache, run.outcome, made.index
        compared, verdicts = self._judge_stored(made, run)
        if any(verdict.fails for verdict in verdicts) and self.reference.draw_more(made):
            compared, verdicts = self._judge_stored(made, run)
        if outcome.problem:
            verdicts.insert(0, Verdict.broken("call", outcome.problem))
        expected = made.hidden_out
        if not any(verdict.fails for verdict in verdicts) and made.kv is not None:
            if self.reference.records and any(verdict.reason for verdict in verdicts):
                # Ties are nobody's fault; what follows from them is judged as if the reference had decided them that way.
                expected = self.reference.given(made, run.stored)
            if self.ledger:
                moved = self.reference.moved(made)
                likely = partial(chances_of_layer, self.reference.model, self.reference.ops, cache, made, moved)
                rates = self.ledger.stored("layers", index, made.stored, run.stored, likely)
                verdicts = [rates.get(verdict.stage, verdict) for verdict in verdicts]
        alone = not any(verdict.fails for verdict in verdicts)
        hidden, allowed = self._judge_hidden(made, run, expected, alone)
        if hidden.fails and self.reference.draw_more(made):
            hidden, allowed = self._judge_hidden(made, run, expected, alone)
        if made.kv is None:
            if not hidden.fails and hidden.reason and alone:
                hidden = self._numbers(made, run, expected, outcome.result) or hidden
        elif hidden.fails and self.reference.records and torch.isfinite(outcome.result).all():
            heads, ops = cache.shape(made.index).num_kv_heads, self.reference.ops
            read = self.reference.as_read(made, run.stored)
            found = errors_of_layer(made, expected, outcome.result, None, ops, heads, read=read)
            hidden = replace(hidden, head=guilty_head(found, expected, outcome.result))
        elif hidden.reason and alone and not hidden.fails:
            result = slack.nearer(expected, outcome.result, allowed)
            hidden = self._numbers(made, run, expected, result) or hidden
        return Judged([*verdicts, hidden], compared, expected, outcome.result)

    def _judge_stored(self, made: MadeLayer, run: Run) -> tuple[StoredComparison, list[Verdict]]:
        """What a run stored, and whether rounding explains each number by itself."""
        noise = self.reference.kv_noise(made, self.limits.kv_noise)
        compared = compare_both(self.reference.cache, made, run.stored, noise)
        return compared, judge_stored(compared, run.strays, made.index, self.limits, self._kv_heads(made.index))

    def _judge_hidden(self, made: MadeLayer, run: Run, expected: Tensor, stored_well: bool) -> tuple[Verdict, Tensor | None]:
        """A run's hidden states, and what its vectors may differ by; see `slack.judged`."""
        result, moved = run.outcome.result, self.reference.moved(made)
        steps = None if moved is None else most(moved.hidden)

        def judge(allowed: Tensor | None) -> Verdict:
            every = allowed if steps is None else steps if allowed is None else allowed + steps
            verdict = judge_hidden("attention_mlp", compare_vectors(expected, result, made.hidden_in, every), self.limits)
            if steps is None or not verdict.reason:
                return verdict
            error, bound = beside(expected, result, self.limits.rel_l2, steps)
            return replace(verdict, error=error, bound=bound, detail=f"{verdict.detail}, beyond what steps of x explain")

        if not stored_well or not self.reference.records or torch.equal(expected, result) or made.kv is None:
            return judge(None), None
        read = self.reference.as_read(made, run.stored)

        def rounding() -> Tensor:
            exact, *moved = (self.reference.over(read, made, exact=True, draw=i) for i in range(slack.DRAWN_INPUTS + 1))
            return slack.of_rounding(exact, [expected, *moved])

        return slack.judged(
            judge, lambda drawn: self.reference.over(drawn, made, exact=True), read, made.index,
            None if expected.dtype == torch.float32 else rounding,
        )  # fmt: skip

    def _far(self, run: Run, altered: Reference, other: MadeLayer) -> float | None:
        """How far a run is from what an altered reference made; None if it is at fault beside that, too."""
        judged = Forced(altered, self.trial, None, self.limits, Ledger(altered.cache)).judge(other, run)
        if any(verdict.fails for verdict in judged.verdicts):
            return None
        expected = judged.expected.double()
        distance = float((judged.result.double() - expected).norm() / expected.norm())
        return distance + sum(part.different_share for part in judged.compared.parts.values())

    def _numbers(self, made: MadeLayer, run: Run, expected: Tensor, result: Tensor) -> Verdict | None:
        """A direction or a distance that rounding does not give a layer's hidden states."""
        if not self.reference.records or self.ledger is None:
            return None
        rounds, heads = expected.dtype != torch.float32, self._kv_heads(made.index)
        moved = self.reference.moved(made)
        if made.kv is None:
            exact = self.reference.unrounded(made) if rounds else None
        else:
            exact = self.reference.given(made, run.stored, exact=True) if rounds else None
        by_draw = moved.hidden if moved else ()
        found = errors_of_layer(made, expected, result, exact, self.reference.ops, heads, moved=by_draw)
        return self.ledger.numbers("layers", made.index, "attention_mlp", found)

    # -- Ops -----------------------------------------------------------------------------------------------------------
    def _op(self, call: Call, made: MadeLayer, bad: Stored) -> list[Verdict]:
        """One recorded op, run by the candidate's table on the reference's own inputs."""
        if self.ops is None:
            return []
        run = self._op_run(call, made, bad)
        verdicts = self._judge_op(call, made, run)
        if any(verdict.fails for verdict in verdicts):
            unstable = self.repeats.confirmed(run, lambda: self._op_run(call, made, bad))
            failing = first(verdicts)
            if unstable is not None and failing is not None:
                return [replace(unstable, stage=failing.stage)]
            if call.op == "gated_delta":
                return explain_delta(self.reference, call, made, run, verdicts)
            if call.op == "paged_attention" and self.explains and _same_kind(call.result, run.outcome.result):
                self.explains -= 1
                stored = self._readable(call, made)
                return [explain_attention(self.reference, call, run.outcome.result, stored, verdict) for verdict in verdicts]
        return verdicts

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

    def _kv_heads(self, index: int) -> int:
        """Of a layer; 1 of one that keeps a state."""
        return 1 if state_of(self.reference.cache, index) is not None else self.reference.cache.shape(index).num_kv_heads

    def _readable(self, call: Call, made: MadeLayer) -> Stored:
        """The layer's cache as attention is given it: what it must not read is far from what it was."""
        cache, batch = self.reference.cache, made.batch
        return without_unread(cache, made.index, snapshot(cache, made.index), batch, batch.seq_lens, call.args[0])

    def _judge_op(self, call: Call, made: MadeLayer, run: Run) -> list[Verdict]:
        result: Any = run.outcome.result  # of `store_kv` none is right
        cache, index, intact = self.reference.cache, made.index, not run.outcome.problem
        if call.op != "store_kv":
            by_draw = self.reference.moved_by(call)
            steps = most(by_draw) if by_draw else None
            judge = partial(judge_op, call, result, intact, self.limits, steps=steps)
            verdict, allowed = judge(None), None
            if by_draw and verdict.fails:
                by_draw = self.reference.moved_by(call, self.reference.steps.most_draws)
                judge = partial(judge_op, call, result, intact, self.limits, steps=most(by_draw))
                verdict = judge(None)
            if call.op == "gated_delta" and verdict.fails and _same_kind(call.result, result):
                allowed = of_sums(self.reference, call, made)
                verdict = judge(allowed)
            if call.op == "paged_attention" and verdict.reason and _same_kind(call.result, result):
                verdict, allowed = slack.judged(judge, *slack.attending(call, self.reference.ops))
            if verdict.reason == "rounding" and self.ledger:
                counted = slack.nearer(call.result, result, allowed)
                found = errors_of_op(call, counted, self.reference.ops, self._kv_heads(index), by_draw)
                verdict = self.ledger.numbers("ops", index, call.stage, found) or verdict
            if call.op == "gated_delta":
                compared = compare_both(cache, made, run.stored, 0.0)
                return [*judge_stored(compared, run.strays, index, replace(self.limits, state=bounds.DELTA)), verdict]
            return [verdict]
        compared = compare_both(cache, made, run.stored, self.limits.same_kv_noise)
        refused = [] if result is None and intact else [judge_op(call, result, intact, self.limits)]
        verdicts = judge_stored(compared, run.strays, index, self.limits, cache.shape(made.index).num_kv_heads)
        if any(verdict.fails for verdict in (*refused, *verdicts)) or self.ledger is None:
            return [*refused, *verdicts]
        rates = self.ledger.stored("ops", index, made.stored, run.stored, partial(chances_of_store, cache, made))
        return [rates.get(verdict.stage, verdict) for verdict in verdicts]


def _same_kind(ours: Any, theirs: Any) -> bool:
    """Whether two results can be compared number by number."""
    return isinstance(ours, Tensor) and isinstance(theirs, Tensor) and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
