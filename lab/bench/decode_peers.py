"""What others do with the same tensors: torch's attention over unpacked K and V, on a GPU FlashAttention's and FlashInfer's,
transformers with its own caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from haarkv.benchmarks.cases import Variant, kv_numbers
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig, unknown_layer

SDPA, TRANSFORMERS, LLAMA = PEERS = ("sdpa", "transformers", "llama.cpp")
"""Who can be measured beside ours: torch's attention, transformers' model with its caches, llama.cpp."""


_PAGE = 16  # tokens of a page of FlashInfer's
_WORKSPACE = 128 * 2**20
_NOT_ATTENTION = 2.0**-4
"""An output that is off by more of the largest number is not attention's, and its time says nothing."""


def attention(q: Tensor, k: Tensor, v: Tensor, copies: Callable[[float], int] = lambda _: 1) -> Iterator[Variant]:
    """Every way of asking torch for decode attention that this device takes.

    `rows` hands over the query heads that share a KV head as rows of one head, which reads K and V once. `gqa` is the
    documented way, which on a CPU repeats them. A CPU also gets FP32 K and V, and two plain products with a softmax between.

    Args:
        q: [B, Hq, D]; k, v: [B, Hkv, S, D] bf16.
        copies: how many copies of K and V take turns, from the bytes of one.
    """
    batch, query_heads, dim = q.shape
    kv_heads = k.shape[1]
    rows = q.to(torch.bfloat16).view(batch, kv_heads, query_heads // kv_heads, dim)
    whole = q.to(torch.bfloat16).view(batch, query_heads, 1, dim)

    def copied(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        count = copies(k.numel() * 2 * dtype.itemsize)
        return [(k.to(dtype, copy=True), v.to(dtype, copy=True)) for _ in range(count)]

    half, half_bytes = copied(torch.bfloat16), 4.0 * kv_heads * dim
    for form, queries in (("rows", rows), ("gqa", whole)):
        for word, backend in sdpa_backends(q.device).items():
            run = _sdpa(queries, half, gqa=form == "gqa", backend=backend)
            with suppress(RuntimeError):  # this backend does not take this form
                run(0)
                yield Variant(f"sdpa bf16 {form}{word}", run, [half_bytes])
    if q.device.type == "cpu":
        single, scale = copied(torch.float32), dim**-0.5
        yield Variant("sdpa fp32 rows", _sdpa(rows.float(), single), [2 * half_bytes])

        @torch.inference_mode()
        def products(number: int) -> Tensor:
            keys, values = half[number % len(half)]
            return torch.matmul(torch.softmax(torch.matmul(rows, keys.transpose(-1, -2)) * scale, dim=-1), values)

        yield Variant("torch bf16 products", products, [half_bytes])


def packages(
    q: Tensor, k: Tensor, v: Tensor, exact: Tensor, copies: Callable[[float], int] = lambda _: 1
) -> Iterator[Variant]:
    """FlashAttention 3 and 2 and FlashInfer, and of each that cannot be asked why not.

    Args:
        q: [B, new, Hq, D] bf16, whose tokens are the last of k, v [B, Hkv, S, D] bf16.
        exact: what comes out, in any shape of as many numbers.
        copies: as `attention`.
    """
    token_bytes = 4.0 * k.shape[1] * k.shape[3]
    count, infer = copies(2 * k.nbytes), _flash_infer if q.shape[1] == 1 else _flash_infer_prompt
    for name, module, make in (
        ("flash-attention 3", "flash_attn_interface", _flash_attention), ("flash-attention 2", "flash_attn", _flash_attention),
        ("flashinfer", "flashinfer", infer),
    ):  # fmt: skip
        run, note = None, "" if find_spec(module) else f"{module} is not installed"
        if not note:
            try:
                run = make(import_module(module), q, k, v, count)
                off = float((run(0).view(exact.shape).float() - exact).abs().max() / exact.abs().max())
                if not off <= _NOT_ATTENTION:  # NaN is not, either
                    run, note = None, f"its result is off by {off:.3g} of the largest: not attention"
            except Exception as error:  # whatever the package raises: one peer must not take the others with it
                run, note = None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        yield Variant(name, run, [token_bytes], note)


def _flash_attention(package: Any, q: Tensor, k: Tensor, v: Tensor, count: int) -> Callable[[int], Tensor]:
    lengths = torch.full((len(q),), k.shape[2], dtype=torch.int32, device=q.device)
    kv = [[x.transpose(1, 2).contiguous() for x in (k, v)] for _ in range(count)]

    def run(number: int) -> Tensor:
        given = package.flash_attn_with_kvcache(q, *kv[number % count], cache_seqlens=lengths, causal=True)
        out: Tensor = given[0] if isinstance(given, tuple) else given
        return out

    return run


def _flash_infer_prompt(package: Any, q: Tensor, k: Tensor, v: Tensor, _count: int) -> Callable[[int], Tensor]:
    """Of one sequence."""
    keys, values = (x[0].transpose(0, 1).contiguous() for x in (k, v))
    return lambda _number: package.single_prefill_with_kv_cache(q[0], keys, values, causal=True)


def _flash_infer(package: Any, q: Tensor, k: Tensor, v: Tensor, count: int) -> Callable[[int], Tensor]:
    """FlashInfer's decode over pages of 16 tokens."""
    batch, kv_heads, length, dim = k.shape
    pages = length // _PAGE
    paged = [x.view(batch, kv_heads, pages, _PAGE, dim).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)]
    kv = [[x.clone() for x in paged] for _ in range(count)]
    steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * pages
    indices = torch.arange(batch * pages, dtype=torch.int32, device=q.device)
    last = torch.full((batch,), _PAGE, dtype=torch.int32, device=q.device)
    # A graph needs the buffers of the plan to stay where they are.
    planned = package.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device), "HND", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=steps.clone(), paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )  # fmt: skip
    types = dict.fromkeys(("q_data_type", "kv_data_type"), torch.bfloat16)
    planned.plan(steps, indices, last, q.shape[2], kv_heads, dim, _PAGE, **types)
    return lambda number: planned.run(q[:, 0], tuple(kv[number % count]))


