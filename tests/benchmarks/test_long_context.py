"""Long contexts: lines are measured once, steps see what was stored, memory is what the prediction says."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from checkpoints import write_checkpoint

from haarkv.benchmarks import long_context
from haarkv.benchmarks.filled_cache import Case, Request, loaded
from haarkv.benchmarks.long_context import main, measure, memory_line
from haarkv.tq_ops.errors import InputError

SMALL = {"head_dim": 64, "max_position_embeddings": 256}


@pytest.fixture
def request_of(tmp_path):
    folder = write_checkpoint(tmp_path / "m", config=SMALL)

    def request_of(**changed):
        given = {
            "model": str(folder), "layers": None, "dtype": "float32", "executor": "cpu", "kv": "tq4", "contexts": (200, 700),
            "prefill": 100, "steps": 2, "threads": 1,
        }  # fmt: skip
        return Request(**(given | changed))

    return request_of


def test_a_case_stores_its_history_and_goes_on(request_of):
    """700 tokens in a model of 256 positions, by YaRN; K and V of the history are as random as they should be."""
    request = request_of()
    assert request.config.max_position_embeddings == 703
    assert request.config.rope_scaling.factor == 703 / 256
    executor = loaded(request)
    case = Case(request, executor, 700, 100)
    assert case.paging.length(case.sequence) == 600
    k, v = case.cache.read(1, torch.arange(4, dtype=torch.int32).unsqueeze(0))
    assert abs(float(k.std()) - 1) < 0.02
    assert abs(float(v.std()) - 1) < 0.02
    case.prefill(100)
    found = case.step()
    assert case.paging.length(case.sequence) == 701
    assert found["step"] == pytest.approx(found["attention"] + found["paging"] + found["rest"])
    assert min(found.values()) > 0


def test_lines_are_measured_once(request_of, monkeypatch):
    monkeypatch.setattr(long_context, "ProcessPoolExecutor", _Here)
    requests = [request_of(), request_of(kv="k=tq3,v=tq4")]
    lines = list(measure(requests))
    assert [(line["line"], line["kv"]) for line in lines] == [(a, r.kv) for a in ("steps", "memory") for r in requests]
    assert [row["context"] for row in lines[0]["at"]] == [200, 700]
    assert lines[2]["predicted_bytes"] == lines[2]["weight_bytes"] + lines[2]["kv_bytes"]
    assert lines[2]["cache_bytes"] == lines[2]["kv_bytes"]
    known = json.loads(json.dumps(lines[:3]))
    assert [(line["line"], line["kv"]) for line in measure(requests, known)] == [("memory", "k=tq3,v=tq4")]
    assert len(list(measure([request_of(steps=1)], known))) == 2


class _Here:
    """A pool whose process is this one."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def submit(self, run, *args):
        self.result = lambda: run(*args)
        return self


@pytest.mark.slow
def test_memory_is_what_was_predicted(tmp_path):
    """A cache of 78 MiB beside small weights, in a process of its own."""
    folder = write_checkpoint(tmp_path / "m", config=SMALL | {"head_dim": 128})
    out = tmp_path / "out"
    args = ["--model", str(folder), "--dtype", "float32", "--kv", "bf16", "--contexts", "300,40000", "--prefill", "300",
            "--steps", "1", "--out", str(out)]  # fmt: skip
    main(args)
    (line,) = [found for found in map(json.loads, out.read_text().splitlines()) if found["line"] == "memory"]
    # What the program itself grows by, and what stays of a chunk, is some MB: nothing beside a real model.
    assert -0.02 * line["predicted_bytes"] < line["resident_bytes"] - line["predicted_bytes"] < 48 * 2**20
    assert line["peak_bytes"] > line["kv_bytes"]
    out.write_text(out.read_text()[:-40])  # cut off in the middle of a line
    before = out.read_text()
    main(args)
    assert len(out.read_text().splitlines()) == len(before.splitlines()) + 1
    assert out.read_text().startswith(before)


@pytest.mark.slow
def test_a_long_prompt_takes_no_more_memory_than_a_short_one(tmp_path):
    """Layers as wide as the 0.6B shape's, whose chunks hold 18 MB of numbers at a time; in processes of their own.

    Gaps in malloc's heap, without what is handed back between chunks, add 30 MB from 1,024 to 6,144 tokens.
    """
    wide = {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "head_dim": 128,
    }
    folder = write_checkpoint(tmp_path / "m", config=wide | {"max_position_embeddings": 8192})
    prompts, beside = {}, {}
    for context in (1025, 6145):
        request = Request(str(folder), None, "bfloat16", "cpu", "tq4", (context,), context - 1, 1, 1)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            line = process.submit(memory_line, request).result()
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
    for args in (["--contexts", "a"], ["--contexts", "100", "--prefill", "100"], ["--steps", "0"]):
        with pytest.raises(SystemExit):
            main(args)
    assert capsys.readouterr().out == ""
    assert callable(memory_line)
