"""Load on vLLM's server: its own benchmark client, several storages of K and V, the same users, prompts and memory.

    python -m haarkv.benchmarks.serve                      # the 0.6B's shapes, 4 of 28 layers, random weights
    python -m haarkv.benchmarks.serve --model tiny --users 1,2 --prompt-tokens 128 --output-tokens 16 --memory 64
    python -m haarkv.benchmarks.serve --kv bf16,tq4,k=lr128,v=lr64          # learned nibbles, of made-up coordinates
    python -m haarkv.benchmarks.serve --model tiny --kv bf16 --kv-plan plan.safetensors

One server for each storage, with the same flags and the same bytes for its KV cache; both are up and take turns round by
round, so that what disturbs the machine disturbs them alike; who waits takes about 1 % of a core. Cold rounds send prompts
that the servers have not seen: time to the first token, and the rate of prompts and answers together. The rounds after them
send the last prompts again, whose pages are found as long as the cache holds them: the rate of answers, and the time of a
token, without the prefill of others in between. A ratio is the median over rounds of the quotients within a round.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from haarkv.benchmarks import serve_plot
from haarkv.benchmarks.report import emit, print_rows
from haarkv.benchmarks.serve_client import Client
from haarkv.benchmarks.serve_model import Served, model_folder
from haarkv.benchmarks.serve_process import Child, Server, ending
from haarkv.benchmarks.serve_rounds import (
    Case,
    LoadRow,
    Ratio,
    Round,
    Rounds,
    as_json,
    client_args,
    ratio,
    read_round,
    step_bytes,
    summed_up,
    watched,
    write_prompts,
)
from haarkv.benchmarks.serve_storages import Storage, names_in, storages
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE

_COLUMNS = ("users", "prompt", "KV", "out tok/s", "low … high", "TPOT", "p99", "CPU", "found", "TTFT", "p99", "cold tok/s",
            "cold CPU", "fits", "held", "at once", "preempted", "failed")  # fmt: skip
_LEGEND = (
    "out tok/s, TPOT (ms), CPU (ms of the worker, a token of the answers): prompts sent again; found: the share still stored\n"
    "TTFT (ms), cold: prompts sent for the first time; fits: tokens of KV cache, as vLLM says;\n"
    "held, at once: the most seen, empty where every round was over before anybody looked"
)
_WORKER = "VLLM::Worker"
_WARM_UP = Case(users=2, prompt=128, output=4)


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        kvs: formats, of which `bf16` is vLLM's own, and after them `plans`, files of `tq plan`. The last of all over the
            first is the ratio.
        calibration: a file of `tq calibrate`; of a random model, coordinates are made up unless it is given.
        memory: MiB of KV cache of each server.
        cold: rounds that send prompts which the servers have not seen.
        repeats: rounds that send the last of them again.
        out: where the client's own results go; None for nowhere.
    """

    model: str
    layers: int | None
    kvs: Sequence[str]
    cases: Sequence[Case]
    memory: int
    cold: int
    repeats: int
    seed: int
    patience: float
    out: Path | None
    plans: Sequence[Path] = ()
    calibration: Path | None = None


