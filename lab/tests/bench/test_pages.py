"""What pages print parses: each command of these benchmarks has the options that a page gives it."""

import re
import shlex
from importlib.util import find_spec

import pytest
from places import ROOT

from lab.bench.__main__ import command

FORMER_COMMANDS = {"delta", "npu", "long-context"}
"""Commands that the log still names beside their figures."""
PAGES = [ROOT / "README.md", *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "lab" / "README.md"]


def commands(text):
    """Module and words of each command of a page's shell blocks and of its inline code."""
    text = text.replace("\\\n", " ")
    for match in re.findall(r"^python -m (lab\.bench.*)|`python -m (lab\.bench[^`]*)`", text, re.MULTILINE):
        module, *words = shlex.split("".join(match), comments=True)
        yield module, words


def unknown(module, words):
    """What of a command is not there."""
    if {module.rpartition(".")[2], *words[:1]} & FORMER_COMMANDS:
        return []
    if not find_spec(module):
        return [module]
    if module != "lab.bench" or not words or not re.fullmatch("[a-z-]+", words[0]):
        return []
    if words[0] not in command.commands:
        return [words[0]]
    option_names = {name for parameter in command.commands[words[0]].params for name in parameter.opts}
    return [word for word in words if word.startswith("--") and word not in option_names]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_is_there(page):
    wrong = {shlex.join(words): unknown(module, words) for module, words in commands(page.read_text(encoding="utf-8"))}
    assert {words: names for words, names in wrong.items() if names} == {}


def test_a_slip_would_be_seen():
    text = "`python -m lab.bench serve\n--layers 2 --cool 2`, `python -m lab.bench nothing`, `python -m lab.bench.dalta`"
    assert [unknown(*command) for command in commands(text)] == [["--cool"], ["nothing"], ["lab.bench.dalta"]]
