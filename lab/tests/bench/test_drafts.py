"""Drafts beside none: what a run says, and what it refuses."""

import json

import pytest

from lab.bench.__main__ import main


def test_no_cache_is_promised_that_is_not_taken(capsys):
    assert main(["drafts", "--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "auto: the smallest cache" not in output
    assert "A format of `tq formats`, or k=NAME,v=NAME. [default: tq4]" in output


def test_both_are_measured_in_one_run(capsys):
    code = main([
        "drafts", "--model", "tiny", "--draft", "ngram", "--executor", "cpu", "--dtype", "float32", "--contexts", "40",
        "--repeats", "1", "--threads", "1", "--json",
    ])  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    none, first, experienced_row = json.loads(out)["rows"]
    assert (none["draft"], none["drafting"], none["speed_up"]) == ("none", None, None)
    for row in (first, experienced_row):
        assert row["draft"] == "ngram, up to 4"
        assert row["same_text"]
        assert row["speed_up"] > 0 < row["cpu_speed_up"]
    assert (first["known"], experienced_row["known"]) == (False, True)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "name what guesses the tokens"),
        (["--draft", "ngram", "--kv", "bf16,tq4"], "bf16,tq4"),
        (["--draft", "ngram", "--kv", "auto"], "unknown KV format 'auto'"),
    ],
)
def test_what_is_refused(capsys, args, words):
    code = main(["drafts", *args])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
