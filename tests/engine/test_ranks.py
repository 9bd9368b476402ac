"""Ranks as processes over gloo: together they are one process, each with its part of weights and cache."""

from importlib.util import find_spec

import pytest
import torch
from at_length import MORE, rest
from bounds import REORDERED_KV, REORDERED_LOGITS
from ranks import alone, on_ranks, rank_validation, run_small
from small_models import SMALL, resize_config

from haarkv.engine.ranks import join
from haarkv.executors.catalog import refusal
from haarkv.models.parallel import Alone
from haarkv.tq_ops.errors import InputError

FOUR = resize_config(SMALL, num_heads=8, num_kv_heads=4, num_layers=2)
MODELS = {
    "4 KV heads on 2": (2, FOUR),
    "4 KV heads on 4": (4, FOUR),
    "2 KV heads on 4, each held twice": (4, resize_config(FOUR, num_kv_heads=2)),
    "a tied head": (2, resize_config(FOUR, tie_word_embeddings=True)),
    "biases": (2, resize_config(FOUR, model_type="qwen2", bias=True)),
    "experts": (
        2,
        resize_config(
            FOUR, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
        ),
    ),
}
FEW = ("2 KV heads on 4, each held twice", "experts")
KV_SPLITS = ("2 KV heads on 4, each held twice", "4 KV heads on 4")
LENGTHS, STEPS = (37, 5), 2


def test_a_script_that_torchrun_did_not_start_is_told_so():
    with pytest.raises(InputError, match="start this script with torchrun"), join():
        pass


# The rest runs with `make test-long`.
@pytest.mark.parametrize("name", rest(MORE, MODELS, lambda _, name: name in FEW))
def test_together_they_are_one_process(name):
    """In FP32 with a cache that rounds nothing, only the order of FP32 sums is another."""
    size, config = MODELS[name]
    args = ("reference", config, torch.float32, "fp32", LENGTHS, STEPS)
    one, many = alone(*args), on_ranks(size, run_small, *args)
    assert (many[0]["logits"] - one["logits"]).abs().max() <= REORDERED_LOGITS
    for rank in many[1:]:
        # To the last bit: else tokens and experts could be chosen apart.
        assert torch.equal(rank["logits"], many[0]["logits"])
        assert torch.equal(rank["hidden"], many[0]["hidden"])
    shares = max(1, size // config.heads.num_kv_heads)
    for layer in range(config.num_layers):
        for side in "kv":
            whole = one["fields"][layer][side]
            for name, values in whole.items():
                parts = torch.cat([rank["fields"][layer][side][name] for rank in many[::shares]], dim=1)
                error = (parts - values).norm(dim=-1) / values.norm(dim=-1).clamp(min=1e-9)
                assert error.max() <= REORDERED_KV


# The rest runs with `make test-long`.
@pytest.mark.parametrize(("size", "config"), rest(MORE, (MODELS[name] for name in KV_SPLITS), lambda i, _: i == 0))
def test_a_rank_holds_its_part_of_the_cache_and_no_more(size, config):
    """Of the weights, `test_parallel` says so."""
    args = ("reference", config, torch.bfloat16, "tq4", (5,), 0)
    one, many = alone(*args), on_ranks(size, run_small, *args)
    assert [rank["kv"] for rank in many] == [one["kv"] // min(size, config.heads.num_kv_heads)] * size


@pytest.mark.parametrize(
    ("executor", "dtype"),
    [("cpu", torch.bfloat16), pytest.param("reference", torch.float32, marks=MORE)],  # `make test-long`
)
def test_layer_by_layer_they_are_within_the_bounds_of_an_executor(executor, dtype):
    report, nothing = on_ranks(2, rank_validation, executor, FOUR, dtype, LENGTHS, 1)
    assert nothing is None
    assert report.passed, report.first_divergence
    forwards = 4  # prefill, decode, verify, and decode behind it
    assert len(report.rows) == 2 * forwards * FOUR.num_layers


@pytest.mark.skipif(find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.cuda_long
def test_so_are_they_over_the_cuda_table():
    config = resize_config(FOUR, num_heads=4, num_kv_heads=2, num_layers=1)
    report, _ = on_ranks(2, rank_validation, "cuda", config, torch.bfloat16, (3,), 0)
    assert report.passed, report.first_divergence


@pytest.mark.parametrize("executor", ["npu", "onnx"])
def test_programs_of_whole_layers_are_refused(executor):
    assert "ranks must meet twice" in refusal(executor, FOUR, [], ranks=Alone(0, 2))
    assert refusal("cpu", FOUR, [], ranks=Alone(0, 2)) is None


FAULTS = {"a sum is left out": "attention_mlp", "a rank has another's keys": "store_kv.k"}


@pytest.mark.parametrize(("fault", "stage"), FAULTS.items(), ids=FAULTS)
def test_a_fault_of_ranks_is_found(fault, stage):
    report, _ = on_ranks(2, rank_validation, "reference", FOUR, torch.bfloat16, (9,), 0, fault)
    assert not report.passed
    assert (report.first_divergence.layer, report.first_divergence.stage) == (0, stage)
