"""What a validation exercises, and prompts that exercise everything.

A short prompt has one block, one sequence and one chunk: an executor that reads the wrong one passes. So each report names
what was not exercised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import cast

import torch
from torch import Tensor

from haarkv.engine.generation import PREFILL_CHUNK
from haarkv.models.balance import fold_scales
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.text import Tokenizer
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import vector_lengths
from haarkv.tq_ops.formats.stretches import STRETCH
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, WINDOW_CHUNK, blocks_for
from haarkv.tq_ops.table import OpTable
from haarkv.validation.layers.forward import LayerRecord, Schedule, observe_vectors
from haarkv.validation.layers.parts import new_cache

STATE_READ = "a state that an earlier forward left"
OTHER_STATE = "another state of as many tokens in its place (a prefix that is reused)"
TINY, HUGE = 0.01, 1000.0
"""Lengths of K and V below and above which their stored scales count as tiny and as huge."""
TINY_SCALES, HUGE_SCALES = f"tiny scales (K or V shorter than {TINY})", f"huge scales (K or V longer than {HUGE:.0f})"


class Exercise:
    """Records what a validation exercises; `decode_step` is the number of keys that the executor's decode takes at a time."""

    def __init__(self, schedule: Schedule, whole_forwards: bool, decode_step: int | None) -> None:
        self._lengths, self._steps, self._plan = list(map(len, schedule.prompts)), schedule.steps, schedule.plan
        self._whole, self._chunk, self._decode_step = whole_forwards, schedule.chunk, decode_step
        self._shortest, self._longest = float("inf"), 0.0
        self._states = self._read_back = False

    def saw(self, record: LayerRecord) -> None:
        """Record the lengths of the vectors [T, Hkv, D] that a layer stores, or that it keeps a state."""
        if record.kv is None:
            self._states = True
            self._read_back |= bool((record.batch.seq_lens > record.batch.query_start_loc.diff()).any())
            return
        for kv_format, x in zip((self._plan.k(record.index), self._plan.v(record.index)), record.kv, strict=True):
            if kv_format.lossy:
                lengths = vector_lengths(x)
                self._shortest = min(self._shortest, float(lengths.min()))
                self._longest = max(self._longest, float(lengths.max()))

    def result(self, over_others: int = 0) -> dict[str, bool]:
        """Whether each thing was exercised, in the order of a forward; `over_others` layers also ran over another state."""
        places = self._decode_positions()
        longest = max(self._lengths) + Schedule.more(self._steps)
        blocks, chunk = [blocks_for(length) for length in self._lengths], self._chunk
        coverage = {
            "a second layer": len(self._plan.layers) > 1,
            "a second sequence": len(self._lengths) > 1,
            "padding (sequences of unequally many blocks)": len(set(blocks)) > 1,
            f"a second chunk of a prompt (over {chunk} tokens)": max(self._lengths) > chunk,
            f"positions from {BLOCK_SIZE} on (a second block)": longest > BLOCK_SIZE,
            f"positions from {2 * BLOCK_SIZE} on (a third block)": longest > 2 * BLOCK_SIZE,
            "a prompt that fills its last block": any(length % BLOCK_SIZE == 0 for length in self._lengths),
            "decode": self._steps > 0,
            "drafted tokens, taken back": self._steps > 0,
            "a decode step into a new block": any((n + step) % BLOCK_SIZE == 0 for n in self._lengths for step in places),
            "whole forwards": self._whole,
        }
        if size := self._decode_step:
            keys = [n + step + 1 for n in self._lengths for step in places]
            coverage[f"decode over a second step of keys (over {size:,} tokens)"] = max(keys, default=0) > size
        if self._plan.by_stretches:
            coverage[f"keys of a second stretch (over {STRETCH:,} tokens)"] = longest > STRETCH
        if self._states:
            coverage |= {STATE_READ: self._read_back, OTHER_STATE: over_others > 0}
        if any(kv_format.lossy for kv_format in self._plan.formats):
            coverage |= {TINY_SCALES: self._shortest < TINY, HUGE_SCALES: self._longest > HUGE}
        return coverage | self._window_coverage()

    def _decode_positions(self) -> list[int]:
        """Place behind its prompt of the token that each decode step stores."""
        return [*range(self._steps), self._steps + 1] if self._steps else []

    def _window_coverage(self) -> dict[str, bool]:
        """What tokens in BF16 add."""
        plan, chunk = self._plan, self._chunk
        lossy = [kv_format for kv_format in plan.formats if plan.has_window(kv_format)]
        forwards = [
            (begin, end)
            for n in self._lengths
            for begin, end in (
                *((begin, min(begin + chunk, n)) for begin in range(0, n, chunk)),
                *((n + step, n + step + 1) for step in self._decode_positions()),
            )
        ]
        coverage: dict[str, bool] = {}
        for tail in sorted({plan.tail(kv_format) for kv_format in lossy} - {0}):
            ring = next(plan.ring_tokens(kv_format, WINDOW_CHUNK) for kv_format in lossy if plan.tail(kv_format) == tail)
            words = f"a tail of {tail}"
            coverage |= {
                f"{words} that is not full": tail == 1 or any(end < tail for _, end in forwards),
                f"{words} that is just full": any(end == tail for _, end in forwards),
                f"{words} with one token beyond it": any(end == tail + 1 for _, end in forwards),
                f"{words} with a block beyond it": any(end > tail + BLOCK_SIZE for _, end in forwards),
                f"{words} whose ring starts over": any(end > ring for _, end in forwards),
                f"a decode step beyond {words}": any(end == begin + 1 and end == tail + 1 for begin, end in forwards),
            }
        if plan.sink and lossy:
            coverage["sinks that an earlier forward stored"] = any(begin >= plan.sink for begin, _ in forwards)
        return coverage


