"""Generate greedily with two executors or KV formats and find the first token that differs, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from haarkv.engine.generation import Completion, prefill_in_chunks
from haarkv.engine.sampling import Sampling
from haarkv.engine.session import Session
from haarkv.executors.base import prefill
from haarkv.tq_ops.errors import InputError
from haarkv.validation import bounds
from haarkv.validation.fidelity.scores import kl_divergence, kl_figures, require_finite

OnStep = Callable[[str], None]
"""Gets what is being done, for each token of it."""
TOP = 5
Candidate = tuple[int, float]


@dataclass(frozen=True)
class PositionScore:
    """What A and B predict after the same tokens.

    Attributes:
        top_a, top_b: the five best of each, (token, logit); of equal logits the lower id first.
        kl: KL(A || B) of the next token, in nats.
        gap_a, gap_b: a side's best logit less its logit of the other side's best token; 0 if both agree.
        near_tie: each side's logits of both tokens lie within an executor's permitted error. Never between formats.
        spread: standard deviation of A's logits, the unit of relative errors.
        logit_error: the largest |A - B| of any logit.
    """

    top_a: tuple[Candidate, ...]
    top_b: tuple[Candidate, ...]
    kl: float
    gap_a: float
    gap_b: float
    near_tie: bool
    spread: float
    logit_error: float

    @property
    def agrees(self) -> bool:
        return self.top_a[0][0] == self.top_b[0][0]

    @property
    def margin(self) -> float:
        """A's best logit less its second best; infinite with a single token."""
        return self.top_a[0][1] - self.top_a[1][1] if len(self.top_a) > 1 else float("inf")


@dataclass(frozen=True)
class Fidelity:
    """How well B repeats A over all positions, teacher-forced: KL in nats (99.9 % by nearest rank), and the largest logit
    error, also in units of its position's `spread`.
    """

    positions: int
    top1_agreement: float
    kl_mean: float
    kl_median: float
    kl_p999: float
    logit_error: float
    relative_logit_error: float


@dataclass(frozen=True)
class Divergence:
    """Where a prompt's two continuations part, after `position` equal new tokens.

    Attributes:
        token_a, token_b: what each side chose; an end-of-text token if it ended here.
    """

    prompt: int
    position: int
    token_a: int
    token_b: int
    scores: PositionScore


@dataclass(frozen=True)
class PromptDiff:
    """One prompt's continuations, where they part, and scores after the prompt and each of A's tokens, teacher-forced."""

    prompt: str
    a: Completion
    b: Completion
    text_a: str
    text_b: str
    scores: list[PositionScore]
    divergence: Divergence | None


@dataclass(frozen=True)
class GreedyDiff:
    """The result of `greedy_diff`.

    Attributes:
        same_format: both store K and V alike, so that they agree but for rounding.
        near_ties: positions with another best token that are near ties; 0 between formats.
        unexplained: the others, as (prompt, new tokens before it). No fault between formats.
    """

    a: str
    b: str
    same_format: bool
    prompts: list[PromptDiff]
    fidelity: Fidelity
    near_ties: int
    unexplained: list[tuple[int, int]]

    @property
    def first_divergence(self) -> Divergence | None:
        """The earliest divergence that is not a near tie; without one, the earliest near tie."""
        divergences = [prompt.divergence for prompt in self.prompts if prompt.divergence]
        return min(divergences, key=lambda d: (d.scores.near_tie, d.position, d.prompt), default=None)

    @property
    def faulty(self) -> bool:
        """With one format, the executors disagree where no rounding explains it."""
        return self.same_format and bool(self.unexplained)


