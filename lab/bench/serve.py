"""Load on vLLM's server: its own benchmark client, several storages of K and V, the same users, prompts and memory.

    python -m lab.bench serve                                          # the 0.6B's shapes, 4 of 28 layers, random weights
    python -m lab.bench serve --model tiny --users 1,2 --prompt-tokens 128 --output-tokens 16 --memory 64

The model is a checkpoint as it is, or a Qwen3's true shapes with few of its layers and random weights. A storage is a format
or a pair of them. One server for each storage, with the same flags and the same bytes for its KV cache; both are up and take
turns round by round, so that what disturbs the machine disturbs them alike; who waits takes about 1 % of a core. Cold rounds
send prompts that the servers have not seen: time to the first token, and the rate of prompts and answers together. The rounds
after them send the last prompts again, whose pages are found as long as the cache holds them: the rate of answers, and the
time of a token, without the prefill of others in between. A ratio is the median over rounds of the quotients within a round.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from haarkv.benchmarks.report import Report, Table
from haarkv.benchmarks.timing import OnTurn
from haarkv.engine.plans import shape_signature
from haarkv.models.catalog import TINY, find_model, read_config
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE
from lab.bench import serve_rounds
from lab.bench.serve_process import Child, Client, Server, ending
from lab.bench.serve_rounds import Case, Round, Rounds, Row

_COLUMNS = ("users", "prompt", "KV", "out tok/s", "low … high", "TPOT", "p99", "CPU", "found", "TTFT", "p99", "cold tok/s",
            "cold CPU", "fits", "preempted", "failed")  # fmt: skip
_LEGEND = (
    "out tok/s, TPOT (ms), CPU (ms of the worker, a token of the answers): prompts sent again; found: the share still stored\n"
    "TTFT (ms), cold: prompts sent for the first time; fits: tokens of KV cache, as vLLM says"
)
_WORKER = "VLLM::Worker"
_PATIENCE_S = 300.0  # that a server may take to start
_WORDS = 4096  # of the tokenizer that random weights are served with; ids from there on mean nothing
_WARM_UP = Case(users=2, prompt=128, output=4)


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        kvs: formats, of which `bf16` is vLLM's own. The last over the first is the ratio.
        memory: MiB of KV cache of each server.
        cold, repeats: rounds of prompts that the servers have not seen, and rounds that send the last of them again.
    """

    model: str
    layers: int | None
    kvs: Sequence[str]
    cases: Sequence[Case]
    memory: int
    cold: int
    repeats: int
    seed: int


def names_in(text: str) -> list[str]:
    """Formats with commas between: `bf16,tq4,k=q8_0,v=tq3` names three. One that is none is refused."""
    names = list(dict.fromkeys(part.strip() for part in re.split(r",(?!\s*v=)", text)))
    for name in names:
        formats.parse(name)
    return names


def request_of(
    *, model: str, layers: int | None, kv: str, users: Sequence[int], prompt_tokens: Sequence[int], output_tokens: int,
    **more: Any,
) -> Request:  # fmt: skip
    """A request; of a random model four layers unless told. What is no format, or a learned one, is refused."""
    kvs = names_in(kv)
    cases = [Case(count, prompt, output_tokens) for prompt in dict.fromkeys(prompt_tokens) for count in dict.fromkeys(users)]
    layers = 4 if layers is None and model.startswith("random:") else layers
    return Request(model, layers, kvs, cases, **more)


class ServedModel(NamedTuple):
    """A model folder for vLLM, what it is for people, and the flags of vLLM that it needs."""

    folder: Path
    config: ModelConfig
    description: str
    flags: tuple[str, ...] = ()


