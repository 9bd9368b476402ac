"""Whom `python -m lab.bench decode` measures beside ours: torch's SDPA, transformers with its caches, llama.cpp.

torch attends to unpacked K and V, and transformers' own model runs the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from haarkv.benchmarks.cases import Measurement, Variant, appended_tokens, copies, random_prompts, visible_tokens
from haarkv.benchmarks.decode import TITLES
from haarkv.benchmarks.decode_cost import CostRow
from haarkv.benchmarks.report import Report
from haarkv.benchmarks.timing import OnTurn
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.errors import InputError
from lab.bench import gguf_file, llama_process
from lab.bench.llama_process import BITS, LlamaError, LlamaKV, LlamaProcess

SDPA, TRANSFORMERS, LLAMA = PEERS = ("sdpa", "transformers", "llama.cpp")
_WARM_UP = 32  # tokens of a prompt that brings weights into memory, and does not count


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


@dataclass
class Peers:
    """Some of `PEERS`, for one run of a model: what `decode.measure` takes as `beside`.

    Attributes:
        stack: closes what was started, when the run is over.
        llama_kvs: kinds of llama.cpp's KV cache.
        hf_caches: other caches for transformers' model, measured beside its own.
    """

    names: Sequence[str]
    model_name: str
    stack: ExitStack
    llama_kvs: Sequence[LlamaKV] = ()
    hf_caches: Callable[[ModelConfig], Sequence[HFCache]] = lambda _: ()
    on_turn: OnTurn = lambda _: None
    process: LlamaProcess | None = None

    def __call__(self, kind: str, args: Measurement) -> Iterator[Variant]:
        """torch's attention; llama.cpp's and transformers' forwards."""
        if kind == "attention":
            yield from attention(args) if SDPA in self.names else ()
            return
        if LLAMA in self.names:
            self.process = self.process or self._llama(args.model)
            yield from (llama(self.process, cache, kind, args) for cache in self.llama_kvs)
        if TRANSFORMERS in self.names and kind == "prompt":
            yield transformers_prompt(args.model, random_prompts(args.model.config, args.case))
        elif TRANSFORMERS in self.names:
            more = self.hf_caches(args.model.config)
            yield from transformers_steps(args.model, args.case.batch, args.k, args.v, more)

    def _llama(self, model: DecoderModel) -> LlamaProcess:
        llama_process.require()
        if not gguf_file.source_file(self.model_name) and (reason := gguf_file.unsupported_reason(model.config)):
            raise InputError(f"llama.cpp is no peer of {self.model_name}: {reason}")
        with TemporaryDirectory(prefix="haarkv-gguf-") as folder:
            file = gguf_file.source_file(self.model_name)
            if file is None:
                self.on_turn("the GGUF being written")
                gguf_file.write(file := Path(folder) / "model.gguf", model)
            self.on_turn("llama.cpp loading it")
            try:
                # It maps the file into memory, so that one of ours can go.
                process = LlamaProcess(file, torch.get_num_threads())
            except LlamaError as error:
                raise InputError(f"llama.cpp cannot be measured: {error}") from None
        self.stack.callback(process.close)
        return process


def kv_numbers(config: ModelConfig) -> list[int]:
    """Numbers of K and V of one token in each layer, all heads."""
    return [2 * shape.numbers if shape else 0 for shape in config.kv_shapes]


# -- torch
def attention(args: Measurement) -> Iterator[Variant]:
    """Others' decode attention of a case, over what its first layer sees."""
    k, q, window = args.k, args.queries, args.model.config.layers[0].attention.window
    keys, values = (x[:, :, -visible_tokens(window, args.case.context) :] for x in (k, args.v))
    return forms(q, keys, values, copies)


