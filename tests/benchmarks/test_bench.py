"""The decode benchmark: what it says must move, fair turns, and a command that measures what it names."""

import json
import math

import pytest
import torch
from checkpoints import write_checkpoint
from small_models import SMALL, small_model

from haarkv.benchmarks import decode, decode_peers, timing
from haarkv.benchmarks.decode_cost import Case, attention_cost, row, step_cost
from haarkv.benchmarks.timing import Machine, Spread, take_turns
from haarkv.models.base import DecoderModel
from haarkv.models.qwen3_14b.config import QWEN3_14B
from haarkv.models.qwen3_14b.weights import LayerWeights, Weights
from haarkv.tq_ops.kv.plan import KVSpec
from tq.cli import main

MACHINE = Machine(copy_gbps=10, fp32_gflops=50, bf16_gflops=100)


def qwen3_14b():
    """The true shapes without the numbers."""
    c = QWEN3_14B

    def empty(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = LayerWeights(
        input_norm=empty(c.hidden_size), q_proj=empty(q, c.hidden_size), k_proj=empty(kv, c.hidden_size),
        v_proj=empty(kv, c.hidden_size), q_norm=empty(c.head_dim), k_norm=empty(c.head_dim),
        o_proj=empty(c.hidden_size, q), post_norm=empty(c.hidden_size), gate_proj=empty(c.intermediate_size, c.hidden_size),
        up_proj=empty(c.intermediate_size, c.hidden_size), down_proj=empty(c.hidden_size, c.intermediate_size),
    )  # fmt: skip
    table, head = empty(c.vocab_size, c.hidden_size), empty(c.vocab_size, c.hidden_size)
    return DecoderModel(c, Weights(table, (layer,) * c.num_layers, empty(c.hidden_size), head), None)


@pytest.mark.parametrize(("kv", "gigabytes"), [("bf16", 5.37), ("tq4", 1.384)])
def test_a_step_of_the_14b_must_move_what_arithmetic_says(kv, gigabytes):
    """29.5 GB of weights but for the embedding, of which a step reads rows only; 163,840 bytes a token in bf16."""
    plan = KVSpec(kv).plan(40)
    cost = step_cost(qwen3_14b(), Case(1, 32768), plan.bytes_per_token(8, 128))
    assert math.isclose(cost.weights + 2 * 151936 * 5120, 29.5e9, rel_tol=2e-3)
    assert math.isclose(cost.kv, gigabytes * 1e9, rel_tol=2e-3)
    assert cost.flops == 2 * cost.weights / 2 + 40 * attention_cost(QWEN3_14B, Case(1, 32768), 0, 0).flops


def test_attention_of_one_layer():
    cost = attention_cost(QWEN3_14B, Case(8, 4096), 2 * 8 * 66, 2)
    assert (cost.weights, cost.kv, cost.rest) == (0, 8 * 4096 * 1056, 2 * 8 * 40 * 128 * 2)
    assert cost.flops == 8 * 40 * 4096 * 128 * 4  # two products, a multiplication and an addition each


def test_the_floor_is_the_longer_of_bytes_and_operations():
    assert MACHINE.floor_ms(10e9, 1) == 1000
    assert MACHINE.floor_ms(1, 100e9) == 1000
    cost = attention_cost(QWEN3_14B, Case(1, 1024), 1056, 2)
    made = row("attention", "cpu tq4", Case(1, 1024), cost, MACHINE, Spread(2.0, 1.0, 3.0))
    assert made.of_floor == 2.0 / MACHINE.floor_ms(cost.nbytes, cost.flops)
    assert math.isclose(made.gbps, cost.nbytes / 2e-3 / 1e9)
    assert math.isclose(made.of_copy, made.gbps / 10)


def test_variants_take_turns_and_warm_up_does_not_count(monkeypatch):
    seen, times = [], iter([90.0, 90.0, 1.0, 10.0, 3.0, 20.0, 2.0, 30.0])
    monkeypatch.setattr(timing, "clock", lambda _: lambda run: (run(), next(times))[1])
    monkeypatch.setattr(timing, "flusher", lambda _: lambda: seen.append("flush"))
    runs = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    result = take_turns(runs, torch.device("cpu"), repeats=3, warm_up=1)
    assert seen == ["flush", "a", "flush", "b"] * 4
    assert result == {"a": Spread(2000.0, 1000.0, 3000.0), "b": Spread(20000.0, 10000.0, 30000.0)}


def test_sdpa_gets_the_same_attention_in_every_form():
    q, k, v = torch.randn(2, 10, 64), *(torch.randn(2, 2, 33, 64).bfloat16() for _ in "kv")
    runs = decode_peers.sdpa(q, k, v)
    assert {"sdpa bf16 rows", "sdpa bf16 gqa"} <= runs.keys()
    rows, whole = runs["sdpa bf16 rows"]().view(2, 10, 64), runs["sdpa bf16 gqa"]().view(2, 10, 64)
    torch.testing.assert_close(rows.float(), whole.float(), rtol=0, atol=2e-2)
    scores = torch.einsum("bgrd,bgsd->bgrs", q.bfloat16().double().view(2, 2, 5, 64), k.double()) / 8
    expected = (scores.softmax(-1) @ v.double()).view(2, 10, 64)
    torch.testing.assert_close(rows.double(), expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("spec", [KVSpec("tq4"), KVSpec("tq4", tail=5), KVSpec("k=tq4,v=bf16", skip_layers=(1,))])
def test_every_layer_of_a_filled_cache_holds_the_case(spec):
    case, plan = Case(2, 70), spec.plan(SMALL.num_layers)
    k, v = decode.random_kv(SMALL, case, torch.device("cpu"))
    cache, paging = decode.filled(plan, SMALL, case, k, v, 3)
    assert [paging.length(s) for s in range(2)] == [69, 69]
    batch = paging.batch([0, 1], [1, 1])
    for layer in range(SMALL.num_layers):
        stored_k, stored_v = cache.read(layer, batch.block_table)
        # Layer 0's bytes serve all layers of its format, so a rotated vector comes back turned: its length tells.
        for stored, x in ((stored_k, k), (stored_v, v)):
            ratio = stored[:, :, :69].norm(dim=-1) / x[:, :, :69].float().norm(dim=-1)
            assert ((ratio - 1).abs() < 0.02).all()


def test_transformers_steps_continue_the_same_cache():
    """Their logits after the same K and V are ours, so both sides of the comparison do the same work."""
    pytest.importorskip("transformers")
    from haarkv.executors.reference import ReferenceExecutor

    model, case = small_model(), Case(2, 20)
    k, v = decode.random_kv(SMALL, case, torch.device("cpu"))
    cache, paging = decode.filled(KVSpec("fp32").plan(SMALL.num_layers), SMALL, case, k, v, 2)
    ours = ReferenceExecutor(model).decode(torch.arange(2), paging.batch([0, 1], [1, 1]), cache).argmax(-1).tolist()
    peers = {peer.name: peer for peer in decode_peers.transformers_steps(model, 2, k, v)}
    assert peers["hf DynamicCache bf16"].run() == ours
    for name in ("hf quanto 4-bit", "hf hqq 4-bit"):
        assert peers[name].run is not None or peers[name].note


# -- The commands ----------------------------------------------------------------------------------------------------------
QUICK = ["--executor", "reference", "--repeats", "1", "--contexts", "40"]


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """A small checkpoint, and a machine that is measured by a glance."""
    monkeypatch.setattr(timing, "_COPY_BYTES", 2**16)
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 2**16)
    monkeypatch.setattr(timing, "_MATRIX", 16)
    checkpoint = write_checkpoint(tmp_path / "checkpoint")

    def run(name, *args):
        code = main(["bench", name, "--model", str(checkpoint), *args])
        return code, *capsys.readouterr()

    return run


def test_bench_decode_measures_what_it_names(run):
    code, out, _ = run("decode", *QUICK, "--kv", "tq4", "--only", "attention", "--json")
    result = json.loads(out)
    assert (code, result["benchmark"]) == (0, "decode")
    assert {r["who"] for r in result["rows"]} == {"reference tq4", "sdpa bf16 rows", "sdpa bf16 gqa"}
    assert all(r["ms"] > 0 and r["low"] <= r["ms"] <= r["high"] and r["context"] == 40 for r in result["rows"])
    sizes = {r["who"]: r["cost"]["kv"] for r in result["rows"]}
    assert sizes == {"reference tq4": 40 * 2 * 2 * 18, "sdpa bf16 rows": 40 * 2 * 2 * 64, "sdpa bf16 gqa": 40 * 2 * 2 * 64}
    assert result["machine"]["copy_gbps"] > 0


def test_without_an_executor_the_fastest_that_reads_a_format_is_measured(monkeypatch):
    from haarkv.executors import catalog
    from tq.commands.bench_decode import _request

    monkeypatch.setattr(
        catalog, "_HERE", {name: lambda name=name: name in ("cpu", "reference") for name in catalog.FASTEST_FIRST}
    )
    given = {
        "model": "tiny", "contexts": (8,), "batches": (1,), "dtype": "bfloat16", "layers": None, "device": None, "repeats": 1,
        "threads": None,
    }  # fmt: skip
    for executors, kvs, expected in (
        (["auto"], [], ["cpu"]),
        (["auto"], ["bf16"], ["reference"]),
        (["auto", "cpu", "reference"], ["tq4"], ["cpu", "reference"]),
    ):
        assert _request({**given, "executors": executors, "kvs": kvs}).executors == expected


def test_bench_ops_measures_each_op(run):
    code, table, _ = run("ops", *QUICK, "--kv", "tq4")
    assert code == 0
    assert "store_kv" in table
    assert "{" not in table  # JSON only when asked
    code, line, _ = run("ops", *QUICK, "--kv", "tq4", "--json")
    assert (code, line.count("\n")) == (0, 1)
    rows = json.loads(line)["rows"]
    assert {(r["op"], r["new_tokens"]) for r in rows} == {(op, 1) for op in ("quantize", "store_kv", "paged_attention")}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--contexts", "0"], ["--contexts", "positive integers"]),
        (["--batches", "x"], ["--batches", "positive integers"]),
        (["--kv", "tq9"], ["tq9", "choose from"]),
        (["--executor", "gpu"], ["gpu", "choose from"]),
        (["--executor", "npu", "--kv", "bf16", "--device", "sim"], ["cannot run"]),
        (["--contexts", "999999"], ["room for", "999999"]),
        (["--plot", "absent/p.svg"], ["absent/p.svg", "does not exist"]),
    ],
)
def test_bad_input_is_one_line_and_2(run, args, words):
    quick = [a for a in QUICK if args[0] != "--executor" or a not in ("--executor", "reference")]
    code, out, error = run("decode", *quick, *args)
    assert (code, out) == (2, "")
    assert len(error.strip().splitlines()) == 1
    assert all(word in error for word in words)
