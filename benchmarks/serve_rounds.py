"""Rounds of requests on a server, and what a case comes to: rates, latencies, memory, and the ratio of two storages."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np

from haarkv.models.config import ModelConfig
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan

_WATCH_SECONDS = 0.2


@dataclass(frozen=True)
class Case:
    """So many users, each with one request at a time.

    Attributes:
        prompt: tokens of a prompt; one more is sent, so that all pages of a prompt can be found again.
        output: tokens of an answer.
    """

    users: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Round:
    """One request of each user, all sent at once.

    Attributes:
        output_rate, total_rate: tokens a second, of the answers and of prompts and answers, from the first request to the
            last answer.
        ttft, tpot: of each answered request, milliseconds; to the first token, and a token after it.
        failed: requests without an answer.
        preempted: times that the server took a request's pages away.
        found: of the prompts' tokens, the share whose K and V were still there.
        at_once: most requests that ran at one time.
        held: most tokens whose K and V they held.
        cpu_ms: processor time of the server's worker, a token of the answers.
        steps: of the engine.
    """

    output_rate: float
    total_rate: float
    ttft: Sequence[float]
    tpot: Sequence[float]
    failed: int
    preempted: int
    found: float
    at_once: int
    held: int
    cpu_ms: float
    steps: int


@dataclass(frozen=True)
class Rounds:
    """Rounds of one storage in one case.

    Attributes:
        cold: those whose prompts the server had not seen.
        known: those that sent the last of these prompts again.
    """

    cold: list[Round] = field(default_factory=list)
    known: list[Round] = field(default_factory=list)


@dataclass(frozen=True)
class LoadRow:
    """One storage in one case; medians of the rounds whose prompts the server knew, unless said otherwise.

    Attributes:
        output_rate, low, high: median and extremes of the rounds.
        tpot, tpot_p99: over all requests of these rounds.
        ttft, ttft_p99: over all requests of the cold rounds.
        cold_rate, cold_cpu_ms: of the cold rounds; tokens of prompts and answers a second.
        capacity: tokens that the KV cache holds, as vLLM says.
        requests: that a p99 is taken of, cold and known.
    """

    kv: str
    users: int
    prompt: int
    output_rate: float
    low: float
    high: float
    tpot: float
    tpot_p99: float
    cpu_ms: float
    found: float
    ttft: float
    ttft_p99: float
    cold_rate: float
    cold_cpu_ms: float
    capacity: int
    held: int
    at_once: int
    preempted: int
    failed: int
    requests: tuple[int, int]


@dataclass(frozen=True)
class Ratio:
    """One storage over another in one case: medians over rounds of the quotients within a round."""

    users: int
    prompt: int
    output_rate: float
    low: float
    high: float
    tpot: float
    cpu_ms: float
    ttft: float
    cold_rate: float
    cold_cpu_ms: float


# -- One round ---------------------------------------------------------------------------------------------------------------


def write_prompts(path: Path, case: Case, number: int) -> None:
    """A trace for the client: prompts of exactly so many tokens, drawn from a number that no other user and case has."""
    users = range(case.users)
    lines = [
        json.dumps({"timestamp": 0, "input_length": case.prompt + 1, "output_length": case.output, "hash_ids": [seed]})
        for seed in (number * 1_000_000 + user for user in users)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def client_args(model: Path, port: int, case: Case, prompts: Path, seed: int, result: Path | None) -> list[str]:
    """Arguments of `vllm bench serve`: the prompts of a trace all at once, greedy answers of the full length.

    Args:
        result: where the client is to save all that it measured; None for nowhere.
    """
    size = str(case.prompt + 1)
    args = ["--backend", "vllm", "--endpoint", "/v1/completions", "--host", "127.0.0.1", "--port", str(port),
            "--model", str(model), "--dataset-name", "timed_trace", "--dataset-path", str(prompts), "--no-self-timed",
            "--timed-trace-chunk-hash-size", size, "--num-prompts", str(case.users), "--max-concurrency", str(case.users),
            "--ignore-eos", "--temperature", "0", "--seed", str(seed), "--num-warmups", "0", "--ready-check-timeout-sec", "0",
            "--save-detailed", "--disable-tqdm"]  # fmt: skip
    if result is not None:
        args += ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
    return args


@dataclass
class Peaks:
    """The most that was seen of some gauges."""

    seen: dict[str, float] = field(default_factory=dict)

    def see(self, metrics: Mapping[str, float]) -> None:
        """Take one look in."""
        for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
            self.seen[name] = max(self.seen.get(name, 0.0), metrics.get(name, 0.0))


@contextmanager
def watched(look: Callable[[], Mapping[str, float]], every: float = _WATCH_SECONDS) -> Any:
    """Look at gauges while the body runs; yields their peaks."""
    peaks, over = Peaks(), Event()

    def watch() -> None:
        while not over.wait(every):
            # A server that does not answer is for whoever asks next to tell of.
            with suppress(InputError):
                peaks.see(look())

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def read_round(
    result: Mapping[str, Any], before: Mapping[str, float], after: Mapping[str, float], peaks: Peaks, cpu_seconds: float
) -> Round:
    """A round from what the client measured and what the server counted.

    Args:
        result: of `vllm bench serve --save-detailed`.
        before, after: `parse_metrics` of both ends.
        cpu_seconds: of the worker between them.
    """

    def counted(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    answered = [
        (ttft, latency, tokens)
        for ttft, latency, tokens, error in zip(
            result["ttfts"], result["latencies"], result["output_lens"], result["errors"], strict=True
        )
        if not error and tokens > 0
    ]
    asked, tokens = counted("vllm:prefix_cache_queries_total"), result["total_output_tokens"]
    return Round(
        output_rate=result["output_throughput"], total_rate=result["total_token_throughput"],
        ttft=[1e3 * ttft for ttft, _, _ in answered],
        tpot=[1e3 * (latency - ttft) / (n - 1) for ttft, latency, n in answered if n > 1],
        failed=len(result["errors"]) - len(answered), preempted=int(counted("vllm:num_preemptions_total")),
        found=counted("vllm:prefix_cache_hits_total") / asked if asked else 0.0,
        at_once=int(peaks.seen.get("vllm:num_requests_running", 0)),
        held=round(peaks.seen.get("vllm:kv_cache_usage_perc", 0.0) * after.get("tokens", 0.0)),
        cpu_ms=1e3 * cpu_seconds / tokens if tokens else float("nan"),
        steps=int(counted("vllm:iteration_tokens_total_count")),
    )  # fmt: skip


# -- What rounds come to -----------------------------------------------------------------------------------------------------


def summed_up(kv: str, case: Case, capacity: int, rounds: Rounds) -> LoadRow:
    """The row of a case from its rounds."""
    cold, known = rounds.cold, rounds.known
    rates, tpot, ttft = (
        [r.output_rate for r in known],
        [ms for r in known for ms in r.tpot],
        [ms for r in cold for ms in r.ttft],
    )
    every = [*cold, *known]
    return LoadRow(
        kv, case.users, case.prompt, _median(rates), min(rates), max(rates), _median(tpot), _p99(tpot),
        _median([r.cpu_ms for r in known]), _median([r.found for r in known]), _median(ttft), _p99(ttft),
        _median([r.total_rate for r in cold]), _median([r.cpu_ms for r in cold]), capacity, max(r.held for r in every),
        max(r.at_once for r in every), sum(r.preempted for r in every), sum(r.failed for r in every), (len(ttft), len(tpot)),
    )  # fmt: skip


def ratio(case: Case, one: Rounds, other: Rounds) -> Ratio:
    """`one` over `other`; the rounds took turns, so that each is divided by its neighbour."""

    def over(of: Callable[[Round], float], known: bool = True) -> list[float]:
        pairs = zip(one.known, other.known, strict=True) if known else zip(one.cold, other.cold, strict=True)
        return [of(a) / of(b) if of(b) else float("nan") for a, b in pairs]

    rates = over(lambda r: r.output_rate)
    return Ratio(
        case.users, case.prompt, _median(rates), min(rates), max(rates), _median(over(lambda r: _median(r.tpot))),
        _median(over(lambda r: r.cpu_ms)), _median(over(lambda r: _median(r.ttft), known=False)),
        _median(over(lambda r: r.total_rate, known=False)), _median(over(lambda r: r.cpu_ms, known=False)),
    )  # fmt: skip


def step_bytes(config: ModelConfig, plan: KVPlan, case: Case) -> dict[str, float]:
    """What a decode step of all users must read, and its multiply-adds, on average over the answer.

    Returns:
        weight_bytes, kv_bytes; macs: multiply-adds of projections, attention_macs: of both products of attention.
    """
    layer = config.hidden_size * config.heads.head_dim * (2 * config.heads.num_heads + 2 * config.heads.num_kv_heads)
    matrices = config.num_layers * (layer + 3 * config.hidden_size * config.common.mlp.width)
    matrices += config.vocab_size * config.hidden_size
    stored = case.users * (case.prompt + 1 + case.output / 2)
    token = plan.bytes_per_token(config.heads.num_kv_heads, config.heads.head_dim)
    return {
        "weight_bytes": 2 * matrices, "kv_bytes": stored * token, "macs": case.users * matrices,
        "attention_macs": 2 * stored * config.num_layers * config.heads.num_heads * config.heads.head_dim,
    }  # fmt: skip


def as_json(row: LoadRow | Ratio) -> dict[str, Any]:
    """For a JSON line: four digits are more than any figure here has."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in asdict(row).items()}


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else float("nan")
