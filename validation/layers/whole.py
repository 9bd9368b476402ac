"""A whole forward: the candidate's own prefill, decode or verify against its own layers one by one, and its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.table import OpTable
from haarkv.validation import bounds
from haarkv.validation.layers.compare import compare_vectors
from haarkv.validation.layers.forward import Forward, Reference
from haarkv.validation.layers.judge import Verdict, judge_logits, judge_op, judge_strays
from haarkv.validation.layers.parts import parts_of, take
from haarkv.validation.layers.record import Call, replay
from haarkv.validation.layers.repeat import FreeRun, differing_forward, differing_layer
from haarkv.validation.layers.report import LogitRow
from haarkv.validation.layers.trial import Outcome, Trial


@dataclass(frozen=True)
class Judged:
    """What was found of a forward.

    Attributes:
        verdicts: of its ops, of what it stored and of its logits; or of the layer that differs from itself.
        layer: that layer; None if there is none.
        row: its logits beside the reference's.
    """

    verdicts: Sequence[Verdict]
    layer: int | None
    row: LogitRow


class Whole:
    """Runs a candidate's whole forwards.

    Args:
        reference: the trusted one.
        trial: the candidate, with a cache into which only whole forwards store.
        layers: the candidate that ran the layers one by one, with its cache.
        ops: the candidate's, which replay those that the reference recorded in the head; None replays none.
    """

    def __init__(
        self, reference: Reference, trial: Trial, layers: Trial, ops: OpTable | None, model: DecoderModel,
        limits: bounds.LayerBounds,
    ) -> None:  # fmt: skip
        self._reference, self._trial, self._layers, self._ops = reference, trial, layers, ops
        self._model, self._limits = model, limits

    def predicted(self, hidden: Tensor, forward: Forward) -> tuple[Tensor, Sequence[Call]]:
        """The reference's logits [N, vocab] of its hidden states [T, hidden], and the recorded calls of its head.

        Raises:
            InputError: its logits are all equal.
        """
        recorder = self._reference.recorder
        logits = self._model.head(hidden[forward.predicted], recorder.ops)
        if not (logits.amax(-1) > logits.amin(-1)).all():
            raise InputError(f"the reference's logits are all equal in {forward.phase} {forward.step}; it predicts nothing")
        return logits, recorder.taken() if self._ops is not None else []

    def judge(self, logits: Tensor, calls: Sequence[Call], free: Tensor, forward: Forward, runs: list[FreeRun]) -> Judged:
        """The candidate's forward.

        Args:
            logits, calls: from `predicted`.
            free: [T, hidden] that the candidate's layers made one after the other, in `runs`.
        """
        trial, recorder, last = self._trial, self._reference.recorder, forward.predicted
        replayed = [(c, replay(c, self._ops, trial.executor.device, trial.cache, recorder)) for c in calls if self._ops]
        verdicts = [judge_op(call, result, intact, self._limits) for call, (result, intact) in replayed]
        outcome = trial.forward(forward.token_ids, forward.batch, forward.phase, self._model.config.vocab_size)
        stage = "head" if self._ops is None else "forward"
        verdicts += self._stored(stage, forward)
        expected = self._model.head(free[last], self._reference.ops)
        verdicts.append(judge_logits(stage, expected, outcome.result, outcome.problem, self._limits))
        index = None
        if any(verdict.fails for verdict in verdicts):
            index, verdicts = self._unstable(outcome, forward, runs) or (None, verdicts)
        compared = compare_vectors(logits, outcome.result)
        same = int((logits.argmax(-1) == outcome.result.argmax(-1)).sum())
        row = LogitRow(forward.phase, forward.step, compared.cosine, compared.rel_l2, compared.max_abs, same, len(logits))
        return Judged(verdicts, index, row)

    def _unstable(self, outcome: Outcome, forward: Forward, runs: list[FreeRun]) -> tuple[int | None, list[Verdict]] | None:
        """Whether the whole forward and its layers disagree because one of them differs from itself, and where."""
        vocabulary = self._model.config.vocab_size
        found = differing_layer(self._layers, runs, forward) or differing_forward(
            self._trial, outcome, runs, forward, vocabulary
        )
        return (found[0], [found[1]]) if found else None

    def _stored(self, stage: str, forward: Forward) -> list[Verdict]:
        """What a whole forward stored, against what the same executor's layers stored one by one."""
        layers, batch = range(self._model.config.num_layers), forward.batch
        if strays := self._trial.strays(layers, batch):
            return judge_strays(strays, None, "the whole forward")
        for index in layers:
            ours, theirs = (take(trial.cache, index, batch) for trial in (self._layers, self._trial))
            for part in parts_of(self._reference.cache, index):
                if not len(part.where(batch)[0]):
                    continue
                both = (part.kv_format.dequantize(by_token(stored[part.name]), index) for stored in (ours, theirs))
                compared = compare_vectors(*both)
                if not compared.rel_l2 <= bounds.SAME_KV:
                    detail = f"the whole forward stores another {part.title} in layer {index} than the layer run alone"
                    return [Verdict(stage, "fault", compared.rel_l2, bounds.SAME_KV, detail)]
        return []
