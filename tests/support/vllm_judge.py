"""The reference as the judge of served tokens: fed the same prompt and answer, how much better does it like another token?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import bounds
import torch
from vllm_server import Answer

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model
from haarkv.models.text import Tokenizer, load_tokenizer
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import blocks_for

DTYPE = "bfloat16"
NEAR_TIE = bounds.EXECUTOR_LOGITS[DTYPE]
# Log-probabilities of the five likeliest tokens, the largest error of a position in standard deviations of its logits; half
# of all positions stay below this. vLLM rounds every projection to BF16. Measured, `tiny`, 1,280 positions: 0.025; 0.049 where
# its cache is BF16 and the reference's tq4, which no near tie tells apart (0.123 of the permitted 0.125).
MEDIAN_ERROR = 0.035


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer("tiny", load_model("tiny", DTYPE).config)


def prompts(count: int, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of the first so many held-out texts, cut to lengths that take turns."""
    texts = list(held_out_texts().values())[:count]
    cut = [tokenizer().encode(text)[: lengths[i % len(lengths)]] for i, text in enumerate(texts)]
    assert len(cut) == count
    return cut


@dataclass(frozen=True)
class Score:
    """One answer, position by position, in standard deviations of the reference's logits there.

    Attributes:
        gaps: the reference's best logit less that of the served token; 0 where it likes the same.
        errors: the largest |served - reference| of the likeliest tokens' log-probabilities.
    """

    gaps: tuple[float, ...]
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """Answers against the reference.

    Attributes:
        answers: how many.
        equal: those of which every token is the reference's own.
        positions: tokens judged.
        largest_gap: of any of them.
        median_error: of all positions.
    """

    answers: int
    equal: int
    positions: int
    largest_gap: float
    median_error: float

    def __str__(self) -> str:
        return (
            f"{self.equal} of {self.answers} answers equal the reference's, {self.positions} tokens; largest gap "
            f"{self.largest_gap:.3f} (allowed {NEAR_TIE}), median error {self.median_error:.4f} (allowed {MEDIAN_ERROR})"
        )

    @property
    def passes(self) -> bool:
        """Whether each token is the reference's or nearly as good to it, and half of all errors are small."""
        return self.positions > 0 and self.largest_gap <= NEAR_TIE and self.median_error <= MEDIAN_ERROR


@dataclass
class Judge:
    """The reference with its cache in a format, or as a whole plan says; what it has once scored it remembers."""

    kv: str = "tq4"
    spec: KVSpec | None = None
    _scores: dict[tuple[tuple[int, ...], Answer], Score] = field(default_factory=dict)

    @cached_property
    def model(self) -> DecoderModel:
        return load_model("tiny", DTYPE)

    def score(self, prompt: Sequence[int], answer: Answer) -> Score:
        """Feed the reference a prompt and what was served after it, all in one forward."""
        key = (tuple(prompt), answer)
        if key not in self._scores:
            self._scores[key] = self._score(prompt, answer)
        return self._scores[key]

    @torch.inference_mode()
    def _score(self, prompt: Sequence[int], answer: Answer) -> Score:
        config, fed = self.model.config, torch.tensor([*prompt, *answer.token_ids[:-1]])
        cache = PagedKVCache(
            (self.spec or KVSpec(self.kv)).plan(config.num_layers), config.kv_shapes,
            num_blocks=blocks_for(len(fed)), chunk=len(fed),
        )  # fmt: skip
        paging = PagedSequences(cache.num_blocks, cache.block_size)
        batch = paging.batch([paging.add()], [len(fed)])
        hidden = ReferenceExecutor(self.model).layers(self.model.embed(fed), range(config.num_layers), batch, cache)
        logits = self.model.head(hidden[len(prompt) - 1 :], reference)
        token_ids, spread = torch.tensor(answer.token_ids), logits.std(-1)
        token_logits = logits.gather(-1, token_ids[:, None])[:, 0]
        logprobs = logits.log_softmax(-1)
        errors = torch.tensor([
            max(abs(value - float(row[token])) for token, value in candidates)
            for row, candidates in zip(logprobs, answer.candidates, strict=True)
        ])  # fmt: skip
        return Score(tuple(((logits.amax(-1) - token_logits) / spread).tolist()), tuple((errors / spread).tolist()))

    def judge(self, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> Verdict:
        scores = [self.score(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        gaps, errors = ([x for score in scores for x in getattr(score, name)] for name in ("gaps", "errors"))
        equal = sum(max(score.gaps) == 0 for score in scores)
        return Verdict(len(scores), equal, len(gaps), max(gaps), statistics.median(errors))

    def parted_at_a_near_tie(self, prompt: Sequence[int], a: Answer, b: Answer) -> bool:
        """Whether two answers to one prompt are equal, or differ first where the reference likes both nearly best."""
        for position, (mine, theirs) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            if mine != theirs:
                gaps = [self.score(prompt, answer).gaps[position] for answer in (a, b)]
                return max(gaps) <= NEAR_TIE
        return True
