"""Kernels with a fault: a change of their source, imported in their place."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


@contextmanager
def planted(module: Any, old: str, new: str) -> Iterator[None]:
    """The kernels of a module changed as long as this lasts.

    Args:
        old, new: a text that its source holds once, and what stands there instead.
    """
    kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, "nothing was planted"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "faulty_kernels.py"
        path.write_text(text.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("faulty_kernels", path)
        assert spec is not None
        assert spec.loader is not None
        faulty = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(faulty)
        try:
            vars(module).update({name: vars(faulty)[name] for name in kernels})
            yield
        finally:
            vars(module).update(kernels)
