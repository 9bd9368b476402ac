"""The laboratory stands outside: neither installed nor imported by the product or its tests."""

import re

from places import ROOT


def test_no_test_of_the_product_imports_it():
    files = list((ROOT / "tests").rglob("*.py"))
    assert len(files) > 100
    assert [
        file for file in files if re.search(r"^\s*(from|import) lab\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    ] == []


def test_it_is_not_installed():
    package_lists = re.findall(
        r"^(?:packages|only-include) = \[(.*)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(package_lists) == 3
    assert [names for names in package_lists if "lab" in names] == ['"haarkv", "tq", "lab"']  # mypy's, which only reads it
