"""`tq eval`: its list of formats, what it prints and what it refuses."""

import json
import re
import sys

import pytest

from haarkv.validation.fidelity.setup import parse_list

TEXT = "for spam in eggs:\n    print(spam, 'and', eggs)\n\nclass Knight:\n    says = 'Ni!'\n"


# -- The grammar of --kv ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["tq4"], ["tq4"]),
        (["tq4,tq2", "q8_0"], ["tq4", "tq2", "q8_0"]),
        (["k=q8_0,v=tq4"], ["k=q8_0,v=tq4"]),
        (["bf16, k=q8_0,v=tq4 ,tq2"], ["bf16", "k=q8_0,v=tq4", "tq2"]),
        (["k=q8_0,v=tq4,k=bf16,v=tq2"], ["k=q8_0,v=tq4", "k=bf16,v=tq2"]),
        (["v=tq4,k=q8_0", "k=tq2,v=tq2", "tq2"], ["k=q8_0,v=tq4", "tq2"]),
        ([], []),
    ],
)
def test_a_list_of_formats(specs, names):
    assert parse_list(specs) == names


# -- The command ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(run, tmp_path, checkpoint):
    (tmp_path / "text.txt").write_text(TEXT * 2, encoding="utf-8")

    return lambda *args: run("eval", "--model", checkpoint, "--text", tmp_path / "text.txt", *args)


SHORT = ("--kv", "bf16,k=q8_0,v=tq2,tq4", "--window", "40", "--tokens", "60", "--threads", "1")


def test_json_has_the_promised_keys(run):
    code, out, err = run(*SHORT, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report.keys() == {"model", "text", "dtype", "tokens", "windows", "window", "rows"}
    assert (report["tokens"], report["windows"], report["window"]) == (60, 2, 40)
    assert [r["kv"] for r in report["rows"]] == ["bf16", "k=q8_0,v=tq2", "tq4"]
    for r in report["rows"]:
        assert r.keys() == {
            "kv", "bytes_per_token", "bits_per_value", "kl_mean", "kl_median", "kl_p999", "top1", "rms_dp", "ppl",
            "ppl_delta",
        }  # fmt: skip
    assert report["rows"][0]["kl_p999"] == 0 < report["rows"][2]["kl_mean"] < report["rows"][1]["kl_mean"]


def test_words_and_resume(run, tmp_path):
    files = ("--resume", tmp_path / "run.json")
    code, out, err = run(*SHORT, *files)
    assert (code, err) == (0, "")
    assert "60 tokens" in out
    assert "2 windows of 40" in out
    assert "k=q8_0,v=tq2" in out
    assert "largest" in out  # 60 positions have no 99.9 %
    assert all(len(line) <= 140 for line in out.splitlines() if str(tmp_path) not in line)
    assert (tmp_path / "run.json").exists()
    assert run(*SHORT, *files)[:2] == (0, out)
    code, out, err = run(*SHORT, "--resume", tmp_path / "run.json", "--window", 41)
    assert (code, out) == (2, "")
    assert "another windows" in err


def test_a_narrow_terminal_gets_two_tables(run, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("--kv", "k=q8_0,v=tq2,tq4", "--window", "9", "--tokens", "9")
    assert code == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", out)
    lines = [line.rstrip() for line in out.splitlines()[1:]]
    assert max(map(len, lines)) <= 80
    assert sum("k=q8_0,v=tq2" in line for line in lines) == 2
    for column in ("bytes/token", "KL mean", "same top", "RMS Δp", "ΔPPL"):
        assert column in out
