"""`tq validate`: what it prints and writes, and that it says yes, no and "this cannot be compared" with 0, 1 and 2."""

import csv
import html
import json
import re
import shlex

import pytest
import torch
from checkpoints import CONFIG, write_checkpoint
from gguf_files import byte_vocabulary, convert
from machines import has_only
from refusals import assert_refused

import tq
from haarkv.executors import catalog
from haarkv.executors.reference import ReferenceExecutor
from haarkv.validation.faults.layer import published_faults

# By hand: without --executor the reference is never compared with itself.
ITSELF = ("--executor", "reference")


@pytest.fixture
def faulty(monkeypatch):
    """The executor `faulty`: the reference whose layer 1 has no attention."""

    def build(model, device):
        fault = next(f for f in published_faults(model, 1) if f.name == "zero output")
        return ReferenceExecutor(model, fault.table())

    original = catalog.executor_class
    monkeypatch.setattr(catalog, "executor_class", lambda name: original("reference" if name == "faulty" else name))
    monkeypatch.setitem(catalog.EXECUTORS, "faulty", catalog.ExecutorInfo(build, lambda: False))
    monkeypatch.setattr(catalog, "NAMES", (*catalog.NAMES, "faulty"))


@pytest.fixture
def validate(run):
    """Runs `tq validate` in an empty folder."""
    return lambda *args: run("validate", *args)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_reference_passes_against_itself(validate, checkpoint):
    args = ("--model", checkpoint, *ITSELF, "--prompt", "spam", "--prompt", "x", "--prompt-tokens", 3, "--steps", 2)
    summary, verbose = validate(*args), validate(*args, "--verbose")
    assert (summary.code, verbose.code, summary.err + verbose.err) == (0, 0, "")
    assert verbose.out.startswith(summary.out.replace("20 more rows: --verbose\n", ""))  # the summary first
    assert "equal to the last bit" in summary.out
    # prefill, two steps, a verify and the step behind it, two layers, two modes
    for mode, rows in (("teacher-forced", 10), ("free-running", 10)):
        assert (summary.out.count(mode), verbose.out.count(mode)) == (0, rows)
    # What one's own prompts leave out is said.
    text = " ".join(summary.out.split())
    assert re.search(r"not exercised another executor: both sides are \w+; ", text)
    assert "; contexts beyond 5 tokens (leave out --prompt" in text


def test_a_faulty_executor_fails_and_is_named(validate, checkpoint, faulty, tmp_path):
    common = ("--model", checkpoint, "--executor", "faulty", "--prompt", "spam", "--steps", 0)
    report = json.loads(validate(*common, "--json", "--csv", "rows.csv", "--html", tmp_path / "page.html").ended(1))
    assert report["passed"] is False
    first = report["first_divergence"]
    assert (first["layer"], first["stage"], first["reason"]) == (1, "paged_attention", "fault")
    rows = list(csv.DictReader((tmp_path / "rows.csv").open(encoding="utf-8")))
    assert [row["passed"] for row in rows[::2]] == ["True", "False"]
    assert float(rows[0]["rel_l2"]) < float(rows[2]["rel_l2"])
    assert "layer 1, paged_attention: fault" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert names_in(tmp_path) == ["page.html", "rows.csv"]
    validate(*common).shows("FAILED", "layer 1, paged_attention: fault", "OUTSIDE", code=1)


def test_a_failing_layer_is_written_and_runs_again_on_any_executor(validate, run, checkpoint, faulty, tmp_path):
    common = ("--model", checkpoint, "--executor", "faulty", "--prompt", "spam and eggs", "--steps", 0)
    said = json.loads(validate(*common, "--replay", "layer.replay", "--json").shows(code=1))["replay"]
    assert "13 tokens of 1 sequence" in said
    assert "run it with tq dev replay layer.replay --executor" in said

    def replay(*args):
        return run("dev", "replay", "layer.replay", *args)

    again = json.loads(replay("--executor", "faulty", "--json").shows(code=1))
    assert (again["same_failure"], again["passed"]) == (True, False)
    assert again["first_divergence"]["stage"] == again["file"]["finding"]["stage"] == "paged_attention"
    assert re.search("now +the same failure", replay("--executor", "faulty").ended(1))
    out = replay("--executor", "reference").ended()
    assert re.search("now +passes", out)
    assert "not exercised" not in out
    assert_refused(replay("--executor", "cpu"), "cpu cannot run this")
    assert_refused(replay(), "only reference can run this here", "name another --executor")
    content = bytearray((tmp_path / "layer.replay").read_bytes())
    content[-3] ^= 1
    (tmp_path / "layer.replay").write_bytes(content)
    assert_refused(replay("--executor", "faulty"), "layer.replay is no replay file", "SHA-256")
    (tmp_path / "layer.replay").unlink()
    assert_refused(replay("--executor", "faulty"), "cannot be read")
    ran = validate("--model", checkpoint, *ITSELF, "--prompt", "spam", "--steps", 0, "--replay", "layer.replay")
    ran.shows("nothing failed, so no file is written")
    assert names_in(tmp_path) == []


