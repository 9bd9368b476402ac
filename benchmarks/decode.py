"""Decode latency: attention of a layer, a layer's call, whole steps and prompts, of executors and formats in turns.

    tq bench decode --model random:0.6b --contexts 4096,16384 --kv bf16,tq4 --executor cpu

A row says what was measured, how many bytes it must move (weights, KV, rest) and how far it is from the floor of this machine,
measured in the same run: the longer of moving those bytes at a copy's speed and doing the operations at a matrix product's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

from haarkv.benchmarks import cases, whole
from haarkv.benchmarks.attention import Asked, Sides, decode_rows
from haarkv.benchmarks.beside import OURS_ALONE, Beside
from haarkv.benchmarks.cases import Case, decode_step, filled, first_layer, layer_call, random_kv, token_bytes
from haarkv.benchmarks.decode_cost import Cost, CostRow, layer_cost, step_cost
from haarkv.benchmarks.report import Report, Table
from haarkv.benchmarks.timing import Machine, OnTurn, measure_machine, take_turns
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.executors.cpu import CpuExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model, maps_file, read_config, weights_of
from haarkv.models.checkpoint import Progress
from haarkv.models.parallel import ALONE, Ranks, Split
from haarkv.tq_ops.errors import InputError

SIMULATED = "simulated: its times mean nothing, so that none is given"
_MUCH_LONGER = 10  # a first call that takes this many times as long as the others has compiled something


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        model, dtype, layers, device: as in `engine.loading.load`.
        executors, kvs: each executor is run with each cache that it supports; caches as `cases.parse_caches` reads them.
        beside: what takes turns with ours.
        isa: the instruction set of the CPU executor's kernels; the best unless given.
        activation_bits: as of `load_model`.
        mmap: as of `engine.loading.load`; decided alike, where one of the executors reads weights in place.
        ranks: who runs each step together. Of several, all figures are of one: its share of weights and cache.
    """

    model: str
    executors: Sequence[str]
    kvs: Sequence[str]
    contexts: Sequence[int]
    batches: Sequence[int]
    dtype: str = "bfloat16"
    layers: int | None = None
    device: str | None = None
    beside: Beside = OURS_ALONE
    kinds: Sequence[str] = ("attention", "layer", "step")
    repeats: int = 7
    isa: str | None = None
    activation_bits: int = 16
    mmap: bool | None = None
    ranks: Ranks = ALONE

    @property
    def on_prompts(self) -> bool:
        """Whether steps follow a prompt that each side computes."""
        return self.beside.on_prompts or "prompt" in self.kinds

    @property
    def steps(self) -> int:
        """Tokens that a whole-step measurement appends to each sequence."""
        return self.repeats + 2


def model_of(request: Request, progress: Progress | None) -> DecoderModel:
    """A request's model, its weights where its executors are fastest with them."""
    kept = set.intersection(*(set(catalog.block_types(name)) for name in request.executors))
    ranks, config = request.ranks, read_config(request.model, request.layers)
    split = Split(config, ranks.rank, ranks.size) if ranks.size > 1 else None
    in_place = any(catalog.reads_in_place(name, request.device) for name in request.executors)
    weights = weights_of(request.model, config, request.dtype, split, kept)
    maps = maps_file(weights, request.mmap, ranks.size, in_place)
    return load_model(
        request.model, request.dtype, request.layers, progress, request.ranks, keep_blocks=kept,
        activation_bits=request.activation_bits, mmap=maps,
    )  # fmt: skip


