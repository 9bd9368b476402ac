"""The matrix: what is counted, what is seen, that rows are kept, and what is drawn."""

import json

import pytest
import torch
from checkpoints import write_checkpoint
from torch.nn import functional

from haarkv.executors.base import verify
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape
from lab.matrix import measure as matrix
from lab.matrix.__main__ import main
from lab.matrix.entries import ENTRIES, OURS, FullGroupFormat, parse_entry, without_waiting
from lab.matrix.measure import Results, measure
from lab.matrix.models import ResidualSizes, Subject, Task, Text, prepare
from lab.matrix.plot import family, matrix_svg
from lab.rivals import register

CODE = Text("code", "for spam in eggs:\n    print(spam, 'and', eggs)\n\nclass Knight:\n    says = 'Ni!'\n" * 6)
TASK = Task(
    (parse_entry("q4_0"), parse_entry("tq2"), parse_entry("kvarn2")),
    [CODE],
    (128,),
    (ResidualSizes(0, 0), ResidualSizes(128, 4)),
    256,
)


@pytest.fixture(scope="module", autouse=True)
def registered_formats():
    """The names of the rivals, for these tests alone."""
    before = dict(formats.BY_NAME)
    register()
    yield
    formats.BY_NAME.clear()
    formats.BY_NAME.update(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("matrix") / "checkpoint"))


@pytest.fixture(scope="module")
def model_info(checkpoint):
    return prepare(checkpoint, TASK)


@pytest.fixture(scope="module")
def subject(model_info):
    return Subject(model_info, TASK)


def measure_rows(subject, model_info, file, task=TASK, on_step=lambda *_: None):
    results = Results(file)
    measure(subject, model_info, task, results, {"cpu": "x"}, on_step)
    return results.rows


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


# -- Figures -----------------------------------------------------------------------------------------------------------------


def whole_logits(subject, side, tokens):
    """Of a window in one piece."""
    cache, paging = side.new_cache(1, len(tokens))
    return verify(side.executor, tokens, paging.batch([paging.add()], [len(tokens)]), cache).double().log_softmax(-1)


def test_figures_are_those_of_torch_on_whole_windows(subject, model_info, tmp_path):
    plan = model_info.workloads["code", 128]
    assert plan.scored_tokens == 256
    for row in measure_rows(subject, model_info, tmp_path / "rows"):
        side = subject.side(parse_entry(row["kv"]), ResidualSizes(row["tail"], row["sink"]))
        kl, same, nll = [], [], []
        for window in plan.windows:
            exact, side_logits = (whole_logits(subject, s, plan.fed(window)) for s in (subject.base, side))
            kl.append(functional.kl_div(side_logits, exact, reduction="none", log_target=True).sum(-1))
            same.append(exact.argmax(-1) == side_logits.argmax(-1))
            nll.append(functional.nll_loss(side_logits, plan.tokens[window.start + 1 : window.start + 129], reduction="none"))
        kl, same, nll = map(torch.cat, (kl, same, nll))
        expected = [kl.mean(), kl.quantile(0.5), kl.max(), same.double().mean(), nll.mean().exp()]
        figures = [row[name] for name in ("kl_mean", "kl_median", "kl_p999", "top1", "ppl")]
        assert figures == pytest.approx([float(x) for x in expected], rel=2e-3, abs=1e-9), row["label"]
        assert row["tail"] or row["kl_mean"] > 1e-3


def test_logits_that_are_not_kept_give_the_same_rows(subject, model_info, tmp_path, monkeypatch):
    cached_rows = without_time(measure_rows(subject, model_info, tmp_path / "kept"))
    monkeypatch.setattr(matrix, "MAX_LOGIT_BYTES", 0)
    assert without_time(measure_rows(subject, model_info, tmp_path / "made")) == cached_rows


@pytest.mark.parametrize(("name", "side"), [("kvarn2", "v"), ("kivi4", "k")])
def test_groups_as_they_come_hold_what_their_format_restores(name, side):
    kv_format = formats.get(name, side)
    group = kv_format.group_tokens
    x = torch.randn(2, 2 * group, 128, generator=torch.Generator().manual_seed(0))
    whole = FullGroupFormat(kv_format)
    dequantized = whole.dequantize(whole.quantize(x, 0), 0)
    for head in range(2):
        for begin in (0, group):
            tokens = x[head, begin : begin + group].bfloat16()
            expected = kv_format.dequantize(kv_format.quantize(tokens, 0), 0)
            torch.testing.assert_close(dequantized[head, begin : begin + group], expected, rtol=0, atol=1e-5)
    assert whole.bytes_per_vector(128) == kv_format.bytes_per_vector(128)