def sdpa_backends(device: torch.device) -> dict[str, Any]:
    """The ways in which SDPA computes on a device, by what a peer's name ends with; on a CPU it chooses itself."""
    names = {" flash": "FLASH", " cudnn": "CUDNN", " efficient": "EFFICIENT"} if device.type == "cuda" else {}
    return {word: getattr(SDPBackend, f"{name}_ATTENTION") for word, name in names.items()} or {"": None}


def _sdpa(
    q: Tensor, kv: Sequence[tuple[Tensor, Tensor]], *, gqa: bool = False, backend: Any = None
) -> Callable[[int], Tensor]:
    @torch.inference_mode()
    def run(number: int) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return scaled_dot_product_attention(q, *kv[number % len(kv)], enable_gqa=gqa)

    return run


class HFCache(NamedTuple):
    """A cache for transformers' model.

    Attributes:
        make: the model's config -> an empty cache.
        bits: of a stored value, scales included.
        package: that it needs.
        implementation: of attention, by transformers' name.
    """

    name: str
    make: Callable[[Any], Any]
    bits: float
    package: str | None = None
    implementation: str = "sdpa"


def transformers_steps(
    model: DecoderModel, batch: int, k: Tensor, v: Tensor, more: Sequence[HFCache] = ()
) -> Iterator[Variant]:
    """transformers' own model with the same weights, its caches filled with the same K and V in every layer; `more` beside."""
    caches = (
        HFCache("DynamicCache bf16", partial(their_cache, package=None), 16.0),
        HFCache("quanto 4-bit", partial(their_cache, package="quanto"), 4.5, "optimum.quanto"),
        HFCache("hqq 4-bit", partial(their_cache, package="hqq"), 4.5, "hqq"),
        *more,
    )
    missing = transformers_missing(model.config)
    theirs = {} if missing else {name: their_model(model, name) for name in {cache.implementation for cache in caches}}
    for kind in caches:
        run, note = None, missing
        if not note and kind.package is not None and find_spec(kind.package.split(".")[0]) is None:
            note = f"{kind.package} is not installed"
        if not note:
            try:
                cache = kind.make(theirs[kind.implementation].config)
                for layer in range(model.config.num_layers):
                    cache.update(k[:, :, :-1].to(model.dtype), v[:, :, :-1].to(model.dtype), layer)
                run = _their_step(theirs[kind.implementation], cache, batch)
            except (ImportError, RuntimeError, OSError, AttributeError, TypeError) as error:
                note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        yield Variant(f"hf {kind.name}", run, [numbers * kind.bits / 8 for numbers in kv_numbers(model.config)], note)