def measure(
    request: Request, progress: Progress | None = None, on_turn: OnTurn = lambda _: None, model: DecoderModel | None = None
) -> tuple[Machine, list[CostRow]]:
    """Every row of a request, case by case.

    Args:
        model: the request's, if it is loaded.
    Raises:
        InputError: a model, executor, format or device is not there, or a case is longer than the model's context.
    """
    if request.ranks.size > 1 and tuple(request.kinds) != ("step",):
        raise InputError("ranks run whole steps together; all else is measured on one")
    if model is None:
        model = model_of(request, progress)
    longest, limit = max(request.contexts), model.config.max_position_embeddings - request.steps
    if {"layer", "prompt", "step"} & set(request.kinds) and longest > limit:
        raise InputError(
            f"{request.model} has room for {limit} tokens before the steps that are measured, not {longest}; lower --contexts"
        )
    if model.config.state_shapes and (alone := [kind for kind in request.kinds if kind not in ("prompt", "step")]):
        raise InputError(
            f"{request.model} has layers with a state beside those of attention, and {alone[0]} is measured of models that "
            "have one kind of layer; give --only step or --only prompt"
        )
    sides = sides_of(request, model, on_turn)
    if request.on_prompts:
        whole.check(request, sides)
    device = next(iter(sides.values()))[0].device
    machine = measure_machine(device)
    rows: list[CostRow] = []
    for case in (Case(batch, context) for batch in request.batches for context in request.contexts):
        k, v = random_kv(model.config, case, device)
        asked = Asked(sides, model, case, k, v, machine, request.beside, request.repeats, on_turn)
        if "attention" in request.kinds:
            rows += decode_rows(asked)
        if "layer" in request.kinds:
            rows += _call_rows("layer", request, asked)
        if "step" in request.kinds and not request.on_prompts:
            rows += _call_rows("step", request, asked)
    if request.on_prompts:
        rows += whole.measure(request, model, sides, machine, on_turn)
    return machine, rows


def sides_of(request: Request, model: DecoderModel, on_turn: OnTurn = lambda _: None) -> Sides:
    """Every executor with every plan that it supports, by the name of its rows; `on_turn` is told what is compiled."""
    sides: Sides = {}
    refused = ""
    for name in request.executors:
        executor: Executor | None = None
        for kv in request.kvs:
            plan = cases.plan_of(kv, model.config)
            try:
                if executor is None and request.isa is None:
                    device = None if name == "reference" else request.device
                    executor = catalog.create(
                        name, model, plan, device, lambda program: on_turn(f"the compilation of {program}")
                    )
                elif executor is None and name != CpuExecutor.name:
                    raise InputError(f"executor {name} has no instruction sets to choose from; leave out --isa")
                executor = executor or CpuExecutor(model, request.isa)
            except InputError as error:
                refused = str(error)
                continue
            if reason := executor.supports(model.config, plan):
                refused = f"executor {name} cannot run {kv}: {reason}"
            else:
                sides[f"{name} {cases.name_of(kv)}"] = (executor, plan)
    if not sides:
        raise InputError(refused)
    return sides


def _call_rows(kind: Literal["layer", "step"], request: Request, asked: Asked) -> Iterator[CostRow]:
    """One call of a layer, or a whole step, of every side in a case; beside steps those of others."""
    model, case, k, v = asked.model, asked.case, asked.k, asked.v
    runs: dict[str, Callable[[], object]] = {}
    costs: dict[str, Cost] = {}
    for who, (executor, plan) in asked.sides.items():
        step, nbytes = kind == "step", token_bytes(plan, model.config)
        costs[who] = step_cost(model, case, nbytes) if step else layer_cost(model, case, nbytes[0])
        if executor.simulated:
            yield CostRow(kind, who, case, costs[who], asked.machine, None, SIMULATED)
            continue
        held = (plan, model.config) if step else first_layer(plan, model.config)
        cache, paging = filled(*held, case, k, v, request.steps)
        runs[who] = decode_step(executor, cache, paging, case) if step else layer_call(executor, model, cache, paging, case)
    if kind == "step":
        for other in request.beside.steps(asked):
            costs[other.name] = step_cost(model, case, other.kv_bytes)
            if other.run is None:
                yield CostRow(kind, other.name, case, costs[other.name], asked.machine, None, other.note, peer=True)
            else:
                runs[other.name] = partial(other.run, 0)
    # Weights and caches of a step leave no cache warm.
    for who, taken in take_turns(runs, k.device, repeats=request.repeats, cold=False, on_turn=asked.on_turn).items():
        compiled = dict(asked.sides[who][0].compiled) if who in asked.sides else None
        yield CostRow(
            kind, who, case, costs[who], asked.machine, taken, compiled=compiled or None, peer=who not in asked.sides
        )  # fmt: skip


TITLES = {
    "attention": "decode attention of one layer, K and V from memory", "store": "storing one new token in one layer",
    "layer": "one call of one decoder layer", "prompt": "whole prompt, weights and all", "step": "whole decode step",
}  # fmt: skip
_LEGEND = "floor: its bytes at a copy's speed, or its operations if longer"


