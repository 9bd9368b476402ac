"""`tq.generate`: text from a Hugging Face model with a low-bit KV cache, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from tq.hf.attention import packed_attention
from tq.hf.cache import TQCache


@overload
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, kv: str | None = ..., **kwargs: Any
) -> str: ...


@overload
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[str], kv: str | None = ..., **kwargs: Any
) -> list[str]: ...


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[str], kv: str | None = None, *,
    tail: int | None = None, sink: int | None = None, skip_layers: Sequence[int] = (),
    plan: Mapping[int, str] | str | Path | None = None, calibration: CalibrationFile | str | Path | None = None,
    balance: bool = True, allow_collapse: bool = False, **generate_kwargs: Any,
) -> str | list[str]:  # fmt: skip
    """Continue one prompt or several; the continuations without the prompts and without special tokens.

    Where the model's attention is SDPA, decode steps read the cache as it is packed (`tq.hf.attention`).

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer. It need not have a padding token: shorter prompts are padded on the left here.
        prompt: a text or several, taken as they are; apply a chat template before.
        kv, tail, sink, skip_layers, plan, calibration, balance, allow_collapse: as `TQCache` takes them.
        generate_kwargs: for `model.generate`, such as `max_new_tokens`, `num_beams` or `do_sample`.
    Returns:
        a text for a text, a list for several; `num_return_sequences` = n makes it a list with n texts a prompt.
    Raises:
        InputError: what `TQCache` refuses, no prompt or an empty one, or an argument that this function sets itself.
    """
    ours = {"past_key_values", "input_ids", "inputs", "attention_mask", "return_dict_in_generate"} & generate_kwargs.keys()
    if ours:
        raise InputError(
            f"tq.generate sets {', '.join(sorted(ours))} itself; call model.generate(past_key_values=tq.TQCache(…))"
        )
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    rows: list[list[int]] = [tokenizer(text).input_ids for text in prompts]
    if not rows or not all(rows):
        raise InputError("there is no prompt, or a prompt has no tokens")
    width = max(map(len, rows))
    # Padding is masked, so any token serves if the tokenizer names none.
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    input_ids = torch.tensor([[padding] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    cache = TQCache(
        model.config, kv, tail=tail, sink=sink, skip_layers=skip_layers, plan=plan, calibration=calibration, model=model,
        balance=balance, allow_collapse=allow_collapse,
    )  # fmt: skip
    with packed_attention(model):
        output = model.generate(
            input_ids=input_ids, attention_mask=mask, past_key_values=cache, return_dict_in_generate=False, **generate_kwargs,
        )  # fmt: skip
    texts: list[str] = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return texts[0] if isinstance(prompt, str) and len(texts) == 1 else texts
