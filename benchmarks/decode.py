"""Decode latency: attention of a layer, whole steps and prompts, of executors and formats in turns.

    tq bench decode --model random:0.6b --contexts 4096,16384 --kv bf16,tq4 --executor cpu

Each row has the bytes that it must move and its ratio to this machine's floor, measured in the same run: moving those bytes at
a copy's speed or computing at a matrix product's, whichever takes longer. A step or prompt ends when the host has the argmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from haarkv.benchmarks import cases
from haarkv.benchmarks.cases import Case, Measurement
from haarkv.benchmarks.decode_cost import Cost, CostRow, attention_cost, step_cost, store_cost
from haarkv.benchmarks.report import Report, Table
from haarkv.benchmarks.timing import Limits, Machine, OnTurn, Run, take_turns
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.executors.cpu import CpuExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model, maps_file, model_weight_bytes, read_config
from haarkv.models.checkpoint import Progress
from haarkv.tq_ops.errors import InputError

TITLES = {
    "attention": "decode attention of one layer, K and V from memory", "store": "storing one new token in one layer",
    "prompt": "whole prompt, weights and all", "step": "whole decode step",
}  # fmt: skip
SIMULATION_NOTE = "simulated: its times mean nothing, so that none is given"
NO_OPS = "its layers are whole programs"
NO_GRAPH = "no CUDA graph can hold it"
_MUCH_LONGER = 10  # a first call that takes this many times as long as the others has compiled something


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        model, dtype, layers, device, mmap: as in `engine.loading.load`.
        executors, kvs: each executor runs with each cache that it supports; caches as `cases.parse_caches` reads them.
        peer_variants: other programs that take turns with ours.
        isa: instruction set of the CPU kernels; the best unless given.
    """

    model: str
    executors: Sequence[str]
    kvs: Sequence[str]
    contexts: Sequence[int]
    batches: Sequence[int]
    dtype: str = "bfloat16"
    layers: int | None = None
    device: str | None = None
    peer_variants: cases.PeerVariants = lambda *_: ()
    kinds: Sequence[str] = ("attention", "step")
    repeats: int = 7
    isa: str | None = None
    activation_bits: int = 16
    mmap: bool | None = None


def load_request_model(request: Request, progress: Progress | None) -> DecoderModel:
    """The request's model, its weights as all its executors read them."""
    block_types = set.intersection(*(set(catalog.info(name).block_types()) for name in request.executors))
    config = read_config(request.model, request.layers)
    in_place = any(catalog.info(name).reads_in_place(request.device) for name in request.executors)
    weights = model_weight_bytes(request.model, config, request.dtype, keep_blocks=block_types)
    maps = maps_file(weights, request.mmap, in_place=in_place)
    return load_model(
        request.model, request.dtype, request.layers, progress, keep_blocks=block_types,
        activation_bits=request.activation_bits, mmap=maps,
    )  # fmt: skip


def measure(
    request: Request, progress: Progress | None = None, on_turn: OnTurn = lambda _: None, model: DecoderModel | None = None
) -> tuple[Machine, list[CostRow]]:
    """Every row of a request, case by case, and the machine; `model`: the request's, if loaded.

    Raises:
        InputError: a model, executor, format or device is missing, or a case is longer than the model's context.
    """
    if model is None:
        model = load_request_model(request, progress)
    room = cases.appended_tokens(request.repeats) if "step" in request.kinds else 0
    longest, limit = max(request.contexts), model.config.max_position_embeddings - room
    if {"prompt", "step"} & set(request.kinds) and longest > limit:
        raise InputError(
            f"{request.model} has room for {limit} tokens before the steps that are measured, not {longest}; lower --contexts"
        )
    if model.config.state_shapes and "attention" in request.kinds:
        raise InputError(
            f"{request.model} has layers with a state beside those of attention, and attention is measured of models that "
            "have one kind of layer; give --only step or --only prompt"
        )
    sides = open_executors(request, model, on_turn)
    device = next(iter(sides.values()))[0].device
    limits, rows = Limits(device), list[CostRow]()
    for case in (Case(batch, context) for batch in request.batches for context in request.contexts):
        k, v = cases.random_kv(model.config, case, device)
        measurement = Measurement(sides, model, case, k, v, limits, request.peer_variants, request.repeats, on_turn)
        for kind in dict.fromkeys(request.kinds):
            rows += cost_rows(kind, measurement)
    return limits.machine, [replace(row, machine=limits.machine) for row in rows]


def open_executors(request: Request, model: DecoderModel, on_turn: OnTurn = lambda _: None) -> cases.Sides:
    """Every executor with every plan that it supports, by row name; `on_turn` is told of compilations."""
    sides: cases.Sides = {}
    refusal = ""
    for name in request.executors:
        executor: Executor | None = None
        for kv in request.kvs:
            plan = cases.benchmark_plan(kv, model.config)
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
                refusal = str(error)
                continue
            if reason := executor.supports(model.config, plan):
                refusal = f"executor {name} cannot run {kv}: {reason}"
            else:
                sides[f"{name} {Path(kv).name if cases.is_file(kv) else kv}"] = (executor, plan)
    if not sides:
        raise InputError(refusal)
    return sides


