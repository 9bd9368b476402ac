"""`tq dev bringup`: the first hour on a new machine, one rung after the other; `tq dev compile`: an NPU's programs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.output_files import check_folder, whole_folder, write_whole
from tq import options
from tq.commands.generate import read_prompt
from tq.groups import Command
from tq.output import counting, print_judged, print_table, telling, unread_is_fine

if TYPE_CHECKING:
    from haarkv.models.qwen3_14b.npu.compile import CompiledProgram
    from haarkv.tq_ops.kv.plan import KVSpec
    from haarkv.validation.bringup.ladder import Result, RungFinding
    from haarkv.validation.bringup.workbench import Workbench

_REPORT = "report.json"
_REPEATS = 7  # timed turns of the latency


@click.command("bringup", cls=Command)
@options.model_option()
@options.prompt_options
@click.option(
    "--kv", "kvs", multiple=True, metavar="LIST",
    help="Formats, separated by commas; repeatable [default: tq4].",
)  # fmt: skip
@options.calibration_option
@click.option("--kv-plan", "plan_files", multiple=True, metavar="FILE", help="A plan from `tq plan`, as one more cache.")
@click.option("--executor", default="npu", show_default=True, help="npu, cuda, cpu or onnx.")
@options.device_option
@options.layers_option
@options.threads_option
@options.numbers("--contexts", "Tokens in the cache, for the latency [default: 512,4096; 40 in the simulator].")
@options.count("--max-new-tokens", "Of greedy text [default: 32; 3 in the simulator].", metavar="N")
@options.file("--out", "Where report and logs go; must not exist.", metavar="FOLDER", required=True)
@click.option("--any-versions", is_flag=True, help="Go on with versions that were not published together; it is recorded.")
@options.json_option
@click.pass_context
def command(context: click.Context, /, **args: Any) -> int:
    """Bring an executor up on a new machine, from its versions to text and latency, one rung after the other.

    \b
      tq dev bringup --out first                    # on a machine with an Ascend NPU
      tq dev bringup --device sim --out rehearsal   # the same, without a card

    The first rung that fails ends it: the output names the rung, and the layer and stage if there is one. FOLDER holds
    report.json to send home, in which no path is left, and the whole message of a failure.

    Exit code 0 if every rung passed that this executor has, 1 if one failed, 2 if nothing could be tried.
    """
    with unread_is_fine():
        from haarkv.tq_ops.errors import InputError
        from haarkv.validation.bringup.ladder import climb, ladder, require_executor, verdict

        require_executor(args["executor"])
        out: Path = args["out"]
        check_folder(out)
        began = time.time()
        with telling() as tell:
            show = _Show(tell, out, quiet=args["as_json"])
            rungs = ladder(partial(_bench, args, show.tell), args["executor"], args["device"], _latency, args["any_versions"])
            try:
                climb(rungs, show.begin, show.result)
            except InputError:  # the command as it was meant may use the folder
                raise
            except BaseException:  # interrupted: what is known so far is worth looking at
                _leave(show.results, context, args, began)
                raise
            text = _leave(show.results, context, args, began)
        print(text if args["as_json"] else f"{verdict(show.results)}\nsend home {out / _REPORT}")
        return int(any(result.verdict == "failed" for result in show.results))


def _bench(args: dict[str, Any], tell: Callable[[str], None]) -> Workbench:
    """The workbench, which imports torch."""
    from haarkv.validation.bringup.workbench import Workbench

    texts = (*args["prompts"], *(read_prompt(file) for file in args["files"]))
    return Workbench(
        tell, args["executor"], args["device"], model=args["model"], layers=args["layers"], caches=_caches(args),
        prompts=texts, new_tokens=args["max_new_tokens"], contexts=args["contexts"] or (),
    )  # fmt: skip


def _caches(args: dict[str, Any]) -> dict[str, KVSpec]:
    """The requested caches, by name."""
    from haarkv.tq_ops.kv import calibration_file
    from haarkv.tq_ops.kv.plan import KVSpec
    from haarkv.validation.fidelity.setup import parse_list
    from tq.loading import named_plans

    spec = KVSpec() if args["calibration"] is None else calibration_file.load(args["calibration"]).spec
    if spec.calibration and not args["kvs"]:
        raise click.UsageError("--calibration is for formats lr2 to lr5; name them with --kv")
    kvs = args["kvs"] or (() if args["plan_files"] else ("tq4",))
    caches = {name: replace(spec, kv=name) for name in parse_list(kvs, spec.calibration)}
    return caches | named_plans(args["plan_files"], caches, "caches")


def _latency(bench: Workbench) -> RungFinding:
    """The highest rung: prompts and steps by the device's own clock; in a simulator each only runs."""
    from haarkv.benchmarks.cases import RUNS_PER_TURN, Case, forward_run
    from haarkv.benchmarks.timing import Spread, take_turns
    from haarkv.validation.bringup.ladder import RungFinding

    executor = bench.executor(bench.model)
    facts = {f"compiled {name}": f"in {seconds:.1f} s" for name, seconds in executor.compiled.items()}
    calls = 0
    for context, kind in ((context, kind) for context in bench.contexts for kind in ("prompt", "step")):
        plans = {f"{kind} {kv} at {context}": plan for kv, plan in bench.plans.items()}
        runs = {name: forward_run(kind, executor, plan, Case(1, context), _REPEATS) for name, plan in plans.items()}
        times: dict[str, Spread] = {}
        for name, run in runs.items() if executor.simulated else ():
            bench.tell(name)
            run(0)
        if not executor.simulated:
            times = take_turns(runs, executor.device, repeats=_REPEATS, counted_runs=RUNS_PER_TURN[kind], on_turn=bench.tell)
        calls += len(runs)
        for name, t in times.items():
            facts[name] = f"{t.ms:.3f} ms ({t.low:.3f} to {t.high:.3f}), first call {(t.first_ms or 0) / 1e3:.3f} s"
    summary = f"{calls} calls of {', '.join(bench.plans)} at {', '.join(map(str, bench.contexts))} tokens"
    if executor.simulated:
        summary += " ran; simulated, so that their times mean nothing and none is given"
    return RungFinding(True, summary, calls, "calls", facts=facts)