def forms(q: Tensor, k: Tensor, v: Tensor, copies: Callable[[float], int] = lambda _: 1) -> Iterator[Variant]:
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

    def convert_copies(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        count = copies(k.numel() * 2 * dtype.itemsize)
        return [(k.to(dtype, copy=True), v.to(dtype, copy=True)) for _ in range(count)]

    half, half_bytes = convert_copies(torch.bfloat16), 4.0 * kv_heads * dim
    for form, queries in (("rows", rows), ("gqa", whole)):
        for word, backend in sdpa_backends(q.device).items():
            run = _sdpa(queries, half, gqa=form == "gqa", backend=backend)
            with suppress(RuntimeError):  # this backend does not take this form
                run(0)
                yield Variant(f"sdpa bf16 {form}{word}", run, [half_bytes])
    if q.device.type == "cpu":
        single, scale = convert_copies(torch.float32), dim**-0.5
        yield Variant("sdpa fp32 rows", _sdpa(rows.float(), single), [2 * half_bytes])

        @torch.inference_mode()
        def products(number: int) -> Tensor:
            keys, values = half[number % len(half)]
            return torch.matmul(torch.softmax(torch.matmul(rows, keys.transpose(-1, -2)) * scale, dim=-1), values)

        yield Variant("torch bf16 products", products, [half_bytes])


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


# -- transformers
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

    return Variant("hf DynamicCache bf16", run, nbytes, f"transformers {version('transformers')} with SDPA")


def transformers_missing(config: ModelConfig) -> str:
    """Why transformers' own model is not measured; empty if it can be."""
    if config.model_type not in ("qwen3", "llama"):
        return f"the peer is a Qwen3 or Llama, this is a {config.model_type}"
    if other := gguf_file.unlike_plain(config):
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
    theirs.load_state_dict(dict(model.weights.named_tensors()), assign=True, strict=False)
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


# -- llama.cpp
def llama(process: LlamaProcess, cache: LlamaKV, kind: str, args: Measurement) -> Variant:
    """llama.cpp with one kind of KV cache: a prompt, or steps behind one, by its own clock."""
    if args.case.batch > 1:
        raise InputError("llama.cpp is measured with one sequence; leave out --batches")
    (ids,) = random_prompts(args.model.config, args.case)

    def prompt(_: int) -> float:
        seconds: float = process.call("prompt", cache, ids)
        return seconds

    def step(number: int) -> float:
        (seconds,) = process.call("steps", cache, ids[number % len(ids) :][:1])
        return float(seconds)

    name, nbytes = f"llama.cpp {cache.name}", [numbers * BITS[cache.type] / 8 for numbers in kv_numbers(args.model.config)]
    try:
        process.call("open", cache, args.case.context + appended_tokens(args.repeats))
        process.call("prompt", cache, ids[:-1] if kind == "step" else ids[:_WARM_UP])
    except LlamaError as error:
        return Variant(name, None, nbytes, f"at {args.case.context:,} tokens: {error}")
    return Variant(name, step if kind == "step" else prompt, nbytes, process.about)


def beside_peers(result: Report, rows: Sequence[CostRow], titles: Mapping[str, str] = TITLES) -> Report:
    """A report with each time of ours beside the fastest peer's of the same kind and case, in the JSON line and in notes under
    the table of the kind. `titles`: of the report's kinds.
    """
    kinds = [kind for kind in titles if any(r.kind == kind for r in rows)]
    notes = {table: list(lines) for table, lines in result.notes.items()}
    values: list[dict[str, Any]] = []
    for r, value in zip(rows, result.values["rows"], strict=True):
        times = [(p.ms, p.who) for p in rows if p.peer and p.ms is not None and (p.kind, p.case) == (r.kind, r.case)]
        values.append(value)
        if times and r.ms is not None and not r.peer:
            best, who = min(times)
            values[-1] = {**value, "speed_up": best / r.ms}
            case = f"batch {r.case.batch}, {r.case.context:,} tokens"
            notes[kinds.index(r.kind)].append(f"{r.kind} of {r.who}, {case}: {best / r.ms:.2f} times as fast as {who}")
    return replace(result, values={**result.values, "rows": values}, notes=notes)
