"""The decode benchmark: what it says must move, fair turns, and a command that measures what it names."""

import json
import math
from dataclasses import replace

import pytest
import torch
from small_models import SMALL, gemma_config, resize_config, small_model, window_config, without_numbers

from haarkv.benchmarks import cases, report
from haarkv.benchmarks.cases import Case, benchmark_plan, parse_caches
from haarkv.benchmarks.decode_cost import CostRow, attention_cost, step_cost, store_cost
from haarkv.benchmarks.timing import Machine, Spread
from haarkv.engine.plans import shape_signature
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import read_config
from haarkv.models.families import SIZES
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.plan import KVSpec

MACHINE = Machine(copy_gbps=10, fp32_gflops=50, bf16_gflops=100)


@pytest.mark.parametrize(("kv", "gigabytes"), [("bf16", 5.37), ("tq4", 1.384)])
def test_a_step_of_the_14b_must_move_what_arithmetic_says(kv, gigabytes):
    """29.5 GB of weights but for the embedding, of which a step reads rows only; 163,840 bytes a token in bf16."""
    plan = KVSpec(kv).plan(40)
    cost = step_cost(without_numbers(SIZES["14b"]), Case(1, 32768), cases.token_bytes(plan, SIZES["14b"]))
    assert math.isclose(cost.weights + 2 * 151936 * 5120, 29.5e9, rel_tol=2e-3)
    assert math.isclose(cost.kv, gigabytes * 1e9, rel_tol=2e-3)
    assert cost.flops == 2 * cost.weights / 2 + 40 * attention_cost(SIZES["14b"], Case(1, 32768), 0, 0).flops


def test_attention_and_storing_of_one_layer():
    case, nbytes = Case(8, 4096), 2 * 8 * 66
    cost = attention_cost(SIZES["14b"], case, nbytes, 2)
    assert (cost.weights, cost.kv, cost.rest) == (0, 8 * 4096 * 1056, 2 * 8 * 40 * 128 * 2)
    assert cost.flops == 8 * 40 * 4096 * 128 * 4  # two products, a multiplication and an addition each
    assert store_cost(SIZES["14b"], case, nbytes).nbytes == 8 * (nbytes + 2 * 8 * 128 * 4)


def test_the_floor_is_the_longer_of_bytes_and_operations():
    assert MACHINE.floor_ms(10e9, 1) == 1000
    assert MACHINE.floor_ms(1, 100e9) == 1000
    cost = attention_cost(SIZES["14b"], Case(1, 1024), 1056, 2)
    figures = CostRow("attention", "cpu tq4", Case(1, 1024), cost, MACHINE, Spread(2.0, 1.0, 3.0)).figures()
    assert figures["of_floor"] == 2.0 / MACHINE.floor_ms(cost.nbytes, cost.flops)
    assert math.isclose(figures["gbps"], cost.nbytes / 2e-3 / 1e9)
    assert math.isclose(figures["of_copy"], figures["gbps"] / 10)


@pytest.mark.parametrize("kv", ["tq4", "fp32"])
def test_every_copy_gives_the_attention_of_its_layer(kv, monkeypatch):
    """Another layer of the same cache, whose last token has been stored: what is timed is the whole work."""
    monkeypatch.setattr(cases, "MOST_COPIES", 3)
    model, case = small_model(), Case(2, 40)
    k, v = cases.random_kv(SMALL, case, torch.device("cpu"))
    request = cases.Measurement({}, model, case, k, v, MACHINE, lambda *_: (), 1, print)
    executor = ReferenceExecutor(model)
    attend, _, nbytes = cases.attention_runs(executor, KVSpec(kv).plan(SMALL.num_layers), request)
    q = request.queries
    assert nbytes == cases.token_bytes(KVSpec(kv).plan(1), cases.layers_in_turn(KVSpec(kv).plan(3), SMALL, 1)[1])
    exact = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k.float(), v.float(), enable_gqa=True)[:, :, 0]
    outputs = [attend(number) for number in range(4)]
    assert torch.equal(outputs[0], outputs[3])
    if kv == "fp32":
        for out in outputs:
            torch.testing.assert_close(out.float(), exact, rtol=0, atol=2e-2)
    else:  # the same codes by another layer's rotation are other vectors
        assert not torch.equal(outputs[0], outputs[1])


