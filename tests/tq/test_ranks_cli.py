"""`--tensor-parallel`: the same text as of one process, one line whatever is lost, and nobody left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from terminal import AS_IN_A_TERMINAL

from tq import ranks
from tq.cli import main

TQ = [sys.executable, "-m", "tq"]
GENERATE = ["generate", "--executor", "reference", "--prompt", "def main("]
TWO = ["--tensor-parallel", "2"]


def run(*args, before=TQ):
    done = subprocess.run([*before, *map(str, args)], capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_two_ranks_say_what_one_process_says(capfd):
    args = [*GENERATE, "--max-new-tokens", "8", "--json"]
    assert main(args) == 0
    one = json.loads(capfd.readouterr().out)
    code, out, err = run(*args, *TWO)
    assert (code, err) == (0, "")
    two = json.loads(out)
    assert two["token_ids"] == one["token_ids"]
    assert two["kv"] == one["kv"]
    assert [rank["rank"] for rank in two["ranks"]] == [0, 1]
    assert sum(rank["kv"] for rank in two["ranks"]) == one["kv"]["bytes"]
    assert all(rank["peak"] > rank["weights"] > 0 for rank in two["ranks"])


@pytest.mark.long
def test_torchrun_starts_them_too(capfd):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tq"]
    code, out, _ = run(*GENERATE, "--max-new-tokens", "3", *TWO, before=torchrun)
    assert code == 0
    assert main([*GENERATE, "--max-new-tokens", "3"]) == 0
    assert out == capfd.readouterr().out


@pytest.mark.long
def test_validate_judges_two_ranks():
    window_args = ("--kv-tail", "2", "--kv-sink", "1")
    code, out, _ = run("validate", "--executor", "cpu", "--prompt", "import os", "--steps", "1", *window_args, "--json", *TWO)
    assert code == 0
    report = json.loads(out)
    assert report["passed"]
    assert {"store_kv.k", "window.v", "sink.k"} <= {stage["stage"] for stage in report["stages"]}
    assert report["candidate"] == "cpu"


# -- A lost rank ---------------------------------------------------------------------------------------------------------
def find_rank(pid, rank):
    """The process of a rank that `tq` has started."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"tq.ranks" in words and words[words.index(b"tq.ranks") + 1] == str(rank).encode():
            return int(child)
    raise AssertionError(f"no rank {rank}")


def has_ended(pid):
    """Whether a process has ended; nobody may have asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@contextmanager
def talking(*more):
    """`tq generate` on two ranks, after its first characters, and the processes of its ranks."""
    line = [sys.executable, "-c", AS_IN_A_TERMINAL, *GENERATE, "--max-new-tokens", "4000", *TWO, *more]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        process.stdout.read(4)
        pids = [find_rank(process.pid, rank) for rank in range(2)]
        yield process, pids
        until = time.monotonic() + 120
        while not all(map(has_ended, pids)) and time.monotonic() < until:
            time.sleep(0.05)
        assert all(map(has_ended, pids))
    finally:
        process.kill()
        process.communicate()


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")


@needs_proc
@pytest.mark.long
def test_a_killed_rank_ends_all_with_one_line():
    with talking() as (process, pids):
        os.kill(pids[1], signal.SIGKILL)
        _, err = process.communicate(timeout=180)
        assert process.returncode == 2
        assert err == "tq: rank 1 was killed by SIGKILL; the other ranks were ended\n"


@needs_proc
@pytest.mark.long
def test_a_rank_that_does_not_answer_ends_all_with_one_line():
    with talking("--rank-timeout", "5") as (process, pids):
        os.kill(pids[1], signal.SIGSTOP)
        _, err = process.communicate(timeout=180)
        assert process.returncode == 2
        assert err == "tq: rank 1 did not answer for 5 s; all ranks were ended\n"


@needs_proc
def test_ctrl_c_ends_all_with_one_word():
    with talking() as (process, _):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=180)
        assert process.returncode == 130
        assert err == "tq: interrupted\n"


def test_ctrl_c_while_a_rank_still_imports_says_nothing_of_its_own():
    script = (
        "import os, signal, sys, tq.ranks\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'haarkv.engine.ranks': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "sys.argv[1:] = ['0', '1', 'meeting', sys.argv[1], 'formats']\n"
        "sys.exit(tq.ranks.main())"
    )
    reads, writes = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, str(reads)], pass_fds=(reads,), capture_output=True, check=False, text=True
        )
    finally:
        os.close(reads)
        os.close(writes)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@needs_proc
def test_ranks_end_with_the_command_that_started_them():
    with talking() as (process, _):
        process.kill()


VERDICTS = {
    "all went well": ({0: 0, 1: 0}, 0),
    "a comparison found a fault": ({0: 1, 1: 0}, 1),
    "rank 0 has said it": ({0: 2, 1: 2}, 2),
    "rank 0 has said it, and the other lost it": ({0: 2, 1: ranks.RANK_LOST}, 2),
    "rank 1 failed, and rank 0 lost it": ({0: ranks.RANK_LOST, 1: 2}, "rank 1 failed: no such disk"),
    "rank 1 failed, and rank 0 ended well": ({0: 0, 1: 2}, "rank 1 failed: no such disk"),
    "rank 1 failed, and rank 0 still runs": ({1: 2}, "rank 1 failed: no such disk"),
    "rank 1 was killed": ({0: ranks.RANK_LOST, 1: -9}, "rank 1 was killed by SIGKILL"),
    "rank 1 hangs": ({0: ranks.RANK_LOST}, "rank 1 did not answer for 5 s"),
    "nobody hangs": ({0: ranks.RANK_LOST, 1: ranks.RANK_LOST}, "raise --rank-timeout"),
}


@pytest.mark.parametrize(("codes", "expected"), VERDICTS.values(), ids=VERDICTS)
def test_what_is_said_of_exit_codes(codes, expected, tmp_path):
    errors = {1: tmp_path / "rank1.txt"}
    errors[1].write_text("Traceback\ntq: no such disk\n")
    if isinstance(expected, int):
        assert ranks._verdict(codes, dict.fromkeys(range(2)), errors, 5) == expected
    else:
        with pytest.raises(ranks.RankError, match=expected):
            ranks._verdict(codes, dict.fromkeys(range(2)), errors, 5)
