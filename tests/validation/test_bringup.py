"""The ladder beneath `tq dev bringup`: what a verdict needs, what it makes of the tools of an NPU's host (scripts of the same
names here), and what is left out of the file to send home."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from places import ROOT

from haarkv.tq_ops.npu import versions
from haarkv.validation.bringup.ladder import RungFinding, climb, collect_host_logs, environment, public_text
from tq.cli import main


def test_a_rung_that_compared_nothing_does_not_pass():
    rungs = ("layer", lambda: RungFinding(True, "all is well")), ("head", lambda: RungFinding(True, "", 1))
    (result,) = climb(rungs, lambda _: None, lambda _: None)
    assert result.verdict == "failed"
    assert "compared nothing" in result.found.said


def test_rungs_are_made_only_when_those_beneath_have_passed():
    def rungs():
        yield "environment", lambda: RungFinding(False, "an old driver", 1)
        raise AssertionError("made although the one beneath failed")

    assert [result.verdict for result in climb(rungs(), lambda _: None, lambda _: None)] == ["failed"]


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


def test_the_lowest_rung_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from haarkv.validation.bringup.ladder import environment\n"
        "import haarkv.validation.bringup.ladder, tq.commands.bringup\n"
        "found = environment('cpu', None, lambda: None)\n"
        "assert found.passed and found.facts['torch'], found"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- Versions --------------------------------------------------------------------------------------------------------------
def test_versions_that_nobody_published_can_be_allowed_and_are_recorded(monkeypatch, tmp_path):
    ours = versions.Installation(
        python="3.11.7", torch="2.12.0", torch_npu="2.12.0.post3", pypto="0.2.1", cann="8.5.0", cann_folder=tmp_path,
        sourced=True, driver="25.5.0",
    )  # fmt: skip
    monkeypatch.setattr(versions, "find_installation", lambda: ours)
    monkeypatch.setattr("haarkv.validation.bringup.ladder._missing", lambda _: None)
    refusal = environment("npu", "npu:0", lambda: None)
    assert (refusal.passed, refusal.allowed) == (False, "")
    finding = environment("npu", "npu:0", lambda: None, any_versions=True)
    assert finding.passed
    assert finding.allowed
    assert finding.allowed in refusal.said
    assert f"allowed by --any-versions: {finding.allowed}" in finding.said

    def breaks():
        raise ImportError("libascendcl.so: cannot open shared object file")

    assert "torch cannot be imported: libascendcl.so" in environment("npu", "npu:0", breaks, any_versions=True).said
    monkeypatch.setattr(versions, "find_installation", lambda: replace(ours, cann="9.1.0"))
    finding = environment("npu", "npu:0", lambda: None)
    assert (finding.passed, finding.allowed) == (True, "")
    assert finding.said.endswith("; torch-npu 2.12.0.post3 is newer than any published with CANN 9.1")


# -- What its tools say ------------------------------------------------------------------------------------------------------
def test_npu_smi_and_plog_stand_in_the_report_without_paths(tmp_path, capsys, monkeypatch):
    """Of a request that ends at its first rung as well; a log of another run does not."""
    monkeypatch.setattr(versions, "unsimulated_reason", lambda _: "not here")
    script = tmp_path / "npu-smi"
    script.write_text("#!/bin/sh\necho '/home/anna/npu <OK>'; exit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    log = tmp_path / "ascend/log/debug/plog/plog-77_20261126.log"
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(f"[ERROR] line {n}" for n in range(99)))
    os.utime(log, (later := time.time() + 60, later))
    out = tmp_path / "out"
    assert main(["dev", "bringup", "--device", "sim", "--out", str(out)]) == 1
    capsys.readouterr()
    host_logs = json.loads((out / "report.json").read_text(encoding="utf-8"))["collected"]
    assert host_logs["npu-smi"] == ["exit code 3", "…/npu <OK>"]
    assert (len(host_logs["plog"]), host_logs["plog"][-1]) == (60, "[ERROR] line 98")
    assert "plog" not in collect_host_logs(later + 1)
