"""The notebooks of `examples/` are notebooks, run from the first cell to the last, and hold what their cells gave."""

import ast
import io
import json
from contextlib import redirect_stdout

import pytest
from places import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def run(notebook):
    """Run the code cells one after the other; what each printed, and the value of its last expression or None."""
    scope, results = {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        body = ast.parse("".join(cell["source"]), cell["id"]).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        with redirect_stdout(io.StringIO()) as stdout:
            exec(compile(ast.Module(body, []), cell["id"], "exec"), scope)
            value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), scope) if last else None
        results.append((stdout.getvalue(), value))
    return results


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """On another CPU a text may differ; how many lines a cell prints, and of what, does not."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, (stdout, value) in zip(cells, run(notebook), strict=True):
        assert stdout or value is not None or cell["id"] == "step-1", cell["id"]
        kinds = ["stream"] * bool(stdout) + ["execute_result"] * (value is not None)
        assert [each["output_type"] for each in cell["outputs"]] == kinds, cell["id"]
    assert list(tmp_path.iterdir()) == []
