"""Making a failing layer small: fewer tokens, less context, fewer heads, narrower, as long as it fails the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.config import Layer, ModelConfig
from haarkv.models.weights import tensors_of
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.weight import Weight, selected
from haarkv.validation.layers.forward import MadeLayer
from haarkv.validation.layers.parts import Stored, load, put, snapshot
from haarkv.validation.layers.replay.case import LayerCase, Make, Span, capture, expected, judged, moved, new_cache
from haarkv.validation.layers.replay.file import ReplayFile
from haarkv.validation.layers.report import Report, Verdict

Fails = Callable[[LayerCase], bool]
_WIDTHS = tuple(2**power for power in range(3, 20))


def fails_alike(reference: Make, candidate: Make, stage: str, reason: str) -> Fails:
    """Whether an executor fails on a case at this stage, for this reason.

    A case that cannot be run does not fail alike, whatever the executor makes of it.
    """

    def fails(case: LayerCase) -> bool:
        try:
            found = judged(case, reference, candidate).first_divergence
        except Exception:  # an executor that breaks down on another shape does so in its own way
            return False
        return found is not None and (found.stage, found.reason) == (stage, reason)

    return fails


def shrink(case: LayerCase, reference: Make, fails: Fails, seconds: float, on_try: Callable[[], object]) -> LayerCase:
    """The smallest case that was found to fail alike, within so many seconds; the case itself if it does not.

    Args:
        reference: makes what fills the cache when a token becomes context.
        on_try: called before each attempt.
    """
    end = time.monotonic() + seconds

    def first_failing(candidates: Iterator[LayerCase]) -> LayerCase | None:
        for candidate in candidates:
            if time.monotonic() > end:
                return None
            on_try()
            if fails(candidate):
                return candidate
        return None

    if first_failing(iter([case])) is None:
        return case
    for _ in range(2):  # what could not go at first may go once something else has gone
        size = _size(case)
        for smaller in (_earlier_layers, _fewer_sequences, _fewer_tokens, _less_context, _fewer_heads, _narrower):
            while time.monotonic() <= end:
                made = expected(case, reference) if smaller is _fewer_tokens else None
                found = first_failing(smaller(case, made))
                if found is None:
                    break
                case = found
        if _size(case) == size:
            break
    return case


def _size(case: LayerCase) -> tuple[int, ...]:
    config, context = case.config, sum(case.lengths)
    return case.index, case.tokens, context, config.heads.num_heads, config.hidden_size, config.common.mlp.width


# -- Each yields smaller cases, the smallest first ---------------------------------------------------------------------


def _earlier_layers(case: LayerCase, _: MadeLayer | None) -> Iterator[LayerCase]:
    """The layer's place chooses the rotation, and how many layers an executor has to be made for."""
    for index in range(min(case.index, 2)):
        yield replace(case, config=case.config.with_layers(index + 1))


def _fewer_sequences(case: LayerCase, _: MadeLayer | None) -> Iterator[LayerCase]:
    every = case.spans
    if len(every) > 1:
        yield from (_picked(case, [one]) for one in every)
    if len(every) > 2:
        yield from (_picked(case, [other for other in every if other is not one]) for one in every)


