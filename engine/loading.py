"""Load a session: model, tokenizer, executor, KV plan and guard."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from haarkv.engine.collapse import Guard
from haarkv.engine.draft_choice import DraftSpec, Target, choose
from haarkv.engine.plans import SINKS, TAIL, balanced_for, memory_need, plan_for
from haarkv.engine.sampling import Sampling
from haarkv.engine.session import LoadRecord, Session
from haarkv.executors.catalog import AUTO, OnProgram, check, create, info, interpreter_warning, select
from haarkv.models import balance as balancing
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import block_types, load_model, maps_file, model_weight_bytes, open_source, read_config
from haarkv.models.checkpoint import Progress
from haarkv.models.config import ModelConfig
from haarkv.models.parallel import SINGLE_RANK, Ranks, Split
from haarkv.models.source import KeptBlocks
from haarkv.models.text import Tokenizer, generation_settings, load_tokenizer
from haarkv.models.weights import fingerprint, keeps
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError, warn
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec

Room = Callable[[Tokenizer, ModelConfig], tuple[int, int]]
"""(sequences, tokens each) that the cache will hold, from a tokenizer and a config."""


def load(
    model: str | Path = "tiny",
    *,
    kv: str | KVSpec | Callable[[], KVSpec] = "tq4",
    executor: str = AUTO,
    device: str | None = None,
    dtype: str | None = None,
    layers: int | None = None,
    progress: Progress | None = None,
    on_program: OnProgram | None = None,
    ranks: Ranks = SINGLE_RANK,
    balance: bool = True,
    allow_collapse: bool = False,
    on_warning: Callable[[str], object] | None = None,
    draft: str | DraftSpec | None = None,
    keep_blocks: bool | None = None,
    activation_bits: int = 16,
    mmap: bool | None = None,
    room: Room | None = None,
) -> Session:
    """Load a model with its tokenizer, an executor and a KV plan.

    Args:
        model: `tiny`, `random:SIZE`, a folder in Hugging Face format, a `.gguf` file (`~` is home), or the Hub id of a
            downloaded model.
        kv: a KV format, `k=NAME,v=NAME`, a `KVSpec`, or what chooses one: called when nothing else is wrong, before the
            weights are read.
        executor: auto, cuda, npu, cpu, onnx or reference. `auto` is the fastest of this machine that reads the cache and runs
            the model.
        device: the executor's default unless given; cuda: cuda:N; npu: sim or npu:N.
        dtype: float32 or bfloat16; the executor's default unless given (bfloat16 on cuda and npu, else float32).
        layers: for `random:SIZE`, the number of layers.
        progress: called with (tensors done, tensors).
        on_program: called with a program's name before it is compiled, which may take minutes on an NPU.
        ranks: processes that run the model together, from `engine.ranks.join`.
        balance: scale uneven channels of K and V by powers of two, and weights by the inverse. The model stays the same; a
            rotated cache loses less.
        allow_collapse: warn where text from this cache would be garbage, instead of refusing.
        on_warning: called with a sentence if text will suffer; a Python warning unless given.
        draft: `ngram`, `mtp`, a smaller model of the same tokenizer, or a `DraftSpec`.
        keep_blocks: keep quantized weights of a GGUF file in blocks. Unless given, those that the executor multiplies with.
            True keeps all: other executors restore them at each product, slowly, or at load (cuda, npu, onnx). False restores
            all at load.
        activation_bits: 8 lets `cpu` round activations to 8 bits for quantized weights: faster with VNNI, less exact.
        mmap: True leaves weights in the file's pages. False copies them, which `cpu` reads a tenth faster. Unless given, `cpu`
            copies where twice their bytes are free.
        room: sequences and tokens that the cache will hold, counted when memory is checked; else one sequence of one block.
    Raises:
        InputError: no room for weights, cache and activations; text from this cache would be garbage; or a name that does not
            exist or does not fit.
    """
    settings = dict(locals())
    name, began = str(model), time.perf_counter()
    # What is wrong is said before the weights are read.
    config = read_config(name, layers)
    if callable(kv):  # until it chooses, a cache that stands for any
        tail, sink = (min(tokens, config.max_position_embeddings) for tokens in (TAIL, SINKS))
        spec = KVSpec("tq4", tail, sink)
    else:
        spec = KVSpec(kv) if isinstance(kv, str) else kv
    formats.parse(spec.kv, spec.calibration)
    split = Split(config, ranks.rank, ranks.size)
    part, plan = split.part, plan_for(spec, config, split)
    selection = select(executor, part, [plan], device=device, dtype=dtype, ranks=ranks)
    check(selection.name, part, plan, device, ranks)
    generation = _model_sampling(name)
    dtype = dtype or info(selection.name).dtype
    drafts = DraftSpec(draft) if isinstance(draft, str) else draft
    target = Target(name, part, selection.name, device, dtype, ranks, balance)
    make_draft = choose(drafts, target, progress, on_program) if drafts else None
    kept_types = info(selection.name).block_types(device) if keep_blocks is None else keep_blocks
    require_rounding(activation_bits, selection.name, name, kept_types)
    tokenizer = load_tokenizer(name, config)
    order = info(selection.name).in_order
    weights = model_weight_bytes(name, config, dtype, split if ranks.size > 1 else None, kept_types, order)
    maps = maps_file(weights, mmap, ranks.size, info(selection.name).reads_in_place(device))
    weights = weights if maps else weights.copied()
    if info(selection.name).on_host(device):
        sequences, tokens = room(tokenizer, config) if room else (1, 1)
        memory_need(part, plan, tokens, weights, sequences).require(name)
    if callable(kv):
        return load(**settings | {"kv": kv()})
    decoder = load_model(
        name, dtype, layers, progress, ranks, keep_blocks=kept_types, activation_bits=activation_bits, mmap=maps
    )
    on_warning = on_warning or warn
    # The reference restores by definition.
    if keep_blocks is None and selection.name != "reference" and ranks.size == 1:
        in_file = model_weight_bytes(name, config, dtype, None, True).total
        types = ", ".join(kind for kind in block_types(name) if not keeps(kind, kept_types))
        if types and weights.total > in_file:
            sizes = f"{weights.total / 2**30:,.2f} GiB in place of {in_file / 2**30:,.2f}"
            on_warning(f"{selection.name} restores quantised weights as they load ({types}): {sizes}")
    decoder, scaling, mark = _balance_model(decoder, plan, spec, balance, ranks)
    guard = None
    if spec.calibration is None:
        guard = Guard(plan, scaling.moments, decoder.config.attentions[0].scale, not balance, allow_collapse, ranks)
        guard.at_load(on_warning)
    running = create(selection.name, decoder, plan, device, on_program)
    if (slowly := interpreter_warning(selection.name, device)) and ranks.rank == 0:
        on_warning(slowly)
    keeping = decoder.config.for_drafts(drafts.tokens) if drafts else decoder.config
    return Session(
        name=name, config=keeping, executor=running, tokenizer=tokenizer, plan=plan,
        generation=generation, passed_over=selection.passed_over, ranks=ranks, weight_bytes=decoder.weights.nbytes,
        load_record=LoadRecord(weights, time.perf_counter() - began),
        guard=guard, weights=mark, draft=make_draft(running) if make_draft else None,
        draft_tokens=drafts.tokens if drafts else 4,
    )  # fmt: skip


def _model_sampling(name: str) -> Mapping[str, Any]:
    """Sampling settings of a model; an invalid one is refused by its file's name."""
    generation: Mapping[str, Any] = generation_settings(name)
    try:
        Sampling(**generation)
    except InputError as error:
        source = open_source(name)
        raise InputError(f"{source.sampling_path if source else name}: {error}") from None
    return generation


