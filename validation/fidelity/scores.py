"""Two sides fed the same tokens: how far apart their predictions lie, position by position."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from haarkv.engine.generation import prefill_in_chunks
from haarkv.engine.session import Session
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.validation.layers.trial import run_phase

TOP = 5
# Logits that are scored at a time: float64 copies of a whole window's would take gigabytes with a large vocabulary, and larger
# slices than this fall out of the CPU's cache.
_SLICE = 2**17
Candidate = tuple[int, float]
"""A token and its logit."""


@dataclass(frozen=True)
class Scored:
    """What A and B predict after the same tokens.

    Attributes:
        top_a, top_b: the five best candidates of each, best first; the lower id first where logits are equal.
        kl: KL(A || B) of the next token's distributions, in nats.
        gap_a: A's best logit less A's logit of the token that B likes best; 0 where both like the same one.
        gap_b: B's best logit less B's logit of the token that A likes best. Together they are what B's errors of these two
            logits come to.
        spread: standard deviation of A's logits over the vocabulary, the unit of relative errors.
        logit_error: the largest |A - B| of any logit.
    """

    top_a: tuple[Candidate, ...]
    top_b: tuple[Candidate, ...]
    kl: float
    gap_a: float
    gap_b: float
    spread: float
    logit_error: float

    @property
    def agrees(self) -> bool:
        """Whether both like the same token best."""
        return self.top_a[0][0] == self.top_b[0][0]

    @property
    def margin(self) -> float:
        """A's best logit less its second best; infinite if there is only one token to choose from."""
        return self.top_a[0][1] - self.top_a[1][1] if len(self.top_a) > 1 else float("inf")


