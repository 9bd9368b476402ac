"""The decode benchmark of layers that differ: what a window sees, and which experts are read."""

import json

import pytest
import torch
from small_models import SMALL, resized, windowed, without_numbers

from haarkv.benchmarks import cases
from haarkv.benchmarks.cases import Case
from haarkv.benchmarks.decode_cost import attention_cost, layer_cost, step_cost, whole_prompt_cost
from haarkv.benchmarks.timing import Machine
from haarkv.models.families import SIZES
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.plan import KVSpec
from tq.cli import main

MACHINE = Machine(copy_gbps=10, fp32_gflops=50, bf16_gflops=100)


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
    attention, layer = attention_cost(config, Case(2, 4096), one, 2), layer_cost(model, Case(2, 4096), one)
    assert attention.kv == layer.kv == 2 * 512 * one
    assert attention.flops == 2 * 512 * pair
    # The query at position i of a prompt sees i + 1 tokens, 512 at most.
    pairs = sum(min(tokens, 512) for tokens in range(1, 4097))
    whole = whole_prompt_cost(model, 4096, nbytes)
    assert whole.kv == 18 * 4096 * one
    assert whole.flops - 4096 * step_cost(model, Case(1, 0), nbytes).flops == (
        (15 * pairs + 3 * 4096 * 4097 // 2) * pair - 2 * 4095 * config.vocab_size * config.hidden_size
    )


def test_experts_count_as_many_as_tokens_choose():
    config = resized(SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
    model, nbytes = without_numbers(config), [0.0] * SMALL.num_layers
    one = 3 * 16 * config.hidden_size
    few, all_of_them = (step_cost(model, Case(batch, 0), nbytes) for batch in (1, 5))
    assert all_of_them.weights - few.weights == 2 * 6 * one * SMALL.num_layers
    assert all_of_them.flops == 5 * few.flops


def test_every_layer_of_a_filled_cache_attends_within_its_window():
    config, case = windowed(24, None, 24, 200), Case(2, 1000)
    k, v = cases.random_kv(config, case, torch.device("cpu"))
    cache, paging = cases.filled(KVSpec("fp32").plan(4), config, case, k, v, 1)
    batch, q = paging.batch([0, 1], [1, 1]), torch.randn(2, 10, 128)
    for layer, mixer in enumerate(config.attentions):
        reference.store_kv(*(cases.as_rows(x[:, :, -1:]) for x in (k, v)), cache, layer, batch)
        out = reference.paged_attention(q, cache, layer, batch, mixer.scale)
        near = (x[:, :, -cases.seen(mixer.window, 1000) :] for x in (k, v))
        k_seen, v_seen = (x.float() for x in near)
        exact = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k_seen, v_seen, enable_gqa=True)[:, :, 0]
        torch.testing.assert_close(out, exact, rtol=0, atol=2e-2)


@pytest.mark.slow
def test_bench_decode_measures_a_model_whose_layers_differ(capsys, glance):
    args = ["--layers", "6", "--kv", "tq4", "--contexts", "600", "--repeats", "1", "--executor", "cpu", "--json"]
    assert main(["bench", "decode", "--model", "random:gemma-270m", *args]) == 0
    rows = {(row["kind"], row["who"]): row for row in json.loads(capsys.readouterr().out)["rows"]}
    one = 2 * (256 // 2 + 2)
    assert rows["attention", "cpu tq4"]["cost"]["kv"] == 512 * one
    assert rows["step", "cpu tq4"]["cost"]["kv"] == (5 * 512 + 600) * one
    assert all(rows[kind, "cpu tq4"]["ms"] > 0 for kind in ("attention", "store", "layer", "step"))
