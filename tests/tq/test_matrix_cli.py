"""`tq matrix`: what it prints and writes, and what it refuses."""

import json

import pytest
from checkpoints import write_checkpoint
from refusals import assert_refused

from tq.cli import main

TEXT = "for spam in eggs:\n    print(spam, 'and', eggs)\n\nclass Knight:\n    says = 'Ni!'\n" * 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("matrix") / "checkpoint"))


@pytest.fixture
def run(capsys, tmp_path, checkpoint):
    for kind in ("code", "prose"):
        (tmp_path / f"{kind}.txt").write_text(TEXT + kind, encoding="utf-8")

    def run(*args, models=(checkpoint,), texts=("code", "prose")):
        options = [part for kind in texts for part in ("--text", str(tmp_path / f"{kind}.txt"))]
        code = main(["matrix", *models, *options, "--out", str(tmp_path / "rows.jsonl"), *map(str, args)])
        return code, *capsys.readouterr()

    return run


SHORT = ("--kv", "tq4,q8_0,tbq4_0", "--windows", "128", "--beside", "0:0,16:2", "--threads", "1")


def test_rows_tables_and_figure(run, tmp_path, checkpoint):
    pytest.importorskip("matplotlib")
    code, out, err = run(*SHORT, "--plot", tmp_path / "kl.svg")
    assert code == 0
    assert err.count("no row for tbq4_0") == 2  # blocks of 128
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    found = [(r["text"], r["tail"], r["sink"], r["kv"]) for r in rows]
    assert found == [(t, *b, kv) for t in ("code", "prose") for b in ((0, 0), (16, 2)) for kv in ("tq4", "q8_0")]
    assert all(r["cpu"] and r["date"] and r["haarkv"] and r["model"] == "checkpoint" and r["tokens"] == 128 for r in rows)
    assert out.count("llama.cpp q8_0") == 4
    assert "128 tokens of prose, windows of 128, tail 16, 2 sinks" in out
    first = (tmp_path / "kl.svg").read_text()
    # All is there: nothing is measured, and the same is shown; --plot alone draws it too.
    content = (tmp_path / "rows.jsonl").read_text()
    assert run(*SHORT)[1] == out
    (tmp_path / "kl.svg").unlink()
    code, again, err = run("--plot", tmp_path / "kl.svg", models=(), texts=())
    assert (code, again, err) == (0, out, "")
    assert (tmp_path / "kl.svg").read_text() == first
    assert (tmp_path / "rows.jsonl").read_text() == content


REFUSED = {
    "no_model": ({"models": ()}, [], ["name models"]),
    "no_text": ({"texts": ()}, [], ["name models"]),
    "two_texts_of_a_kind": ({"texts": ("code", "code")}, [], ["same kind", "rename"]),
    "unknown_model": ({"models": ("nowhere/at-all",)}, [], ["nowhere/at-all"]),
    "unknown_format": ({}, ["--kv", "tq9"], ["tq9", "choose from"]),
    "learned_without_a_text": ({}, ["--kv", "oscar2"], ["oscar2", "--learn"]),
    "a_window_of_no_groups": ({}, ["--windows", "100"], ["multiples of 128", "100"]),
    "a_text_too_short": ({}, ["--windows", "512"], ["too few", "512"]),
    "a_window_beyond_the_model": ({}, ["--windows", "2048"], ["too few"]),
    "no_pairs": ({}, ["--beside", "128"], ["TAIL:SINKS"]),
    "one_file_for_both": ({}, ["--plot", "OUT"], ["same file"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_2(run, case, tmp_path):
    how, args, words = REFUSED[case]
    assert_refused(run(*[tmp_path / "rows.jsonl" if arg == "OUT" else arg for arg in args], **how), *words)
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_file_of_something_else_is_left_alone(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text("mine\n")
    assert_refused(run(*SHORT), "line 1", "no row of a matrix")
    assert (tmp_path / "rows.jsonl").read_text() == "mine\n"
