"""Kernels with a fault: a change of their source, imported in their place."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


@contextmanager
def planted(launcher: Any, kernels: str, old: str, new: str) -> Iterator[None]:
    """A module of kernels changed as long as this lasts.

    Args:
        launcher: the module that launches them, and knows them by the name `kernels`.
        old, new: a text that its source holds once, and what stands there instead.
    """
    kept = getattr(launcher, kernels)
    text = Path(kept.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, "nothing was planted"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "faulty_kernels.py"
        path.write_text(text.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("faulty_kernels", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        setattr(launcher, kernels, module)
        spec.loader.exec_module(module)
        try:
            yield
        finally:
            setattr(launcher, kernels, kept)
