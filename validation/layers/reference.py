"""The reference's side of a validation: its forwards run layer by layer, every op recorded; refused if they prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

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
from haarkv.tq_ops.weight import Blocks, Weight, activations, numbers_of
from haarkv.validation.layers.forward import Forward, MadeLayer
from haarkv.validation.layers.null import RUNS, honest
from haarkv.validation.layers.parts import Stored, load, put, snapshot, take, tensors_of
from haarkv.validation.layers.record import Call, Recorder, table_of
from haarkv.validation.layers.states import CONV, SEEN, STATE, Fields, heads_of, left_after, state_of, with_others
from haarkv.validation.layers.trial import Trial
from haarkv.validation.layers.windows import without_unread


class Reference:
    """Runs the reference and keeps what the candidate is held against.

    An executor with an op table on the host is recorded op by op. Any other is run layer by layer; what it quantized is
    then computed by the spec from the same hidden state.

    Args:
        blocks: types of quantised blocks, by name, with which the candidate multiplies as they lie.
    """

    def __init__(self, executor: Executor, model: DecoderModel, cache: PagedKVCache, blocks: Collection[str] = ()) -> None:
        self.model, self.cache = model, cache
        table = table_of(executor)
        used = {weight.type.name for _, weight in model.weights.named() if isinstance(weight, Blocks)}
        self.blocks = tuple(sorted(used.intersection(blocks)))
        self.ops: OpTable = remembering(table or spec) if self.blocks else table or spec
        self.recorder = Recorder(self.ops, model.weights)
        self._whole = Trial(executor, cache) if table_of(executor) is None else None
        self._scratch = cache.empty_like(cache.device)

    @property
    def records(self) -> bool:
        """Whether its ops are seen one by one."""
        return self._whole is None

    def layer(self, index: int, hidden: Tensor, forward: Forward, *, plant: bool = True) -> MadeLayer:
        """Run one layer.

        Args:
            plant: whether what must not be read is far off in its `before`, which a candidate is given.
        Raises:
            InputError: what it makes is not finite or zero: nothing can be held against that.
        """
        before, batch = snapshot(self.cache, index), forward.batch
        made, q = self._layer(index, hidden, forward, before)
        if q is None or not plant:
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
        return Reference(ReferenceExecutor(changed, ops), changed, self.cache.empty_like(self.cache.device), self.blocks)

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

    def _require_states(self, index: int, state: Recurrent, fields: Fields, forward: Forward) -> None:
        """Refuse a state of which a head is zero or not finite: reading it or not makes no difference there."""
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

    def given(self, made: MadeLayer, stored: Stored) -> Tensor:
        """Hidden states after a layer whose new K and V are someone else's: what ties lead to."""
        return self.over(self.as_read(made, stored), made)

    def over(self, cache: PagedKVCache, made: MadeLayer, ops: OpTable | None = None, *, exact: bool = False) -> Tensor:
        """Hidden states after a layer that stores nothing and attends to what is there.

        Args:
            ops: in place of the reference's; stores elsewhere, if at all.
            exact: in FP32, of a model in BF16 without its rounding points.
        """
        table = with_ops(self.ops, {"store_kv": keep}) if ops is None else ops
        hidden = made.hidden_in.float() if exact else made.hidden_in
        return self.model.layers(hidden, range(made.index, made.index + 1), made.batch, cache, table)

    def rounds_x(self, weight: object) -> bool:
        """Whether the candidate rounds what it multiplies with a weight."""
        return isinstance(weight, Blocks) and weight.type.name in self.blocks

    def honest(
        self,
        place: int,
        runs: int = RUNS,
        tokens: int | None = None,
        replaced: Mapping[str, Callable[..., Tensor | None]] | None = None,
    ) -> OpTable:
        """The table of honest runs.

        Args:
            place: other noise at another one.
            tokens: as `null.honest` takes it.
            replaced: ops in place of the reference's own.
        """
        return honest(with_ops(self.ops, replaced or {}), 2 * place, runs, tokens, self.rounds_x)

    def as_read(self, made: MadeLayer, stored: Stored) -> PagedKVCache:
        """The cache that an executor's attention read in a layer whose K and V it stored itself; valid until the next call."""
        load(self._scratch, made.index, made.before)
        put(self._scratch, made.index, made.batch, stored)
        return self._scratch


def keep(*_: object) -> None:
    """In place of `store_kv`: what is there stays."""


_REMEMBERED = 2**31
"""Bytes of restored weights that are kept."""


def remembering(ops: OpTable) -> OpTable:
    """A table on the host that restores blocks once, not at each product, as far as 2 GiB go; the oldest are forgotten."""
    kept: WeakKeyDictionary[Blocks, Tensor] = WeakKeyDictionary()

    def linear(x: Tensor, weight: Weight) -> Tensor:
        if not isinstance(weight, Blocks):
            return ops.linear(x, weight)
        if (restored := kept.pop(weight, None)) is None:
            restored = numbers_of(weight)
        kept[weight] = restored
        while len(kept) > 1 and sum(numbers.nbytes for numbers in kept.values()) > _REMEMBERED:
            del kept[next(iter(kept.keys()))]
        return ops.linear(activations(x.float(), weight), restored)

    return with_ops(ops, {"linear": linear})
