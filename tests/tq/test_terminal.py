"""What a terminal shows: the first page, headings, tables, colours; and the shell's completion."""

import os
import re
import subprocess
import sys

import pytest
from at_length import MORE
from checkpoints import write_checkpoint
from terminal import Terminal

from tq.cli import _FIRST_STEPS, main

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def run_terminal(*args, columns=80, cwd=None):
    """Exit code and text of a command in a terminal."""
    with Terminal(*args, columns=columns, cwd=cwd) as terminal:
        code = terminal.end()
        return code, terminal.shown.replace("\r\n", "\n")


def test_tq_alone_greets_and_shows_four_first_steps(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert len(_FIRST_STEPS) == 4
    assert all(command in out and about in out for command, about in _FIRST_STEPS)
    assert "tq --help" in out
    assert out.count("\n") < 12


def test_commands_stand_under_headings(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    headings = re.findall(r"^([A-Z][a-z ]+):$", out, re.MULTILINE)
    assert headings == ["Options", "Run", "Choose a cache", "Check", "Measure", "Files", "Workshop"]
    workshop = out.split("Workshop:")[1]
    assert re.findall(r"^  (\S+)", workshop, re.MULTILINE) == ["dev"]
    assert main(["dev", "--help"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^  (\S+)", out.split("A new machine:")[1], re.MULTILINE) == [
        "bringup", "compile", "replay", "self-test",
    ]  # fmt: skip


def test_a_bar_counts_what_it_knows(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    code, output = run_terminal("generate", "--model", "m", "--max-new-tokens", 2, "a", "--threads", 1, cwd=folder.parent)
    text = COLOUR.sub("", output)
    assert code == 0
    assert "/?" not in text
    assert re.search(r"\d+/\d+", text)


@pytest.mark.parametrize("columns", [80, pytest.param(160, marks=MORE)])
def test_no_number_and_no_name_of_a_table_is_broken(columns):
    code, output = run_terminal("formats", columns=columns)
    assert code == 0
    text = COLOUR.sub("", output)
    assert all(len(line) <= columns for line in text.splitlines() if not line.startswith("no layout"))
    assert all(re.search(rf"(^|\s){cell}(\s|$)", text) for cell in ("tq4_seed", "4\\.125", "3\\.88x"))


def test_a_verdict_has_a_colour_in_a_terminal_and_none_in_a_pipe(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    args = ("validate", "--model", folder, "--executor", "reference", "--prompt", "spam", "--steps", 0, "--threads", 1)
    code, output = run_terminal(*args)
    assert code == 0
    assert "\x1b[32mpassed: no fault" in output
    line = [sys.executable, "-m", "tq", *map(str, args)]
    process = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "passed: no fault" in process.stdout
    assert "\x1b" not in process.stdout


def test_an_interruption_leaves_the_cursor_visible():
    with Terminal("generate", "def main(", "--max-new-tokens", 3000, "--threads", 1) as terminal:
        terminal.until("\x1b[?25l")  # a bar begins
        terminal.type("\x03")
        assert terminal.end() == 130
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")
    assert terminal.shown.endswith("tq: interrupted\r\n")


def test_the_shell_completes_commands_and_options():
    def complete(*words):
        env = {**os.environ, "_TQ_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        done = subprocess.run([sys.executable, "-m", "tq"], env=env, capture_output=True, text=True, check=True)
        return [line.split(",")[1] for line in done.stdout.splitlines()]

    assert complete("tq", "ge") == ["generate"]
    assert complete("tq", "dev", "self") == ["self-test"]
    assert "--kv-plan" in complete("tq", "generate", "--kv")
    env = {**os.environ, "_TQ_COMPLETE": "bash_source"}
    script = subprocess.run([sys.executable, "-m", "tq"], env=env, capture_output=True, text=True, check=True).stdout
    assert "_TQ_COMPLETE=bash_complete" in script


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
    run = subprocess.run(
        [sys.executable, "-m", "tq", "generate", "hi"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "tq: interrupted\n")