def server_flags(request: Request, served: Served) -> list[str]:
    """What all servers get alike; of the longest case in whole pages, since vLLM counts in these what fits.

    Raises:
        InputError: a case that is longer than the model's context.
    """
    longest = max(case.prompt + 1 + case.output for case in request.cases)
    if longest > served.config.max_position_embeddings:
        raise InputError(f"{request.model} has room for {served.config.max_position_embeddings} tokens, not for {longest}")
    longest = min(-(-longest // BLOCK_SIZE) * BLOCK_SIZE, served.config.max_position_embeddings)
    return ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(longest), *served.flags,
            "--kv-cache-memory-bytes", str(request.memory * 2**20), "--enable-prefix-caching",
            "--seed", str(request.seed)]  # fmt: skip


class Bench:
    """Servers and client of one run.

    Args:
        scratch: a folder for logs and prompts.
    """

    def __init__(self, request: Request, served: Served, servers: Sequence[Server], client: Client, scratch: Path) -> None:
        self.request, self.served, self.servers, self.client, self.scratch = request, served, servers, client, scratch

    def rounds(self, case: Case, number: int, cold: int, known: int) -> dict[str, Rounds]:
        """Rounds of one case by storage, the servers taking turns.

        Args:
            number: of the case; no other has its prompts.
        """
        prompts = self.scratch / "prompts.jsonl"
        rounds = {server.kv: Rounds() for server in self.servers}
        for turn in range(cold + known):
            if turn < cold:
                write_prompts(prompts, case, number * 1000 + turn)
            for server in self.servers:
                said = f"{case.users} users, {case.prompt:,} tokens, {server.kv}, round {turn + 1} of {cold + known}"
                print(f"\r{said:<70}", end="", file=sys.stderr, flush=True)
                taken = self._round(server, case, prompts, turn)
                (rounds[server.kv].cold if turn < cold else rounds[server.kv].known).append(taken)
        return rounds

    def _round(self, server: Server, case: Case, prompts: Path, turn: int) -> Round:
        name = f"{server.kv}-{case.users}x{case.prompt}-{turn}.json"
        saved = None if self.request.out is None or case is _WARM_UP else self.request.out / name
        args = client_args(self.served.folder, server.port, case, prompts, self.request.seed, saved)
        before, cpu = server.metrics(), server.cpu_seconds(_WORKER)
        with watched(server.metrics) as peaks:
            result = self.client.round(args)
        return read_round(result, before, server.metrics(), peaks, server.cpu_seconds(_WORKER) - cpu)

    def measure(self) -> tuple[list[LoadRow], list[Ratio]]:
        """All rows and ratios, case by case."""
        self.rounds(_WARM_UP, 0, 1, 0)
        capacity = {server.kv: int(server.metrics()["tokens"]) for server in self.servers}
        rows: list[LoadRow] = []
        ratios: list[Ratio] = []
        for number, case in enumerate(self.request.cases, 1):
            rounds = self.rounds(case, number, self.request.cold, self.request.repeats)
            rows += [summed_up(kv, case, capacity[kv], of) for kv, of in rounds.items()]
            if len(self.servers) > 1:
                first, *_, last = rounds.values()
                ratios.append(ratio(case, last, first))
        print("\r" + " " * 70 + "\r", end="", file=sys.stderr, flush=True)
        return rows, ratios


@dataclass(frozen=True)
class Measured:
    """What was served and how, what the servers tell about themselves, rows and ratios."""

    served: Served
    kvs: Sequence[Storage]
    about: dict[str, object]
    rows: list[LoadRow]
    ratios: list[Ratio]


def measure(request: Request, scratch: Path) -> Measured:
    """Start the servers, measure, end them.

    Raises:
        InputError: vLLM is not there, a server or the client did not start or ended; nothing is left running.
    """
    if find_spec("vllm") is None:
        raise InputError("vLLM is not installed in this Python; docs/serving.md says how")
    served = model_folder(request.model, request.layers, scratch)
    flags, random = server_flags(request, served), request.model.startswith("random:")
    kvs = storages(request.kvs, request.plans, request.calibration, served.config, scratch, random=random)
    if request.out is not None:
        request.out.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    with ending(children):
        servers = []
        for number, kv in enumerate(kvs):
            servers.append(Server(served.folder, kv.name, [*kv.flags, *flags], scratch / f"{number}.log"))
            children.append(servers[-1])
        for server in servers:
            server.wait(request.patience)
        about = servers[0].about()
        client = Client(scratch / "client.log")
        children.append(client)
        rows, ratios = Bench(request, served, servers, client, scratch).measure()
    return Measured(served, kvs, about, rows, ratios)


# -- What is shown -----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[LoadRow], ratios: Sequence[Ratio]) -> list[tuple[str, ...]]:
    """Rows of text, the ratio of a case below its rows."""
    told: list[tuple[str, ...]] = []
    for users, prompt in dict.fromkeys((row.users, row.prompt) for row in rows):
        case = (str(users), f"{prompt:,}")
        told += [(*case, *_row(row)) for row in rows if (row.users, row.prompt) == (users, prompt)]
        told += [(*case, *_ratio(r)) for r in ratios if (r.users, r.prompt) == (users, prompt)]
    return told


def _row(r: LoadRow) -> tuple[str, ...]:
    known = (f"{r.output_rate:.1f}", f"{r.low:.1f} … {r.high:.1f}", f"{r.tpot:.1f}", f"{r.tpot_p99:.1f}", f"{r.cpu_ms:.1f}")
    cold = (f"{r.ttft:,.0f}", f"{r.ttft_p99:,.0f}", f"{r.cold_rate:.1f}", f"{r.cold_cpu_ms:,.1f}")
    held, at_once = (f"{seen:,}" if seen else "" for seen in (r.held, r.at_once))
    return (r.kv, *known, f"{r.found:.0%}", *cold, f"{r.capacity:,}", held, at_once, str(r.preempted), str(r.failed))


def _ratio(r: Ratio) -> tuple[str, ...]:
    return ("ratio", f"{r.output_rate:.2f}", f"{r.low:.2f} … {r.high:.2f}", f"{r.tpot:.2f}", "", f"{r.cpu_ms:.2f}", "",
            f"{r.ttft:.2f}", "", f"{r.cold_rate:.2f}", f"{r.cold_cpu_ms:.2f}", *[""] * 5)  # fmt: skip


# -- The command -------------------------------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """Whole numbers above 0, commas between.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers above 0 with commas between")
    return list(dict.fromkeys(found))


def parse(argv: Sequence[str] | None) -> tuple[Request, argparse.Namespace]:
    """The request, and what is left of the arguments: `save` and `plot`."""
    parser = argparse.ArgumentParser(prog="serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:0.6b", help="tiny, random:SIZE or a Hugging Face folder [%(default)s]")
    parser.add_argument("--layers", type=int, help="of random:SIZE [4]")
    parser.add_argument("--users", type=numbers, default="1,2,4,8,16,25", help="[%(default)s]")
    parser.add_argument("--prompt-tokens", type=numbers, default="128,1024,8192", help="[%(default)s]")
    parser.add_argument("--output-tokens", type=int, default=64, help="[%(default)s]")
    parser.add_argument("--kv", default="bf16,tq4", metavar="LIST", help="formats; the ratio is the last's [%(default)s]")
    parser.add_argument("--kv-plan", type=Path, action="append", default=[], metavar="FILE", help="also a plan; repeat it")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="of formats lrN; random models do without")
    parser.add_argument("--memory", type=int, default=1536, metavar="MiB", help="KV cache of each server [%(default)s]")
    parser.add_argument("--cold", type=int, default=1, help="rounds that send new prompts [%(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that send the last of them again [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    parser.add_argument("--patience", type=float, default=300, metavar="S", help="how long a server may start [%(default)s]")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the client's own result of each round")
    parser.add_argument("--save", action="store_true", help="append the JSON line to benchmarks/results")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw rates and latencies by users, as SVG")
    args = parser.parse_args(argv)
    try:
        kvs = names_in(args.kv)
    except InputError as error:
        parser.error(str(error))
    if len({*kvs, *(plan.stem for plan in args.kv_plan)}) < len(kvs) + len(args.kv_plan):
        parser.error("two storages have the same name; rename a plan's file")
    if least := [name for name in ("output_tokens", "memory", "cold", "repeats") if getattr(args, name) < 1]:
        parser.error(f"--{least[0].replace('_', '-')} must be at least 1")
    layers = 4 if args.layers is None and args.model.startswith("random:") else args.layers
    cases = [Case(users, prompt, args.output_tokens) for prompt in args.prompt_tokens for users in args.users]
    return Request(
        args.model, layers, kvs, cases, args.memory, args.cold, args.repeats, args.seed, args.patience, args.out,
        args.kv_plan, args.calibration,
    ), args  # fmt: skip


