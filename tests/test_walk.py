"""The documentation runs: every Python block, link and anchor, every command's name and options, examples in docstrings."""

import doctest
import re
import shlex
from importlib import import_module
from importlib.util import find_spec

import click
import pytest
from places import ROOT, module_name, sources

from tq.cli import cli

PAGES = [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
of_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def code_blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@of_every_page
def test_code_of_a_page_runs_in_order(page, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for number, block in enumerate(code_blocks(page, "python"), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), scope)


def test_the_walk_asserts_its_byte_counts():
    blocks = "\n".join(code_blocks(ROOT / "docs" / "walk.md", "python"))
    assert len(re.findall(r"^assert .*nbytes ==", blocks, re.MULTILINE)) >= 5
    assert "== 66" in blocks


# -- Links ------------------------------------------------------------------------------------------------------------------
def anchors(page):
    """What GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@of_every_page
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        target_page = page.parent / target if target else page
        assert target_page.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(target_page), f"{page.name} links to {target}#{anchor}"


def test_pages_that_the_code_names_exist():
    rooms = (ROOT / room for room in ("codebooks", "tq_ops", "models", "executors", "engine", "validation", "benchmarks"))
    for folder in (*rooms, ROOT / "serving", ROOT / "tq", ROOT / "examples"):
        for source in folder.rglob("*.py"):
            for name in re.findall(r"docs/\w+\.md", source.read_text(encoding="utf-8")):
                assert (ROOT / name).exists(), f"{source.relative_to(ROOT)} names {name}"


def test_every_picture_is_shown():
    pictures = {
        (page.parent / name).resolve() for page in PAGES for name in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text())
    }
    assert pictures == {picture.resolve() for picture in (ROOT / "docs").glob("*.svg")}


# -- Commands ---------------------------------------------------------------------------------------------------------------
def command_lines(page):
    """The words of every command of a page's shell blocks and of its inline code."""
    text = page.read_text(encoding="utf-8")
    shell = "\n".join(code_blocks(page, "sh")).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`((?:tq|python -m) [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in (*shell, *(" ".join(code.split()) for code in inline)):
        yield shlex.split(line, comments=True)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "LOG.md"], ids=lambda p: p.name)
def test_every_tq_command_has_the_options_that_a_page_gives_it(page):
    """But of the log: its commands are those of their day."""
    context = click.Context(cli)
    for words in command_lines(page):
        if words[:1] != ["tq"] or not re.fullmatch("[a-z]+", words[1]):
            continue
        command, rest = cli.get_command(context, words[1]), words[2:]
        assert command is not None, f"{page.name}: {shlex.join(words)}"
        while isinstance(command, click.Group) and rest:
            command = command.get_command(context, rest.pop(0))
            assert command is not None, f"{page.name}: {shlex.join(words)}"
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        if not command.context_settings.get("ignore_unknown_options"):  # else they are vLLM's
            unknown = {word.split("=")[0] for word in rest if word.startswith("--")} - options
            assert not unknown, f"{page.name}: {shlex.join(words)}"


@of_every_page
def test_every_module_that_a_page_runs_exists(page):
    for words in command_lines(page):
        if words[:2] == ["python", "-m"] and words[2].startswith("haarkv"):
            assert find_spec(words[2]), f"{page.name}: {shlex.join(words)}"


# -- Docstrings -------------------------------------------------------------------------------------------------------------
WITH_EXAMPLES = [path for path in sources() if "\n>>> " in path.read_text(encoding="utf-8").replace("    >>> ", ">>> ")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_examples_run(path):
    result = doctest.testmod(import_module(module_name(path)))
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("path", ["tq/__init__.py", "tq_ops/formats/__init__.py", "tq_ops/kv/plan.py", "tq_ops/kv/batch.py"])
def test_the_first_pages_of_the_project_have_examples(path):
    assert ROOT / path in WITH_EXAMPLES
