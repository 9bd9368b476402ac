"""The reference as the judge of served tokens: fed the same prompt and answer, how much better does it like another token?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import bounds
import torch
from small_models import text_logits
from vllm_server import Answer

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model
from haarkv.models.text import Tokenizer, load_tokenizer
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops.kv.plan import KVSpec

DTYPE, TQ4 = "bfloat16", KVSpec("tq4")
NEAR_TIE = bounds.EXECUTOR_LOGITS[DTYPE]
# Log-probabilities of the five likeliest tokens, the largest error of a position in standard deviations of its logits; half
# of all positions stay below this. vLLM rounds every projection to BF16. Measured, `tiny`, 1,280 positions: 0.025; 0.049 where
# its cache is BF16 and the reference's tq4, which no near tie tells apart (0.123 of the permitted 0.125).
MEDIAN_ERROR = 0.035


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer("tiny", load_model("tiny", DTYPE).config)


def prompts(count: int, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of the first held-out texts, cut to lengths that take turns."""
    texts = list(held_out_texts().values())[:count]
    cut = [tokenizer().encode(text)[: lengths[i % len(lengths)]] for i, text in enumerate(texts)]
    assert len(cut) == count
    return cut


@dataclass(frozen=True)
class Verdict:
    """Answers against the reference.

    Attributes:
        answers: how many.
        equal: those of which every token is the reference's own.
        wrong: those with a token that the reference likes less than nearly best.
        positions: tokens judged.
        largest_gap: the reference's best logit less that of the served token, in standard deviations of its logits.
        median_error: of all positions.
    """

    answers: int
    equal: int
    wrong: int
    positions: int
    largest_gap: float
    median_error: float

    def __str__(self) -> str:
        return (
            f"{self.equal} of {self.answers} answers equal the reference's, {self.wrong} are wrong; {self.positions} tokens, "
            f"largest gap {self.largest_gap:.3f} (allowed {NEAR_TIE}), error {self.median_error:.4f} (allowed {MEDIAN_ERROR})"
        )

    @property
    def passes(self) -> bool:
        """Whether each token is the reference's or nearly as good to it, and half of all errors are small."""
        return self.positions > 0 and not self.wrong and self.median_error <= MEDIAN_ERROR


@dataclass
class Judge:
    """The reference with its cache as a plan says; what it has once scored it remembers."""

    spec: KVSpec = TQ4
    name: str = "tiny"
    _scores: dict[tuple[tuple[int, ...], Answer], tuple[list[float], list[float]]] = field(default_factory=dict)

    @cached_property
    def _executor(self) -> ReferenceExecutor:
        return ReferenceExecutor(load_model(self.name, DTYPE))

    def score(self, prompt: Sequence[int], answer: Answer) -> tuple[list[float], list[float]]:
        """Feed the reference a prompt and what was served after it, all in one forward.

        Returns:
            position by position, in standard deviations of the logits there: the best logit less that of the served token, 0
            where the reference likes the same; and the largest |served - reference| of candidates' log-probabilities.
        """
        key = (tuple(prompt), answer)
        if key not in self._scores:
            self._scores[key] = self._score(prompt, answer)
        return self._scores[key]

    def _score(self, prompt: Sequence[int], answer: Answer) -> tuple[list[float], list[float]]:
        logits = text_logits(self._executor, [*prompt, *answer.token_ids[:-1]], self.spec)[len(prompt) - 1 :]
        token_ids, spread = torch.tensor(answer.token_ids), logits.std(-1)
        token_logits = logits.gather(-1, token_ids[:, None])[:, 0]
        logprobs = logits.log_softmax(-1)
        errors = torch.tensor([
            max((abs(value - float(row[token])) for token, value in candidates), default=0.0)
            for row, candidates in zip(logprobs, answer.candidates, strict=True)
        ])  # fmt: skip
        return ((logits.amax(-1) - token_logits) / spread).tolist(), (errors / spread).tolist()

    def judge(self, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> Verdict:
        scores = [self.score(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        gaps, errors = zip(*scores, strict=True)
        worst = [max(one) for one in gaps]
        positions = [error for one in errors for error in one]
        return Verdict(
            len(worst), worst.count(0), sum(not gap <= NEAR_TIE for gap in worst), len(positions), max(worst),
            statistics.median(positions),
        )  # fmt: skip

    def parted_at_a_near_tie(self, prompt: Sequence[int], a: Answer, b: Answer) -> bool:
        """Whether two answers to one prompt are equal, or differ first where the reference likes both nearly best."""
        for position, (mine, theirs) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            if mine != theirs:
                return max(self.score(prompt, answer)[0][position] for answer in (a, b)) <= NEAR_TIE
        return True