def model_folder(name: str, layers: int | None, scratch: Path) -> ServedModel:
    """A model by name as a folder; for `random:SIZE` one is made in `scratch`, a config of `layers` layers without weights.

    Raises:
        InputError: no such model, or layers that it does not have.
    """
    folder, config = find_model(name), read_config(name, layers)
    if folder is not None:
        return ServedModel(folder.resolve(), config, f"{name}, {config.num_layers} layers")
    whole = read_config(name)
    if whole.model_type != "qwen3":
        raise InputError(f"only a dense Qwen3 is served with random weights, {name} is a {whole.model_type}")
    config = replace(config, vocab_size=scaled_vocabulary(whole.vocab_size, config.num_layers, whole.num_layers))
    config_folder = scratch / f"{name.replace(':', '-')}-{config.num_layers}-layers"
    config_folder.mkdir()
    (config_folder / "config.json").write_text(json.dumps(hf_config(config)), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / file, config_folder / file)
    description = (
        f"{name}, {config.num_layers} of {whole.num_layers} layers, {config.vocab_size:,} of {whole.vocab_size:,} words"
    )
    return ServedModel(config_folder, config, f"{description}, random weights", ("--load-format", "dummy"))


def scaled_vocabulary(words: int, layers: int, whole_layers: int) -> int:
    """As many words as give the head the share of a step that it has in the whole model; a multiple of 128."""
    return max(_WORDS, -(-words * layers // (whole_layers * 128)) * 128)


def hf_config(config: ModelConfig) -> dict[str, object]:
    """Shapes as the `config.json` of a dense Qwen3 says them."""
    shape = config.attentions[0].heads
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16",
        "hidden_size": config.hidden_size, "intermediate_size": config.common.mlp.width,
        "num_hidden_layers": config.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim, "vocab_size": config.vocab_size,
        "rope_theta": config.common.attention.rope.theta, "rms_norm_eps": config.final_norm.eps, "hidden_act": "silu",
        "tie_word_embeddings": config.tied, "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False, "use_sliding_window": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def server_flags(request: Request, served_model: ServedModel) -> list[str]:
    """What all servers get alike; of the longest case, which must fit, in whole pages: vLLM counts in these what fits."""
    limit, longest = served_model.config.max_position_embeddings, max(case.prompt + 1 + case.output for case in request.cases)
    if longest > limit:
        raise InputError(f"{request.model} has room for {limit} tokens, not for {longest}")
    longest = min(-(-longest // BLOCK_SIZE) * BLOCK_SIZE, limit)
    return ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(longest), *served_model.flags,
            "--kv-cache-memory-bytes", str(request.memory * 2**20), "--enable-prefix-caching",
            "--seed", str(request.seed)]  # fmt: skip


class Bench:
    """Servers and client of one run; `scratch` is a folder for logs and prompts."""

    def __init__(
        self,
        request: Request,
        served_model: ServedModel,
        servers: Sequence[Server],
        client: Client,
        scratch: Path,
        on_turn: OnTurn,
    ) -> None:
        self.request, self.served_model, self.servers, self.client = request, served_model, servers, client
        self.scratch, self.on_turn = scratch, on_turn

    def rounds(self, case: Case, number: int, cold: int, warm: int) -> dict[str, Rounds]:
        """Rounds of one case by storage, the servers taking turns; no other case has its number, nor its prompts."""
        prompts = self.scratch / "prompts.jsonl"
        rounds = {server.kv: Rounds() for server in self.servers}
        for turn in range(cold + warm):
            if turn < cold:
                serve_rounds.write_prompts(prompts, case, number * 1000 + turn)
            for server in self.servers:
                self.on_turn(f"{case.users} users, {case.prompt:,} tokens, {server.kv}, round {turn + 1} of {cold + warm}")
                measurement = self._round(server, case, prompts)
                (rounds[server.kv].cold if turn < cold else rounds[server.kv].warm).append(measurement)
        return rounds

    def _round(self, server: Server, case: Case, prompts: Path) -> Round:
        args = serve_rounds.client_args(self.served_model.folder, server.port, case, prompts, self.request.seed)
        before, cpu = server.metrics(), server.cpu_seconds(_WORKER)
        result = self.client.round(args)
        return serve_rounds.read_round(result, before, server.metrics(), server.cpu_seconds(_WORKER) - cpu)

    def measure(self) -> tuple[list[Row], list[Row]]:
        """All rows and ratios, case by case."""
        self.rounds(_WARM_UP, 0, 1, 0)
        capacity = {server.kv: int(server.metrics()["tokens"]) for server in self.servers}
        rows: list[Row] = []
        ratios: list[Row] = []
        for number, case in enumerate(self.request.cases, 1):
            rounds = self.rounds(case, number, self.request.cold, self.request.repeats)
            rows += [serve_rounds.summary_row(kv, case, capacity[kv], kv_rounds) for kv, kv_rounds in rounds.items()]
            if len(self.servers) > 1:
                first, *_, last = rounds.values()
                ratios.append(serve_rounds.ratio(case, last, first))
        return rows, ratios


def measure(request: Request, on_turn: OnTurn = lambda _: None) -> Report:
    """Start the servers, measure, end them.

    Raises:
        InputError: vLLM is not there, a server or the client did not start or ended; nothing is left running.
    """
    if find_spec("vllm") is None:
        raise InputError(
            "vLLM is not installed in this Python; `python -m haarkv.serving.vllm_plugin.install` installs it for a CPU"
        )
    children: list[Child] = []
    with _stoppable(), tempfile.TemporaryDirectory() as folder, ending(children):
        scratch = Path(folder)
        served_model = model_folder(request.model, request.layers, scratch)
        flags, shape = server_flags(request, served_model), shape_signature(served_model.config)
        for kv in request.kvs:
            KVSpec(kv).plan(served_model.config.num_layers, shape)  # refused before a server starts
        servers = []
        for number, kv in enumerate(request.kvs):
            servers.append(Server(served_model.folder, kv, ["--kv", kv, *flags], scratch / f"{number}.log"))
            children.append(servers[-1])
        for server in servers:
            server.wait(_PATIENCE_S)
        client = Client(scratch / "client.log")
        children.append(client)
        rows, ratios = Bench(request, served_model, servers, client, scratch, on_turn).measure()
    return report(request, served_model.description, rows, ratios)


@contextmanager
def _stoppable() -> Iterator[None]:
    """The servers end with this process."""

    def raise_interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report(request: Request, description: str, rows: Sequence[Row], ratios: Sequence[Row]) -> Report:
    """Everything that was measured; the ratio of a case stands below its rows."""
    cells = []
    for case in request.cases:
        begin = (str(case.users), f"{case.prompt:,}")
        for r in (row for row in (*rows, *ratios) if (row["users"], row["prompt"]) == (case.users, case.prompt)):
            cells.append((*begin, *_cells(r)))
    output = request.cases[0].output
    values = {"served": description, "memory_mib": request.memory, "output_tokens": output, "cold": request.cold,
              "repeats": request.repeats, "rows": list(rows), "ratios": list(ratios)}  # fmt: skip
    title = f"{description}; {request.memory:,} MiB of KV cache, {output} tokens an answer"
    prompts, kvs = ([*dict.fromkeys(row[name] for row in rows)] for name in ("prompt", "kv"))
    return Report("serve", request.model, prompts, kvs, values, [Table(title, _COLUMNS, cells)], {0: [_LEGEND]}, ("vllm",))


def _cells(r: Row) -> tuple[str, ...]:
    if "kv" not in r:
        return ("ratio", f"{r['output_rate']:.2f}", f"{r['low']:.2f} … {r['high']:.2f}", f"{r['tpot']:.2f}", "",
                f"{r['cpu_ms']:.2f}", "", f"{r['ttft']:.2f}", "", f"{r['cold_rate']:.2f}", f"{r['cold_cpu_ms']:.2f}",
                "", "", "")  # fmt: skip
    return (r["kv"], f"{r['output_rate']:.1f}", f"{r['low']:.1f} … {r['high']:.1f}", f"{r['tpot']:.1f}",
            f"{r['tpot_p99']:.1f}", f"{r['cpu_ms']:.1f}", f"{r['found']:.0%}", f"{r['ttft']:,.0f}", f"{r['ttft_p99']:,.0f}",
            f"{r['cold_rate']:.1f}", f"{r['cold_cpu_ms']:,.1f}", f"{r['capacity']:,}", str(r["preempted"]), str(r["failed"]),
            )  # fmt: skip