def transformers_prompt(model: DecoderModel, prompts: Sequence[Sequence[int]]) -> Variant:
    """transformers' own model with the same weights, and prompts into an empty `DynamicCache`."""
    nbytes = [float(numbers * model.dtype.itemsize) for numbers in kv_numbers(model.config)]
    if missing := transformers_missing(model.config):
        return Variant("hf DynamicCache bf16", None, nbytes, missing)
    theirs, ids = their_model(model, "sdpa"), torch.tensor(prompts, device=model.weights.embedding.device)

    @torch.inference_mode()
    def run(_number: int) -> object:
        cache = their_cache(theirs.config, package=None)
        out = theirs(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1).tolist()

    return Variant("hf DynamicCache bf16", run, nbytes, "", f"transformers {version('transformers')} with SDPA")


def unlike_plain(config: ModelConfig) -> str | None:
    """Why a model is none of equal plain layers with RoPE as it was trained, which peers are built of; None if it is one."""
    if any(mixer.rope.scaling for mixer in config.attentions):
        return "its RoPE is scaled"
    return unknown_layer(config, knows=("head_norms",)) or ("its layers differ" if len(set(config.layers)) > 1 else None)


def transformers_missing(config: ModelConfig) -> str:
    """Why transformers' own model is not measured; empty if it can be."""
    if config.model_type not in ("qwen3", "llama"):
        return f"the peer is a Qwen3 or Llama, this is a {config.model_type}"
    if other := unlike_plain(config):
        return f"the peer has plain layers: {other}"
    return "" if find_spec("transformers") else "transformers is not installed"


def their_model(model: DecoderModel, implementation: str) -> Any:
    """transformers' own Qwen3 or Llama over the same weights, which it shares."""
    from transformers import AutoConfig, AutoModelForCausalLM

    c, shape = model.config, model.config.attentions[0].heads
    config = AutoConfig.for_model(
        c.model_type, vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.common.mlp.width,
        num_hidden_layers=c.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        rms_norm_eps=c.final_norm.eps, max_position_embeddings=c.max_position_embeddings, tie_word_embeddings=c.tied,
        rope_parameters={"rope_type": "default", "rope_theta": c.common.attention.rope.theta},
    )  # fmt: skip
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    theirs.load_state_dict(dict(model.weights.named()), assign=True, strict=False)
    theirs.tie_weights()
    # Rotary tables are buffers that no state dict holds.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config).to(model.weights.embedding.device)
    return theirs.eval()


def their_cache(config: Any, package: str | None) -> Any:
    """An empty cache of transformers: `DynamicCache`, or that of a package that quantizes to four bits."""
    from transformers import DynamicCache, QuantizedCache

    if package is None:
        return DynamicCache(config=config)
    axis = 1 if package == "hqq" else 0
    return QuantizedCache(package, config, nbits=4, axis_key=axis, axis_value=axis, q_group_size=64, residual_length=128)


def _their_step(theirs: Any, cache: Any, batch: int) -> Callable[[int], object]:
    tokens = (torch.arange(batch, device=theirs.device) % theirs.config.vocab_size).unsqueeze(1)

    @torch.inference_mode()
    def run(_number: int) -> object:
        return theirs(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1).tolist()

    return run
