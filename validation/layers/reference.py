"""The reference's side of a validation: its forwards run layer by layer, every op recorded; refused if they prove nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import reference as spec
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.recurrent import Recurrent
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.validation.layers import slack
from haarkv.validation.layers.block_steps import DRAWS, NO_STEPS, BlockSteps, most, remembering
from haarkv.validation.layers.forward import Forward, MadeLayer
from haarkv.validation.layers.parts import Stored, load, put, snapshot, take, tensors_of
from haarkv.validation.layers.record import Call, Recorder, table_of
from haarkv.validation.layers.states import CONV, SEEN, STATE, Fields, heads_of, left_after, state_of, with_others
from haarkv.validation.layers.trial import Trial
from haarkv.validation.layers.windows import without_unread

Noise = float | Tensor | Mapping[str, Tensor]
"""As of `KVFormat.choice`, [T, Hkv or 1, 1] where it is a tensor; or that by side."""


@dataclass(frozen=True)
class Moved:
    """What half a step of each x moves a layer's results by, draw by draw.

    Attributes:
        k, v: [T, Hkv, D] fp64 of each draw.
        hidden: [T, hidden] fp64 of each, K and V being as stored.
    """

    k: list[Tensor]
    v: list[Tensor]
    hidden: list[Tensor]

    def noise(self, made: MadeLayer) -> dict[str, Tensor]:
        """[T, Hkv, 1] by side: what a coordinate of a unit vector may be off by."""
        pairs = {"k": (made.k, self.k), "v": (made.v, self.v)}
        return {
            side: (most(moved) / x.double().norm(dim=-1).clamp(min=1e-300)).float().unsqueeze(-1)
            for side, (x, moved) in pairs.items()
        }


class Reference:
    """Runs the reference and keeps what the candidate is held against.

    An executor with an op table on the host is recorded op by op. Any other is run layer by layer; what it quantized is
    then computed by the spec from the same hidden state.

    Args:
        steps: products of which the candidate rounds x.
    """

    def __init__(self, executor: Executor, model: DecoderModel, cache: PagedKVCache, steps: BlockSteps = NO_STEPS) -> None:
        self.model, self.cache = model, cache
        table = table_of(executor)
        self.steps = NO_STEPS if table is None else steps
        self.ops: OpTable = remembering(table or spec) if self.steps else table or spec
        self._moved: tuple[MadeLayer, Moved] | None = None
        self.recorder = Recorder(self.ops, model.weights)
        self._whole = Trial(executor, cache) if table_of(executor) is None else None
        self._scratch = cache.empty_like(cache.device)

    @property
    def records(self) -> bool:
        """Whether its ops are seen one by one."""
        return self._whole is None

    def layer(self, index: int, hidden: Tensor, forward: Forward) -> MadeLayer:
        """Run one layer.

        Raises:
            InputError: what it makes is not finite or zero: nothing can be held against that.
        """
        before, batch = snapshot(self.cache, index), forward.batch
        made, q = self._layer(index, hidden, forward, before)
        if q is None:
            return made
        older = batch.seq_lens - batch.query_start_loc.diff()
        return replace(made, before=without_unread(self.cache, index, before, batch, older, q))

    def _layer(self, index: int, hidden: Tensor, forward: Forward, before: Stored) -> tuple[MadeLayer, Tensor | None]:
        """Run one layer on the cache as it is, which is `before`; also its queries [T, Hq, D], if it attends."""
        batch = forward.batch
        cache = self.cache
        if self._whole is not None:
            cache = self._scratch
            load(cache, index, tensors_of(self.cache, index))
        out = self.model.layers(hidden, range(index, index + 1), batch, cache, self.recorder.ops)
        calls = self.recorder.taken()
        if self._whole is not None:
            self._whole.load(index, tensors_of(self.cache, index))
            outcome = self._whole.layer(hidden, index, batch)
            if outcome.problem:
                raise InputError(f"the reference cannot be compared with: layer {index}: {outcome.problem}")
            out = outcome.result
            load(self.cache, index, snapshot(self._whole.cache, index))
        stored, state = take(self.cache, index, batch), state_of(self.cache, index)
        kv, q = None, None
        if state is None:
            kv = next(call.args[:2] for call in calls if call.op == "store_kv")
            q = next(call.args[0] for call in calls if call.op == "paged_attention")
            kept = {"K": kv[0].flatten(1), "V": kv[1].flatten(1)}
        else:
            self._require_states(index, state, stored[STATE], forward)
            kept = {}
        for what, tensor in {**kept, "hidden state": out}.items():
            self._require_something(f"{what} of layer {index}", tensor, forward)
        return MadeLayer(index, forward, calls if self.records else [], before, hidden, out, kv, stored), q

    def altered(self, model: DecoderModel | None, ops: OpTable) -> Reference:
        """Another reference, with an empty cache of its own; of the same model unless one is given."""
        changed = model or self.model
        return Reference(ReferenceExecutor(changed, ops), changed, self.cache.empty_like(self.cache.device), self.steps)

    def again(self, made: MadeLayer) -> MadeLayer:
        """Run a layer on what another reference ran it on; raises as `layer`."""
        load(self.cache, made.index, made.before)
        return self._layer(made.index, made.hidden_in, made.forward, made.before)[0]

    def over_another_state(self, made: MadeLayer) -> MadeLayer | None:
        """A layer that keeps a state, run over another one of as many tokens; None if no sequence has a state yet.

        The cache is left as it was.
        """
        after, state = snapshot(self.cache, made.index), state_of(self.cache, made.index)
        assert state is not None
        load(self.cache, made.index, made.before)
        found = None
        if with_others(state, made.batch):
            before = snapshot(self.cache, made.index)
            found = self._layer(made.index, made.hidden_in, made.forward, before)[0]
        load(self.cache, made.index, after)
        return found

    def unrounded(self, made: MadeLayer) -> Tensor:
        """Hidden states in FP32 after a layer that keeps a state, of a model in BF16 without its rounding points."""
        load(self._scratch, made.index, made.before)
        span = range(made.index, made.index + 1)
        return self.model.layers(made.hidden_in.float(), span, made.batch, self._scratch, self.ops)

    def _require_states(self, index: int, state: Recurrent, fields: Fields, forward: Forward) -> None:
        """Refuse a state of which a head is zero or not finite: whoever reads it, or does not, is right there."""
        for row, counts in enumerate(left_after(state, forward.batch)):
            version = int((fields[SEEN][row] == counts[-1]).nonzero()[0])
            for name in state.tensors:
                for head, part in enumerate(heads_of(name, fields[name][row, version][None], state)):
                    newest = part[:, -1:] if name == CONV else part  # before its first tokens a convolution is fed zeros
                    if not bool(torch.isfinite(newest).all() and newest.any()):
                        what = "zero" if bool(torch.isfinite(newest).all()) else "not finite"
                        where = f"sequence {row} of {forward.phase} {forward.step}"
                        raise InputError(
                            f"the reference's state ({name}, head {head}) of layer {index} is {what} in {where}; nothing can "
                            "be compared with that"
                        )

    def _require_something(self, what: str, rows: Tensor, forward: Forward) -> None:
        """Refuse rows [T, n] of which one is zero or not finite."""
        for problem, bad in (("not finite", ~torch.isfinite(rows).all(-1)), ("zero", (rows == 0).all(-1))):
            if bad.any():
                where = f"token {int(bad.nonzero()[0])} of {forward.phase} {forward.step}"
                raise InputError(f"the reference's {what} is {problem} at {where}; nothing can be compared with that")

    def predicted(self, hidden: Tensor, forward: Forward) -> tuple[Tensor, list[Call]]:
        """Logits [N, vocab] of final hidden states [T, hidden], and the recorded calls of the head, if ops are seen.

        Raises:
            InputError: they are all equal.
        """
        logits = self.model.head(hidden[forward.predicted], self.recorder.ops)
        if not (logits.amax(-1) > logits.amin(-1)).all():
            raise InputError(f"the reference's logits are all equal in {forward.phase} {forward.step}; it predicts nothing")
        calls = self.recorder.taken()
        return logits, calls if self.records else []

    def require_embedding(self, hidden: Tensor, forward: Forward) -> None:
        """Refuse hidden states [T, hidden] of which one is zero or not finite: any layer is right there, or none."""
        self._require_something("embedding", hidden, forward)

    def given(self, made: MadeLayer, stored: Stored, *, exact: bool = False) -> Tensor:
        """Hidden states after a layer whose new K and V are someone else's: what ties lead to.

        Args:
            exact: in FP32, of a model in BF16 without its rounding points.
        """
        return self.over(self.as_read(made, stored), made, exact=exact)

    def over(self, cache: PagedKVCache, made: MadeLayer, *, exact: bool, draw: int = 0) -> Tensor:
        """Hidden states after a layer that stores nothing and attends to what is there; `exact` as in `given`.

        Args:
            draw: with `exact`, which of the inputs that rounding may have made; 0 for what is there.
        """
        ops, hidden = with_ops(self.ops, {"store_kv": _keep}), made.hidden_in.float() if exact else made.hidden_in
        if draw:
            hidden = slack.moved_by_rounding(made.hidden_in, draw)
        return self.model.layers(hidden, range(made.index, made.index + 1), made.batch, cache, ops)

    def moved(self, made: MadeLayer) -> Moved | None:
        """What half a step of each x moves a layer's results by; None if the candidate rounds none."""
        if not self.steps:
            return None
        if self._moved is None or self._moved[0] is not made:
            self._moved = made, self._drawn(made, range(DRAWS))
        return self._moved[1]

    def draw_more(self, made: MadeLayer) -> bool:
        """Let `moved` of a layer know more draws; whether it did not before."""
        moved = self.moved(made)
        if moved is None or len(moved.hidden) == self.steps.most_draws:
            return False
        more = self._drawn(made, range(DRAWS, self.steps.most_draws))
        self._moved = made, Moved(moved.k + more.k, moved.v + more.v, moved.hidden + more.hidden)
        return True

    def _drawn(self, made: MadeLayer, draws: range) -> Moved:
        cache = self.as_read(made, made.stored)
        runs = [self._run_over(cache, made, ops) for ops in (self.ops, *self.steps.drawn(self.ops, made.index, draws))]
        k, v, hidden = zip(*([x.double() for x in run] for run in runs), strict=True)
        return Moved(*([x - part[0] for x in part[1:]] for part in (k, v, hidden)))

    def _run_over(self, cache: PagedKVCache, made: MadeLayer, ops: OpTable) -> tuple[Tensor, Tensor, Tensor]:
        """K, V and hidden states of a layer in FP32 that attends to what is there."""
        given: list[tuple[Tensor, Tensor]] = []
        table = with_ops(ops, {"store_kv": lambda k, v, *_: given.append((k, v))})
        hidden = self.model.layers(made.hidden_in.float(), range(made.index, made.index + 1), made.batch, cache, table)
        return *given[0], hidden

    def moved_by(self, call: Call, draws: int = DRAWS) -> list[Tensor]:
        """What half a step of each x moves a recorded product by, draw by draw; nothing of any other op, or where none is
        rounded."""
        if call.op != "linear" or not self.steps.rounds(call.args[1]):
            return []
        x, weight = call.args
        return self.steps.moved(lambda ops: ops.linear(x.float(), weight), self.ops, x.shape[-1], range(draws))

    def kv_noise(self, made: MadeLayer, least: float | Tensor) -> Noise:
        """What a coordinate of a K's or V's unit vector may be off by: `least`, and what half a step of x does."""
        moved = self.moved(made)
        return least if moved is None else {side: least + by for side, by in moved.noise(made).items()}

    def attended(self, ops: OpTable, call: Call, stored: Stored) -> Tensor:
        """What an op table makes of a recorded attention over a layer's cache."""
        q, _, index, batch, scale = call.args
        load(self._scratch, index, stored)
        return ops.paged_attention(q, self._scratch, index, batch, scale)

    def as_read(self, made: MadeLayer, stored: Stored) -> PagedKVCache:
        """The cache that an executor's attention read in a layer whose K and V it stored itself; valid until the next call."""
        load(self._scratch, made.index, made.before)
        put(self._scratch, made.index, made.batch, stored)
        return self._scratch


def _keep(*_: object) -> None:
    """In place of `store_kv`: what is there stays."""