def test_layers_that_are_stored_unlike_take_turns_themselves():
    """Learned keys have no coordinates beyond the model's last layer, and one layer does not stand for others."""
    like_first = cases.layers_in_turn(KVSpec("tq4").plan(SMALL.num_layers), SMALL, 7)[1]
    assert like_first.num_layers == 7
    calibration = synthetic.calibration(SMALL.num_layers, SMALL.heads.num_kv_heads, SMALL.heads.head_dim)
    learned_plan = KVSpec("k=lr4,v=tq4", calibration=calibration).plan(SMALL.num_layers)
    plan, config = cases.layers_in_turn(learned_plan, SMALL, 7)
    assert (plan.layers, config.num_layers) == (learned_plan.layers, SMALL.num_layers)
    mixed_plan = replace(learned_plan, layers=(*KVSpec("tq3").plan(1).layers, *KVSpec("tq4").plan(2).layers))
    assert cases.layers_in_turn(mixed_plan, SMALL, 7)[0].layers == mixed_plan.layers
    gemma = gemma_config(num_layers=5)
    plan, config = cases.layers_in_turn(replace(mixed_plan, layers=(*mixed_plan.layers, *mixed_plan.layers[:2])), gemma, 7)
    assert config.layers == (gemma.layers[0],) * 3
    assert plan.layers == (mixed_plan.layers[0], mixed_plan.layers[2], mixed_plan.layers[1])


