"""The real server with other caches than `tq4`: learned coordinates, layers that differ, and formats of K and V that do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from learned_tiny import write_plan
from vllm_judge import Judge, prompts
from vllm_server import CACHE_BYTES, MODEL, Answer, Server, serving

from haarkv.models.catalog import read_config
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.plan_file import load

pytestmark = pytest.mark.vllm_server

NEW_TOKENS = 64
ASKED = prompts(20, (7, 40, 130, 200, 300))
CONFIG = read_config("tiny")
LEARNED = ("k=lr4,v=tq3",) * 6
"""3.125 bits."""
MIXED = ("k=lr4,v=tq3", "bf16", "k=lr3,v=tq3", "tq3", "k=tq8,v=tq3", "k=lr4,v=tq4")
ITSELF = {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 3}


@dataclass(frozen=True)
class Variant:
    """One cache, and one way to serve it.

    Attributes:
        kv: the format of all layers, or that of each.
        flags, environment: beside those that all servers have.
        drafts: whether a draft's layers take pages, too.
    """

    kv: str | Sequence[str]
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    drafts: bool = False


NOBIND = (("VLLM_CPU_OMP_THREADS_BIND", "nobind"),)
VARIANTS = {
    "two formats": Variant("k=tq8,v=tq3"),
    "learned": Variant(LEARNED),
    "learned, two ranks": Variant(LEARNED, ("--tensor-parallel-size", "2"), NOBIND),
    "mixed": Variant(MIXED, ("--kv-metrics-per-layer",)),
    "mixed, chunks, drafts": Variant(
        MIXED, ("--max-num-batched-tokens", "64", "--speculative-config", json.dumps(ITSELF)), drafts=True
    ),
}


@pytest.fixture(scope="module", params=VARIANTS)
def served(request, tmp_path_factory):
    """A variant, its server, and the reference with the same cache."""
    variant, folder = VARIANTS[request.param], tmp_path_factory.mktemp("served")
    if isinstance(variant.kv, str):
        spec, kv, flags = KVSpec(variant.kv), variant.kv, variant.flags
    else:
        file = write_plan(folder / "plan.safetensors", variant.kv)
        spec, kv, flags = load(file), None, ("--kv-plan", str(file), *variant.flags)
    with serving(folder / "log", *flags, kv=kv, **dict(variant.environment)) as server:
        yield variant, server, Judge(spec=spec)


def complete(server: Server) -> list[Answer]:
    answers = server.complete(ASKED, NEW_TOKENS)
    assert all(len(answer.token_ids) == NEW_TOKENS for answer in answers)
    return answers


def bytes_per_token(plan: KVPlan) -> float:
    return plan.bytes_per_token(CONFIG.kv_shapes)


def test_each_served_token_is_the_references_or_nearly_as_good_to_it(served, record_property):
    """Twice, since in the second round the server may know the prompts."""
    _, server, judge = served
    for number in (1, 2):
        verdict = judge.judge(ASKED, complete(server))
        record_property(f"round {number}", str(verdict))
        print(verdict)
        assert verdict.passes, verdict


def test_the_servers_memory_holds_as_many_tokens_as_the_formats_bytes_allow_and_metrics_say_so(served):
    variant, server, judge = served
    plan, metrics = judge.spec.plan(CONFIG.num_layers), server.metrics()
    taken, bf16 = (bytes_per_token(of) for of in (plan, KVSpec("bf16").plan(CONFIG.num_layers)))
    drafts = bf16 if variant.drafts else 0.0  # vLLM gives a draft's layers to its own backend
    ranks = 2 if variant.environment else 1  # each keeps one of the two KV heads in as much memory
    fits = ranks * CACHE_BYTES / (taken + drafts)
    print(f"{server.kv_tokens()} tokens; BF16 alone would hold {CACHE_BYTES * ranks / bf16:.0f}")
    # Whole blocks of 128 tokens, of which one is never handed out.
    assert fits - 3 * 128 <= server.kv_tokens() <= fits
    assert metrics["haarkv:kv_compression_ratio"] == pytest.approx(bf16 / taken)
    assert f"{taken:,.0f} bytes a token, {bf16 / taken:.2f} times less than BF16" in server.log.read_text()
    if variant.kv == LEARNED:
        assert bf16 / taken >= 5
    if "--kv-metrics-per-layer" in variant.flags:
        assert "haarkv:kv_layer_held_bytes" in metrics


def test_the_reference_with_another_cache_is_told_apart(served, record_property):
    """What passes as this cache's text does not pass as that of the plan with each layer's formats at another's place."""
    variant, server, judge = served
    if variant.kv != MIXED or variant.drafts:
        pytest.skip("one variant is enough")
    layers = judge.spec.layers
    moved = {layer: layers[(layer + 3) % len(layers)] for layer in layers}
    other = Judge(spec=KVSpec(layers=moved, calibration=judge.spec.calibration)).judge(ASKED, complete(server))
    record_property("moved", str(other))
    print(other)
    assert not other.passes
