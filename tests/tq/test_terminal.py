"""What a terminal shows: the first page, headings, tables, colours; and the shell's completion."""

import os
import re
import subprocess
import sys

import pytest
from at_length import MORE
from checkpoints import write_checkpoint
from terminal import Terminal

from tq.cli import _FIRST_STEPS

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def run_terminal(*args, columns=80):
    """What a command shows in a terminal."""
    with Terminal(*args, columns=columns) as terminal:
        assert terminal.end() == 0
        return terminal.shown.replace("\r\n", "\n")


def run_process(*args, code=0, **variables):
    """Its output and what it says on stderr, without a terminal."""
    command = [sys.executable, "-m", "tq", *map(str, args)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def test_tq_alone_greets_and_shows_four_first_steps(run):
    out = run().shows("tq --help", *(word for step in _FIRST_STEPS for word in step))
    assert len(_FIRST_STEPS) == 4
    assert out.count("\n") < 12


def test_commands_stand_under_headings(run):
    out = run("--help").shows()
    headings = re.findall(r"^([A-Z][a-z ]+):$", out, re.MULTILINE)
    assert headings == ["Options", "Run", "Choose a cache", "Check", "Measure", "Files", "Workshop"]
    assert re.findall(r"^  (\S+)", out.split("Workshop:")[1], re.MULTILINE) == ["dev"]
    workshop = run("dev", "--help").shows().split("A new machine:")[1]
    assert re.findall(r"^  (\S+)", workshop, re.MULTILINE) == ["bringup", "compile", "replay", "self-test"]


def test_a_bar_counts_what_it_knows(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    text = COLOUR.sub("", run_terminal("generate", "--model", folder, "--max-new-tokens", 2, "a", "--threads", 1))
    assert "/?" not in text
    assert re.search(r"\d+/\d+", text)


@pytest.mark.parametrize("columns", [80, pytest.param(160, marks=MORE)])
def test_no_number_and_no_name_of_a_table_is_broken(columns):
    text = COLOUR.sub("", run_terminal("formats", columns=columns))
    assert all(len(line) <= columns for line in text.splitlines() if not line.startswith("no layout"))
    assert all(re.search(rf"(^|\s){cell}(\s|$)", text) for cell in ("tq4_seed", "4\\.125", "3\\.88x"))


def test_a_verdict_has_a_colour_in_a_terminal_and_none_in_a_pipe(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    args = ("validate", "--model", folder, "--executor", "reference", "--prompt", "spam", "--steps", 0, "--threads", 1)
    assert "\x1b[32mpassed: no fault" in run_terminal(*args)
    out, _ = run_process(*args)
    assert "passed: no fault" in out
    assert "\x1b" not in out


def test_an_interruption_leaves_the_cursor_visible():
    with Terminal("generate", "def main(", "--max-new-tokens", 3000, "--threads", 1) as terminal:
        terminal.until("\x1b[?25l")  # a bar begins
        terminal.type("\x03")
        assert terminal.end() == 130
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")
    assert terminal.shown.endswith("tq: interrupted\r\n")


def test_the_shell_completes_commands_and_options():
    def complete(*words):
        out, _ = run_process(_TQ_COMPLETE="bash_complete", COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1))
        return [line.split(",")[1] for line in out.splitlines()]

    assert complete("tq", "ge") == ["generate"]
    assert complete("tq", "dev", "self") == ["self-test"]
    assert "--kv-plan" in complete("tq", "generate", "--kv")
    assert "_TQ_COMPLETE=bash_complete" in run_process(_TQ_COMPLETE="bash_source")[0]


SWALLOWS = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except BaseException:  # as libraries do that try one thing after the other
    pass
"""


def test_an_interruption_ends_the_command_although_a_library_swallows_it(tmp_path):
    """As torch does while it is imported: the command went on, or spoke of a fault of its own."""
    (tmp_path / "torch.py").write_text(SWALLOWS)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    assert run_process("generate", "hi", code=130, PYTHONPATH=path) == ("", "tq: interrupted\n")
