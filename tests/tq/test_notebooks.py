"""The notebooks of `examples/` are notebooks, run from the first cell to the last, and hold what their cells gave."""

import re

import notebooks
import pytest
from places import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_there_is_one():
    assert "first_steps.ipynb" in {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_the_form_of_one(path):
    notebook = notebooks.read(path)
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | code
        assert cell["cell_type"] in ("code", "markdown")
        assert all(isinstance(line, str) for line in cell["source"])
        assert re.fullmatch(r"[a-zA-Z0-9-_]{1,64}", cell["id"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """On another CPU a text may differ; how many lines a cell prints, and of what, does not."""
    monkeypatch.chdir(tmp_path)
    notebook = notebooks.read(path)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, (printed, value) in zip(cells, notebooks.run(notebook), strict=True):
        assert printed or value is not None or cell["id"] == "step-1", cell["id"]
        fresh = notebooks.outputs(printed, value)
        assert [(each["output_type"], each.keys()) for each in cell["outputs"]] == [
            (each["output_type"], each.keys()) for each in fresh
        ], cell["id"]
    assert list(tmp_path.iterdir()) == []