def _leave(results: list[Result], context: click.Context, args: dict[str, Any], began: float) -> str:
    """Write the report to send home; its text."""
    from haarkv.validation.bringup.ladder import collect_host_logs, report
    from tq import __version__

    if not results:
        return ""
    about = {
        "executor": args["executor"],
        **({"device": args["device"]} if args["device"] else {}),
        "model": args["model"],
        "command": shlex.join(["tq", *context.find_root().obj]),
        "haarkv": __version__,
        "date": results[-1].date,
    }
    if results[0].verdict == "passed":
        from haarkv.benchmarks.report import machine

        about |= {name: str(value) for name, value in machine().items()}
    text = report(results, about, collect_host_logs(began) if args["executor"] == "npu" else {})
    args["out"].mkdir(exist_ok=True)
    write_whole(args["out"] / _REPORT, text)
    return text


class _Show:
    """Prints a line a rung, unless `quiet`, and writes logs; on a terminal, `tell` shows progress."""

    def __init__(self, tell: Callable[[str], None], out: Path, quiet: bool) -> None:
        self._tell, self._out, self._quiet, self._name = tell, out, quiet, ""
        self.results: list[Result] = []

    def tell(self, what: str) -> None:
        """Show progress within a rung."""
        self._tell(f"{self._name}: {what}")

    def begin(self, name: str) -> None:
        self._name = name
        self.tell("…")

    def result(self, result: Result) -> None:
        self.results.append(result)
        self._tell("")
        log = ""
        if result.log:
            self._out.mkdir(exist_ok=True)
            write_whole(self._out / f"{result.name}.log", result.log)
            log = f" (the whole message: {result.name}.log)"
        if not self._quiet:
            line = f"{result.name:14}  {result.verdict:20}  {result.seconds:5.1f} s  {result.found.said}{log}"
            print_judged(line, {"passed": True, "failed": False}.get(result.verdict))


# -- Compiling -----------------------------------------------------------------------------------------------------------

_PROGRAMS = ("decode", "prefill", "head")


@click.command("compile", cls=Command)
@options.model_option()
@click.option(
    "--program", "names", multiple=True, type=click.Choice(_PROGRAMS), help="Compile only this one; repeatable [default: all]."
)
@options.file("--cpp", "Write the C++ to a new folder.", "folder", metavar="DIR")
@options.kv_options(default="as said above")
@options.json_option
def compile_command(model: str, names: tuple[str, ...], folder: Path | None, as_json: bool, **kv: Any) -> int:
    """Compile a model's NPU programs down to AICore C++. Only the model's config is read.

    Without --kv the cache is the one that `--kv auto` chose for this model and the NPU, or tq4 with 124 recent and 4 first
    tokens in BF16.

    Layers that store K and V alike share a program; a plan of several formats is compiled into several.

    This shows that the programs compile, how long it takes, and the C++ they become. It does not speed up a later run: PyPTO
    keeps compiled programs only within a process, so the first forward on an NPU compiles them again.
    """
    from haarkv.engine.plans import plan_for
    from haarkv.models.catalog import read_config
    from haarkv.models.qwen3_14b.npu.compile import compile_programs, plan_programs, write_sources

    if folder is not None:
        check_folder(folder)
    config = read_config(model)
    plan = plan_for(_cache_to_compile(model, kv), config)
    programs: list[CompiledProgram] = []
    kinds = names or _PROGRAMS
    with counting(len(plan_programs(config, kinds, plan)), "compiling {task.description}", completed=-1) as begin:
        programs.extend(compile_programs(config, kinds, begin, plan))
    if folder is not None:
        with whole_folder(folder) as half:
            write_sources(half, {program.name: program.sources for program in programs})
    rows = [
        {
            "program": program.name, "layers": list(program.layers), "seconds": program.seconds,
            "functions": len(program.functions), "lines": sum(text.count("\n") for text in program.functions),
        }
        for program in programs
    ]  # fmt: skip
    if as_json:
        print(json.dumps({"model": model, "kv": plan.describe(), "programs": rows, "cpp": folder and str(folder)}))
        return 0
    columns = ("program", "seconds", "kernel functions", "lines of C++")
    cells = [(str(r["program"]), f"{r['seconds']:.1f}", str(r["functions"]), str(r["lines"])) for r in rows]
    print_table(f"{model} with a {plan.describe()} cache for Ascend NPU", columns, cells)
    if folder is not None:
        print(f"C++ in {folder}")
    return 0


def _cache_to_compile(model: str, args: dict[str, Any]) -> KVSpec:
    """The cache to compile for; without a name, an earlier choice, or `tq4`: no weights are read here."""
    from haarkv.engine.plans import SINKS, TAIL
    from haarkv.tq_ops.kv.plan import KVSpec
    from haarkv.validation.planning.choice_cache import saved_choice
    from tq.loading import kv_spec

    if all(value in (None, ()) for value in args.values()):
        return saved_choice(model, executor="npu") or KVSpec("tq4", TAIL, SINKS)
    if all(args[name] is None for name in ("kv", "calibration", "kv_plan", "kv_loss")):
        args = {**args, "kv": "tq4"}
    return kv_spec({"model": model, "executor": "npu", **args})
