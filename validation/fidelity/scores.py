"""How far apart two predictions of a text lie, position by position; and the file from which another run goes on."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from haarkv.tq_ops import artifact
from haarkv.tq_ops.artifact import SCORES
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.input_files import parse_json

# Logits that are scored at a time: float64 copies of a whole window's would take gigabytes with a large vocabulary, and larger
# slices than this fall out of the CPU's cache.
_SLICE = 2**17


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(P || Q) = sum_i p_i (log p_i - log q_i) in nats, at least 0: [...] float64 of log p, log q [..., vocab] float64."""
    # Rounding leaves equal distributions a few 1e-17 below nothing.
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0.0)


def kl_figures(kl: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99.9 % of divergences: the smallest that at least 999 of a thousand do not exceed."""
    ascending = sorted(kl)
    at_most = ascending[-(-999 * len(ascending) // 1000) - 1]
    return {"kl_mean": statistics.fmean(ascending), "kl_median": statistics.median(ascending), "kl_p999": at_most}


@dataclass(frozen=True)
class Scores:
    """Predictions of A and B at N positions: KL(A || B) in nats, float64; whether the most likely token is the same (of equal
    logits the lower id); log probability of the token that follows.
    """

    kl: Tensor
    same_top: Tensor
    log_p_a: Tensor
    log_p_b: Tensor

    def __len__(self) -> int:
        return len(self.kl)


def join(parts: Sequence[Scores]) -> Scores:
    """The positions of several, concatenated."""
    return Scores(**{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})


def score_text(a: Tensor, b: Tensor, targets: Tensor) -> Scores:
    """Compare two predictions [N, vocab] at each position of a text, in float64, on the CPU.

    Args:
        targets: [N] int64, the tokens that follow.
    Raises:
        NonFiniteError: a logit is infinite or NaN.
    """
    rows = max(1, _SLICE // a.shape[1])
    parts = zip(*(torch.split(x.to(a.device), rows) for x in (a, b, targets)), strict=True)
    return join([_score_slice(*part) for part in parts])


def require_finite(a: Tensor, b: Tensor) -> None:
    """Refuse logits that are not finite."""
    for name, logits in (("A", a), ("B", b)):
        if not torch.isfinite(torch.stack(logits.aminmax())).all():  # faster than asking each
            raise NonFiniteError(f"side {name} gave a logit that is {logits[~torch.isfinite(logits)][0].item()}")


def _score_slice(a: Tensor, b: Tensor, targets: Tensor) -> Scores:
    require_finite(a, b)
    log_p, log_q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    actual = targets.unsqueeze(-1)
    return Scores(
        kl=kl_divergence(log_p, log_q).cpu(),
        same_top=torch.from_numpy(_first_best(a) == _first_best(b)),
        log_p_a=log_p.gather(-1, actual).squeeze(-1).cpu(),
        log_p_b=log_q.gather(-1, actual).squeeze(-1).cpu(),
    )


def _first_best(logits: Tensor) -> NDArray[np.intp]:
    """Id of the largest logit of each row, of equals the lowest: NumPy promises that, `Tensor.argmax` does not."""
    best: NDArray[np.intp] = logits.float().cpu().numpy().argmax(-1)
    return best


# -- What is kept of a run ------------------------------------------------------------------------------------------------
# Rewriting a file of some megabytes after each window of each cache would cost more than the windows.
_SAVE_EVERY_S = 10.0


class Partial:
    """Scores of windows by cache, bit for bit: what an evaluation has done so far.

    Args:
        path: read if it exists, written every ten seconds at most, and at the end. None saves nothing.
        run: what both runs must have in common, by a word for the user; `caches`: fingerprints.
    Raises:
        InputError: no partial result, or one of another run; the file is left alone.
    """

    def __init__(
        self, path: Path | None = None, run: Mapping[str, str] | None = None, caches: Mapping[str, str] | None = None
    ) -> None:
        self._path, self._run, self._unsaved, self._saved_at = path, dict(run or {}), False, time.monotonic()
        self._tensors: dict[str, Tensor] = {}
        self._caches: dict[str, str] = {}
        if earlier := artifact.resume(path, SCORES, self._run):
            metadata, self._tensors = earlier
            with SCORES.refusing(path):
                self._caches = parse_json(metadata["caches"])
        for name, fingerprint in (caches or {}).items():
            if self._caches.setdefault(name, fingerprint) != fingerprint:
                raise InputError(f"--resume: its {name} had other code or tables; begin a new file")

    def scores(self, name: str, window: int) -> Scores | None:
        tensors = {field.name: self._tensors.get(f"{window} {field.name} {name}") for field in fields(Scores)}
        return None if None in tensors.values() else Scores(**cast(dict[str, Tensor], tensors))

    def keep_scores(self, name: str, window: int, scores: Scores) -> None:
        self._tensors |= {f"{window} {field} {name}": tensor for field, tensor in vars(scores).items()}
        self._unsaved = True
        if time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
            self.flush()

    def flush(self) -> None:
        if self._path and self._unsaved:
            metadata = {"run": json.dumps(self._run), "caches": json.dumps(self._caches)}
            artifact.write(self._path, SCORES, metadata, self._tensors)
            self._unsaved, self._saved_at = False, time.monotonic()
