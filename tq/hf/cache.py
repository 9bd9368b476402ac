"""`TQCache`, the low-bit KV cache for transformers' `generate`, and `tq.generate`: text with it in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, CacheLayerMixin

from haarkv.engine.plans import WITH_CALIBRATION
from haarkv.models.balance import Scales, Uneven
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from haarkv.tq_ops.kv.calibration_file import load as load_calibration
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.plan_file import load
from tq.hf.choice import choose
from tq.hf.config import balance_scales, cache_layers, decoder_config, head_dims, model_shape
from tq.hf.layer import IMPLEMENTATION, TQLayer, packed_attention
from tq.loading import AUTO_KV, require_one_cache


@dataclass(frozen=True)
class LayerStats:
    """One layer.

    Attributes:
        kv: its formats, as `kv=` takes them.
        tokens: of each row; fewer than seen with a sliding window.
        used: bytes in use, of K and V, tail and sink included.
        allocated: bytes allocated.
        bf16: bytes of the same tokens in BF16.
    """

    layer: int
    kv: str
    tokens: int
    used: int
    allocated: int
    bf16: int


@dataclass(frozen=True)
class CacheStats:
    """All layers, and their sums in bytes."""

    layers: tuple[LayerStats, ...]
    used: int
    allocated: int
    bf16: int

    @property
    def ratio(self) -> float:
        """Bytes in use relative to BF16; 0 if empty."""
        return self.used / self.bf16 if self.bf16 else 0.0


class TQCache(Cache):  # type: ignore[misc]
    """A KV cache that keeps K and V packed, for any causal Hugging Face model.

        model.generate(**inputs, past_key_values=tq.TQCache(model.config, model=model))

    Attention gets dequantized temporaries of one layer at a time; after `model.set_attn_implementation("tq")`, decode steps
    read packed K and V where kernels can. A vector is quantized once, when it comes or its group is full; tokens that a crop
    brings back into the tail are dequantized.

    Args:
        config: `model.config`.
        kv: formats of K and V: `NAME` or `k=NAME,v=NAME`, of `tq.formats.names()`. By default `auto`: the cache that `tq
            generate` takes for the files of this model, chosen before or now; a `model` with other weights gets
            `k=lr4,v=tq4`, learned from itself. With a calibration `k=lr4,v=tq4`. These keep the newest 124 and the first 4
            tokens.
        tail: recent tokens in the model's own dtype; else the fewest that a format needs.
        sink: first positions in the model's own dtype; with left padding they are the padding's.
        skip_layers: layers kept in `bf16`; negative ones count from the end.
        plan: layer -> formats, where they differ from `kv`; or a file of `tq plan`, which sets all.
        calibration: coordinates for `lr2` to `lr5`, from `tq.calibrate` or a file. Only its shapes can be checked here.
        model: if given, uneven channels of K and V are balanced by its weights (of Llama's names), and a model whose text
            would be garbage is refused; `auto` looks at its weights.
        tokenizer: of `model`, for `auto`, where its files are not on this machine.
        balance: False stores every channel as it is.
        allow_collapse: warn where text would be garbage, instead of refusing.
    Attributes:
        uneven: the layers whose K or V is balanced.
    Warns:
        UserWarning: what would be lost, and why keys could not be learned.
    Raises:
        InputError: no cache can be chosen; text would be garbage; an unknown format or layer; a head_dim without layout; a
            tail that is too short; or a model with other caches than those of attention.
    """

    def __init__(
        self, config: Any, kv: str | None = None, *, tail: int | None = None, sink: int | None = None,
        skip_layers: Sequence[int] = (), plan: Mapping[int, str] | str | Path | None = None,
        calibration: CalibrationFile | str | Path | None = None,
        model: Any = None, tokenizer: Any = None, balance: bool = True, allow_collapse: bool = False,
    ) -> None:  # fmt: skip
        decoder = decoder_config(config)
        theirs = cache_layers(decoder)
        if isinstance(plan, (str, Path)):
            if (kv, tail, sink, tuple(skip_layers), calibration) != (None, None, None, (), None):
                raise InputError("a plan file sets the whole cache; leave out kv, tail, sink, skip_layers and calibration")
            spec = load(plan)
        elif plan is not None and kv in (None, AUTO_KV):
            raise InputError("a plan of some layers needs the format of the others; name it with kv")
        elif kv == AUTO_KV or (kv, calibration) == (None, None):
            args = {
                "kv": kv,
                "kv_tail": tail,
                "kv_sink": sink,
                "kv_skip_layers": tuple(skip_layers),
                "calibration": calibration,
            }
            require_one_cache(args, auto=True)
            spec = choose(config, model, tokenizer)
        else:
            file = load_calibration(calibration) if isinstance(calibration, (str, Path)) else calibration
            default = KVSpec(kv) if kv is not None else WITH_CALIBRATION
            spec = replace(
                file.spec if file else default, kv=default.kv, tail=default.tail if tail is None else tail,
                sink=default.sink if sink is None else sink, skip_layers=skip_layers, layers=plan or {},
            )  # fmt: skip
        kv_plan = spec.plan(len(theirs), model_shape(decoder) if spec.made_for else None)
        scales: Mapping[int, Scales] = {}
        self.uneven: tuple[Uneven, ...] = ()
        if model is not None and spec.calibration is None:
            scales, self.uneven = balance_scales(model, decoder, kv_plan, balances=balance, allow_collapse=allow_collapse)
        layers: list[Any] = []
        for layer, (kv_formats, their) in enumerate(zip(kv_plan.layers, theirs, strict=True)):
            if isinstance(their, CacheLayerMixin):
                for kv_format, head_dim in zip(kv_formats, head_dims(decoder, layer), strict=True):
                    kv_format.fields(head_dim)  # raises without a layout for head_dim
                k_tail, v_tail = (kv_plan.tail(kv_format) for kv_format in kv_formats)
                window = getattr(their, "sliding_window", None)
                layers.append(
                    TQLayer(
                        *kv_formats, layer, sink=kv_plan.sink, tail=(k_tail, v_tail), window=window,
                        scales=scales.get(layer, (None, None)), require_context=kv_plan.require_context,
                        reads_packed=lambda: getattr(decoder, "_attn_implementation", None) == IMPLEMENTATION,
                    )
                )  # fmt: skip
            else:
                layers.append(their)  # holds nothing: the model reads another layer's K and V there
        super().__init__(layers=layers)

    def stats(self) -> CacheStats:
        """Bytes held, layer by layer and in all."""
        rows = tuple(_layer_stats(layer) for layer in self.layers if isinstance(layer, TQLayer))
        return CacheStats(rows, *(sum(getattr(row, name) for row in rows) for name in ("used", "allocated", "bf16")))


def _layer_stats(layer: TQLayer) -> LayerStats:
    kv, store = formats.describe(layer.k_format, layer.v_format), layer.store
    if store is None:  # before the first token
        return LayerStats(layer.layer, kv, 0, 0, 0, 0)
    numbers = store.tokens * store.rows * store.heads * sum(store.head_dims)
    allocated_bytes = sum(tensor.untyped_storage().nbytes() for tensor in store.tensors())
    return LayerStats(layer.layer, kv, store.tokens, store.used_bytes, allocated_bytes, 2 * numbers)


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

    Where the model's attention is SDPA, decode steps read the cache as it is packed (`tq.hf.layer`).

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
        tokenizer=tokenizer, balance=balance, allow_collapse=allow_collapse,
    )  # fmt: skip
    with packed_attention(model):
        output = model.generate(
            input_ids=input_ids, attention_mask=mask, past_key_values=cache, return_dict_in_generate=False, **generate_kwargs,
        )  # fmt: skip
    texts: list[str] = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return texts[0] if isinstance(prompt, str) and len(texts) == 1 else texts
