"""Plain decoding: one token at a time by our own engine, which texts served in any other way are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from vllm_judge import DTYPE, NEAR_TIE
from vllm_soak import Request

from haarkv.engine.generation import GenerationRequest, generate
from haarkv.executors.base import verify
from haarkv.executors.cpu import CpuExecutor
from haarkv.models.base import new_cache
from haarkv.models.catalog import load_model
from haarkv.tq_ops.kv.plan import KVSpec


@dataclass
class TextComparison:
    """Texts beside those of plain decoding.

    Attributes:
        texts: how many.
        equal: of them, those that are plain decoding's token for token.
        gaps: of the others, how much better plain decoding likes another token than one that was served, at worst, in
            standard deviations of its logits.
        wrong: what is wrong with them, a sentence each.
    """

    texts: int = 0
    equal: int = 0
    gaps: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        largest = f", largest gap {max(self.gaps):.3f} of {NEAR_TIE}" if self.gaps else ""
        return f"{self.equal} of {self.texts} texts equal{largest}; {len(self.wrong)} wrong"


@dataclass
class Plain:
    """A model with its cache in a format; what it wrote once it remembers."""

    model: str
    kv: str
    _texts: dict[Request, list[int]] = field(default_factory=dict)

    @cached_property
    def _executor(self) -> CpuExecutor:
        return CpuExecutor(load_model(self.model, DTYPE))

    def texts(self, requests: Sequence[Request]) -> list[list[int]]:
        """Greedy continuations, past any end of text."""
        if new := [request for request in dict.fromkeys(requests) if request not in self._texts]:
            config, most = self._executor.config, max(request.new_tokens for request in new)
            longest = max(len(request.prompt) for request in new) + most
            plan = KVSpec(self.kv).plan(config.num_layers)
            cache, paging = new_cache(config, plan, sequences=len(new), tokens=longest)
            prompts = [request.prompt for request in new]
            request = GenerationRequest(prompts=prompts, max_new_tokens=most, max_context=longest)
            done, _ = generate(self._executor, cache, paging, request)
            for request, text in zip(new, done, strict=True):
                self._texts[request] = list(text.token_ids)[: request.new_tokens]
        return [self._texts[request] for request in requests]

    def compare(self, requests: Sequence[Request], texts: Sequence[Sequence[int]]) -> TextComparison:
        """Judge texts: each is plain decoding's, or parts from it where that likes both tokens nearly best, and goes on with
        tokens that it likes nearly best as well, fed the same text."""
        comparison = TextComparison()
        for request, plain, text in zip(requests, self.texts(requests), texts, strict=True):
            comparison.texts += 1
            if len(text) != request.new_tokens:
                comparison.wrong.append(f"{len(text)} of {request.new_tokens} tokens")
            elif list(text) == plain:
                comparison.equal += 1
            else:
                at = next(i for i, (one, other) in enumerate(zip(text, plain, strict=True)) if one != other)
                gaps = self._gaps(request.prompt, text)
                comparison.gaps.append(max(gaps))
                if max(gaps) > NEAR_TIE:
                    comparison.wrong.append(f"token {at} is another, and one of them is liked {max(gaps):.2f} deviations less")
        return comparison

    def _gaps(self, prompt: Sequence[int], text: Sequence[int]) -> list[float]:
        """Of each token of a text, the best logit at its place less its own, in standard deviations of the logits there."""
        fed, config = torch.tensor([*prompt, *text[:-1]]), self._executor.config
        plan = KVSpec(self.kv).plan(config.num_layers)
        cache, paging = new_cache(config, plan, sequences=1, tokens=len(fed))
        logits = verify(self._executor, fed, paging.batch([paging.add()], [len(fed)]), cache)[len(prompt) - 1 :]
        token_logits = logits.gather(-1, torch.tensor(text)[:, None])[:, 0]
        return ((logits.amax(-1) - token_logits) / logits.std(-1)).tolist()
