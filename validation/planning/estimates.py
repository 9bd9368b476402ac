"""What caches lose on a text, estimated from a few logits a position.

For n tokens t drawn from bf16's own prediction p, whose logits a cache moves by d_t:

    KL(p || p') = log E_p[exp d] - E_p[d]  ~  n / (n - 1) * (log mean exp d - mean d)

Logits differ by the head's rows times what the final norm gives: the head runs over the vocabulary once, for bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields

import torch
from torch import Tensor

from haarkv.engine.session import Session
from haarkv.models.base import DecoderModel, new_cache
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE
from haarkv.tq_ops.weight import weight_rows
from haarkv.validation.fidelity.evaluation import (
    CHUNK,
    FidelityRow,
    Workload,
    chunk_logits,
    fidelity_row,
    head_logits,
    run_span,
    score_window,
)
from haarkv.validation.planning.search import Place, run_one_layer, session_with_plan, with_format

DRAWS = 32
"""Tokens a position, with replacement."""


class _LargeChunks(Session):
    def new_cache(self, sequences: int, max_context: int) -> tuple[PagedKVCache, PagedSequences]:
        self.plan.require_context(max_context)
        return new_cache(
            self.config, self.plan, sequences=sequences, tokens=max_context, device=self.executor.device, chunk=CHUNK
        )


def in_larger_chunks(session: Session) -> Session:
    """A session whose caches take larger chunks: the same results, with fewer restorations of what is stored."""
    return _LargeChunks(**{field.name: getattr(session, field.name) for field in fields(session) if field.name[0] != "_"})


class Estimator:
    """Mean KL at some positions, by `model`'s norm and head, beside the baseline's `hidden` [n, hidden] after all layers."""

    def __init__(self, model: DecoderModel, side: Session, hidden: Tensor) -> None:
        self._model, self._side = model, side
        self._exact = self._final_norm(hidden)
        generator = torch.Generator(hidden.device).manual_seed(0)
        samples = [
            torch.multinomial(head_logits(model, side, some).softmax(-1), DRAWS, replacement=True, generator=generator)
            for some in torch.split(hidden, CHUNK)
        ]
        self._rows = weight_rows(model.weights.lm_head, torch.cat(samples).flatten()).view(len(hidden), DRAWS, -1)

    @torch.inference_mode()
    def _final_norm(self, hidden: Tensor) -> Tensor:
        ops, norm = self._side.executor.ops, self._model.config.final_norm
        assert ops is not None, "what runs a layer whole is not calibrated"
        return ops.rms_norm(hidden, self._model.weights.final_norm, norm.eps)

    @torch.inference_mode()
    def kl(self, hidden: Tensor) -> float:
        """Mean KL in nats of a cache with these hidden states [n, hidden] after all layers."""
        hidden_change = (self._final_norm(hidden).float() - self._exact.float()).unsqueeze(-1)
        total = 0.0
        for rows, by in zip(torch.split(self._rows, CHUNK), torch.split(hidden_change, CHUNK), strict=True):
            d = torch.bmm(rows.float(), by).squeeze(-1).double()
            total += float((d.logsumexp(-1) - math.log(DRAWS) - d.mean(-1)).sum())
        return total * DRAWS / (DRAWS - 1) / len(hidden)


class Probes:
    """What a format costs at one place of a model, with all else in bf16.

    The layers before a place, and tokens [T] that every query sees in BF16, are bf16's: they run once. The layers behind it
    run over the other tokens alone, in the one bf16 cache, whose first blocks stay. `base`, in bf16, has the tail and
    sinks of the caches that are compared.
    """

    def __init__(self, model: DecoderModel, base: Session, tokens: Tensor) -> None:
        self._base, self._layers, self._device = base, model.config.num_layers, base.executor.device
        self._cache, self._paging = base.new_cache(1, len(tokens))
        self._sequence = self._paging.add()
        hidden = model.embed(tokens).to(self._device)
        self._entering = [hidden]
        batch = self._paging.batch([self._sequence], [len(tokens)]).to(self._device)
        for layer in range(self._layers):
            self._entering.append(base.executor.layers(self._entering[-1], range(layer, layer + 1), batch, self._cache))
        exact = (base.plan.recent or 0) + base.plan.sink
        # At least one token is scored, and what stays is whole blocks.
        self.first = min(exact // BLOCK_SIZE * BLOCK_SIZE, (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE)
        self.scored_tokens = len(tokens) - self.first
        self._paging.take_back([self._sequence], [self.scored_tokens])
        self._estimator = Estimator(model, base, self._entering[-1][self.first :])

    def cost(self, place: Place, name: str, calibration: Calibration | None = None) -> float:
        """Mean KL in nats a token, behind those that every query sees in BF16."""
        layer, _ = place
        side = session_with_plan(self._base, with_format(self._base.plan, place, name, calibration))
        run, config = self._base.executor.layers, self._base.config
        hidden = run_one_layer(run, side.plan, config, layer, self._entering[layer])[self.first :]
        if layer + 1 < self._layers:
            batch = self._paging.batch([self._sequence], [self.scored_tokens]).to(self._device)
            hidden = self._base.executor.layers(hidden, range(layer + 1, self._layers), batch, self._cache)
            self._paging.take_back([self._sequence], [self.scored_tokens])
        return self._estimator.kl(hidden)


class Whole:
    """What whole caches lose on one window of text [T + 1].

    Args:
        first: the first position that counts; at least one does.
        every: estimates look at every `every`-th position.
    Attributes:
        hidden: [T, hidden] after all layers, by plan; the baseline's by its own.
    """

    def __init__(self, model: DecoderModel, base: Session, text: Tensor, first: int, every: int) -> None:
        self._model, self._base, self._text, self.tokens = model, base, text, len(text) - 1
        self.hidden: dict[KVPlan, Tensor] = {}
        self._first, self._every = min(first, self.tokens - 1), every
        self._estimator = Estimator(model, base, self._scored_hidden(base.plan)[::every])

    def _scored_hidden(self, plan: KVPlan) -> Tensor:
        """Hidden states of the positions that count."""
        if plan not in self.hidden:
            side, layers = session_with_plan(self._base, plan), range(self._model.config.num_layers)
            self.hidden[plan] = run_span(side, self._model.embed(self._text[:-1]), layers)
        return self.hidden[plan][self._first :]

    def kl(self, plan: KVPlan) -> float:
        """Estimated mean KL in nats of the positions that count."""
        return self._estimator.kl(self._scored_hidden(plan)[:: self._every])

    def row(self, name: str, plan: KVPlan) -> FidelityRow:
        """A cache measured by all of its logits; bytes are of the whole window."""
        exact, plan_hidden = self._scored_hidden(self._base.plan), self._scored_hidden(plan)
        text, window = self._text[self._first :], range(len(plan_hidden))
        logits = (chunk_logits(self._model, self._base, hidden) for hidden in (exact, plan_hidden))
        scores = score_window(name, Workload(text, [window]), window, *logits)
        return fidelity_row(name, session_with_plan(self._base, plan), self.tokens, scores)


class Judge:
    """What caches lose on the worst of several texts.

    The first cache runs on all of them. A text on which it loses less than `share` of the most is dropped.
    """

    def __init__(self, texts: Mapping[str, Whole], share: float, on_step: Callable[[str, int], None], layers: int) -> None:
        self._texts, self._share, self._on_step, self._layers = dict(texts), share, on_step, layers
        self._asked = False

    def estimate(self, plan: KVPlan, what: str = "auto") -> float:
        """Estimated mean KL in nats."""
        losses = {}
        for name, text in self._texts.items():
            losses[name] = text.kl(plan)
            self._on_step(f"{what} on {name}", text.tokens * self._layers)
        worst = max(losses.values())
        if not self._asked:
            self._asked = True
            self._texts = {name: text for name, text in self._texts.items() if losses[name] >= self._share * worst}
        return worst

    def measure(self, plan: KVPlan) -> FidelityRow:
        """By all logits; the row is named by the text."""
        return max((text.row(name, plan) for name, text in self._texts.items()), key=lambda row: row.kl_mean)