def test_without_a_window_no_token_stays_in_bf16():
    waiting = KVSpec("k=kivi2,v=kvarn4").plan(3)
    plan = without_waiting(waiting)
    assert waiting.has_windows
    assert not plan.has_windows
    assert [f.group_tokens for f in plan.formats] == [1] * len(plan.formats)
    assert plan.bytes_per_token(KVShape(2, 128)) == waiting.bytes_per_token(KVShape(2, 128))


def test_what_stays_in_bf16_is_the_same_for_all(subject):
    for kv in ("q4_0", "kvarn2"):
        assert not subject.side(parse_entry(kv), ResidualSizes(0, 0)).plan.has_windows
        plan = subject.side(parse_entry(kv), ResidualSizes(128, 4)).plan
        assert (plan.recent, plan.sink, plan.describe()) == (128, 4, f"{kv}; tail 128; sink 4")


def test_formats_that_learn_do_so_from_the_text_that_is_given(model_info, subject, tmp_path):
    learning = [parse_entry(kv) for kv in ("oscar2", "k=lr2,v=tq3")]
    task = Task(learning, [CODE], (128,), (ResidualSizes(0, 0),), 256, Text("learn", CODE.content * 2))
    rows = measure_rows(Subject(model_info, task), model_info, tmp_path / "rows", task)
    assert [(row["whose"], row["balanced"]) for row in rows] == [("others", False), ("ours", False)]
    assert all(0 < row["kl_mean"] < 1 and row["learned_sha256"] for row in rows)
    without = Task(learning, [CODE], (128,), (ResidualSizes(0, 0),), 256)
    assert measure_rows(subject, model_info, tmp_path / "none", without) == []


def test_formats_by_layer_take_what_is_asked_and_lose_less_than_one_format_everywhere(model_info, tmp_path):
    entries = [parse_entry(kv) for kv in ("layers:4.5", "layers:3.5", "k=lr3,v=tq3")]
    task = Task(entries, [CODE], (128,), (ResidualSizes(0, 0), ResidualSizes(16, 4)), 256, Text("learn", CODE.content * 2))
    subject = Subject(model_info, task)
    plans = [subject.side(entries[0], residual).plan for residual in task.residuals]
    assert [(plan.recent, plan.sink) for plan in plans] == [(None, 0), (16, 4)]
    assert plans[0].layers == plans[1].layers
    wide, narrow, uniform = measure_rows(subject, model_info, tmp_path / "rows", task)[:3]
    assert wide["bits_per_value"] <= 4.5
    assert narrow["bits_per_value"] <= uniform["bits_per_value"] == 3.5
    assert wide["kl_mean"] < narrow["kl_mean"] < uniform["kl_mean"]


def test_a_cache_by_layer_needs_a_number_of_bits():
    with pytest.raises(InputError, match=r"layers:x names no bits a value; write layers:4\.25"):
        parse_entry("layers:x")


# -- Rows are kept -----------------------------------------------------------------------------------------------------------


def test_an_interrupted_matrix_keeps_its_rows_and_goes_on(subject, model_info, tmp_path):
    whole = without_time(measure_rows(subject, model_info, tmp_path / "whole"))
    assert len(whole) == 6
    steps = []

    def stop(what, _):
        steps.append(what)
        if len(steps) == 5:  # two windows a row
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_rows(subject, model_info, tmp_path / "part", on_step=stop)
    lines = (tmp_path / "part").read_text().splitlines()
    assert without_time(map(json.loads, lines)) == whole[:2]
    assert without_time(measure_rows(subject, model_info, tmp_path / "part")) == whole
    assert (tmp_path / "part").read_text().splitlines()[:2] == lines


def test_what_is_there_is_not_measured_again(subject, model_info, tmp_path, monkeypatch):
    rows = measure_rows(subject, model_info, tmp_path / "rows")
    calls = []
    figures = matrix._figures
    monkeypatch.setattr(matrix, "_figures", lambda *args: calls.append(args[2].plan.describe()) or figures(*args))
    assert measure_rows(subject, model_info, tmp_path / "rows") == rows
    assert calls == []
    more = Task((*TASK.entries, parse_entry("tq4")), [CODE], (128,), (ResidualSizes(0, 0),), 256)
    assert [row["kv"] for row in measure_rows(subject, model_info, tmp_path / "rows", more)][6:] == ["tq4"]
    assert calls == ["tq4"]
    other = Task(TASK.entries[:1], [Text("code", CODE.content.upper())], (128,), (ResidualSizes(0, 0),), 256)
    measure_rows(subject, prepare(model_info.name, other), tmp_path / "rows", other)
    measure_rows(subject, model_info, tmp_path / "rows", Task(TASK.entries[:1], [CODE], (128,), (ResidualSizes(128, 8),), 256))
    assert calls == ["tq4", "q4_0", "q4_0; tail 128; sink 8"]


