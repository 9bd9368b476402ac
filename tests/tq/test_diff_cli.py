"""`tq diff`: its sides, what it prints, and 1 for a fault."""

import json

import pytest
from checkpoints import saying, write_checkpoint
from machines import has_only
from small_models import SMALL, small_model

from haarkv.executors import catalog
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import read_config
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import with_ops
from haarkv.validation.fidelity import setup
from haarkv.validation.fidelity.setup import Contender, load_contenders, parse_contender, resolve_contenders

# -- Sides ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "executor", "kv"),
    [
        ("bf16", "auto", "bf16"),
        ("auto", "auto", "tq4"),
        ("auto:tq2", "auto", "tq2"),
        ("reference", "reference", "tq4"),
        ("reference:tq4_seed", "reference", "tq4_seed"),
        ("k=bf16,v=tq4", "auto", "k=bf16,v=tq4"),
        ("v=tq4, k=bf16", "auto", "k=bf16,v=tq4"),
        ("reference:k=tq4,v=tq4", "reference", "tq4"),
    ],
)
def test_a_side_is_executor_format_or_both(spec, executor, kv):
    assert parse_contender(spec) == Contender(executor, kv)


def test_no_word_is_both_an_executor_and_a_format():
    assert not {catalog.AUTO, *catalog.NAMES} & set(formats.names())


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        # One executor for both, or two formats would be told apart by who ran them.
        ("kivi2", "tq4", ("cpu", "cpu")),
        ("bf16", "tq4", ("cpu", "cpu")),
        ("tq4", "tbq4_0", ("cpu", "cpu")),
        ("reference", "auto", ("reference", "cpu")),
        ("onnx", "reference:tq2", ("onnx", "reference")),
    ],
)
def test_auto_is_the_fastest_that_reads_both_sides(monkeypatch, a, b, names):
    has_only(monkeypatch, "cpu", "reference")
    sides, _ = resolve_contenders([parse_contender(a), parse_contender(b)], read_config("tiny"), KVSpec())
    assert tuple(side.executor for side in sides) == names
    assert tuple(side.kv for side in sides) == (parse_contender(a).kv, parse_contender(b).kv)


def test_the_dtype_is_one_that_both_executors_run():
    reference, npu, config = Contender("reference"), Contender("npu"), read_config("tiny")
    for sides, dtype in (((reference, reference), "float32"), ((reference, npu), "bfloat16"), ((npu, reference), "bfloat16")):
        assert resolve_contenders(sides, config, KVSpec()) == (list(sides), dtype)


def test_both_sides_share_one_loaded_model_and_the_device_is_not_the_references(monkeypatch):
    creations, loads, model = [], [], small_model(SMALL)
    monkeypatch.setattr(setup, "load_model", lambda *_, **how: loads.append(how) or model)
    monkeypatch.setattr(catalog, "create", lambda *args: creations.append(args) or ReferenceExecutor(args[1]))
    a, b, _ = load_contenders("random:0.6b", (Contender("reference", "bf16"), Contender("npu")), device="sim")
    assert len(loads) == 1
    assert all(args[1] is model for args in creations)
    assert [(args[0], args[-1]) for args in creations] == [("reference", None), ("npu", "sim")]
    assert (a.plan.describe(), b.plan.describe()) == ("bf16", "tq4")


# -- The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(run):
    return lambda *args: run("diff", *args)


BOTH = ("--a", "tq4", "--b", "tq4")


def test_json_has_the_promised_keys(run, checkpoint):
    args = ("--model", checkpoint, "--a", "fp32", "--b", "tq4", "--prompt", "spam", "--prompt", "x" * 200, "--json")
    report = json.loads(run(*args, "--max-new-tokens", 40).shows())
    assert report.keys() == {
        "a", "b", "model", "dtype", "same_format", "first_divergence", "positions", "top1_agreement", "kl", "logit_error",
        "relative_logit_error", "near_ties", "unexplained", "prompts",
    }  # fmt: skip
    assert (report["a"], report["b"], report["dtype"]) == ("reference:fp32", "reference:tq4", "float32")
    assert report["kl"].keys() == {"mean", "median", "p999"}
    first = report["first_divergence"]
    assert first.keys() == {
        "prompt", "position", "token_a", "token_b", "text_a", "text_b", "margin", "gap_a", "gap_b", "spread", "logit_error",
        "kl", "near_tie", "top_a", "top_b",
    }  # fmt: skip
    assert {name: first[name] for name in ("prompt", "position")} in report["unexplained"]
    row = report["prompts"][first["prompt"]]
    assert row["divergence"] == first
    assert row["a"]["token_ids"][first["position"]] == first["token_a"] != first["token_b"]
    assert row["b"]["token_ids"][first["position"]] == first["token_b"]
    assert first["margin"] == first["top_a"][0]["logit"] - first["top_a"][1]["logit"]
    assert len(first["top_a"]) == len(first["top_b"]) == 5
    assert report["positions"] == sum(len(r["a"]["token_ids"]) + (r["a"]["finish"] == "eos") for r in report["prompts"])


def test_the_same_side_twice_is_identical_in_words(run, checkpoint):
    ran = run(*BOTH, "--model", checkpoint, "--max-new-tokens", 5)
    ran.shows("prompt 4: the same 5 tokens", "Identical: every token of every prompt.")


def plant(monkeypatch, ops):
    """Side B of the next diff runs with this table."""
    right = catalog.create

    def create(name, model, *args):
        names.append(name)
        return ReferenceExecutor(model, ops) if len(names) == 2 else right(name, model, *args)

    names = []
    monkeypatch.setattr(catalog, "create", create)


def test_a_fault_exits_with_1(run, checkpoint, monkeypatch):
    plant(monkeypatch, with_ops(reference, {"rope": lambda x, cos, sin: x.float()}))
    ran = run(*BOTH, "--model", checkpoint, "--prompt", "spam and eggs")
    ran.shows("differs", "where no rounding explains it", code=1)


def test_the_end_of_text_is_shown_in_words(run, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "abc", mutate=saying("abc"))
    run(*BOTH, "--model", folder, "--prompt", "a").shows("the same 2 tokens and the end of text")
    # The head's rows 0 and up: a fault in the last norm makes B say something else where A ends.
    plant(monkeypatch, with_ops(reference, {"rms_norm": lambda x, w, eps: -reference.rms_norm(x, w, eps)}))
    ran = run(*BOTH, "--model", folder, "--prompt", "c")
    ran.shows("A     » end of text (256)\n", "new token 1 differs", "both    nothing", code=1)


def test_lines_fit_a_terminal_and_show_where_texts_part(run):
    args = ("--a", "fp32", "--b", "tq4", "--model", "tiny", "--max-new-tokens", 16, "--threads", 1)
    ran = run(*args, "--prompt", "import os\nimport sys\n\n", "--prompt", "\n" * 99, "--prompt", "x" * 99 + "END")
    out = ran.shows("prompt  'import os\\nimport sys\\n\\n'", "xEND'\n", "differs", "Between formats that is no fault.")
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100
