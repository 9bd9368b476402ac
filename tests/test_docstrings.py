"""Examples in docstrings run, and print what they say."""

import doctest
from importlib import import_module

import pytest
from places import ROOT, module_name, sources

WITH_EXAMPLES = [path for path in sources() if "\n>>> " in path.read_text(encoding="utf-8").replace("    >>> ", ">>> ")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_examples_run(path):
    result = doctest.testmod(import_module(module_name(path)))
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("path", ["tq/__init__.py", "tq_ops/formats/__init__.py", "tq_ops/kv/plan.py", "tq_ops/kv/batch.py"])
def test_the_first_pages_of_the_project_have_examples(path):
    assert ROOT / path in WITH_EXAMPLES
