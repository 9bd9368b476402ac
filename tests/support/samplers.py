"""One sequence drawn alone: what `BatchSampler` must draw whatever else runs beside it."""

from haarkv.engine.sampling import BatchSampler


class Sampler:
    """Draws the tokens of one sequence, of this index among those generated together, after a prompt's token ids."""

    def __init__(self, sampling, index=0, prompt=()):
        self._batch = BatchSampler(sampling, [list(prompt)], index)

    def next(self, logits):
        return int(self._batch.next(logits.unsqueeze(0), [0]))

    def probabilities(self, logits):
        return self._batch.probabilities(logits.unsqueeze(0))[0]
