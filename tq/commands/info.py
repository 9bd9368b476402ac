"""`tq info`: a model's shapes, and its KV cache in every format; `tq formats`: every format and its cost."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from tq import options
from tq.groups import Command
from tq.options import IntRange
from tq.output import print_sentence, print_table

if TYPE_CHECKING:
    from haarkv.models.config import Attention, ModelConfig
    from haarkv.models.weights import WeightBytes
    from haarkv.tq_ops.formats import KVFormat
    from haarkv.tq_ops.kv.plan import KVPlan

_UNITS = {unit: power for power, unit in enumerate(("", "K", "M", "G", "T"))}


def _amount(value: str) -> int:
    """Bytes: 24GiB, 24G (the same), 24GB (24e9), or a number from a million up."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", value.strip(), re.IGNORECASE)
    if not match:
        raise click.BadParameter(f"{value!r} is not an amount of memory; write it like 24GiB")
    base = 1000 if (match[3] or "").upper() == "B" else 1024
    size = float(match[1]) * base ** _UNITS[match[2].upper()]
    if not (match[2] or match[3]) and size < 1e6:
        raise click.BadParameter(f"{value.strip()} has no unit; write {value.strip()}GiB, or {value.strip()}B for bytes")
    if size == float("inf"):
        raise click.BadParameter("that is too much memory to count")
    return int(size)