def _balance_model(
    model: DecoderModel, plan: KVPlan, spec: KVSpec, balance: bool, ranks: Ranks
) -> tuple[DecoderModel, balancing.Scaling, str]:
    """The model as a session runs it, its scaling, and the fingerprint of its weights; "" for a rank's part."""
    mark = fingerprint(model.weights.named_tensors()) if ranks.size == 1 else ""
    spec.require_weights(mark or spec.weights)
    model, scaling = balanced_for(model, plan, spec, balance)
    if scaling.uneven:
        # K and V are those of other channels then.
        mark += "-" + hashlib.sha256(repr(scaling.uneven).encode()).hexdigest()[:8]
    return model, scaling, mark


def require_rounding(bits: int, name: str, model: str | Path, kept_types: KeptBlocks) -> None:
    """Refuse activation bits other than 16 where no kernel rounds: 8 is for `cpu` and weights in blocks."""
    if bits not in (8, 16):
        raise InputError(f"activations have 16 or 8 bits where they meet quantised weights, not {bits}")
    if bits == 16:
        return
    if name != "cpu":
        raise InputError(f"activations of 8 bits are cpu's; {name} does not round them: give executor cpu, or leave it out")
    if not any(keeps(kind, kept_types) for kind in block_types(model)):
        raise InputError(f"{model} has no quantised weights that cpu multiplies with, so nothing is rounded; leave it out")
