"""One sequence drawn alone: what `BatchSampler` must draw whatever else runs beside it."""

import torch

from haarkv.engine.sampling import BatchSampler


class Sampler:
    """Draws the tokens of one sequence, of this index among those generated together, after a prompt's token ids."""

    def __init__(self, sampling, index=0, prompt=()):
        self._batch, self._rows = BatchSampler(sampling, [[]] * index + [list(prompt)]), [index]

    def next(self, logits):
        return int(self._batch.next(logits.unsqueeze(0), self._rows))

    def probabilities(self, logits):
        """[vocab] fp64, those that `next` draws with."""
        batch, logits = self._batch, logits.unsqueeze(0)
        ids, weights = batch._candidates(batch._penalize(batch._at_hand(logits), self._rows))
        return torch.zeros(logits.shape, dtype=weights.dtype).scatter(1, ids, weights / weights.sum())[0]