def covering_prompts_for(
    tokenizer: Tokenizer, config: ModelConfig, plan: KVPlan, steps: int, decode_step: int | None = None
) -> list[list[int]]:
    """Token ids of prompts that exercise everything but scales: a full block, one token more, and more than one chunk.

    A tail takes two more: one that does not fill it, and one a block longer. The longest, longer than `decode_step`, stands
    last, so that a second chunk belongs to another row than the first. The text is source code of Python's standard library.

    Raises:
        InputError: the context is too short for two tokens and the steps.
    """
    context = min(config.max_position_embeddings, plan.context or config.max_position_embeddings)
    room = context - Schedule.more(steps)
    if room < 2:
        raise InputError(f"the context of {context} tokens is too short for a prompt and {steps} steps; lower --steps")
    tails = {plan.tail(kv_format) for kv_format in plan.formats if plan.has_window(kv_format)} - {0}
    # Decode takes each tail from not full to beyond it.
    tail_lengths = [max(tail - 1, 1) for tail in sorted(tails)]
    longest = max(
        [
            PREFILL_CHUNK + 3,
            (decode_step or 0) + 1,
            (STRETCH + 3) * plan.by_stretches,
            *(tail + BLOCK_SIZE + 1 for tail in tails),
        ]
    )
    lengths = [min(length, room) for length in (BLOCK_SIZE, BLOCK_SIZE + 1, *tail_lengths, longest)]
    text = "".join(islice(held_out_texts().values(), 4))
    ids = cycle(tokenizer.encode(text[: _CHARACTERS * sum(lengths)]))
    return [list(islice(ids, length)) for length in lengths]


_CHARACTERS = 20
"""Of a token, at most."""


# -- Lengths that ordinary models never reach --------------------------------------------------------------------------
_SHORTEST, _LONGEST = 2.0**-8, 2.0**13
"""Where tiny vectors begin and huge ones end: their scales are normal FP16 numbers."""
_LENGTH_TOLERANCE = 0.05
"""Relative error of a length where the format still has a scale for it."""


@torch.inference_mode()
def with_extreme_scales(model: DecoderModel, plan: KVPlan, token_ids: Sequence[int]) -> DecoderModel:
    """A model that computes the same, whose K and V of a prompt are tiny in one layer and huge in the next."""
    kv = _layer_kv(model, plan, token_ids)
    layers = []
    for index, layer in enumerate(model.weights.layers):
        if index not in kv:  # it keeps a state
            layers.append(layer)
            continue
        for side, kv_format, x in (("K", plan.k(index), kv[index][0]), ("V", plan.v(index), kv[index][1])):
            tiny = (index % 2 == 0) == (side == "K")
            exponent = _exponent(kv_format, index, x, tiny)
            layer = fold_scales(layer, side, torch.full(x.shape[1:], 2.0**exponent))
        layers.append(layer)
    return replace(model, weights=replace(model.weights, layers=tuple(layers)))


def _layer_kv(model: DecoderModel, plan: KVPlan, token_ids: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """K and V [T, Hkv, D] of each layer that has them."""
    kv_pairs: list[tuple[Tensor, Tensor]] = []
    ops = observe_vectors(cast(OpTable, reference), lambda k, v: kv_pairs.append((k, v)))
    cache = new_cache(plan, model.config, blocks_for(len(token_ids)))
    paging = PagedSequences(cache.num_blocks, cache.block_size)
    batch = paging.batch([paging.add()], [len(token_ids)])
    model.layers(model.embed(torch.tensor(token_ids)), range(model.config.num_layers), batch, cache, ops)
    having = [index for index, shape in enumerate(model.config.kv_shapes) if shape is not None]
    return dict(zip(having, kv_pairs, strict=True))


def _exponent(kv_format: KVFormat, layer: int, x: Tensor, tiny: bool) -> int:
    """Of the power of two that takes vectors [T, Hkv, D] as far as the format goes."""
    lengths = vector_lengths(x)
    if not kv_format.lossy or not (lengths > 0).any():
        return 0
    if tiny:
        exponent = math.ceil(math.log2(_SHORTEST / float(lengths[lengths > 0].min())))
    else:
        exponent = math.floor(math.log2(_LONGEST / float(lengths.max())))
    while exponent and not _holds(kv_format, layer, x * 2.0**exponent):
        exponent -= int(math.copysign(1, exponent))
    return exponent


def _holds(kv_format: KVFormat, layer: int, x: Tensor) -> bool:
    """Whether a format keeps the lengths of vectors [T, Hkv, D]."""
    x = x.transpose(0, 1)
    try:
        decoded_lengths = vector_lengths(kv_format.dequantize(kv_format.quantize(x, layer), layer))
    except NonFiniteError:
        return False
    lengths = vector_lengths(x)
    return bool(((decoded_lengths - lengths).abs() <= _LENGTH_TOLERANCE * lengths).all())
