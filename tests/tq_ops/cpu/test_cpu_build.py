"""The C++ sources compile without a warning."""

import subprocess

import pytest

from haarkv.tq_ops.cpu import build


@pytest.mark.parametrize("unit", build.units())
def test_a_translation_unit_has_no_warning(unit, tmp_path):
    """What the front end sees; `python -m haarkv.tq_ops.cpu.build --werror` also asks the optimizer."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    source = build.SOURCES / f"{unit}.cpp"
    command = [build.compiler(), *build.FLAGS, *build.units()[unit], "-Werror", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_warning_would_be_seen(tmp_path):
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "unused.cpp"
    source.write_text("static int f(int unused) { return 1; } int main() { return f(2); }")
    done = subprocess.run(
        [build.compiler(), *build.FLAGS, "-Werror", "-fsyntax-only", str(source)], capture_output=True, check=False
    )
    assert b"unused" in done.stderr