_FASTER = "speed-up: over the fastest peer of the same case; "


def report(
    name: str, request: Request, machine: Machine, rows: Sequence[CostRow], titles: Mapping[str, str] = TITLES
) -> Report:
    """Everything that was measured: a table for each kind that has a title, and beneath it what explains its rows."""
    limits = (
        f"copy {machine.copy_gbps:.1f} GB/s, FP32 {machine.fp32_gflops:.0f} GFLOP/s, BF16 {machine.bf16_gflops:.0f} GFLOP/s"
    )
    tables: list[Table] = []
    faster = _FASTER if any(r.peer for r in rows) else ""
    notes: dict[int, list[str]] = {}
    ranks = f", one of {request.ranks.size} ranks" if request.ranks.size > 1 else ""
    for kind, title in titles.items():
        if not (chosen := [r for r in rows if r.kind == kind]):
            continue
        columns = ("batch", "context", "who", "ms", "low … high", "tokens/s" if kind == "prompt" else "ms/token",
                   *["speed-up"] * bool(faster), "weights MB", "KV MB", "GB/s", "of copy", "floor ms", "× floor")  # fmt: skip
        counts = {r.runs or request.repeats for r in chosen}
        runs = " to ".join(map(str, sorted({min(counts), max(counts)})))
        heading = f"{request.model}, {request.dtype}{ranks}: {title}, median of {runs}; {limits}"
        notes[len(tables)] = list(dict.fromkeys(_notes(chosen)))
        tables.append(Table(heading, columns, [_cells(r, rows, bool(faster)) for r in chosen]))
    notes[len(tables) - 1] += [*dict.fromkeys(r.about for r in rows if r.about), faster + _LEGEND]
    values = {key: getattr(request, key) for key in ("dtype", "layers", "repeats", "isa", "activation_bits")}
    values |= {"tensor_parallel": request.ranks.size, "limits": asdict(machine), "rows": [r.as_json(rows) for r in rows]}
    return Report(name, request.model, request.contexts, request.kvs, values, tables, notes)


def _notes(rows: Sequence[CostRow]) -> Iterator[str]:
    """Why rows have no time, each of ours beside its executor's first cache, and what was compiled."""
    yield from (f"{r.who}: {r.note}" for r in rows if r.note)
    timed = [(r, r.ms) for r in rows if r.ms is not None]
    first: dict[tuple[str, Case], tuple[CostRow, float]] = {}
    for r, ms in timed:
        other, others_ms = first.setdefault((r.who.split()[0], r.case), (r, ms))
        if not r.peer and other is not r:
            yield f"{r.who} at {r.case.context:,} tokens: {ms / others_ms:.2f} of {other.who}'s time"
    for r, ms in timed:
        if r.compiled:
            said = ", ".join(f"{name} in {seconds:.1f} s" for name, seconds in r.compiled.items())
            yield f"{r.who}: compiled {said}, counted in no figure"
        if r.taken and r.taken.first_ms and r.taken.first_ms > _MUCH_LONGER * ms:
            where = f"{r.who}, batch {r.case.batch}, context {r.case.context}"
            yield f"{where}: first call {r.taken.first_ms / 1e3:.2f} s, counted in no figure"


def _cells(r: CostRow, rows: Sequence[CostRow], peers: bool) -> tuple[str, ...]:
    figures = r.figures(rows)

    def shown(name: str, form: str) -> str:
        return "–" if figures.get(name) is None else format(figures[name], form)

    form = {"prompt": ".0f", "step": ".2f"}.get(r.kind, ".3f")
    spread = "–" if r.taken is None else f"{r.taken.low:{form}} … {r.taken.high:{form}}"
    rate = shown("tokens_per_s", ".1f") if r.kind == "prompt" else shown("ms_per_token", form)
    megabytes = (f"{r.cost.weights / 1e6:.1f}", f"{r.cost.kv / 1e6:.2f}")
    speed_up = [shown("speed_up", ".2f")] if peers else []
    return (str(r.case.batch), str(r.case.context), r.who, shown("ms", form), spread, rate, *speed_up, *megabytes,
            shown("gbps", ".1f"), shown("of_copy", ".0%"), shown("floor_ms", form), shown("of_floor", ".2f"))  # fmt: skip
