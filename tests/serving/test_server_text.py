"""The real server's text is the reference's with the same cache, token by token, however the server cuts, shares or spreads
its work: learned coordinates, layers that differ and tokens in BF16 among the caches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from vllm_judge import Judge, Verdict, prompts, tokenizer
from vllm_server import CACHE_BYTES, Answer, Server, serving

from haarkv.models.catalog import TINY, read_config
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops import formats
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.validation.planning.calibrate import load_subject

pytestmark = pytest.mark.vllm_server

NEW_TOKENS = 64
# Shorter and longer than a block of 128 tokens and than a chunk of 64.
PROMPTS = prompts(20, (7, 40, 130, 200, 300))
CONFIG = read_config("tiny")
ITSELF = {"method": "draft_model", "model": str(TINY), "num_speculative_tokens": 3}
TWO_RANKS, NOBIND = ("--tensor-parallel-size", "2"), {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
CHUNKS = ("--max-num-batched-tokens", "64")
LEARNED_FORMATS = ("k=lr4,v=tq3",) * 6
"""3.125 bits."""
MIXED_FORMATS = ("k=lr4,v=tq3", "bf16", "k=lr3,v=tq3", "tq3", "k=tq8,v=tq3", "k=lr4,v=tq4")


@dataclass(frozen=True)
class Variant:
    """One cache, and one way to serve it.

    Attributes:
        kv: the format of all layers, or that of each.
        flags, environment: beside those that all servers have; none of either for the server that other tests share.
        tail, sink: tokens in BF16.
        shows: whether the server, or by how much its figures have grown, says that it was really served so.
        checks_memory: whether the tokens that its memory holds are counted.
        drafts: whether a draft's layers take pages, too.
    """

    kv: str | tuple[str, ...] = "tq4"
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    tail: int | None = None
    sink: int = 0
    shows: Callable[[Server, dict[str, float]], bool] = lambda server, new: True
    checks_memory: bool = False
    drafts: bool = False


def knows(server: Server, new: dict[str, float]) -> bool:
    """In the second round the whole blocks of 12 prompts are known: 8 with one, 4 with two."""
    return new["vllm:prefix_cache_hits_total"] >= 16 * 128


VARIANTS = {
    "plain": Variant(shows=knows),
    "two-ranks": Variant(
        # Each keeps one of the two KV heads in as much memory.
        flags=TWO_RANKS,
        environment=NOBIND,
        shows=lambda server, new: server.kv_tokens() > 1.9 * CACHE_BYTES / (6 * 2 * 2 * 66),
    ),
    "two formats": Variant("k=tq8,v=tq3", checks_memory=True),
    "learned": Variant(LEARNED_FORMATS, checks_memory=True),
    "learned, two ranks": Variant(LEARNED_FORMATS, TWO_RANKS, NOBIND, checks_memory=True),
    "mixed": Variant(MIXED_FORMATS, checks_memory=True),
    "mixed, chunks, drafts": Variant(
        MIXED_FORMATS, (*CHUNKS, "--speculative-config", json.dumps(ITSELF)), checks_memory=True, drafts=True
    ),
    "tail": Variant(tail=124, shows=knows),
    "tail, chunks": Variant(flags=CHUNKS, tail=32, sink=4, shows=knows),
    "tail, learned": Variant(("k=lr4,v=tq4",) * 6, tail=124, sink=4, shows=knows),
    "tail, two ranks": Variant("k=tq5,v=tq3", TWO_RANKS, NOBIND, tail=40, sink=4, shows=knows),
}


@cache
def tiny_calibration() -> CalibrationFile:
    """From 384 tokens of each of eight files; in some seconds. It is no calibration to measure fidelity with."""
    subject = load_subject("tiny", executor="cpu", dtype="bfloat16")
    texts = [text for text in held_out_texts().values() if len(text) > 8 * 384][:8]
    windows = [torch.tensor(subject.tokenizer.encode(text[: 8 * 384])[:384]) for text in texts]
    return subject.calibration_file(subject.learn(windows, []), {})


def write_plan(path: Path, variant: Variant) -> Path:
    """A plan of a variant's formats, layer by layer, with its calibration in one file, as `tq plan` would write it."""
    file = tiny_calibration()
    plan = KVPlan(tuple(formats.parse(kv, file.calibration) for kv in variant.kv), variant.tail, variant.sink)
    calibration_file.save(path, replace(file, plan=plan_file.dumps(plan, file.shape)))
    return path


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=pytest.mark.vllm_short if n == "plain" else ()) for n in VARIANTS]
)
def served_variant(request, tmp_path_factory):
    """A variant, its server, and the reference with the same cache."""
    variant = VARIANTS[request.param]
    if request.param == "plain":
        yield variant, request.getfixturevalue("roomy"), request.getfixturevalue("judge")
        return
    folder = tmp_path_factory.mktemp("served")
    if isinstance(variant.kv, str):
        tail_flags = () if variant.tail is None else ("--kv-tail", str(variant.tail), "--kv-sink", str(variant.sink))
        spec, kv, flags = KVSpec(variant.kv, tail=variant.tail, sink=variant.sink), variant.kv, (*tail_flags, *variant.flags)
    else:
        file = write_plan(folder / "plan.safetensors", variant)
        spec, kv, flags = plan_file.load(file), None, ("--kv-plan", str(file), *variant.flags)
    with serving(folder / "log", *flags, kv=kv, **variant.environment) as server:
        yield variant, server, request.getfixturevalue("judge") if spec == KVSpec("tq4") else Judge(spec=spec)


