"""`--tensor-parallel` under torchrun: the same text as of one process, and rank 0 alone speaks."""

import json
import subprocess
import sys

import pytest

from tq.cli import main

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tq"]
GENERATE = ["generate", "--executor", "reference", "--prompt", "def main("]
TWO = ["--tensor-parallel", "2"]


def run(*args):
    done = subprocess.run([*TORCHRUN, *map(str, args)], capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_two_ranks_say_what_one_process_says(capfd):
    args = [*GENERATE, "--kv", "tq4", "--max-new-tokens", "8", "--json"]
    assert main(args) == 0
    one = json.loads(capfd.readouterr().out)
    code, out, _ = run(*args, *TWO)
    assert code == 0
    two = json.loads(out)
    assert two["token_ids"] == one["token_ids"]
    assert two["kv"] == one["kv"]
    assert [rank["rank"] for rank in two["ranks"]] == [0, 1]
    assert sum(rank["kv"] for rank in two["ranks"]) == one["kv"]["bytes"]
    assert all(rank["peak"] > rank["weights"] > 0 for rank in two["ranks"])


@pytest.mark.long
def test_validate_judges_two_ranks():
    window_args = ("--kv-tail", "2", "--kv-sink", "1")
    code, out, _ = run("validate", "--executor", "cpu", "--prompt", "import os", "--steps", "1", *window_args, "--json", *TWO)
    assert code == 0
    report = json.loads(out)
    assert report["passed"]
    assert {"store_kv.k", "window.v", "sink.k"} <= {stage["stage"] for stage in report["tensors"]}
    assert report["candidate"] == "cpu"


@pytest.mark.long
def test_an_error_of_all_ranks_is_said_once():
    code, out, err = run(*GENERATE, "--kv", "tq9", *TWO)
    assert (code != 0, out) == (True, "")
    assert err.count("unknown KV format 'tq9'") == 1