def test_two_runs_are_compared_by_layer_and_stage(validate, checkpoint, faulty, tmp_path):
    common = ("--model", checkpoint, "--prompt", "spam and eggs", "--steps", 0, "--json")
    reports = {}
    for name, *args in (("right", *ITSELF), ("wrong", "--executor", "faulty"), ("bf16", *ITSELF, "--kv", "bf16")):
        reports[name] = json.loads(validate(*common, *args).out)
        (tmp_path / name).write_text(json.dumps(reports[name]))

    def compare(*args):
        return validate("--compare", *args)

    compare("right", "right").shows("0 worse, 0 better")
    out = compare("right", "wrong").shows("passed before, failed after", code=1)
    assert re.search(r"WRONG NOW +1 +paged_attention +[\d.]+ % \(equal\) +[\d.]+e\+\d+ % \(fault\)", out)
    compare("wrong", "right").ended()
    assert "kv tq4 before, bf16 after" in compare("right", "bf16").out
    plain = json.loads(compare("right", "wrong", "--json").ended(1))
    assert (plain["worse"], plain["verdicts"]) == (True, [True, False])
    assert (plain["changes"][0]["layer"], plain["changes"][0]["stage"]) == (1, "paged_attention")

    (tmp_path / "other").write_text(json.dumps(reports["right"] | {"model": "another"}))
    assert_refused(compare("right", "other"), "different models", "another")
    fewer = [tensor for tensor in reports["right"]["tensors"] if tensor["layer"] != 1]
    (tmp_path / "fewer").write_text(json.dumps(reports["right"] | {"tensors": fewer}))
    assert_refused(compare("right", "fewer"), "different models", "with 2 layers", "with 1")
    for text in ("{}", "[]", "nonsense", json.dumps(reports["right"] | {"tensors": [{"stage": 3}]})):
        (tmp_path / "none").write_text(text)
        assert_refused(compare("right", "none"), "none")
    assert_refused(compare("right", "absent"), "absent")
    assert_refused(validate("--compare", "right", "wrong", "--prompt", "x"), "--compare", "leave out --prompt")


def test_twice_the_share_is_worse_and_less_is_alike(tmp_path):
    from haarkv.validation.layers.report import compare_files

    def write(name, **shares):
        tensors = [{"stage": stage, "layer": 0, "share": share, "reason": "rounding"} for stage, share in shares.items()]
        about = {"candidate": "a", "reference": "b", "kv": "tq4", "dtype": "float32", "prompt_tokens": [3], "steps": 0}
        (tmp_path / name).write_text(json.dumps({"model": "m", "passed": True, "tensors": tensors} | about))
        return tmp_path / name

    before = write("a", q_proj=0.1, k_proj=0.1, v_proj=0.4, o_proj=0.001)
    after = write("b", q_proj=0.21, k_proj=0.19, v_proj=0.1, o_proj=0.009)
    comparison = compare_files(before, after)
    assert [(change["stage"], change["direction"]) for change in comparison["changes"]] == [
        ("q_proj", "worse"),
        ("v_proj", "better"),
    ]
    assert not comparison["worse"]