# -- Layers that differ, and prompts --------------------------------------------------------------------------------------
def test_a_layer_with_a_window_counts_what_it_sees():
    """Gemma 3 270M: of 18 layers three keep all tokens, the others see 512, all of one KV head of 256."""
    config = SIZES["gemma-270m"]
    model, one, nbytes = without_numbers(config), 4 * 256, cases.token_bytes(KVSpec("bf16").plan(18), config)
    assert nbytes == [one] * 18
    near, far = (step_cost(model, Case(2, context), nbytes) for context in (500, 4096))
    assert near.kv == 2 * 18 * 500 * one
    assert far.kv == 2 * (3 * 4096 + 15 * 512) * one
    assert near.weights == far.weights
    pair = 4 * 4 * 256  # two products of four heads
    assert far.flops - near.flops == 2 * (3 * (4096 - 500) + 15 * 12) * pair
    attention = attention_cost(config, Case(2, 4096), one, 2)
    assert attention.kv == 2 * 512 * one
    assert attention.flops == 2 * 512 * pair
    # The query at position i of a prompt sees i + 1 tokens, 512 at most.
    pairs = sum(min(tokens, 512) for tokens in range(1, 4097))
    whole = step_cost(model, Case(1, 4096), nbytes, new=4096)
    assert whole.kv == 18 * 4096 * one
    assert whole.flops - 4096 * step_cost(model, Case(1, 0), nbytes).flops == (
        (15 * pairs + 3 * 4096 * 4097 // 2) * pair - 2 * 4095 * config.vocab_size * config.hidden_size
    )


def test_experts_count_as_many_as_tokens_choose():
    config = resize_config(SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
    model, nbytes = without_numbers(config), [0.0] * SMALL.num_layers
    one = 3 * 16 * config.hidden_size
    few, all_of_them = (step_cost(model, Case(batch, 0), nbytes) for batch in (1, 5))
    assert all_of_them.weights - few.weights == 2 * 6 * one * SMALL.num_layers
    assert all_of_them.flops == 5 * few.flops


def test_every_layer_of_a_filled_cache_attends_within_its_window():
    config, case = window_config(24, None, 24, 200), Case(2, 1000)
    k, v = cases.random_kv(config, case, torch.device("cpu"))
    cache, paging = cases.filled_cache(KVSpec("fp32").plan(4), config, case, k, v, 1)
    batch, q = paging.batch([0, 1], [1, 1]), torch.randn(2, 10, 128)
    for layer, mixer in enumerate(config.attentions):
        reference.store_kv(*(cases.as_rows(x[:, :, -1:]) for x in (k, v)), cache.view(layer, batch))
        out = reference.paged_attention(q, cache.view(layer, batch), mixer.scale)
        near = (x[:, :, -cases.visible_tokens(mixer.window, 1000) :] for x in (k, v))
        k_seen, v_seen = (x.float() for x in near)
        exact = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k_seen, v_seen, enable_gqa=True)[:, :, 0]
        torch.testing.assert_close(out, exact, rtol=0, atol=2e-2)


# -- The commands ----------------------------------------------------------------------------------------------------------
def test_bench_decode_measures_what_it_names(run):
    kinds = [part for kind in ("attention", "step", "prompt") for part in ("--only", kind)]
    code, out, _ = run("decode", "--kv", "tq4", *kinds, "--batches", "2", "--json")
    result = json.loads(out)
    assert (code, result["benchmark"], result["context"], result["kv"]) == (0, "decode", [40], ["tq4"])
    assert set(result["versions"]) >= {"python", "torch"}
    assert result["limits"]["copy_gbps"] > 0
    rows = {r["kind"]: r for r in result["rows"]}
    assert rows.keys() == {"attention", "store", "step", "prompt"}
    assert all(
        r["who"] == "reference tq4" and 0 < r["low"] <= r["ms"] <= r["high"] and r["first_ms"] > 0 for r in rows.values()
    )
    assert rows["attention"]["cost"]["kv"] == 2 * 40 * 2 * 2 * 18
    assert rows["step"]["ms_per_token"] == rows["step"]["ms"] / 2
    assert rows["prompt"]["tokens_per_s"] == 1e3 * 80 / rows["prompt"]["ms"]
    assert (rows["prompt"]["runs"], rows["step"]["runs"]) == (1, 3)
    assert rows["prompt"]["cost"]["weights"] == rows["step"]["cost"]["weights"]


def test_the_file_of_a_plan_is_a_cache(run, tmp_path):
    config = read_config(tmp_path / "checkpoint")
    plan = benchmark_plan("k=tq6,v=tq4/tq4+tail8+sink2", config)
    file = tmp_path / "mine.json"
    plan_file.save(file, plan, shape_signature(config))
    assert benchmark_plan(str(file), config) == plan
    others = "tq4/k=tq4,v=tq3+tail8", "k=lr3,v=tq4"
    code, out, _ = run("decode", "--kv", ",".join(("tq4", str(file), *others)), "--only", "step")
    assert code == 0
    for who in ("mine.json", *others):
        assert f"reference {who} at 40 tokens: " in out
    assert out.count("of reference tq4's time") == 3
    assert str(file) not in out


def test_a_cache_of_the_benchmark_becomes_its_plan():
    plan = benchmark_plan("tq4/k=bf16,v=tq3+tail8+sink2", SMALL)
    names = [(k.name, v.name) for k, v in plan.layers]
    assert names == [("tq4", "tq4"), ("bf16", "tq3"), ("tq4", "tq4")]
    assert (plan.recent, plan.sink) == (8, 2)
    assert benchmark_plan("tq4", SMALL) == KVSpec("tq4").plan(SMALL.num_layers)
    assert benchmark_plan("k=lr3,v=tq4+tail8", SMALL).recent == 8
    for wrong in ("tq4+head3", "tq4+tail", "k=tq4", "", "tq4/", "tq9/tq4"):
        with pytest.raises(InputError):
            parse_caches([wrong])


def test_a_step_goes_on_from_a_full_cache_and_each_prompt_from_none():
    lengths = []

    class WatchedExecutor(ReferenceExecutor):
        def forward(self, token_ids, batch, cache):
            lengths.append(batch.seq_lens.tolist())
            return super().forward(token_ids, batch, cache)

    executor, plan = WatchedExecutor(small_model()), KVSpec("tq4").plan(SMALL.num_layers)
    for kind, expected in (("step", [[20], [21], [22]]), ("prompt", [[20], [20], [20]])):
        lengths.clear()
        run = cases.forward_run(kind, executor, plan, Case(1, 20), 1)
        for number in range(3):
            run(number)
        assert lengths == expected


def test_logits_of_one_value_are_refused():
    class Empty(ReferenceExecutor):
        def forward(self, token_ids, batch, cache):
            return super().forward(token_ids, batch, cache) * 0.0

    with pytest.raises(InputError, match=r"a step in tq4 at 20 tokens gives nothing but 0\.0"):
        cases.forward_run("step", Empty(small_model()), KVSpec("tq4").plan(SMALL.num_layers), Case(1, 20), 1)(0)


def test_steps_of_a_model_with_states_count_them(run):
    code, out, _ = run("decode", "--model", "tiny-hybrid", "--kv", "tq4", "--json", "--only", "step")
    (row,) = json.loads(out)["rows"]
    config = read_config("tiny-hybrid")
    states = sum(shape.nbytes // shape.versions for shape in config.state_shapes.values())
    assert (code, row["ms"] > 0) == (0, True)
    assert row["cost"]["kv"] == 2 * states + row["context"] * 2 * 2 * 66


# -- Lines -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", sorted(report.RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_saved_results_are_whole_lines_that_name_benchmark_and_date(path):
    for result in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        assert result["benchmark"] == path.stem
        assert result["date"] >= "2026-"


def test_lines_are_appended_and_no_value_takes_the_place_of_the_header(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    result_report = report.Report(
        "decode", "tiny", [8, 16], ["tq4"], {"kv": "none", "rows": [1]}, [], packages=("numpy", "nothing")
    )
    result_report.save()
    result_report.save()
    results = [json.loads(line) for line in (tmp_path / "decode.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(results) == 2
    for result in results:
        assert [result[name] for name in ("model", "context", "kv", "rows")] == ["tiny", [8, 16], ["tq4"], [1]]
        assert set(result["versions"]) == {"python", "torch", "numpy"}
        assert result["cpu"]
        assert result["threads"] == torch.get_num_threads()
