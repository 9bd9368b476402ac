"""Rounds of requests on a server, and what a case comes to: rates, latencies, memory, and the ratio of two storages."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """So many users, each with one request at a time; tokens of a prompt and of an answer.

    A prompt is sent with one token more, so that all its pages can be found again.
    """

    users: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Round:
    """One request of each user, all sent at once.

    Attributes:
        output_rate, total_rate: tokens a second, of the answers and of prompts and answers.
        ttft, tpot: of each answered request, milliseconds; to the first token, and a token after it.
        failed, preempted: requests without an answer, and times that the server took a request's pages away.
        found: of the prompts' tokens, the share whose K and V were still there.
        cpu_ms: processor time of the server's worker, a token of the answers.
    """

    output_rate: float
    total_rate: float
    ttft: Sequence[float]
    tpot: Sequence[float]
    failed: int
    preempted: int
    found: float
    cpu_ms: float


@dataclass(frozen=True)
class Rounds:
    """Of one storage in one case: cold ones, whose prompts the server had not seen, and those that sent the last again."""

    cold: list[Round] = field(default_factory=list)
    known: list[Round] = field(default_factory=list)


def write_prompts(path: Path, case: Case, number: int) -> None:
    """A trace for the client: prompts of exactly so many tokens, drawn from a number that no other user and case has."""
    asked = {"timestamp": 0, "input_length": case.prompt + 1, "output_length": case.output}
    lines = [json.dumps(asked | {"hash_ids": [number * 1_000_000 + user]}) for user in range(case.users)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def client_args(model: Path, port: int, case: Case, prompts: Path, seed: int) -> list[str]:
    """Arguments of `vllm bench serve`: the prompts of a trace all at once, greedy answers of the full length."""
    size = str(case.prompt + 1)
    return ["--backend", "vllm", "--endpoint", "/v1/completions", "--host", "127.0.0.1", "--port", str(port),
            "--model", str(model), "--dataset-name", "timed_trace", "--dataset-path", str(prompts), "--no-self-timed",
            "--timed-trace-chunk-hash-size", size, "--num-prompts", str(case.users), "--max-concurrency", str(case.users),
            "--ignore-eos", "--temperature", "0", "--seed", str(seed), "--num-warmups", "0", "--ready-check-timeout-sec", "0",
            "--save-detailed", "--disable-tqdm"]  # fmt: skip


def read_round(
    result: Mapping[str, Any], before: Mapping[str, float], after: Mapping[str, float], cpu_seconds: float
) -> Round:
    """A round from what `vllm bench serve --save-detailed` measured, `parse_metrics` around it, and the worker's time."""

    def counted(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    requests = zip(*(result[name] for name in ("ttfts", "latencies", "output_lens", "errors")), strict=True)
    answered = [(ttft, latency, tokens) for ttft, latency, tokens, error in requests if not error and tokens > 0]
    asked, tokens = counted("vllm:prefix_cache_queries_total"), result["total_output_tokens"]
    return Round(
        output_rate=result["output_throughput"], total_rate=result["total_token_throughput"],
        ttft=[1e3 * ttft for ttft, _, _ in answered],
        tpot=[1e3 * (latency - ttft) / (n - 1) for ttft, latency, n in answered if n > 1],
        failed=len(result["errors"]) - len(answered), preempted=int(counted("vllm:num_preemptions_total")),
        found=counted("vllm:prefix_cache_hits_total") / asked if asked else 0.0,
        cpu_ms=1e3 * cpu_seconds / tokens if tokens else math.nan,
    )  # fmt: skip


Row = dict[str, Any]


def summed_up(kv: str, case: Case, capacity: int, rounds: Rounds) -> Row:
    """The row of a storage in a case; medians of the rounds whose prompts the server knew, unless said otherwise.

    Returns:
        `output_rate`, `low`, `high`: median and extremes of the rounds; `tpot`, `tpot_p99`: over all requests of these;
        `ttft`, `ttft_p99`: over all requests of the cold rounds; `cold_rate`, `cold_cpu_ms`: of these, tokens of prompts and
        answers a second; `capacity`: tokens that the KV cache holds, as vLLM says; `preempted`, `failed`: of all rounds.
    """
    cold, known, every = rounds.cold, rounds.known, [*rounds.cold, *rounds.known]
    rates, tpot, ttft = [r.output_rate for r in known], [x for r in known for x in r.tpot], [x for r in cold for x in r.ttft]
    return _rounded({
        "kv": kv, "users": case.users, "prompt": case.prompt, "output_rate": _median(rates), "low": min(rates),
        "high": max(rates), "tpot": _median(tpot), "tpot_p99": _p99(tpot), "cpu_ms": _median([r.cpu_ms for r in known]),
        "found": _median([r.found for r in known]), "ttft": _median(ttft), "ttft_p99": _p99(ttft),
        "cold_rate": _median([r.total_rate for r in cold]), "cold_cpu_ms": _median([r.cpu_ms for r in cold]),
        "capacity": capacity, "preempted": sum(r.preempted for r in every), "failed": sum(r.failed for r in every),
    })  # fmt: skip


def ratio(case: Case, one: Rounds, other: Rounds) -> Row:
    """`one` over `other`: medians over rounds, which took turns, of each one's quotient with its neighbour."""

    def over(of: Callable[[Round], float], known: bool = True) -> list[float]:
        pairs = zip(one.known, other.known, strict=True) if known else zip(one.cold, other.cold, strict=True)
        return [of(a) / of(b) if of(b) else math.nan for a, b in pairs]

    rates = over(lambda r: r.output_rate)
    return _rounded({
        "users": case.users, "prompt": case.prompt, "output_rate": _median(rates), "low": min(rates), "high": max(rates),
        "tpot": _median(over(lambda r: _median(r.tpot))), "cpu_ms": _median(over(lambda r: r.cpu_ms)),
        "ttft": _median(over(lambda r: _median(r.ttft), known=False)),
        "cold_rate": _median(over(lambda r: r.total_rate, known=False)),
        "cold_cpu_ms": _median(over(lambda r: r.cpu_ms, known=False)),
    })  # fmt: skip


def _rounded(row: Row) -> Row:
    """Four digits are more than any figure here has."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else math.nan
