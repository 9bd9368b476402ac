"""Fidelity of KV caches on a text: every cache against the same model with its cache in bf16, position by position.

>>> from haarkv.validation.fidelity.setup import load_setup
>>> setup = load_setup("tiny", ["tq4", "k=tq8,v=tq4"])
>>> ids = setup.base.tokenizer.encode("def main(argv):\\n    return len(argv)")
>>> plan = make_workload(ids, setup.base.config.max_position_embeddings)
>>> [(row.kv, row.bytes_per_token) for row in evaluate(setup, plan)]
[('tq4', 1584.0), ('k=tq8,v=tq4', 2352.0)]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.engine.session import Session
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.kv.cache import cache_bytes
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, blocks_for
from haarkv.tq_ops.table import OpTable
from haarkv.validation.fidelity.scores import Partial, Scores, join, kl_figures, score_text

# The fastest for the reference: a larger chunk computes more scores that the causal mask hides, a smaller one de-quantizes the
# stored prefix more often.
CHUNK = 256
# Bytes of a window's logits that are kept while caches are scored against them; of a longer one they are made anew each time.
MAX_LOGIT_BYTES = 2**32
WINDOW = 1024

OnStep = Callable[[str, int], None]
"""Gets what has been done, and the number of its tokens."""


@dataclass(frozen=True)
class Setup:
    """What is compared: sessions by name with `base`, whose K and V are in bf16.

    Attributes:
        model: its embedding and head serve all caches.
        weights: fingerprint of the whole model, balanced.
    """

    model: DecoderModel
    base: Session
    caches: Mapping[str, Session]
    weights: str


@dataclass(frozen=True)
class Workload:
    """A text, [n] int64, and its windows of tokens that are fed to an empty cache. Each token predicts the one after it."""

    tokens: Tensor
    windows: list[range]

    def fed(self, window: range) -> Tensor:
        """The tokens of a window."""
        return self.tokens[window.start : window.stop]

    @property
    def scored_tokens(self) -> int:
        """Positions scored for each cache."""
        return sum(map(len, self.windows))


@dataclass(frozen=True)
class FidelityRow:
    """One cache against the baseline; docs/fidelity.md has the formulas.

    Attributes:
        bytes_per_token, bits_per_value: K and V as allocated for a window, scales and tokens in BF16 included.
        kl_mean, kl_median, kl_p999: KL(bf16 || cache) in nats; the last by nearest rank.
        top1: share of positions with the same most likely token.
        rms_dp: root mean square of p_cache - p_bf16 of the token that follows.
        ppl, ppl_delta: perplexity, and its excess over the baseline's.
    """

    kv: str
    bytes_per_token: float
    bits_per_value: float
    kl_mean: float
    kl_median: float
    kl_p999: float
    top1: float
    rms_dp: float
    ppl: float
    ppl_delta: float

    @property
    def measurements(self) -> dict[str, Any]:
        """Sizes and divergences, as plans and calibrations carry them."""
        keys = ("kv", "bytes_per_token", "bits_per_value", "kl_mean", "kl_median", "kl_p999")
        return {key: getattr(self, key) for key in keys}


# -- What to run ----------------------------------------------------------------------------------------------------------


def make_workload(ids: Sequence[int], context: int, *, window: int | None = None, tokens: int | None = None) -> Workload:
    """Cut a text of at least two tokens into windows of W that do not overlap, by default min(1024, context).

    Window i is fed tokens i*W … i*W + W - 1 and scored on i*W + 1 … i*W + W: each token but the first is scored once. With a
    limit of `tokens`, ceil(tokens / W) windows are taken, evenly spread.

    Raises:
        InputError: the text is too short, or the window exceeds the model's context.
    """
    if window is not None and not 1 <= window <= context:
        raise InputError(f"this model has a context of {context} tokens; --window must lie in 1 … {context}")
    total = len(ids) - 1
    if total < 1:
        raise InputError(f"the text is too short: it has {len(ids)} token, and the first one is not scored; give at least 2")
    size, limit = window or min(WINDOW, context), min(tokens or total, total)
    every = [range(begin, min(begin + size, total)) for begin in range(0, total, size)]
    count = -(-limit // size)
    windows = [every[index * len(every) // count] for index in range(count)]
    surplus = sum(map(len, windows)) - limit
    windows[-1] = windows[-1][: len(windows[-1]) - surplus]
    return Workload(torch.tensor(ids), windows)


# -- Running it -----------------------------------------------------------------------------------------------------------


def evaluate(
    setup: Setup, plan: Workload, *, partial: Partial | None = None, on_step: OnStep = lambda *_: None
) -> list[FidelityRow]:
    """Measure every cache on a text; NonFiniteError if one gives a logit that is not finite."""
    partial = partial or Partial()
    try:
        scores = score_all(setup, plan, {name: (side, 0) for name, side in setup.caches.items()}, partial, on_step)
    finally:
        partial.flush()
    size = len(plan.windows[0])
    return [fidelity_row(name, side, size, scores[name]) for name, side in setup.caches.items()]


def score_all(
    setup: Setup, plan: Workload, caches: Mapping[str, tuple[Session, int]], partial: Partial, on_step: OnStep
) -> dict[str, Scores]:
    """Compare caches with the baseline at every position; each runs from the first layer in which it differs."""
    scores: dict[str, list[Scores]] = {name: [] for name in caches}
    for number, window in enumerate(plan.windows):
        exact = Exact(setup.model, setup.base, plan.fed(window), MAX_LOGIT_BYTES)
        for name, (side, first) in caches.items():
            window_scores = partial.scores(name, number)
            if window_scores is None:
                # The baseline as one of the caches is what it has just been.
                cache_logits = exact if side is setup.base else logits_after(setup.model, side, exact.entering(first), first)
                window_scores = score_window(name, plan, window, exact, cache_logits)
                partial.keep_scores(name, number, window_scores)
            scores[name].append(window_scores)
            on_step(f"{name}, window {number + 1} of {len(plan.windows)}", len(window))
    return {name: join(parts) for name, parts in scores.items()}


class Exact:
    """The baseline's hidden states and logits of a window [T], each computed once, on demand.

    Args:
        most: bytes of logits to keep; if they do not fit, the head runs again.
    """

    def __init__(self, model: DecoderModel, side: Session, tokens: Tensor, most: int) -> None:
        self._model, self._side = model, side
        self._entering = {0: model.embed(tokens)}
        self.nbytes = 4 * len(tokens) * model.config.vocab_size
        self._keeps, self._kept = self.nbytes <= most, list[Tensor]()

    def entering(self, layer: int) -> Tensor:
        """[T, hidden] that enters a layer; after the last one, the head."""
        if layer not in self._entering:
            last = max(known_layer for known_layer in self._entering if known_layer < layer)
            self._entering[layer] = run_span(self._side, self._entering[last], range(last, layer))
        return self._entering[layer]

    def __iter__(self) -> Iterator[Tensor]:
        """Logits [n, vocab] fp32, chunk by chunk."""
        if self._kept:
            return iter(self._kept)
        logits = chunk_logits(self._model, self._side, self.entering(self._model.config.num_layers))
        if not self._keeps:
            return logits
        self._kept = list(logits)
        return iter(self._kept)


@torch.inference_mode()
def head_logits(model: DecoderModel, side: Session, hidden: Tensor) -> Tensor:
    """Logits [n, vocab] fp32 of final hidden states [n, hidden], by the side's op table if it runs on the host."""
    ops = side.executor.ops if side.executor.device.type == "cpu" else None
    return model.head(hidden.to(model.weights.lm_head.device), ops or cast(OpTable, reference))