def test_without_a_prompt_everything_is_exercised(validate, tmp_path_factory):
    """Blocks, sequences, chunks, and scales of a second run."""
    folder = write_checkpoint(tmp_path_factory.mktemp("wide") / "m", config={"head_dim": 64})
    report = validate("--model", folder, "--executor", "cpu", "--steps", 1, "--json").json
    assert (report["prompt_tokens"], report["not_exercised"]) == ([128, 129, 515, 24], [])
    phases = {"prefill", "decode", "verify"}
    assert {row["phase"] for row in report["rows"]} == phases | {f"scaled {phase}" for phase in phases}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), ["only reference", "cpu cannot run this", "--kv"]),  # no other executor of a CPU reads vectors of 32
        (("--model", "tiny", "--kv", "kivi4"), ["kivi4 is here to compare with", "nothing to validate"]),
        (("--model", "tiny", "--reference", "auto"), ["auto is cpu here", "the reference itself", "name another --executor"]),
        (("--executor", "onnx", "--kv", "kivi4"), ["executor onnx cannot run this", "kivi4"]),
        ((*ITSELF, "--reference", "onnx", "--kv", "q8_0"), ["executor onnx cannot run this", "q8_0"]),
        (("--executor", "cpu", "--device", "sim"), ["runs on the cpu", "sim"]),
    ],
)
def test_what_cannot_be_compared_is_refused_before_the_weights_are_read(validate, checkpoint, monkeypatch, args, words):
    has_only(monkeypatch, "cpu", "reference")
    monkeypatch.setattr("haarkv.models.catalog.load_model", lambda *_, **__: pytest.fail("the weights were read"))
    assert_refused(validate("--model", checkpoint, "--prompt", "spam", *args), *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fastest executor here is cuda")
def test_without_an_executor_the_fastest_is_compared(validate):
    report = validate("--prompt", "def main(", "--prompt-tokens", 3, "--steps", 0, "--json").json
    assert (report["model"], report["candidate"], report["reference"]) == ("tiny", "cpu", "reference")


def test_the_page_names_model_command_prompt_versions_machine_and_date(validate, checkpoint, tmp_path):
    args = ("--model", checkpoint, *ITSELF, "--prompt", "spam & eggs", "--steps", "0", "--threads", "1", "--html", "page.html")
    validate(*args).ended()
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    command = html.escape(shlex.join(["tq", "validate", *map(str, args)]))
    versions = f"haarkv {tq.__version__}", f"torch {torch.__version__}"
    for fact in (str(checkpoint), command, "spam &amp; eggs</code> (11 tokens)", *versions, "threads 1"):
        assert fact in text
    assert re.search(r">2\d{3}-\d\d-\d\d \d\d:\d\d UTC<", text)


def test_the_self_test_reports_what_it_missed(run, monkeypatch):
    import haarkv.validation.layers.self_test as module

    row = module.SelfTestRow("float32", "ops", "a fault", "layer 3 head", "–", "nothing", False)

    def fake(models, prompts, on_row):
        assert {model.dtype for model in models} == {torch.bfloat16}
        assert [bool(model.config.state_shapes) for model in models] == [False, True]
        assert min(map(len, prompts)) >= 2
        if on_row:
            on_row(row)
        return [row]

    monkeypatch.setattr(module, "self_test", fake)
    out = run("dev", "self-test", "--dtype", "bfloat16").ended(1)
    assert "MISS" in out
    assert "FAILED" in out
    assert json.loads(run("dev", "self-test", "--dtype", "bfloat16", "--json").ended(1))["passed"] is False


# -- A file of quantised blocks ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    sizes = {"head_dim": 64, "hidden_size": 96, "intermediate_size": 128, "vocab_size": 300}
    return convert(
        write_checkpoint(folder / "checkpoint", config=CONFIG | sizes), folder / "m.gguf", "Q8_0", vocabulary=byte_vocabulary()
    )


def test_blocks_are_multiplied_as_generate_does_and_named(validate, gguf_file):
    args = ("--model", gguf_file, "--executor", "cpu", "--prompt", "spam and eggs", "--steps", 1)
    said = " ".join(validate(*args).shows().split())
    assert "multiplied as the blocks of the file: Q8_0; restored for reference" in said
    report = validate(*args, "--json").json
    assert report["blocks"] == ["Q8_0"]
    products = [verdict for verdict in report["tensors"] if verdict["stage"] == "up_proj"]
    assert products[0]["reason"] == "rounding"
    assert validate(*args[:2], *ITSELF, *args[4:], "--json").json["blocks"] == []


@pytest.mark.judge_long
def test_the_self_test_plants_faults_in_a_files_blocks(run, gguf_file, checkpoint, monkeypatch):
    import haarkv.validation.layers.self_test as module
    from haarkv.validation.faults.model import runner_of_blocks

    plant = module.self_test
    monkeypatch.setattr(module, "self_test", lambda models, *more: plant(models, *more) if runner_of_blocks(models[0]) else [])
    ran = run("dev", "self-test", "--model", gguf_file, "--dtype", "float32")
    ran.shows("Q8_0, a scale is the neighbour's", "none (control, blocks)")
    assert_refused(run("dev", "self-test", "--model", checkpoint), "--model", ".gguf")


def test_the_verdict_says_that_no_card_ran(run, monkeypatch, checkpoint):
    args = ("validate", "--model", checkpoint, "--prompt", "ab", "--steps", 0, *ITSELF)
    assert run(*args, "--json").json["simulated"] is False
    assert "interpreter" not in run(*args).out
    monkeypatch.setattr(catalog, "interpreter_warning", lambda *_: "in an interpreter")
    assert "passed: no fault, in PyPTO's interpreter, on no card" in run(*args).out
    assert run(*args, "--json").json["simulated"] is True
