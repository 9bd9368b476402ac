"""Peers beside ours: the same attention and the same steps, why a model has none, and a machine that is busy."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from small_models import SMALL, resize_config, small_model, window_config

from haarkv.benchmarks import cases, decode
from haarkv.benchmarks.cases import Case
from haarkv.benchmarks.decode_cost import Cost, CostRow
from haarkv.benchmarks.timing import Limits, Machine, Spread
from haarkv.engine.generation import prefill_in_chunks
from haarkv.executors.base import verify
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import new_cache
from haarkv.models.rope import LinearScaling
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from lab.bench import gguf_file, llama_process, neighbours, peers, prefill
from lab.bench.peers import Peers

MACHINE = Machine(copy_gbps=10, fp32_gflops=50, bf16_gflops=100)


def test_torch_gets_the_same_attention_in_every_form():
    q, k, v = torch.randn(2, 10, 64), *(torch.randn(2, 2, 33, 64).bfloat16() for _ in "kv")
    every = {peer.name: peer for peer in peers.forms(q, k, v, lambda _: 2)}
    assert set(every) == {"sdpa bf16 rows", "sdpa bf16 gqa", "sdpa fp32 rows", "torch bf16 products"}
    scores = torch.einsum("bgrd,bgsd->bgrs", q.bfloat16().double().view(2, 2, 5, 64), k.double()) / 8
    expected = (scores.softmax(-1) @ v.double()).view(2, 10, 64)
    for peer in every.values():
        for number in range(2):
            torch.testing.assert_close(peer.run(number).view(2, 10, 64).double(), expected, rtol=0, atol=2e-2)
    rows, whole = every["sdpa bf16 rows"].run(0).view(2, 10, 64), every["sdpa bf16 gqa"].run(0).view(2, 10, 64)
    torch.testing.assert_close(rows.float(), whole.float(), rtol=0, atol=2e-2)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_transformers_steps_continue_the_same_cache(kind):
    """Their logits after the same K and V are ours, so both sides of the comparison do the same work."""
    pytest.importorskip("transformers")
    import tq

    model, case = small_model(resize_config(SMALL, model_type=kind, hidden_size=40)), Case(2, 20)
    k, v = cases.random_kv(SMALL, case, torch.device("cpu"))
    cache, paging = cases.filled_cache(KVSpec("fp32").plan(SMALL.num_layers), SMALL, case, k, v, 2)
    ours = verify(ReferenceExecutor(model), torch.arange(2), paging.batch([0, 1], [1, 1]), cache).argmax(-1).tolist()
    tq_cache = peers.HFCache("TQCache fp32", partial(tq.TQCache, kv="fp32"), 32.0, implementation="tq")
    every = {peer.name: peer for peer in peers.transformers_steps(model, 2, k, v, [tq_cache])}
    assert every["hf DynamicCache bf16"].run(0) == every["hf TQCache fp32"].run(0) == ours
    for name in ("hf quanto 4-bit", "hf hqq 4-bit"):
        assert every[name].run is not None or every[name].note


def test_bench_prefill_measures_a_prompt_of_every_format_beside_torch(run):
    code, out, _ = run("prefill", "--kv", "tq4,bf16", "--json")
    result = json.loads(out)
    assert (code, result["benchmark"]) == (0, "prefill")
    assert {r["who"]: r["cost"]["kv"] for r in result["rows"]} == {
        "reference tq4": 40 * 2 * 2 * 18, "reference bf16": 40 * 2 * 2 * 64, "sdpa bf16 causal": 40 * 2 * 2 * 64,
    }  # fmt: skip
    assert all(r["ms"] > 0 and r["kind"] == "prefill" for r in result["rows"])
    code, out, _ = run("prefill", "--kv", "tq4", "--no-peers", "--stored", "10", "--json")
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert (row["who"], row["cost"]["kv"]) == ("reference tq4", 50 * 2 * 2 * 18)
    assert row["cost"]["flops"] * sum(range(1, 41)) == result["rows"][0]["cost"]["flops"] * sum(range(11, 51))


def test_a_processor_that_another_process_takes_is_noticed():
    processors = os.sched_getaffinity(0)
    spin = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin, str(min(processors))], stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            os.sched_setaffinity(0, {min(processors)})  # of this thread alone
            before, until = neighbours.thread_times(), time.monotonic() + 0.5
            while time.monotonic() < until:
                pass
            share = neighbours.share_waited(before, neighbours.thread_times())
        finally:
            other.kill()
            os.sched_setaffinity(0, processors)
    assert share > neighbours.MOST_WAITED
    assert "the machine was busy" in neighbours.warning(share)
    assert neighbours.warning(0.01) is None


def test_where_the_system_does_not_count_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "TASKS", tmp_path)
    assert neighbours.thread_times() is None
    assert neighbours.share_waited(None, neighbours.ThreadTimes(1, 1)) is None
    assert neighbours.warning(None) is None


@pytest.mark.parametrize(("wait_percent", "warns"), [(50, True), (5, False)])
def test_a_headline_says_that_the_machine_was_busy(run, monkeypatch, wait_percent, warns):
    counts = iter([neighbours.ThreadTimes(0, 0), neighbours.ThreadTimes(100 - wait_percent, wait_percent)])
    monkeypatch.setattr(neighbours, "thread_times", lambda: next(counts))
    code, out, err = run("decode", "--kv", "tq4", "--only", "attention", "--json")
    assert (code, json.loads(out)["waited"]) == (0, wait_percent / 100)
    assert (f"tq: warning: the machine was busy: this run waited for a processor {wait_percent} % of its time" in err) == warns


def test_peers_of_plain_layers_say_why_a_model_is_none():
    assert gguf_file.unlike_plain(SMALL) is None
    assert (
        gguf_file.unlike_plain(window_config(24, 24, 24))
        == "layer 0 of this qwen3 model is another than it knows: window is 24"
    )
    far = resize_config(SMALL, rope_scaling=LinearScaling(2.0))
    uneven = replace(SMALL, layers=(*SMALL.layers[1:], *resize_config(SMALL, rope_theta=1e6).layers[1:]))
    for config, why in ((far, "its RoPE is scaled"), (uneven, "its layers differ")):
        assert gguf_file.unlike_plain(config) == why
        assert why in peers.transformers_missing(config)
        assert why in gguf_file.unsupported_reason(config)


@pytest.mark.parametrize("window", [24, 150, None])
def test_attention_within_a_window_is_timed_beside_the_same_by_torch(window, outputs, monkeypatch):
    """The case is longer than the ring that keeps what a decode step sees; a prompt comes whole."""
    monkeypatch.setattr(cases, "MOST_COPIES", 2)
    model, case = small_model(window_config(window, None)), Case(2, 1000)
    sides = {"reference fp32": (ReferenceExecutor(model), KVSpec("fp32").plan(2))}
    k, v = cases.random_kv(model.config, case, torch.device("cpu"))
    args = cases.Measurement(sides, model, case, k, v, Limits(k.device), Peers(["sdpa"], "small", None), 1, print)
    costs = {(row.kind, row.who): row.cost for row in decode.cost_rows("attention", args)}
    ours, theirs = (outputs[f"attention {who}"].reshape(2, 10, 128) for who in ("reference fp32", "sdpa fp32 rows"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-2)
    assert costs["attention", "sdpa bf16 rows"].kv == 2 * (window or 1000) * 2 * 2 * 128 * 2
    rows = list(prefill.prompt_rows(args, 0, peers=True))
    assert [row.note for row in rows] == []
    ours = outputs["reference fp32"].view(2, 1000, 10, 128).float()
    torch.testing.assert_close(ours, outputs[prefill.PROMPT_PEER].transpose(1, 2).float(), rtol=0, atol=3e-2)


@pytest.fixture
def outputs(monkeypatch):
    """What each run of `attention` gives, in place of its time."""
    outputs_by_name = {}

    def record_outputs(calls, *_, **__):
        outputs_by_name.update({who: run(0) for who, run in calls.items()})
        return {}

    monkeypatch.setattr(decode, "take_turns", record_outputs)
    monkeypatch.setattr(prefill, "take_turns", record_outputs)
    return outputs_by_name


def test_transformers_prompt_is_ours():
    pytest.importorskip("transformers")
    model, prompts = small_model(), cases.random_prompts(SMALL, Case(2, 16))
    theirs = peers.transformers_prompt(model, prompts)
    cache, paging = new_cache(SMALL, KVSpec("fp32").plan(SMALL.num_layers), sequences=2, tokens=16)
    ours = prefill_in_chunks(ReferenceExecutor(model), prompts, [paging.add() for _ in prompts], paging, cache)
    assert theirs.run(0) == ours.argmax(-1).tolist()
    # FP32, as the model
    assert theirs.kv_bytes == [2 * SMALL.heads.num_kv_heads * SMALL.heads.head_dim * 4] * SMALL.num_layers


def test_without_transformers_its_rows_say_so(run, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda _: None)
    code, out, _ = run("decode", "--only", "prompt", "--peers", "transformers", "--kv", "tq4", "--json")
    rows = {r["who"]: r for r in json.loads(out)["rows"]}
    assert code == 0
    assert rows["hf DynamicCache bf16"]["note"] == "transformers is not installed"
    assert "ms" not in rows["hf DynamicCache bf16"]
    assert rows["reference tq4"]["ms"] > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f16", ["f16 flash", "f16 plain"]),
        ("q8_0,q4_0", ["q8_0 flash", "q4_0 flash"]),
        ("f16:plain, f16:plain,bf16:flash", ["f16 plain", "bf16 flash"]),
        ("q2_k", "q2_k"),
        ("", "choose from"),
        ("q8_0:plain", "q8_0:flash"),
    ],
)
def test_a_quantized_cache_is_read_by_flash_attention_alone(text, expected):
    if isinstance(expected, list):
        assert [kind.name for kind in llama_process.parse_kinds(text)] == expected
    else:
        with pytest.raises(InputError, match=expected):
            llama_process.parse_kinds(text)


def test_without_the_package_the_line_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(llama_process, "find_spec", lambda _: None)
    code, out, error = run("decode", "--peers", "llama.cpp", "--kv", "tq4")
    assert (code, out, len(error.strip().splitlines())) == (2, "", 1)
    assert "pip install -r lab/requirements.txt" in error


def test_a_model_that_a_gguf_is_not_written_of_is_refused(monkeypatch):
    monkeypatch.setattr(llama_process, "require", lambda: None)
    model = small_model()
    other = replace(model, config=resize_config(model.config, model_type="llama"))
    with pytest.raises(InputError, match="no peer of random:small: a GGUF is written of qwen3"):
        Peers(["llama.cpp"], "random:small", None)._llama(other)
    assert gguf_file.unsupported_reason(model.config) is None


def test_a_prompt_within_a_window_counts_what_its_queries_see():
    config, one = window_config(512), 4 * 256
    cost = prefill.prompt_attention_cost(config, Case(2, 4096), one)
    pairs, heads = sum(min(tokens, 512) for tokens in range(1, 4097)), config.attentions[0].heads
    assert (cost.kv, cost.flops) == (2 * 4096 * one, 2 * pairs * 4 * heads.num_heads * heads.head_dim)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--peers", "vllm"], ["vllm", "choose from sdpa, transformers, llama.cpp"]),
        (["--peer-kv", "q8_0:plain"], ["q8_0:flash"]),
        (["--kv", "tq9"], ["tq9", "choose from"]),
    ],
)
def test_bad_input_is_one_line_and_2(run, args, words):
    code, out, error = run("decode", *args)
    assert (code, out, len(error.strip().splitlines())) == (2, "", 1)
    assert all(word in error for word in words)


def test_torch_is_timed_beside_ours_with_its_bytes(run):
    code, out, _ = run("decode", "--kv", "tq4", "--only", "attention", "--json")
    rows = json.loads(out)["rows"]
    sizes = {r["who"]: r["cost"]["kv"] for r in rows if r["kind"] == "attention"}
    bf16 = 40 * 2 * 2 * 64
    assert code == 0
    assert sizes == {
        "reference tq4": 40 * 2 * 2 * 18, "sdpa bf16 rows": bf16, "sdpa bf16 gqa": bf16, "sdpa fp32 rows": 2 * bf16,
        "torch bf16 products": bf16,
    }  # fmt: skip


def test_a_speed_up_is_over_the_fastest_peer_of_the_same_kind_and_case():
    def row(who, ms, context=64, kind="step", batch=1):
        peer = not who.startswith("cpu")
        return CostRow(kind, who, Case(batch, context), Cost(1, 1, 1, 1), MACHINE, Spread(ms, ms, ms), peer=peer)

    peer_rows = [row("sdpa bf16 rows", 5.0), row("hf DynamicCache bf16", 3.0), row("cpu bf16", 1.0)]
    rows = [
        row("cpu tq4", 2.0),
        *peer_rows,
        row("sdpa a", 0.5, context=65),
        row("sdpa a", 0.5, kind="attention"),
        row("cpu tq4", 3.0, batch=2),
        row("sdpa a", 6.0, batch=2),
    ]
    request = decode.Request("small", [], ["tq4"], [64], [1])
    report = peers.beside_peers(decode.report("decode", request, MACHINE, rows), rows)
    assert [value.get("speed_up") for value in report.values["rows"]] == [1.5, None, None, 3.0, None, None, 2.0, None]
    assert "step of cpu tq4, batch 1, 64 tokens: 1.50 times as fast as hf DynamicCache bf16" in report.notes[1]
    assert "step of cpu tq4, batch 2, 64 tokens: 2.00 times as fast as sdpa a" in report.notes[1]