def complete(server: Server) -> list[Answer]:
    answers = server.complete(PROMPTS, NEW_TOKENS)
    assert all(len(answer.token_ids) == NEW_TOKENS for answer in answers)
    return answers


def report(record_property, name: str, verdict: Verdict) -> None:
    record_property(name, str(verdict))
    print(f"{name}: {verdict}")


def test_each_served_token_is_the_references_or_nearly_as_good_to_it(served_variant, record_property):
    """Twice, since in the second round the server may know the prompts."""
    variant, server, judge = served_variant
    before = server.metrics()
    for number in (1, 2):
        verdict = judge.judge(PROMPTS, complete(server))
        report(record_property, f"round {number}", verdict)
        assert verdict.passes, verdict
    increases = {name: value - before.get(name, 0.0) for name, value in server.metrics().items()}
    assert variant.shows(server, increases), increases


def test_the_servers_memory_holds_as_many_tokens_as_the_formats_bytes_allow(served_variant):
    variant, server, judge = served_variant
    if variant.tail is not None:
        assert f"tail {variant.tail}" in server.log.read_text()
    if not variant.checks_memory:
        return
    plan, plain = judge.spec.plan(CONFIG.num_layers), KVSpec("bf16").plan(CONFIG.num_layers)
    packed_bytes, bf16 = (each.bytes_per_token(CONFIG.kv_shapes) for each in (plan, plain))
    drafts = bf16 if variant.drafts else 0.0  # vLLM gives a draft's layers to its own backend
    ranks = 2 if variant.environment else 1  # each keeps one of the two KV heads in as much memory
    fits = ranks * CACHE_BYTES / (packed_bytes + drafts)
    print(f"{server.kv_tokens()} tokens; BF16 alone would hold {CACHE_BYTES * ranks / bf16:.0f}")
    # Whole blocks of 128 tokens, of which one is never handed out.
    assert fits - 3 * 128 <= server.kv_tokens() <= fits
    assert f"{packed_bytes:,.0f} bytes a token, {bf16 / packed_bytes:.2f} times less than BF16" in server.log.read_text()
    if variant.kv == LEARNED_FORMATS:
        assert bf16 / packed_bytes >= 5


def test_the_reference_with_another_cache_is_told_apart(served_variant, record_property):
    """Without the tail, or with each layer's formats at another's place."""
    variant, server, judge = served_variant
    if variant.tail is not None:
        other = Judge(spec=KVSpec(judge.spec.kv, layers=judge.spec.layers, calibration=judge.spec.calibration))
        verdict = other.judge(PROMPTS, complete(server))
        report(record_property, "no tail", verdict)
        assert verdict.median_error > 2 * judge.judge(PROMPTS, complete(server)).median_error
    elif variant.kv == MIXED_FORMATS and not variant.drafts:
        layers = judge.spec.layers
        shifted_layers = {layer: layers[(layer + 3) % len(layers)] for layer in layers}
        other = Judge(spec=KVSpec(layers=shifted_layers, calibration=judge.spec.calibration))
        verdict = other.judge(PROMPTS, complete(server))
        report(record_property, "moved", verdict)
        assert not verdict.passes


@pytest.mark.vllm_short
def test_the_text_is_the_tokens_and_ends_where_the_model_ends_it(roomy):
    prompt = PROMPTS[1]
    response = roomy.post(json={"model": str(TINY), "prompt": prompt, "max_tokens": 8, "temperature": 0, "echo": True}).json()
    [answer] = roomy.complete([prompt], 8)
    assert response["choices"][0]["text"] == tokenizer().decode([*prompt, *answer.token_ids])


def test_a_server_in_bf16_has_room_for_fewer_and_is_told_apart(roomy, judge, tmp_path, record_property):
    """What the judge lets pass in tq4 it does not let pass from another cache."""
    with serving(tmp_path / "log", kv="bf16") as server:
        print(f"{roomy.kv_tokens()} tokens in tq4, {server.kv_tokens()} in BF16")
        assert roomy.kv_tokens() >= 3.7 * server.kv_tokens()
        answers = server.complete(PROMPTS, NEW_TOKENS)
    other = judge.judge(PROMPTS, answers)
    report(record_property, "bf16 by the reference in tq4", other)
    assert not other.passes
    bf16_verdict = Judge(KVSpec("bf16")).judge(PROMPTS, answers)
    report(record_property, "bf16 by the reference in bf16", bf16_verdict)
    assert bf16_verdict.passes


def test_users_who_must_make_room_for_each_others_tails_get_the_same(tmp_path, record_property):
    """25 at once, in memory for a few."""
    users, prompt_ids = 25, prompts(25, (20, 60, 110, 150, 200))
    flags = ("--kv-tail", "40", "--kv-sink", "4", "--max-num-batched-tokens", "128")
    with serving(tmp_path / "log", *flags, cache_bytes=14 * 2**20) as server, ThreadPoolExecutor(users) as pool:
        answers = list(pool.map(lambda prompt: server.complete([prompt], 300)[0], prompt_ids))
        verdict = Judge(spec=KVSpec("tq4", tail=40, sink=4)).judge(prompt_ids, answers)
        report(record_property, "verdict", verdict)
        assert verdict.passes, verdict
        assert server.metrics()["vllm:num_preemptions_total"] > 0