def chunk_logits(model: DecoderModel, side: Session, hidden: Tensor) -> Iterator[Tensor]:
    """Logits [n, vocab] fp32 of final hidden states [T, hidden], chunk by chunk."""
    return (head_logits(model, side, some) for some in torch.split(hidden, CHUNK))


def logits_after(model: DecoderModel, side: Session, hidden: Tensor, first_layer: int = 0) -> Iterator[Tensor]:
    """Logits [n, vocab] fp32 after each token of a window, chunk by chunk, of `hidden` [T, hidden] that enters `first_layer`.

    Attention reads K and V as stored, also those of the chunk itself: a prefill measures the format.
    """
    return chunk_logits(model, side, run_span(side, hidden, range(first_layer, model.config.num_layers)))


@torch.inference_mode()
def run_span(side: Session, hidden: Tensor, span: range) -> Tensor:
    """Hidden states [T, hidden] after some layers, of those that enter the first, chunk by chunk from an empty cache."""
    device, pieces = side.executor.device, []
    cache, paging = side.new_cache(1, len(hidden))
    sequence = paging.add()
    for chunk in torch.split(hidden, min(CHUNK, cache.most_new_tokens or CHUNK)):
        batch = paging.batch([sequence], [len(chunk)]).to(device)
        pieces.append(side.executor.layers(chunk.to(device), span, batch, cache))
    return torch.cat(pieces)


def score_window(name: str, plan: Workload, window: range, base: Iterable[Tensor], logits: Iterable[Tensor]) -> Scores:
    """Compare a cache's logits with the baseline's, each chunk by chunk; NonFiniteError if one is not finite."""
    targets = torch.split(plan.tokens[window.start + 1 : window.stop + 1], CHUNK)
    try:
        return join([score_text(a, b, t) for a, b, t in zip(base, logits, targets, strict=True)])
    except NonFiniteError as error:
        raise NonFiniteError(f"{name} (B) against bf16 (A), window from token {window.start}: {error}") from None


def fidelity_row(name: str, side: Session, tokens: int, scores: Scores) -> FidelityRow:
    """The figures of a cache; its bytes are counted for a window of `tokens`."""
    shapes, layers = side.config.kv_shapes, side.config.num_layers
    size, exact = (cache_bytes(plan, tokens, shapes) for plan in (side.plan, KVSpec("bf16").plan(layers)))
    ppl = math.exp(-scores.log_p_b.mean().item())
    return FidelityRow(
        kv=name,
        bytes_per_token=(size + side.config.state_bytes) / (blocks_for(tokens) * BLOCK_SIZE),
        bits_per_value=16 * size / exact,
        **kl_figures(scores.kl.tolist()),
        top1=scores.same_top.double().mean().item(),
        rms_dp=math.sqrt((scores.log_p_b.exp() - scores.log_p_a.exp()).square().mean().item()),
        ppl=ppl,
        ppl_delta=ppl - math.exp(-scores.log_p_a.mean().item()),
    )
