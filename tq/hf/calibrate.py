"""`tq.calibrate`: learned coordinates of any causal model of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from haarkv.models.weights import fingerprint
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.stretches import RopeShift
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, make_calibration, save
from haarkv.tq_ops.output_files import check_writable
from haarkv.validation.planning.calibrate import holdout_fit, learn_basis
from haarkv.validation.planning.moments import AttentionVectors, Moments, Sums, over_positions
from tq.hf.config import decoder_config, model_shape

_TOKENS, _LATER = 16, 37
_NEAR = 0.02  # of the moments, for models in BF16
_RECORDING = "haarkv_recording"


def calibrate(
    model: PreTrainedModel, windows: Sequence[Sequence[int]], *, held_back: Sequence[Sequence[int]] = (),
    out: str | Path | None = None, on_window: Callable[[int, int], None] = lambda *_: None,
) -> CalibrationFile:  # fmt: skip
    """Learn the coordinates of every layer's keys, for formats `lrB` of `TQCache`.

        file = tq.calibrate(model, [tokenizer(text).input_ids for text in texts])
        model.generate(**inputs, past_key_values=tq.TQCache(model.config, kv="k=lr3,v=tq4", calibration=file))

    Args:
        model: a causal language model that uses transformers' attention interface.
        windows: token ids of each text; ten thousand tokens in all are enough for most models.
        held_back: texts not learned from: `learned["fit"]` of the file says by layer how many times as much keys cost on them;
            far above 1.25, more text would help.
        out: a file to write as well.
        on_window: called with (windows done, windows in all).
    Raises:
        InputError: no window, a model whose attention cannot be recorded, or a file that cannot be written.
        NonFiniteError: a key or a query is not finite, with the layer.
    """
    if not windows or not all(map(len, (*windows, *held_back))):
        raise InputError("tq.calibrate needs windows of tokens, and none may be empty")
    if out is not None:
        check_writable(Path(out))
    turns, shape = _layer_ropes(model, windows[0]), model_shape(decoder_config(model.config))
    learning, judging = (_Recorder(model, turns) for _ in range(2))
    every = [(learning, window) for window in windows] + [(judging, window) for window in held_back]
    for done, (recorder, window) in enumerate(every, 1):
        recorder.run(window)
        on_window(done, len(every))
    bases = [learn_basis(sums, layer, turns[layer] if turns else None) for layer, sums in learning.sums()]
    pairs = zip(learning.sums(), judging.sums(), bases, strict=True) if held_back else ()
    fits = [holdout_fit(mine, theirs, basis) for (_, mine), (_, theirs), basis in pairs]
    summary = {"tokens": sum(map(len, windows)), "fit": fits}
    weights = fingerprint(model.state_dict().items())
    context = None if turns else max(map(len, windows))
    file = CalibrationFile(make_calibration(bases, context), shape, weights, summary)
    if out is not None:
        save(Path(out), file)
    return file


class _Recorder:
    """Runs windows through a model and sums moments of its attention's inputs; `turns` of each layer undo RoPE."""

    def __init__(self, model: PreTrainedModel, turns: Sequence[RopeShift] | None = None) -> None:
        self._model, self._turns = model, turns
        self._sums, self._of_window = dict[int, Sums](), dict[int, AttentionVectors]()
        self._layers = decoder_config(model.config).num_hidden_layers

    def sums(self) -> list[tuple[int, Sums]]:
        """Of every layer, in order; an InputError if some layer's attention was not seen."""
        if missing := set(range(self._layers)) - self._sums.keys():
            raise InputError(
                f"the attention of layer {min(missing)} does not go through transformers' attention interface, or has no K "
                "and V of its own; nothing can be learned of it"
            )
        return sorted(self._sums.items())

    @torch.no_grad()
    def run(self, window: Sequence[int], begin: int = 0) -> None:
        """One window, from an empty cache, at positions from `begin` on."""
        model, before = self._model, self._model.config._attn_implementation
        self._of_window = {}
        AttentionInterface.register(_RECORDING, self._attention)
        AttentionMaskInterface.register(_RECORDING, sdpa_mask)
        try:
            model.set_attn_implementation(_RECORDING)
            places = {"position_ids": torch.arange(begin, begin + len(window), device=model.device)[None]} if begin else {}
            model(input_ids=torch.tensor([list(window)], device=model.device), use_cache=False, **places)
        finally:
            model.set_attn_implementation(before)
        for layer, record in self._of_window.items():
            self._sums[layer].add(record, self._turns[layer] if self._turns else None)

    def _attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """SDPA that records q [1, Hq, T, D] and K, V [1, Hkv, T, D]."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if layer not in self._sums:
            self._sums[layer] = Sums(key.shape[1], key.shape[-1], kwargs.get("scaling"))
        record = self._of_window.setdefault(layer, AttentionVectors())
        record.add_kv(key[0].transpose(0, 1), value[0].transpose(0, 1))
        record.add_q(query[0].transpose(0, 1))
        out: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
        return out, None


# -- How keys turn with their position ---------------------------------------------------------------------------------------


def _layer_ropes(model: PreTrainedModel, window: Sequence[int]) -> list[RopeShift] | None:
    """RoPE of each layer's keys; None if some layer has another position encoding.

    A few tokens are run at two positions. Of the model's `inv_freq` buffers, a layer's maps the moments of its keys at one to
    those at the other.
    """
    candidates = [buffer.detach().cpu() for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    if not candidates:
        return None
    runs = []
    for begin in (0, _LATER):
        recorder = _Recorder(model)
        recorder.run(window[:_TOKENS], begin)
        runs.append([sums.k for _, sums in recorder.sums()])
    ropes = []
    for first, later in zip(*runs, strict=True):
        fitting = [inv_freq for inv_freq in candidates if _turns(first, later, inv_freq)]
        if not fitting:
            return None
        ropes.append(RopeShift(tuple(fitting[0].tolist())))
    return ropes


def _turns(first: Moments, later: Moments, inv_freq: Tensor) -> bool:
    if inv_freq.ndim != 1 or 2 * len(inv_freq) > first.first.shape[-1]:
        return False
    moments = over_positions(first, inv_freq, torch.tensor([float(_LATER)]))
    return bool((moments.second - later.second).norm() < _NEAR * later.second.norm())
