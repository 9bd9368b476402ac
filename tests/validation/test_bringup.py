"""The ladder beneath `tq dev bringup`: what a verdict needs, and what is left out of the file to send home."""

import subprocess
import sys

import pytest
from places import ROOT

from haarkv.validation.bringup.ladder import Folder, Found, Result, Rung, climb, one_line, public_text, verdict


def climbed(tmp_path, *rungs):
    return climb(rungs, Folder(tmp_path), on_begin=lambda *_: None, on_result=lambda *_: None)


def test_a_rung_that_compared_nothing_does_not_pass(tmp_path):
    (result,) = climbed(
        tmp_path, Rung("compiler", lambda: Found(True, "all is well")), Rung("store", lambda: Found(True, "", 1))
    )
    assert result.verdict == "failed"
    assert "compared nothing" in result.found.said


def test_rungs_are_made_only_when_those_beneath_have_passed(tmp_path):
    def rungs():
        yield Rung("environment", lambda: Found(False, "an old driver", 1))
        raise AssertionError("made although the one beneath failed")

    assert [result.verdict for result in climbed(tmp_path, *[next(rungs())])] == ["failed"]
    assert len(climb(rungs(), Folder(tmp_path), on_begin=lambda *_: None, on_result=lambda *_: None)) == 1


def test_a_result_comes_back_from_its_file_as_it_was(tmp_path):
    found = Found(True, "said", 3, "rows", "tq4, layer 1", {"torch": "2.9"}, allowed="an old torch")
    (result,) = climbed(tmp_path, Rung("layer", lambda: found, {"torch": "2.9"}))
    assert Folder(tmp_path).load("layer") == result


def test_the_first_of_eighty_lines_is_said():
    assert one_line(RuntimeError("\n  [ERROR] FB1002\n" + "x\n" * 80)) == "[ERROR] FB1002"
    assert one_line(RuntimeError("y" * 999)).startswith("yyy")
    assert len(one_line(RuntimeError("y" * 999))) < 310
    assert one_line(AssertionError()) == "AssertionError"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("tq bringup --out /home/anna/work/first --model ~/models/Qwen3-14B", "tq bringup --out …/first --model …/Qwen3-14B"),
        ('File "/usr/lib/python3.11/site-packages/torch/x.py", line 3', 'File "…/x.py", line 3'),
        ("see file:///home/bob/x.py", "see file:…/x.py"),
        ("of 65,536 numbers, 1.2 GB/s, npu:0, k=tq4,v=bf16", "of 65,536 numbers, 1.2 GB/s, npu:0, k=tq4,v=bf16"),
        ("CANN 9.0.0 in /usr/local/Ascend/cann is not sourced", "CANN 9.0.0 in …/cann is not sourced"),
    ],
)
def test_of_a_path_its_last_name_is_left(text, left):
    assert public_text(text) == left


def test_a_failed_rung_is_named_with_its_place():
    failed = Result("layer", "failed", Found(False, "x", 1, where="tq4, layer 3, attention_mlp"), 1.0, "2026-11-22", {})
    assert verdict([failed]) == "failed: layer at tq4, layer 3, attention_mlp; 0 of 10 rungs passed"


def test_the_lowest_rung_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from haarkv.validation.bringup.environment import environment\n"
        "import haarkv.validation.bringup.ladder, tq.commands.bringup\n"
        "found = environment('cpu', None, lambda: None)\n"
        "assert found.passed and found.facts['torch'], found"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
