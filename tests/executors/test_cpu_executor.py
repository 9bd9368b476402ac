"""The executor `cpu`: its text, what it refuses, and life without a compiler."""

from __future__ import annotations

import re

import pytest
from small_models import SMALL, small_model

from haarkv.executors.cpu import CpuExecutor
from haarkv.tq_ops.cpu import build, library

MODEL = small_model(SMALL)


# -- Without the kernels -----------------------------------------------------------------------------------------------
@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """The library is looked for in an empty folder."""
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "_kernels.so")
    library.load.cache_clear()
    yield tmp_path / "_kernels.so"
    library.load.cache_clear()


@pytest.mark.parametrize("content", [None, b"no library"])
def test_without_the_kernels_it_says_how_to_build_them(elsewhere, content):
    if content:
        elsewhere.write_bytes(content)
    with pytest.raises(library.KernelsMissingError, match=r"run `python -m haarkv\.tq_ops\.cpu\.build`") as refusal:
        CpuExecutor(MODEL)
    assert "\n" not in str(refusal.value)


def test_without_a_compiler_nothing_is_built(monkeypatch, tmp_path):
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found"):
        build.build(tmp_path / "_kernels.so")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_leaves_what_was_there(monkeypatch, tmp_path):
    target, fails = tmp_path / "_kernels.so", tmp_path / "c++"
    target.write_bytes(b"old")
    fails.write_text("#!/bin/sh\necho 'x.cpp:1: error: nothing works' >&2\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setattr(build, "compiler", lambda: str(fails))
    with pytest.raises(build.BuildError, match=re.escape("failed: x.cpp:1: error: nothing works")):
        build.build(target)
    assert target.read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"_kernels.so", "c++"}