def _fewer_tokens(case: LayerCase, made: MadeLayer | None) -> Iterator[LayerCase]:
    """A part of each sequence's tokens; those before it become context, those after it go."""
    assert made is not None
    longest, after = max(case.counts), replace(case, before=_with(case, made))
    for size in (1, 2, 4, longest // 2):
        if 0 < size < longest:
            begins = range(longest - size + 1) if longest <= 8 else sorted({0, longest // 2, longest - size})
            for begin in begins:
                firsts = [min(begin, count - min(size, count)) for count in case.counts]
                yield _picked(
                    after,
                    [
                        (row, first, first + min(size, count), context + first)
                        for first, (row, _, count, context) in zip(firsts, case.spans, strict=True)
                    ],
                )


def _less_context(case: LayerCase, _: MadeLayer | None) -> Iterator[LayerCase]:
    """Tokens earlier in their sequences, after fewer that are cached."""
    context = max(context for *_, context in case.spans)
    least, step = max(0, 2 - max(case.counts)), context
    tries = {least}
    while step > 1:  # towards the context from below, by halves: 0, 1/2, 3/4, …
        step //= 2
        tries.add(context - step)
    for tokens in sorted(tries):
        if least <= tokens < context:
            yield _picked(case, [(row, begin, end, min(older, tokens)) for row, begin, end, older in case.spans])


def _fewer_heads(case: LayerCase, _: MadeLayer | None) -> Iterator[LayerCase]:
    config = case.config
    heads, group = range(config.heads.num_kv_heads), config.heads.num_heads // config.heads.num_kv_heads
    if len(heads) > 1:
        yield from (_heads(case, [head], group) for head in heads)
        yield from (_heads(case, [other for other in heads if other != head], group) for head in heads if len(heads) > 2)
    for of_group in (1, 2, group // 2):
        if 0 < of_group < group:
            yield _heads(case, list(heads), of_group)


def _narrower(case: LayerCase, _: MadeLayer | None) -> Iterator[LayerCase]:
    config, layer = case.config, case.config.common
    for width in _WIDTHS:
        if width < layer.mlp.width:
            narrow = replace(layer, mlp=replace(layer.mlp, width=width))
            yield _cut(case, {"mlp": torch.arange(width)}, _of(config, narrow))
    for width in _WIDTHS:
        if width < config.hidden_size:
            yield _cut(case, {"hidden": torch.arange(width)}, replace(config, hidden_size=width))


# -- Cutting -----------------------------------------------------------------------------------------------------------
def _picked(case: LayerCase, spans: Sequence[Span]) -> LayerCase:
    """Some sequences, with less of each."""
    starts = case.batch.query_start_loc.tolist()
    tokens = [starts[row] + token for row, begin, end, _ in spans for token in range(begin, end)]
    counts = tuple(end - begin for _, begin, end, _ in spans)
    lengths = tuple(context + count for (*_, context), count in zip(spans, counts, strict=True))
    fewer = replace(case, hidden=case.hidden[tokens], counts=counts, lengths=lengths)
    return replace(fewer, before=moved(case.before, case.batch, [row for row, *_ in spans], fewer.batch))


def _with(case: LayerCase, made: MadeLayer) -> Stored:
    """The cache after the layer has run."""
    cache = new_cache(case)
    load(cache, case.index, case.before)
    put(cache, case.index, case.batch, made.stored)
    return snapshot(cache, case.index)


def _heads(case: LayerCase, heads: list[int], group: int) -> LayerCase:
    """Some KV heads, and the first few query heads of each."""
    config, dim = case.config, case.config.heads.head_dim
    whole = config.heads.num_heads // config.heads.num_kv_heads
    queries = [head * whole + query for head in heads for query in range(group)]
    rows = {"kv": _of_heads(heads, dim), "q": _of_heads(queries, dim)}
    before = {side: {name: tensor[:, heads] for name, tensor in fields.items()} for side, fields in case.before.items()}
    fewer = replace(case, before=before, basis=case.basis and case.basis.heads(heads))
    mixer = replace(config.common.attention, num_kv_heads=len(heads), num_heads=len(queries))
    return _cut(fewer, rows, _of(config, replace(config.common, mixer=mixer)))


def _of(config: ModelConfig, layer: Layer) -> ModelConfig:
    """The same with another layer in each place."""
    return replace(config, layers=(layer,) * config.num_layers)


def _of_heads(heads: Sequence[int], dim: int) -> Tensor:
    return (torch.tensor(heads)[:, None] * dim + torch.arange(dim)).flatten()


def _cut(case: LayerCase, kept: Mapping[str, Tensor], config: ModelConfig) -> LayerCase:
    """Some rows and columns of the weights. Blocks of which a part is taken are restored: what fails in them fails no more.

    Args:
        kept: by the name of an axis.
        config: that declares what is left.
    """
    stored = tensors_of(case.config.common, case.config.hidden_size)

    def cut(field: str, weight: Weight) -> Weight:
        for place, axis in enumerate(stored[field].axes):
            if axis.name in kept:
                weight = selected(weight, place, kept[axis.name])
        return weight

    hidden = case.hidden[:, kept["hidden"]] if "hidden" in kept else case.hidden
    return replace(case, config=config, weights=case.weights.changed(cut), hidden=hidden)


# -- From a validation that failed -------------------------------------------------------------------------------------
_MOST_FORWARDS = 8
"""In which a layer is tried that does not fail alone where it was found."""


@dataclass(frozen=True)
class OneRun:
    """One validation, and what it takes to run any of its layers again.

    Attributes:
        make: the reference and the executor on trial.
    """

    report: Report
    model: DecoderModel
    prompts: Sequence[Sequence[int]]
    steps: int
    plan: KVPlan
    calibration: Calibration | None
    make: tuple[Make, Make]


def replay_of(
    runs: Sequence[OneRun], versions: Mapping[str, str], seconds: float, on_try: Callable[[], object] = lambda: None
) -> ReplayFile:
    """The first failure of some runs, cut out and shrunk.

    Args:
        versions: of what runs, by name.
        seconds: to shrink it in.
        on_try: called before each attempt to make it smaller.
    Raises:
        InputError: none failed, or what failed shows in no single layer.
    """
    run = next((run for run in runs if not run.report.passed and run.report.first_divergence), None)
    finding = run.report.first_divergence if run else None
    if run is None or finding is None:
        raise InputError("no layer failed")
    reference, candidate = run.make
    fails = fails_alike(reference, candidate, finding.stage, str(finding.reason))
    for place in _places(run, finding):
        trusted = reference(run.model, run.plan)
        case = capture(trusted, run.model, run.prompts, run.steps, run.plan, place, run.calibration)
        if fails(case):
            small = shrink(case, reference, fails, seconds, on_try)
            made = expected(small, reference)
            names = run.report.reference, run.report.candidate
            return ReplayFile(small, made, finding.described(), *names, versions)
    raise InputError(f"what was found at {finding.stage} of layer {finding.layer} does not show when that layer runs alone")


def _places(run: OneRun, finding: Verdict) -> Iterator[Verdict]:
    """Where the layer may fail alone: in the forward of the finding, or in another if it was found over all of them."""
    yield finding
    forwards = dict.fromkeys((row.phase, row.step) for row in run.report.rows if row.layer == finding.layer)
    for phase, step in list(forwards)[:_MOST_FORWARDS]:
        if (phase, step) != (finding.phase, finding.step):
            yield replace(finding, phase=phase, step=step)
