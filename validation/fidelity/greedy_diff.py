"""Generate greedily with two executors or KV formats and find the first token that differs, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.engine.generation import Completion
from haarkv.engine.sampling import Sampling
from haarkv.engine.session import Session
from haarkv.executors.base import Executor
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.table import OpTable
from haarkv.validation import bounds
from haarkv.validation.fidelity.contenders import Contender
from haarkv.validation.fidelity.scores import Candidate, Fidelity, Scored, summarize, teacher_forced

OnStep = Callable[[str], None]
"""Told what is being done each time a token of it is done."""


@dataclass(frozen=True)
class Divergence:
    """Where a prompt's two continuations part.

    Attributes:
        prompt: index of the prompt.
        position: how many new tokens are equal before it.
        token_a, token_b: what each side chose; a token that ends the text if the side ended here.
        scored: both predictions there, after the same tokens.
        near_tie: each side's logits of the two tokens lie so close that an executor's permitted error swaps them. Never
            between formats.
    """

    prompt: int
    position: int
    token_a: int
    token_b: int
    scored: Scored
    near_tie: bool


@dataclass(frozen=True)
class PromptDiff:
    """One prompt's two continuations.

    Attributes:
        prompt: its text.
        a, b: what was generated.
        text_a, text_b: the same as text.
        scored: both predictions after the prompt and after each of A's tokens, teacher-forced.
        divergence: None if both chose the same tokens.
    """

    prompt: str
    a: Completion
    b: Completion
    text_a: str
    text_b: str
    scored: list[Scored]
    divergence: Divergence | None


@dataclass(frozen=True)
class GreedyDiff:
    """What `greedy_diff` returns.

    Attributes:
        a, b: names of the sides.
        same_format: both store K and V alike, so that they should agree but for rounding.
        fidelity: over every position of every prompt, teacher-forced on A's tokens.
        near_ties: how many positions among them are near ties at which both like another token best. None between formats.
        unexplained: all other positions with another best token, as (prompt, new tokens before it), prompt by prompt.
            Between formats they are no fault.
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
        """The earliest divergence that is not a near tie; the earliest near tie if there are only such; else None."""
        found = [prompt.divergence for prompt in self.prompts if prompt.divergence]
        return min(found, key=lambda d: (d.near_tie, d.position, d.prompt), default=None)

    @property
    def faulty(self) -> bool:
        """With the same format, the executors disagree where no rounding explains it."""
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
    """Continue prompts greedily with both sides, each in one ragged batch, then feed both A's tokens and compare.

    Args:
        side_a, side_b: of one model and one dtype; caches are not shared.
        dtype: the model's, which says how far two executors of one format may be apart (`bounds.EXECUTOR_LOGITS`).
        on_step: told what is being done, once a token.
    Raises:
        InputError: a prompt that is empty or does not fit; a side that chooses other tokens when it is fed the same again.
        NonFiniteError: a side gave a logit that is not finite.
    """
    side_a, side_b = (
        replace(s, executor=cast(Executor, _Finite(s.executor, f"side {n}"))) for s, n in ((side_a, "A"), (side_b, "B"))
    )
    name_a, name_b = (str(Contender(side.executor.name, side.plan.describe())) for side in (side_a, side_b))
    same_format = side_a.plan.describe() == side_b.plan.describe()
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
    scored = teacher_forced(side_a, side_b, side_a.encode(prompts), fed, lambda: on_step("both are fed A's tokens"))
    eos = side_a.tokenizer.eos_token_ids
    rows = [
        PromptDiff(
            prompt, a.completions[i], b.completions[i], a.texts[i], b.texts[i], scored[i],
            _divergence(i, a.completions[i], b.completions[i], scored[i], eos, bound, same_format),
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    near_ties, unexplained = 0, []
    for index, row in enumerate(rows):
        for position, now in enumerate(row.scored):
            if same_format and not now.agrees and _is_near_tie(now, bound):
                near_ties += 1
            elif not now.agrees:
                unexplained.append((index, position))
    fidelity = summarize([position for row in rows for position in row.scored])
    return GreedyDiff(name_a, name_b, same_format, rows, fidelity, near_ties, unexplained)


def _is_near_tie(scored: Scored, bound: float) -> bool:
    # Not A's two best, which may tie while B takes a third token; and on both sides, for B may be far off where A ties.
    return max(scored.gap_a, scored.gap_b) <= bound * scored.spread


def _divergence(
    prompt: int, a: Completion, b: Completion, scored: Sequence[Scored], eos: Collection[int], bound: float, same_format: bool
) -> Divergence | None:
    """Where two completions part; whatever each side chose after the same tokens it must choose again when it is fed them."""
    found = None
    for position, now in enumerate(scored):
        tolerance = bound * now.spread
        token_a = _chosen(a, position, now.top_a, eos, tolerance, f"side A, prompt {prompt + 1}")
        if found:
            continue
        token_b = _chosen(b, position, now.top_b, eos, tolerance, f"side B, prompt {prompt + 1}")
        if token_a != token_b:
            found = Divergence(prompt, position, token_a, token_b, now, same_format and _is_near_tie(now, bound))
    return found


def _chosen(
    completion: Completion, position: int, top: Sequence[Candidate], eos: Collection[int], tolerance: float, who: str
) -> int:
    """The token that a side chose when it generated, the end of text included.

    What runs beside a sequence may differ between the two runs, so that a tie may fall the other way; nothing else may.
    """
    ended = position == len(completion.token_ids)
    wanted = eos if ended else (completion.token_ids[position],)
    for token, logit in top:
        if token in wanted and top[0][1] - logit <= tolerance:
            return token
    raise InputError(
        f"{who}, new token {position + 1}: when fed the same tokens again, it chooses another; "
        "its results are not repeatable, so they cannot be compared"
    )


class _Finite:
    """An executor whose logits are refused unless all are finite: the arg max of NaN is a token like any other."""

    def __init__(self, executor: Executor, side: str) -> None:
        self._executor, self._side = executor, side

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def over(self, wrap: Callable[[OpTable], OpTable]) -> None:
        return None

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._executor.head(hidden)
        if torch.isfinite(logits).all():
            return logits
        raise NonFiniteError(f"{self._side} ({self.description}) gave logits that are not finite")
