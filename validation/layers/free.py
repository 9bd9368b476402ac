"""A forward left to itself: each layer is fed what the executor made of the layer before.

How far it may be off by then is no constant: one tie can move a random model by half its hidden state. What must hold is that
each layer follows from what it was given. So the reference runs the layer on the executor's own hidden state and cache, and
the executor's result lies within the bounds of one layer from that: it is as far from the reference's forward as the
reference itself would be if it went on from there, and a layer's rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.validation.bounds import LayerBounds
from haarkv.validation.layers.forced import Forced
from haarkv.validation.layers.forward import Forward, Reference
from haarkv.validation.layers.judge import Verdict, first
from haarkv.validation.layers.parts import Stored, load, snapshot
from haarkv.validation.layers.repeat import FreeRun, Repeats, run_layer
from haarkv.validation.layers.trial import Trial


class Free:
    """Runs a candidate's layers one after the other, and judges each by what it was given.

    Args:
        reference: the trusted one; what follows from the candidate's states is run by another with its ops.
        trial: the candidate, with a cache that nobody else loads.
        repeats: confirms what is wrong.
    """

    def __init__(self, reference: Reference, trial: Trial, limits: LayerBounds, repeats: Repeats) -> None:
        self._follower = reference.altered(None, reference.ops)
        self._forced = Forced(self._follower, trial, None, limits, None)
        self._trial, self._repeats = trial, repeats

    def layer(self, index: int, hidden: Tensor, bad: Stored, forward: Forward) -> tuple[FreeRun, Verdict | None]:
        """Run a layer on hidden states [T, hidden].

        Args:
            bad: what the places of its tokens hold before.
        Returns:
            the run, and what is wrong with it, if anything: a fault, or that the layer differs from itself.
        """
        before = snapshot(self._trial.cache, index)
        run = run_layer(self._trial, hidden, index, bad, forward)
        made = FreeRun(hidden, bad, run)
        load(self._follower.cache, index, before)
        try:
            expected = self._follower.layer(index, hidden, forward)
        except InputError as error:
            detail = f"what the executor makes of its own layers cannot be gone on from: {error}"
            return made, Verdict("free_running", "fault", torch.inf, 0.0, detail)
        failing = first(self._forced.judge(index, expected, run, forward).verdicts)
        if failing is None or not failing.fails:
            return made, None

        def again() -> object:
            self._trial.load(index, before)
            return run_layer(self._trial, hidden, index, bad, forward)

        unstable = self._repeats.confirmed(run, again)
        self._trial.load(index, before)
        self._trial.put(index, forward.batch, run.stored)
        if unstable is not None:
            return made, Verdict(failing.stage, unstable.reason, unstable.error, unstable.bound, unstable.detail)
        detail = f"fed what the executor made of the layer before, the layer is wrong at {failing.stage}: {failing.detail}"
        return made, Verdict("free_running", "fault", failing.error, failing.bound, detail)