def greedy_diff(
    side_a: Session,
    side_b: Session,
    prompts: Sequence[str],
    *,
    dtype: str,
    max_new_tokens: int = 64,
    on_step: OnStep = lambda _: None,
) -> GreedyDiff:
    """Continue prompts greedily with both sides of one model and dtype, then feed both A's tokens and compare.

    Raises:
        InputError: a prompt that is empty or does not fit; a side that chooses other tokens when fed the same again.
        NonFiniteError: a side gave a logit that is not finite.
    """
    kv_a, kv_b = (side.plan.describe() for side in (side_a, side_b))
    bound = bounds.EXECUTOR_LOGITS[dtype]
    a, b = (
        side.generate(
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(),
            on_token=lambda *_, name=name: on_step(f"{name} generates"),
        )
        for side, name in ((side_a, "A"), (side_b, "B"))
    )
    # The last token has been predicted and not been fed, unless another one ended the text after it.
    fed = [c.token_ids if c.finish == "eos" else c.token_ids[:-1] for c in a.completions]
    ties_within = bound if kv_a == kv_b else -math.inf
    position_scores = teacher_forced(
        side_a, side_b, side_a.encode(prompts), fed, ties_within, lambda: on_step("both are fed A's tokens")
    )
    eos = side_a.tokenizer.eos_token_ids
    rows = [
        PromptDiff(
            prompt, a.completions[i], b.completions[i], a.texts[i], b.texts[i], position_scores[i],
            _divergence(i, a.completions[i], b.completions[i], position_scores[i], eos, bound),
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    differing = [(i, place) for i, row in enumerate(rows) for place, now in enumerate(row.scores) if not now.agrees]
    unexplained = [(i, place) for i, place in differing if not rows[i].scores[place].near_tie]
    fidelity = summarize([now for row in rows for now in row.scores])
    return GreedyDiff(
        f"{side_a.executor.name}:{kv_a}", f"{side_b.executor.name}:{kv_b}", kv_a == kv_b, rows, fidelity,
        len(differing) - len(unexplained), unexplained,
    )  # fmt: skip


def _divergence(
    prompt: int,
    a: Completion,
    b: Completion,
    position_scores: Sequence[PositionScore],
    eos: Collection[int],
    bound: float,
) -> Divergence | None:
    """Where two completions part. Each side must choose its own tokens again when it is fed them."""
    divergence = None
    for position, now in enumerate(position_scores):
        tolerance = bound * now.spread
        token_a = _generated_token(a, position, now.top_a, eos, tolerance, f"side A, prompt {prompt + 1}")
        if divergence:
            continue
        token_b = _generated_token(b, position, now.top_b, eos, tolerance, f"side B, prompt {prompt + 1}")
        if token_a != token_b:
            divergence = Divergence(prompt, position, token_a, token_b, now)
    return divergence


def _generated_token(
    completion: Completion, position: int, top: Sequence[Candidate], eos: Collection[int], tolerance: float, who: str
) -> int:
    """The token that a side chose when it generated, an end of text included. A tie may fall otherwise in another batch."""
    at_end = position == len(completion.token_ids)
    candidate_ids = eos if at_end else (completion.token_ids[position],)
    for token, logit in top:
        if token in candidate_ids and top[0][1] - logit <= tolerance:
            return token
    raise InputError(
        f"{who}, new token {position + 1}: when fed the same tokens again, it chooses another; "
        "its results are not repeatable, so they cannot be compared"
    )


# -- Two sides fed the same tokens -------------------------------------------------------------------------------------------
def score(a: Tensor, b: Tensor, ties_within: float) -> PositionScore:
    """Compare two predictions [vocab] of one position, in float64; NonFiniteError if a logit is not finite."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    require_finite(a, b)
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    top_a, top_b = _best(a), _best(b)
    gap_a, gap_b = top_a[0][1] - float(a[top_b[0][0]]), top_b[0][1] - float(b[top_a[0][0]])
    spread = float(a.std(correction=0))
    return PositionScore(
        top_a=top_a,
        top_b=top_b,
        kl=float(kl_divergence(log_p, log_q)),
        gap_a=gap_a,
        gap_b=gap_b,
        # Not A's two best, which may tie while B takes a third token; and on both sides, for B may be far off where A ties.
        near_tie=max(gap_a, gap_b) <= ties_within * spread,
        spread=spread,
        logit_error=float((a - b).abs().max()),
    )


def _best(logits: Tensor) -> tuple[Candidate, ...]:
    # Stable: the lowest id wins a tie, as when tokens are chosen.
    order = logits.argsort(descending=True, stable=True)[:TOP]
    return tuple((int(i), float(logits[i])) for i in order)


def teacher_forced(
    side_a: Session,
    side_b: Session,
    prompts: Sequence[Sequence[int]],
    fed: Sequence[Sequence[int]],
    ties_within: float,
    on_position: Callable[[], None],
) -> list[list[PositionScore]]:
    """Feed both sides the same prompts and following tokens, and compare their predictions after the prompt and each of these.

    All prompts are prefilled together, then one decode step a token; a sequence leaves the batch with its last token.
    """
    position_scores: list[list[PositionScore]] = [[] for _ in prompts]
    for (rows, a), (_, b) in zip(_steps(side_a, prompts, fed), _steps(side_b, prompts, fed), strict=True):
        for index, logits_a, logits_b in zip(rows, a, b, strict=True):
            position_scores[index].append(score(logits_a, logits_b, ties_within))
            on_position()
    return position_scores


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
        logits = prefill(side.executor, token_ids, batch, cache)


def summarize(position_scores: Sequence[PositionScore]) -> Fidelity:
    """Agreement, divergence and logit errors over at least one position."""
    return Fidelity(
        positions=len(position_scores),
        top1_agreement=sum(position.agrees for position in position_scores) / len(position_scores),
        **kl_figures([position.kl for position in position_scores]),
        logit_error=max(position.logit_error for position in position_scores),
        # One token to choose from has no spread, and no error that could matter.
        relative_logit_error=max(position.logit_error / (position.spread or 1.0) for position in position_scores),
    )
