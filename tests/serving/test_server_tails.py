"""The real server with tokens in BF16: its text is the reference's, however it cuts, shares or puts off its work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from learned_tiny import write_plan
from vllm_judge import Judge, prompts
from vllm_server import CACHE_BYTES, serving

from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.plan_file import load

pytestmark = pytest.mark.vllm_server

NEW_TOKENS = 64
ASKED = prompts(20, (7, 40, 130, 200, 300))
LEARNED = ("k=lr4,v=tq4",) * 6


@dataclass(frozen=True)
class Variant:
    """One cache, and one way to serve it.

    Attributes:
        kv: the format of all layers, or that of each.
        tail, sink: tokens in BF16.
        flags, environment: beside those that all servers have.
    """

    kv: str | tuple[str, ...]
    tail: int
    sink: int
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


VARIANTS = {
    "tail": Variant("tq4", 124, 0),
    "chunks": Variant("tq4", 32, 4, ("--max-num-batched-tokens", "64")),
    "learned": Variant(LEARNED, 124, 4),
    "two ranks": Variant("k=tq5,v=tq3", 40, 4, ("--tensor-parallel-size", "2"), (("VLLM_CPU_OMP_THREADS_BIND", "nobind"),)),
}


@pytest.fixture(scope="module", params=VARIANTS)
def served(request, tmp_path_factory):
    """A server, and the reference with the same cache."""
    of, folder = VARIANTS[request.param], tmp_path_factory.mktemp("served")
    if isinstance(of.kv, str):
        spec = KVSpec(of.kv, tail=of.tail, sink=of.sink)
        kv, flags = of.kv, ("--kv-tail", str(of.tail), "--kv-sink", str(of.sink), *of.flags)
    else:
        file = write_plan(folder / "plan.safetensors", of.kv, recent=of.tail, sink=of.sink)
        spec, kv, flags = load(file), None, ("--kv-plan", str(file), *of.flags)
    with serving(folder / "log", *flags, kv=kv, **dict(of.environment)) as server:
        yield server, Judge(spec=spec)


def test_each_served_token_is_the_references_or_nearly_as_good_to_it(served, record_property):
    """Twice: in the second round the server knows the whole blocks of the longer prompts."""
    server, judge = served
    for number in (1, 2):
        before = server.metrics()["vllm:prefix_cache_hits_total"]
        verdict = judge.judge(ASKED, server.complete(ASKED, NEW_TOKENS))
        record_property(f"round {number}", str(verdict))
        print(verdict)
        assert verdict.passes, verdict
    # 8 prompts with one whole block of 128 tokens, 4 with two.
    assert server.metrics()["vllm:prefix_cache_hits_total"] - before >= 16 * 128


def test_memory_is_what_was_given_and_metrics_say_so(served):
    server, judge = served
    metrics = server.metrics()
    assert 0.95 * CACHE_BYTES <= metrics["haarkv:kv_allocated_bytes"] <= 2 * CACHE_BYTES
    assert "haarkv:kv_held_tokens" not in metrics
    assert f"tail {judge.spec.tail}" in server.log.read_text()


def test_another_tail_is_told_apart(served, record_property):
    server, judge = served
    other = Judge(spec=KVSpec(judge.spec.kv, layers=judge.spec.layers, calibration=judge.spec.calibration))
    verdict = other.judge(ASKED, server.complete(ASKED, NEW_TOKENS))
    record_property("no tail", str(verdict))
    print(verdict)
    assert verdict.median_error > 2 * judge.judge(ASKED, server.complete(ASKED, NEW_TOKENS)).median_error


def test_users_who_must_make_room_for_each_other_get_the_same(tmp_path, record_property):
    """25 at once, in memory for a few."""
    users, asked = 25, prompts(25, (20, 60, 110, 150, 200))
    flags = ("--kv-tail", "40", "--kv-sink", "4", "--max-num-batched-tokens", "128")
    with serving(tmp_path / "log", *flags, cache_bytes=14 * 2**20) as server, ThreadPoolExecutor(users) as pool:
        answers = list(pool.map(lambda prompt: server.complete([prompt], 300)[0], asked))
        verdict = Judge(spec=KVSpec("tq4", tail=40, sink=4)).judge(asked, answers)
        record_property("verdict", str(verdict))
        print(verdict, server.metrics()["vllm:num_preemptions_total"])
        assert verdict.passes, verdict
        assert server.metrics()["vllm:num_preemptions_total"] > 0