def _stopped(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    request, args = parse(argv)
    signal.signal(signal.SIGTERM, _stopped)
    try:
        if args.plot is not None:
            serve_plot.require_matplotlib()
        with tempfile.TemporaryDirectory() as scratch:
            measured = measure(request, Path(scratch))
    except InputError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nserve: stopped", file=sys.stderr)
        return 130
    served, rows, ratios = measured.served, measured.rows, measured.ratios
    title = f"{served.said}; {request.memory:,} MiB of KV cache, {request.cases[0].output} tokens an answer"
    print_rows(title, _COLUMNS, table(rows, ratios))
    print(_LEGEND)
    if args.plot is not None:
        args.plot.write_text(serve_plot.svg(rows, title), encoding="utf-8")
    costs = [{"kv": kv.name, "users": c.users, "prompt": c.prompt, **step_bytes(served.config, kv.plan(served.config), c)}
             for c in request.cases for kv in measured.kvs]  # fmt: skip
    told = {"model": served.said, **measured.about, "memory_mib": request.memory, "output_tokens": request.cases[0].output,
            "cold": request.cold, "repeats": request.repeats,
            "rows": [as_json(row) for row in rows], "ratios": [as_json(r) for r in ratios],
            "steps": costs}  # fmt: skip
    emit("serve", told, save=args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
