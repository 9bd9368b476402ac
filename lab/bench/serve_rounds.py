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
        failures, preemptions: requests without an answer, and times that the server took a request's pages away.
        hit_share: of the prompts' tokens, the share whose K and V were still there.
        cpu_ms: processor time of the server's worker, a token of the answers.
    """

    output_rate: float
    total_rate: float
    ttft: Sequence[float]
    tpot: Sequence[float]
    failures: int
    preemptions: int
    hit_share: float
    cpu_ms: float


@dataclass(frozen=True)
class Rounds:
    """Of one storage in one case: cold ones, whose prompts the server had not seen, and those that sent the last again."""

    cold: list[Round] = field(default_factory=list)
    warm: list[Round] = field(default_factory=list)


def write_prompts(path: Path, case: Case, number: int) -> None:
    """A trace for the client: prompts of exactly this many tokens, drawn from a number that no other user and case has."""
    request = {"timestamp": 0, "input_length": case.prompt + 1, "output_length": case.output}
    lines = [json.dumps(request | {"hash_ids": [number * 1_000_000 + user]}) for user in range(case.users)]
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

    def counter_difference(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    requests = zip(*(result[name] for name in ("ttfts", "latencies", "output_lens", "errors")), strict=True)
    answers = [(ttft, latency, tokens) for ttft, latency, tokens, error in requests if not error and tokens > 0]
    queries, tokens = counter_difference("vllm:prefix_cache_queries_total"), result["total_output_tokens"]
    return Round(
        output_rate=result["output_throughput"], total_rate=result["total_token_throughput"],
        ttft=[1e3 * ttft for ttft, _, _ in answers],
        tpot=[1e3 * (latency - ttft) / (n - 1) for ttft, latency, n in answers if n > 1],
        failures=len(result["errors"]) - len(answers), preemptions=int(counter_difference("vllm:num_preemptions_total")),
        hit_share=counter_difference("vllm:prefix_cache_hits_total") / queries if queries else 0.0,
        cpu_ms=1e3 * cpu_seconds / tokens if tokens else math.nan,
    )  # fmt: skip


Row = dict[str, Any]


def summary_row(kv: str, case: Case, capacity: int, rounds: Rounds) -> Row:
    """The row of a storage in a case; medians of the rounds whose prompts the server knew, unless said otherwise.

    Returns:
        `output_rate`, `low`, `high`: median and extremes of the rounds; `tpot`, `tpot_p99`: over all requests of these;
        `ttft`, `ttft_p99`: over all requests of the cold rounds; `cold_rate`, `cold_cpu_ms`: of these, tokens of prompts and
        answers a second; `capacity`: tokens that the KV cache holds, as vLLM says; `preempted`, `failed`: of all rounds.
    """
    cold, warm, every = rounds.cold, rounds.warm, [*rounds.cold, *rounds.warm]
    rates, tpot, ttft = [r.output_rate for r in warm], [x for r in warm for x in r.tpot], [x for r in cold for x in r.ttft]
    return _round_figures({
        "kv": kv, "users": case.users, "prompt": case.prompt, "output_rate": _median(rates), "low": min(rates),
        "high": max(rates), "tpot": _median(tpot), "tpot_p99": _p99(tpot), "cpu_ms": _median([r.cpu_ms for r in warm]),
        "found": _median([r.hit_share for r in warm]), "ttft": _median(ttft), "ttft_p99": _p99(ttft),
        "cold_rate": _median([r.total_rate for r in cold]), "cold_cpu_ms": _median([r.cpu_ms for r in cold]),
        "capacity": capacity, "preempted": sum(r.preemptions for r in every), "failed": sum(r.failures for r in every),
    })  # fmt: skip


def ratio(case: Case, one: Rounds, other: Rounds) -> Row:
    """`one` over `other`: medians over rounds, which took turns, of each one's quotient with its neighbour."""

    def ratios(figure: Callable[[Round], float], warm: bool = True) -> list[float]:
        pairs = zip(one.warm, other.warm, strict=True) if warm else zip(one.cold, other.cold, strict=True)
        return [figure(a) / figure(b) if figure(b) else math.nan for a, b in pairs]

    rates = ratios(lambda r: r.output_rate)
    return _round_figures({
        "users": case.users, "prompt": case.prompt, "output_rate": _median(rates), "low": min(rates), "high": max(rates),
        "tpot": _median(ratios(lambda r: _median(r.tpot))), "cpu_ms": _median(ratios(lambda r: r.cpu_ms)),
        "ttft": _median(ratios(lambda r: _median(r.ttft), warm=False)),
        "cold_rate": _median(ratios(lambda r: r.total_rate, warm=False)),
        "cold_cpu_ms": _median(ratios(lambda r: r.cpu_ms, warm=False)),
    })  # fmt: skip


def _round_figures(row: Row) -> Row:
    """Four digits are more than any figure here has."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else math.nan
