"""Two validations: what is wrong now is said first, and a share of twice as much is a change."""

import json

import pytest

from lab.judge.two_runs import compare, main

ABOUT = {"candidate": "a", "reference": "b", "kv": "tq4", "dtype": "float32", "prompt_tokens": [3], "steps": 0}


@pytest.fixture
def report(tmp_path):
    def write(name, passed=True, reason="rounding", more=None, **shares):
        tensors = [{"stage": stage, "layer": 0, "share": share, "reason": reason} for stage, share in shares.items()]
        path = tmp_path / name
        path.write_text(json.dumps({"model": "m", "passed": passed, "tensors": tensors} | ABOUT | (more or {})))
        return path

    return write


def test_twice_the_share_is_worse_and_less_is_alike(report):
    before = report("a", q_proj=0.1, k_proj=0.1, v_proj=0.4, o_proj=0.001)
    after = report("b", q_proj=0.21, k_proj=0.19, v_proj=0.1, o_proj=0.009)
    comparison = compare(before, after)
    assert [(change["stage"], change["worse"]) for change in comparison["changes"]] == [("q_proj", True), ("v_proj", False)]
    assert not comparison["worse"]


def test_a_new_fault_is_said_first_and_is_exit_code_1(report, capsys):
    before, after = report("a", q_proj=0.1), report("b", passed=False, reason="fault", more={"kv": "bf16"}, q_proj=None)
    assert main([str(before), str(after)]) == 1
    out = capsys.readouterr().out
    assert "kv tq4 before, bf16 after" in out
    assert "WRONG NOW  layer 0, q_proj: 10 % (rounding), then inf % (fault)" in out
    assert main([str(after), str(before)]) == 0


def test_what_is_no_report_or_of_another_model_is_refused(report, tmp_path, capsys):
    (tmp_path / "none").write_text("[]")
    other = report("other", more={"model": "another"})
    for path, word in ((tmp_path / "none", "no report"), (other, "different models"), (tmp_path / "absent", "absent")):
        assert main([str(report("a")), str(path)]) == 2
        assert word in capsys.readouterr().err
