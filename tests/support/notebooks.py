"""Notebooks without Jupyter: their cells run in order, as a kernel runs them."""

import ast
import io
import json
from contextlib import redirect_stdout


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def run(notebook):
    """Run the code cells one after the other; what each printed, and the value of its last expression or None."""
    scope, seen = {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        body = ast.parse("".join(cell["source"]), cell["id"]).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(ast.Module(body, []), cell["id"], "exec"), scope)
            value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), scope) if last else None
        seen.append((printed.getvalue(), value))
    return seen


def outputs(printed, value):
    """A cell's outputs as a notebook keeps them."""
    found = []
    if printed:
        found.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        found.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return found
