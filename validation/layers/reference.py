"""The reference's forwards, layer by layer, every op recorded; refused if they prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import Blocks, Weight, activations, weight_numbers
from haarkv.validation.layers.forward import Call, Forward, LayerRecord, Recorder
from haarkv.validation.layers.null import RUNS, honest
from haarkv.validation.layers.parts import Snapshot, load, put, snapshot, take, without_unread
from haarkv.validation.layers.states import state_part


class Reference:
    """Runs the reference's op table layer by layer, every op recorded.

    Args:
        executor: its ops run one by one on the host; its own layers do not run.
        blocks: names of weight-block types with which the candidate multiplies directly.
    Raises:
        InputError: the executor runs a layer whole, or on a device.
    """

    def __init__(self, executor: Executor, model: DecoderModel, cache: PagedKVCache, blocks: Collection[str] = ()) -> None:
        self.model, self.cache = model, cache
        if executor.ops is None or executor.device.type != "cpu":
            raise InputError(f"a reference runs op by op on the host, and {executor.name} does not; name reference or cpu")
        type_names = {weight.type.name for _, weight in model.weights.named_tensors() if isinstance(weight, Blocks)}
        self.blocks = tuple(sorted(type_names.intersection(blocks)))
        self.ops: OpTable = remembering(executor.ops) if self.blocks else executor.ops
        self.recorder = Recorder(self.ops, model.weights)
        self._scratch = cache.empty_like(cache.device)

    def twin(self) -> Reference:
        """The same reference with an empty cache of its own."""
        twin = copy(self)
        twin.cache, twin.recorder = self.cache.empty_like(self.cache.device), Recorder(self.ops, self.model.weights)
        return twin

    def layer(self, index: int, hidden: Tensor, forward: Forward, *, plant: bool = True) -> LayerRecord:
        """Run one layer; `plant` poisons the record's `before` where it must not be read.

        Raises:
            InputError: a result is not finite or zero: nothing can be compared with that.
        """
        before, batch = snapshot(self.cache, index), forward.batch
        record, q = self._layer(index, hidden, forward, before)
        if q is None or not plant:
            return record
        older = batch.seq_lens - batch.query_start_loc.diff()
        return replace(record, before=without_unread(self.cache, index, before, batch, older, q))

    def _layer(self, index: int, hidden: Tensor, forward: Forward, before: Snapshot) -> tuple[LayerRecord, Tensor | None]:
        """Run one layer on the cache as it is, `before`; also its queries [T, Hq, D], if it attends."""
        batch = forward.batch
        out = self.model.layers(hidden, range(index, index + 1), batch, self.cache, self.recorder.ops)
        calls = self.recorder.take_calls()
        part_fields, state = take(self.cache, index, batch), state_part(self.cache, index)
        kv = next((call.args[:2] for call in calls if call.op == "store_kv"), None)
        q = next((call.args[0] for call in calls if call.op == "paged_attention"), None)
        if state is not None:  # of a head that is zero it makes no difference whether it is read
            for what, rows in state.newest(batch, part_fields[state.name]):
                self.require_something(f"{what} of layer {index}", rows, forward, "in sequence")
        kv_tensors = {"K": kv[0].flatten(1), "V": kv[1].flatten(1)} if kv else {}
        for what, tensor in {**kv_tensors, "hidden state": out}.items():
            self.require_something(f"{what} of layer {index}", tensor, forward)
        return LayerRecord(index, forward, calls, before, hidden, out, kv, part_fields), q

    def over_another_state(self, record: LayerRecord) -> LayerRecord | None:
        """A layer run over another state of as many tokens; None if no sequence has one. The cache is restored."""
        after, state = snapshot(self.cache, record.index), state_part(self.cache, record.index)
        assert state is not None
        load(self.cache, record.index, record.before)
        other_record = None
        if state.replace(record.batch):
            before = snapshot(self.cache, record.index)
            other_record = self._layer(record.index, record.hidden_in, record.forward, before)[0]
        load(self.cache, record.index, after)
        return other_record

    def require_something(self, what: str, rows: Tensor, forward: Forward, at: str = "at token") -> None:
        """Refuse rows [N, n] of which one is zero or not finite."""
        for problem, bad in (("not finite", ~torch.isfinite(rows).all(-1)), ("zero", (rows == 0).all(-1))):
            if bad.any():
                where = f"{at} {int(bad.nonzero()[0])} of {forward.phase} {forward.step}"
                raise InputError(f"the reference's {what} is {problem} {where}; nothing can be compared with that")

    def head_logits(self, hidden: Tensor, forward: Forward) -> tuple[Tensor, list[Call]]:
        """Logits [N, vocab] of final hidden states [T, hidden], and the head's calls; InputError if all logits are equal."""
        logits = self.model.head(hidden[forward.logit_rows], self.recorder.ops)
        if not (logits.amax(-1) > logits.amin(-1)).all():
            raise InputError(f"the reference's logits are all equal in {forward.phase} {forward.step}; it predicts nothing")
        return logits, self.recorder.take_calls()

    def rerun_layer(
        self, cache: PagedKVCache, record: LayerRecord, ops: OpTable | None = None, *, exact: bool = False
    ) -> Tensor:
        """Hidden states after a layer that attends to what is stored, and stores nothing there.

        Args:
            ops: in place of the reference's; stores elsewhere, if at all.
            exact: in FP32, without the rounding points of a BF16 model.
        """
        table = with_ops(self.ops, {"store_kv": keep}) if ops is None else ops
        hidden = record.hidden_in.float() if exact else record.hidden_in
        return self.model.layers(hidden, range(record.index, record.index + 1), record.batch, cache, table)

    def rounds_x(self, weight: object) -> bool:
        """Whether the candidate rounds what it multiplies with a weight."""
        return isinstance(weight, Blocks) and weight.type.name in self.blocks

    def honest(
        self,
        place: int,
        runs: int = RUNS,
        tokens: int | None = None,
        op_overrides: Mapping[str, Callable[..., Tensor | None]] | None = None,
    ) -> OpTable:
        """The op table of honest runs, with `place` as seed and some ops overridden; `tokens` as in `null.honest`."""
        return honest(with_ops(self.ops, op_overrides or {}), 2 * place, runs, tokens, self.rounds_x)

    def as_read(self, record: LayerRecord, part_fields: Snapshot) -> PagedKVCache:
        """The cache that attention reads in a layer after the given stores; valid until the next call."""
        load(self._scratch, record.index, record.before)
        put(self._scratch, record.index, record.batch, part_fields)
        return self._scratch


def keep(*_: object) -> None:
    """A `store_kv` that stores nothing."""


_RESTORED_BYTES = 2**31
"""Bytes of restored weights that are kept."""


def remembering(ops: OpTable) -> OpTable:
    """A table on the host that restores weight blocks once, not for each product, up to 2 GiB; the oldest go first."""
    dense_weights: WeakKeyDictionary[Blocks, Tensor] = WeakKeyDictionary()

    def linear(x: Tensor, weight: Weight) -> Tensor:
        if not isinstance(weight, Blocks):
            return ops.linear(x, weight)
        if (dense_weight := dense_weights.pop(weight, None)) is None:
            dense_weight = weight_numbers(weight)
        dense_weights[weight] = dense_weight
        while len(dense_weights) > 1 and sum(numbers.nbytes for numbers in dense_weights.values()) > _RESTORED_BYTES:
            del dense_weights[next(iter(dense_weights.keys()))]
        return ops.linear(activations(x.float(), weight), dense_weight)

    return with_ops(ops, {"linear": linear})