@click.command("info", cls=Command)
@click.argument("name", required=False, metavar="[MODEL]")
@options.model_option()
@click.option(
    "--memory", type=_amount, default="24GiB", show_default=True, metavar="SIZE",
    help="Room for weights, KV cache and what a forward computes with.",
)  # fmt: skip
@click.option("--context", type=IntRange(1, 2**31), help="Also tell what weights and a cache of this many tokens take.")
@options.executor_option()
@options.dtype_option()
@options.layers_option
@options.json_option
def command(
    name: str | None, model: str, memory: int, context: int | None, executor: str, dtype: str | None, layers: int | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Show a model's shapes, and for every KV format its bytes a token and the longest context that fits.

    MODEL is tiny (the default), random:SIZE, a folder in Hugging Face format or a .gguf file (~ is home), or the Hub id of a
    model already downloaded. The weights are not read. They are counted as --executor holds them, the fastest of this machine
    unless given: in --dtype, and of a .gguf file on cpu as its blocks.

    A context that fits may be longer than the model's positions, which YaRN extends. tq generate counts alike, and refuses
    what does not fit; Python, torch and the tokenizer come on top.
    """
    from haarkv.engine.generation import PREFILL_CHUNK
    from haarkv.executors.catalog import info, select
    from haarkv.models.catalog import DTYPES, maps_file, model_weight_bytes, open_source, read_config
    from haarkv.models.checkpoint import random_tensors, require_tensors
    from haarkv.models.weights import checkpoint_tensors, num_parameters, weight_bytes, work_bytes

    if name is not None and "model" in options.written_options():
        raise click.UsageError("give MODEL, or --model, but not both")
    model = model if name is None else name
    config, source = read_config(model, layers), open_source(model)
    is_file, specs = source is not None and source.path.is_file(), checkpoint_tensors(config)
    entries = require_tensors(source.path, source.tensors(), specs) if source is not None and is_file else {}
    in_file = sum(entries[name].nbytes for name in specs if name in entries) or None
    executor_name = select(executor, config, []).name
    dtype_name = dtype or info(executor_name).dtype
    if entries:
        weights = model_weight_bytes(
            model, config, dtype_name, keep_blocks=info(executor_name).block_types(), in_order=info(executor_name).in_order
        )
        if info(executor_name).reads_in_place(None) and not maps_file(weights, None):
            weights = weights.copied()
        how = f"in memory on {executor_name}"
    else:
        weights, how = weight_bytes(random_tensors(specs), specs, DTYPES[dtype_name]), f"in {dtype_name} on {executor_name}"
        how += "" if dtype or dtype_name != "float32" else ", half with --dtype bfloat16"
    work = work_bytes(config, PREFILL_CHUNK, 1)
    rows, default = _kv_rows(config, weights, memory, context), _default(model, layers, executor, config)
    if as_json:
        shapes = {
            **asdict(config),
            "state_bytes": config.state_bytes,
            "parameters": num_parameters(config),
            "dtype": dtype_name,
            "weight_bytes": weights.total,
            "weight_bytes_mapped": weights.mapped,
            "weight_bytes_in_file": in_file,
            "work_bytes": work,
        }
        request = {"memory": memory, "context": context}
        print(json.dumps({"model": model, **shapes, **request, "kv": rows, "default": default and default.summary()}))
        return
    file_note = f", {in_file / 1e9:.3f} GB in the file" if in_file else ""
    summary = f"{num_parameters(config):,}; {weights.total / 1e9:.3f} GB {how}{file_note}"
    print_table(model, [], [*_shape_rows(config, summary), ("working memory", f"about {work / 1e9:.3f} GB in a forward")])
    cells = [
        (
            r["format"], f"{r['bytes_per_token']:,.0f}", f"{r['ratio']:.2f}x",
            f"{r['max_tokens']:,}" if weights.total < memory else "–",
            *([f"{r['bytes'] / 2**30:,.2f}"] if context else []),
        )
        for r in rows
    ]  # fmt: skip
    size = f"{memory / 2**30:.1f} GiB" if memory >= 2**29 else f"{memory / 2**20:,.1f} MiB"
    title = f"KV cache; tokens that fit in {size} beside the weights"
    total = [f"GiB at {context:,} tokens"] if context else []
    print_table(title, ["format", "bytes/token", "vs bf16", "tokens", *total], cells)
    limit = config.max_position_embeddings
    if any(r["max_tokens"] > limit for r in rows):
        print_sentence(f"a sequence holds at most {limit:,} tokens, the model's positions; more room holds more sequences")
    print_sentence(_default_line(default, config))
    if any("lr" in r["format"] for r in rows):
        print_sentence("lr2 to lr5 take what `tq calibrate` learns of the model; --kv auto learns it by itself")


def _default(model: str, layers: int | None, executor: str, config: ModelConfig) -> KVPlan | None:
    """The cache of a run without `--kv`; None where the first run chooses it."""
    from haarkv.engine.plans import plan_for
    from haarkv.validation.planning.auto import LOSS
    from haarkv.validation.planning.choice_cache import saved_choice

    spec = saved_choice(model, LOSS, layers, executor)
    return plan_for(spec, config) if spec else None


def _default_line(plan: KVPlan | None, config: ModelConfig) -> str:
    if plan is None:
        return "without --kv the first run chooses a cache, layer by layer (--kv auto); later runs take it"
    from haarkv.validation.planning.search import bits_per_value

    context = min(4096, config.max_position_embeddings)
    bits = f"{bits_per_value(plan, config, context):.2f} bits a value at {context:,} tokens"
    return f"without --kv a run takes {plan.summary()}: {bits}" + ", those in BF16 included" * plan.has_windows


def _shape_rows(config: ModelConfig, parameters: str) -> list[tuple[str, str]]:
    positions = f"up to {config.max_position_embeddings:,} positions"
    return [
        ("layers", _layers(config)),
        ("hidden", f"{config.hidden_size}"),
        ("heads", _each(config, lambda m: f"{m.num_heads} over {m.num_kv_heads} KV heads, head_dim {m.head_dim}")),
        ("tokens seen", _each(config, lambda m: f"the newest {m.window:,}" if m.window else "all")),
        ("MLP", " and ".join(dict.fromkeys(f"{layer.mlp.width}" for layer in config.layers))),
        ("vocabulary", f"{config.vocab_size}" + (", head tied to the embedding" if config.tied else "")),
        ("RoPE", f"{_each(config, lambda m: f'theta {m.rope.theta:g}')}, {positions}"),
        ("parameters", parameters),
        *_state_rows(config),
    ]


def _layers(config: ModelConfig) -> str:
    states = len(config.state_shapes)
    return f"{config.num_layers}" + (f", {states} of them with a state in place of K and V" if states else "")


def _state_rows(config: ModelConfig) -> list[tuple[str, str]]:
    if not config.state_shapes:
        return []
    from haarkv.engine.draft_choice import DraftSpec

    once = sum(shape.nbytes // shape.versions for shape in config.state_shapes.values())
    versions = max(shape.versions for shape in config.state_shapes.values())
    draft_bytes = config.for_drafts(DraftSpec.tokens).state_bytes
    versions_note = f"kept {versions} times, {config.state_bytes / 1e6:,.1f} MB"
    drafts = f"with --draft once more for each drafted token, {draft_bytes / 1e6:,.1f} MB with {DraftSpec.tokens}"
    return [("state", f"{once / 1e6:,.1f} MB a sequence, whatever its length; {versions_note}; {drafts}")]


def _each(config: ModelConfig, words: Callable[[Attention], str]) -> str:
    """A property of the layers' attention; with counts where layers differ."""
    counts = Counter(map(words, config.attentions))
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{text} in {count} layers" for text, count in counts.items())


def _kv_rows(
    config: ModelConfig, weights: WeightBytes, memory: int, context: int | None
) -> list[dict[str, Any]]:  # fmt: skip
    """For every format with a layout for this head_dim: bytes a token, and tokens that fit. Learned keys are paired with
    values of as many bits.
    """
    from haarkv.engine.plans import longest_context, memory_need, plan_for
    from haarkv.tq_ops import formats
    from haarkv.tq_ops.errors import InputError
    from haarkv.tq_ops.kv.plan import KVSpec

    bf16, rows = plan_for(KVSpec("bf16"), config).bytes_per_token(config.kv_shapes), []
    shapes = config.kv_shapes
    calibration = formats.unlearned([None if shape is None else (shape.num_kv_heads, shape.head_dim) for shape in shapes])
    pairs = [f"k={name},v=tq{name.removeprefix('lr')}" for name in formats.learned_names()]
    for name in (*formats.names(), *pairs):
        try:
            plan = plan_for(KVSpec(name, calibration=calibration if name in pairs else None), config)
        except InputError:
            continue
        token_bytes = plan.bytes_per_token(config.kv_shapes)
        row = {
            "format": name,
            "bytes_per_token": token_bytes,
            "ratio": bf16 / token_bytes,
            "max_tokens": longest_context(config, plan, memory, weights),
        }
        rows.append(row | ({"bytes": memory_need(config, plan, context, weights).total} if context else {}))
    return rows


@click.command("formats", cls=Command)
@click.option("--head-dim", type=IntRange(2, 1024), default=128, show_default=True, help="Numbers in one K or V vector.")
@options.json_option
def formats_command(head_dim: int, as_json: bool) -> None:
    """List the KV formats: bits a value, bytes, and what each is for.

    Bytes are for one K or V vector of one KV head, scales included. The ratio says how many times smaller than bf16 it is.
    Formats of other projects are here to compare with: --executor reference and cpu run them, slowly. lr2 to lr5 store keys,
    in coordinates that `tq calibrate` learns of a model.
    """
    from haarkv.tq_ops import formats
    from haarkv.tq_ops.errors import InputError

    formats.get(formats.names()[0]).fields(head_dim)  # refuse what not even the first can hold
    rows: list[dict[str, Any]] = []
    left_out = []
    for name in (*formats.names(), *formats.learned_names()):
        try:
            sides = _sides(name, head_dim)
            size = max(each.bytes_per_vector(head_dim) for each in sides)
        except InputError:
            left_out.append(name)
            continue
        rows.append({
            "name": name, "bits_per_value": 8 * size / head_dim, "bytes_per_vector": size, "ratio": 2 * head_dim / size,
            "purpose": sides[0].purpose, "to_compare": sides[0].to_compare,
        })  # fmt: skip
    if as_json:
        print(json.dumps(rows))
        return
    cells = [
        (
            f"{r['name']}{'*' * r['to_compare']}", f"{r['bits_per_value']:.3f}", f"{r['bytes_per_vector']:.0f}",
            f"{r['ratio']:.2f}x", r["purpose"],
        )
        for r in rows
    ]  # fmt: skip
    print_table(f"head_dim {head_dim}", ["format", "bits/value", "bytes/vector", "vs bf16", "for"], cells)
    print_sentence("* to compare with: --executor reference and cpu run it, slowly; others refuse it")
    print_sentence("without --kv: auto, a cache chosen for the model")
    if left_out:
        print(f"no layout for head_dim {head_dim}: {', '.join(left_out)}")


def _sides(name: str, head_dim: int) -> tuple[KVFormat, ...]:
    from haarkv.tq_ops import formats

    if name in formats.learned_names():
        return (formats.get(name, "k", formats.unlearned([(1, head_dim)])),)
    return formats.get(name, "k"), formats.get(name, "v")
