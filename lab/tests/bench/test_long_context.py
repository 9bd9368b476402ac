"""Long contexts: steps see what was stored, memory is what the prediction says."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from checkpoints import write_checkpoint

from haarkv.models.catalog import read_config
from haarkv.tq_ops.errors import InputError
from lab.bench.__main__ import main
from lab.bench.long_context import Held, Request, extended, loaded, measure, memory_row

SMALL = {"head_dim": 64, "max_position_embeddings": 256}


@pytest.fixture
def request_of(tmp_path):
    folder = write_checkpoint(tmp_path / "m", config=SMALL)

    def request_of(**changed):
        given = {
            "model": str(folder), "layers": None, "dtype": "float32", "executor": "cpu", "kv": "tq4", "context": 700,
            "prefill": 100, "steps": 2, "threads": 1,
        }  # fmt: skip
        return Request(**(given | changed))

    return request_of


def test_a_case_stores_its_history_and_goes_on(request_of):
    """700 tokens in a model of 256 positions, by YaRN; K and V of the history are as random as they should be."""
    request = request_of()
    assert request.config.max_position_embeddings == 703
    assert request.config.common.attention.rope.scaling.factor == 703 / 256
    executor = loaded(request)
    held = Held(request, executor, 700, 100)
    assert held.paging.length(held.sequence) == 600
    k, v = held.cache.read(1, torch.arange(4, dtype=torch.int32).unsqueeze(0))
    assert abs(float(k.std()) - 1) < 0.02
    assert abs(float(v.std()) - 1) < 0.02
    assert held.prefill(100) > 0
    assert held.step() > 0
    assert held.paging.length(held.sequence) == 701


def test_memory_is_what_was_predicted(tmp_path, capsys):
    """A cache of 78 MiB beside small weights, in a process of its own."""
    folder = write_checkpoint(tmp_path / "m", config=SMALL | {"head_dim": 128})
    args = ["--model", str(folder), "--dtype", "float32", "--kv", "bf16", "--contexts", "40000", "--prefill", "300",
            "--steps", "1", "--json"]  # fmt: skip
    assert main(["long-context", *args]) == 0
    line = json.loads(capsys.readouterr().out)
    (row,) = line["rows"]
    assert (line["context"], line["kv"]) == ([40000], ["bf16"])
    assert row["predicted_bytes"] == row["weight_bytes"] + row["kv_bytes"]
    assert row["cache_bytes"] == row["kv_bytes"]
    # What the program itself grows by, and what stays of a chunk, is some MB: nothing beside a real model.
    assert -0.02 * row["predicted_bytes"] < row["resident_bytes"] - row["predicted_bytes"] < 48 * 2**20
    assert row["peak_bytes"] > row["kv_bytes"]


@pytest.mark.long
def test_a_long_prompt_takes_no_more_memory_than_a_short_one(tmp_path):
    """Layers as wide as the 0.6B shape's, whose chunks hold 18 MB of numbers at a time; in processes of their own.

    Gaps in malloc's heap, without what is handed back between chunks, add 30 MB from 1,024 to 6,144 tokens.
    """
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    wide = {"hidden_size": 1024, "intermediate_size": 3072, **heads}
    folder = write_checkpoint(tmp_path / "m", config=wide | {"max_position_embeddings": 8192})
    prompts, beside = {}, {}
    for context in (1025, 6145):
        request = Request(str(folder), None, "bfloat16", "cpu", "tq4", context, context - 1, 1, 1)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            line = process.submit(memory_row, request).result()
        prompts[context] = line["prompt_bytes"]
        # Of the whole process: what is resident before the prompt differs from run to run.
        beside[context] = line["peak_bytes"] - line["predicted_bytes"]
    assert max(prompts.values()) < 64 * 2**20, prompts
    assert beside[6145] - beside[1025] < 12 * 2**20, beside


def test_what_cannot_be_measured_is_refused(request_of, capsys):
    with pytest.raises(InputError, match=r"op by op|not built|cannot"):
        loaded(request_of(executor="onnx"))
    with pytest.raises(InputError, match="unknown"):
        list(measure([request_of(kv="tq77")]))
    with pytest.raises(InputError, match="lower --prefill"):
        list(measure([request_of(context=100)]))
    for args in (["--contexts", "a"], ["--steps", "0"]):
        assert main(["long-context", *args]) == 2
    assert capsys.readouterr().out == ""


def test_a_model_of_too_few_positions_is_extended_once():
    plain = read_config("random:0.6b", 1)
    longer = extended(plain, plain.max_position_embeddings + 1)
    assert longer.max_position_embeddings == plain.max_position_embeddings + 1
    assert longer.common.attention.rope.scaling.factor == pytest.approx(1, abs=1e-4)
    assert extended(plain, plain.max_position_embeddings) is plain
    with pytest.raises(InputError, match="scaled already"):
        extended(longer, longer.max_position_embeddings + 1)