@pytest.mark.parametrize("content", ["{}", "[1]", "no JSON", '{"benchmark": "other"}', "[" * 10_000])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "rows").write_text(content + "\n")
    with pytest.raises(InputError, match=r"line 1 of .* is no row of a matrix"):
        Results(tmp_path / "rows")
    (tmp_path / "rows").write_bytes(b"\xff")
    with pytest.raises(InputError, match="cannot be read"):
        Results(tmp_path / "rows")


# -- The figure --------------------------------------------------------------------------------------------------------------


def row(label, bits, kl, model="a", text="code", tail=0):
    return {"label": label, "bits_per_value": bits, "kl_mean": kl, "model": model, "text": text, "tokens": 1024,
            "window": 1024, "tail": tail, "sink": 0}  # fmt: skip


def test_families():
    families = {
        "by layer, 4.25 bits": "by layer", "learned K 4, V tq4": "learned", "tq4": "tq", "tq3_0": "", "tbq4_0": "",
        "KVarN k4v2": "KVarN", "OSCAR": "OSCAR", "KIVI 2": "KIVI", "llama.cpp q4_0": "llama.cpp", "FP8": "",
        "K tq6, V tq4": "K ",
    }  # fmt: skip
    assert {label: family(label) for label in families} == families
    assert {family(entry.label) for entry in ENTRIES if entry.whose == OURS and entry.needs_learning} == {"learned"}
    assert {family(entry.label) for entry in ENTRIES if entry.is_chosen} == {"the default", "by layer"}


def test_the_figure_names_every_row_and_is_the_same_again():
    pytest.importorskip("matplotlib")
    rows = [
        row("tq2", 2.125, 0.05), row("OSCAR", 2.25, 0.1), row("far", 16.0, 0.1), row("none", 3.0, 0.0),
        row("tq4", 4.9, 0.001, "b", tail=128), row("KVarN k4v2", 4.1, 0.002, "b", tail=128),
    ]  # fmt: skip
    svg = matrix_svg(rows)
    assert svg == matrix_svg(rows)
    assert all(f">{label}</text>" in svg for label in ("tq2", "OSCAR", "tq4", "KVarN k4v2"))
    assert not any(f">{label}</text>" in svg for label in ("far", "none"))
    assert "a, windows of 1,024, no tail" in svg
    assert "b, windows of 1,024, tail 128, 0 sinks" in svg


# -- The command -------------------------------------------------------------------------------------------------------------
SHORT = ("--kv", "tq4,q8_0,tbq4_0", "--windows", "128", "--beside", "0:0,16:2", "--threads", "1")


@pytest.fixture
def run(capsys, tmp_path, checkpoint):
    for kind in ("code", "prose"):
        (tmp_path / f"{kind}.txt").write_text(CODE.content[:240] + kind, encoding="utf-8")

    def run(*args, models=(checkpoint,), texts=("code", "prose")):
        options = [part for kind in texts for part in ("--text", str(tmp_path / f"{kind}.txt"))]
        code = main([*models, *options, "--out", str(tmp_path / "rows.jsonl"), *map(str, args)])
        return code, *capsys.readouterr()

    return run


def test_rows_tables_and_figure(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = run(*SHORT, "--plot", tmp_path / "kl.svg")
    assert code == 0
    assert err.count("no row for tbq4_0") == 2  # blocks of 128
    content = (tmp_path / "rows.jsonl").read_text()
    assert len(content.splitlines()) == 8
    assert out.count("llama.cpp q8_0") == 4
    assert "128 tokens of prose, windows of 128, tail 16, 2 sinks" in out
    # All is there: nothing is measured, and the same is shown; --plot alone draws it too.
    first = (tmp_path / "kl.svg").read_text()
    assert run(*SHORT)[1] == out
    assert run("--plot", tmp_path / "kl.svg", models=(), texts=()) == (0, out, "")
    assert (tmp_path / "kl.svg").read_text() == first
    assert (tmp_path / "rows.jsonl").read_text() == content


BAD_COMMANDS = {
    "no_text": ({"texts": ()}, [], "name models"),
    "two_texts_of_a_kind": ({"texts": ("code", "code")}, [], "same kind"),
    "unknown_format": ({}, ["--kv", "tq9"], "tq9"),
    "learned_without_a_text": ({}, ["--kv", "oscar2"], "oscar2 is learned of a model; give --learn"),
    "a_window_of_no_groups": ({}, ["--windows", "100"], "multiples of 128"),
    "a_text_too_short": ({}, ["--windows", "512"], "too few"),
    "one_file_for_both": ({}, ["--plot", "OUT"], "same file"),
}


@pytest.mark.parametrize("case", BAD_COMMANDS)
def test_bad_input_is_one_line_and_2(run, case, tmp_path):
    how, args, words = BAD_COMMANDS[case]
    code, out, err = run(*[tmp_path / "rows.jsonl" if arg == "OUT" else arg for arg in args], **how)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert not (tmp_path / "rows.jsonl").exists()