@dataclass(frozen=True)
class Fidelity:
    """How well B repeats A over many positions, teacher-forced.

    Attributes:
        positions: how many were scored.
        top1_agreement: share of them at which both like the same token best.
        kl_mean, kl_median, kl_p999: of KL(A || B) in nats. The 99.9 % figure is the smallest value that at least 99.9 % of
            the positions do not exceed (nearest rank): with fewer than 1,000 positions, the largest.
        logit_error: the largest |A - B| of any logit.
        relative_logit_error: the same, each in units of its position's `spread`.
    """

    positions: int
    top1_agreement: float
    kl_mean: float
    kl_median: float
    kl_p999: float
    logit_error: float
    relative_logit_error: float


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Kullback-Leibler divergence in nats: `KL(P || Q) = sum_i p_i (log p_i - log q_i)`.

    Args:
        log_p, log_q: [..., vocab] float64, as `log_softmax` gives them.
    Returns:
        [...] float64, at least 0.
    """
    # Rounding leaves equal distributions a few 1e-17 below nothing.
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0.0)


def nearest_rank(values: Sequence[float], permille: int) -> float:
    """The smallest of `values`, ascending and at least one, that at least so many thousandths of them do not exceed."""
    return values[-(-permille * len(values) // 1000) - 1]


def score(a: Tensor, b: Tensor) -> Scored:
    """Compare two predictions of one position.

    The divergence is KL(A || B) of softmax(a) and softmax(b), in float64.

    Args:
        a, b: [vocab], any float dtype and device.
    Raises:
        ValueError: not one vocabulary.
        NonFiniteError: a logit is infinite or NaN.
    """
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"logits of one position have one shape [vocab], not {list(a.shape)} and {list(b.shape)}")
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    _require_finite(a, b)
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    top_a, top_b = _best(a), _best(b)
    return Scored(
        top_a=top_a,
        top_b=top_b,
        kl=float(kl_divergence(log_p, log_q)),
        gap_a=top_a[0][1] - float(a[top_b[0][0]]),
        gap_b=top_b[0][1] - float(b[top_a[0][0]]),
        spread=float(a.std(correction=0)),
        logit_error=float((a - b).abs().max()),
    )


def _best(logits: Tensor) -> tuple[Candidate, ...]:
    # Stable: the lowest id wins a tie, as when tokens are chosen.
    order = logits.argsort(descending=True, stable=True)[:TOP]
    return tuple((int(i), float(logits[i])) for i in order)


@dataclass(frozen=True)
class Scores:
    """What A and B predict at N positions of a text whose next tokens are known.

    Attributes:
        kl: [N] float64, KL(A || B) in nats.
        same_top: [N] bool, whether both like the same token best, the lower id where logits are equal.
        log_p_a, log_p_b: [N] float64, what each gives the token that really follows, in nats.
    """

    kl: Tensor
    same_top: Tensor
    log_p_a: Tensor
    log_p_b: Tensor

    def __len__(self) -> int:
        return len(self.kl)


def join(parts: Sequence[Scores]) -> Scores:
    """The positions of several, one after the other."""
    return Scores(**{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})


def score_text(a: Tensor, b: Tensor, targets: Tensor) -> Scores:
    """Compare two predictions at each position of a text, in float64.

    Args:
        a, b: logits [N, vocab], any float dtype and device.
        targets: [N] int64, the tokens that really follow.
    Returns:
        on the CPU.
    Raises:
        ValueError: shapes that do not fit together.
        NonFiniteError: a logit is infinite or NaN.
    """
    if a.shape != b.shape or a.ndim != 2 or targets.shape != a.shape[:1]:
        raise ValueError(f"logits are [N, vocab] and targets [N], not {[list(x.shape) for x in (a, b, targets)]}")
    rows = max(1, _SLICE // a.shape[1])
    parts = zip(*(torch.split(x.to(a.device), rows) for x in (a, b, targets)), strict=True)
    return join([_score_slice(*part) for part in parts])


def _require_finite(a: Tensor, b: Tensor) -> None:
    for name, logits in (("A", a), ("B", b)):
        if not torch.isfinite(torch.stack(logits.aminmax())).all():  # faster than asking each
            raise NonFiniteError(f"side {name} gave a logit that is {logits[~torch.isfinite(logits)][0].item()}")


def _score_slice(a: Tensor, b: Tensor, targets: Tensor) -> Scores:
    _require_finite(a, b)
    log_p, log_q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    actual = targets.unsqueeze(-1)
    return Scores(
        kl=kl_divergence(log_p, log_q).cpu(),
        same_top=torch.from_numpy(_first_best(a) == _first_best(b)),
        log_p_a=log_p.gather(-1, actual).squeeze(-1).cpu(),
        log_p_b=log_q.gather(-1, actual).squeeze(-1).cpu(),
    )


def _first_best(logits: Tensor) -> NDArray[np.intp]:
    """Id of the largest logit of each row, the lowest where several are: NumPy promises that, `Tensor.argmax` does not."""
    best: NDArray[np.intp] = logits.float().cpu().numpy().argmax(-1)
    return best


def teacher_forced(
    side_a: Session,
    side_b: Session,
    prompts: Sequence[Sequence[int]],
    fed: Sequence[Sequence[int]],
    on_position: Callable[[], None] = lambda: None,
) -> list[list[Scored]]:
    """Feed both sides the same prompts and tokens, each with its own cache, and compare what they predict.

    The steps are generation's: all prompts prefilled together, then one decode step a token; a sequence leaves the batch
    with its last token.

    Args:
        prompts: token ids of each, at least one.
        fed: token ids that follow each prompt, possibly none.
        on_position: called as positions are scored.
    Returns:
        for each prompt the `len(fed) + 1` positions after it and after each token that follows.
    Raises:
        NonFiniteError: a logit is infinite or NaN.
    """
    scored: list[list[Scored]] = [[] for _ in prompts]
    for (rows, a), (_, b) in zip(_steps(side_a, prompts, fed), _steps(side_b, prompts, fed), strict=True):
        for index, of_a, of_b in zip(rows, a, b, strict=True):
            scored[index].append(score(of_a, of_b))
            on_position()
    return scored


def _steps(
    side: Session, prompts: Sequence[Sequence[int]], fed: Sequence[Sequence[int]]
) -> Iterator[tuple[list[int], Tensor]]:
    """Indices of the sequences that still run, and their logits [R, vocab], step by step."""
    longest = max(len(prompt) + len(tokens) for prompt, tokens in zip(prompts, fed, strict=True))
    cache, paging = side.new_cache(len(prompts), longest)
    sequences = [paging.add() for _ in prompts]
    running = list(range(len(prompts)))
    logits = prefill_in_chunks(side.executor, prompts, sequences, paging, cache)
    for step in count():
        yield running, logits
        running = [index for index in running if step < len(fed[index])]
        if not running:
            return
        batch = paging.batch([sequences[i] for i in running], [1] * len(running)).to(cache.device)
        token_ids = torch.tensor([fed[i][step] for i in running], device=cache.device)
        logits = run_phase(side.executor, "decode", token_ids, batch, cache)


def summarize(scored: Sequence[Scored]) -> Fidelity:
    """Agreement, divergence and logit errors over scored positions, at least one."""
    kl = sorted(position.kl for position in scored)
    return Fidelity(
        positions=len(scored),
        top1_agreement=sum(position.agrees for position in scored) / len(scored),
        kl_mean=statistics.fmean(kl),
        kl_median=statistics.median(kl),
        kl_p999=nearest_rank(kl, 999),
        logit_error=max(position.logit_error for position in scored),
        # One token to choose from has no spread, and no error that could matter.
        relative_logit_error=max(position.logit_error / (position.spread or 1.0) for position in scored),
    )
