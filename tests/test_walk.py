"""The documentation runs: the walk of one K vector, the README's script, and every link between our own files."""

import re

import pytest
from places import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_of_a_page_runs_in_order(page, capsys):
    scope = {}
    for number, block in enumerate(code_blocks(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), scope)


def test_the_walk_asserts_its_byte_counts():
    blocks = "\n".join(code_blocks(ROOT / "docs" / "walk.md"))
    assert len(re.findall(r"^assert .*nbytes ==", blocks, re.MULTILINE)) >= 5
    assert "== 66" in blocks


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