def cost_rows(kind: str, measurement: Measurement) -> Iterator[CostRow]:
    """Rows of a kind for every side and peer of a case, timed in turns. Storing is timed with attention."""
    runs: dict[str, Run] = {}
    rows: dict[str, CostRow] = {}

    def add(kind: str, who: str, cost: Cost, run: Run | None, note: str = "", *, peer: bool = False) -> None:
        key = f"{kind} {who}"
        rows[key] = CostRow(kind, who, measurement.case, cost, measurement.limits.machine, None, note, peer=peer)
        if run is not None:
            runs[key] = run

    for who, (executor, plan) in measurement.sides.items():
        nbytes, run, store, note = cases.token_bytes(plan, measurement.model.config), None, None, ""
        if kind == "attention":
            run, store, nbytes = cases.attention_runs(executor, plan, measurement)
            note = "" if executor.ops else NO_OPS
        elif executor.simulated:
            note = SIMULATION_NOTE
        else:
            run = cases.forward_run(kind, executor, plan, measurement.case, measurement.repeats)
        add(kind, who, minimum_cost(kind, measurement, nbytes), run, note)
        if store is not None:
            add("store", who, store_cost(measurement.model.config, measurement.case, nbytes[0]), store)
    for other in measurement.peer_variants(kind, measurement):
        add(kind, other.name, minimum_cost(kind, measurement, other.kv_bytes), other.run, other.note, peer=True)
    spreads = take_turns(
        runs,
        measurement.k.device,
        repeats=measurement.repeats,
        counted_runs=cases.RUNS_PER_TURN[kind],
        capture=kind == "attention",
        on_turn=measurement.on_turn,
        before_turn=measurement.limits.measure,
    )
    for key, row in rows.items():
        compile_seconds = (
            dict(measurement.sides[row.who][0].compiled) if row.who in measurement.sides and kind != "attention" else None
        )
        note = row.note or ("" if key in spreads or key not in runs else NO_GRAPH)
        yield replace(row, spread=spreads.get(key), note=note, compiled=compile_seconds or None)


def minimum_cost(kind: str, measurement: Measurement, nbytes: Sequence[float]) -> Cost:
    """Least work of a run; `nbytes` of a token's K and V by layer."""
    if kind == "attention":
        return attention_cost(measurement.model.config, measurement.case, nbytes[0], measurement.model.dtype.itemsize)
    return step_cost(measurement.model, measurement.case, nbytes, measurement.case.context if kind == "prompt" else 1)


_LEGEND = "floor: its bytes at a copy's speed, or its operations if longer"


def report(
    name: str, request: Request, machine: Machine, rows: Sequence[CostRow], titles: Mapping[str, str] = TITLES
) -> Report:
    """Tables for each kind with a title, notes beneath them, and the values of the JSON line."""
    limits = (
        f"copy {machine.copy_gbps:.1f} GB/s, FP32 {machine.fp32_gflops:.0f} GFLOP/s, BF16 {machine.bf16_gflops:.0f} GFLOP/s"
    )
    tables: list[Table] = []
    notes: dict[int, list[str]] = {}
    for kind, title in titles.items():
        if not (kind_rows := [r for r in rows if r.kind == kind]):
            continue
        columns = ("batch", "context", "who", "ms", "low … high", "tokens/s" if kind == "prompt" else "ms/token",
                   "weights MB", "KV MB", "GB/s", "of copy", "floor ms", "× floor")  # fmt: skip
        counts = {r.spread.runs for r in kind_rows if r.spread} or {0}
        runs = " to ".join(map(str, sorted({min(counts), max(counts)})))
        heading = f"{request.model}, {request.dtype}: {title}, median of {runs}; {limits}"
        notes[len(tables)] = list(dict.fromkeys(_notes(kind_rows)))
        tables.append(Table(heading, columns, [_cells(r) for r in kind_rows]))
    notes[len(tables) - 1] += [_LEGEND, *filter(None, [machine.unsteady()])]
    values = {key: getattr(request, key) for key in ("dtype", "layers", "repeats", "isa", "activation_bits")}
    values |= {"limits": asdict(machine), "rows": [r.as_json() for r in rows]}
    return Report(name, request.model, request.contexts, request.kvs, values, tables, notes)


def _notes(rows: Sequence[CostRow]) -> Iterator[str]:
    yield from (f"{r.who}: {r.note}" for r in rows if r.note)
    timed_rows = [(r, r.ms) for r in rows if r.ms is not None]
    first: dict[tuple[str, Case], tuple[CostRow, float]] = {}
    for r, ms in timed_rows:
        other, others_ms = first.setdefault((r.who.split()[0], r.case), (r, ms))
        if not r.peer and other is not r:
            yield f"{r.who} at {r.case.context:,} tokens: {ms / others_ms:.2f} of {other.who}'s time"
    for r, ms in timed_rows:
        if r.compiled:
            programs = ", ".join(f"{name} in {seconds:.1f} s" for name, seconds in r.compiled.items())
            yield f"{r.who}: compiled {programs}, counted in no figure"
        if r.spread and r.spread.first_ms and r.spread.first_ms > _MUCH_LONGER * ms:
            where = f"{r.who}, batch {r.case.batch}, context {r.case.context}"
            yield f"{where}: first call {r.spread.first_ms / 1e3:.2f} s, counted in no figure"


def _cells(r: CostRow) -> tuple[str, ...]:
    figures = r.figures()

    def cell(name: str, form: str) -> str:
        return "–" if figures.get(name) is None else format(figures[name], form)

    form = {"prompt": ".0f", "step": ".2f"}.get(r.kind, ".3f")
    spread = "–" if r.spread is None else f"{r.spread.low:{form}} … {r.spread.high:{form}}"
    rate = cell("tokens_per_s", ".1f") if r.kind == "prompt" else cell("ms_per_token", form)
    megabytes = (f"{r.cost.weights / 1e6:.1f}", f"{r.cost.kv / 1e6:.2f}")
    return (str(r.case.batch), str(r.case.context), r.who, cell("ms", form), spread, rate, *megabytes,
            cell("gbps", ".1f"), cell("of_copy", ".0%"), cell("floor_ms", form), cell("of_floor", ".2f"))  # fmt: skip
