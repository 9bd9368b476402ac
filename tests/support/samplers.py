"""One sequence drawn alone: what `BatchSampler` must draw whatever else runs beside it."""

from dataclasses import replace

import torch

from haarkv.engine.sampling import BatchSampler


class Sampler:
    """Draws the tokens of one sequence, of this index among those generated together, after a prompt's token ids."""

    def __init__(self, sampling, index=0, prompt=()):
        self._batch = BatchSampler(replace(sampling, seed=sampling.seed + index), [list(prompt)])

    def next(self, logits):
        return int(self._batch.next(logits.unsqueeze(0), [0]))

    def probabilities(self, logits):
        """[vocab] fp64, those that `next` draws with."""
        batch, logits = self._batch, logits.unsqueeze(0)
        ids, weights = batch._candidates(batch._penalize(batch._at_hand(logits), [0]))
        return torch.zeros(logits.shape, dtype=weights.dtype).scatter(1, ids, weights / weights.sum())[0]
