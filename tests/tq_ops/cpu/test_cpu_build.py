"""The C++ sources compile without a warning, and a build that is killed leaves nothing for good."""

import os
import subprocess
import sys
import time

import pytest
from at_length import MORE, rest

from haarkv.tq_ops.cpu import build, library


# Some of each folder of instructions; the rest runs with `make test-long`.
@pytest.mark.parametrize("unit", rest(MORE, build.units(build.compiler()), lambda i, _: i % 3 == 0))
def test_a_translation_unit_has_no_warning(unit, tmp_path):
    """What the front end sees; `python -m haarkv.tq_ops.cpu.build --werror` also asks the optimizer."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    source, flags = build.units(build.compiler())[unit]
    command = [build.compiler(), *build.FLAGS, *flags, "-Werror", "-fsyntax-only", str(build.SOURCES / f"{source}.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_this_machine_alone_is_the_best_of_its_sets():
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    every, native = build.units(build.compiler()), build.units(build.compiler(), native=True)
    sets = {name.removesuffix("_dense") for name in native if name.endswith("_dense")}
    assert sets == {[isa for isa in library.isas() if isa != "amx"][-1]}
    assert ("bf16" in native) == library.multiplies_bf16()
    assert native.items() - every.items() == {("isa", native["isa"])}


def test_a_warning_would_be_seen(tmp_path):
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "unused.cpp"
    source.write_text("static int f(int unused) { return 1; } int main() { return f(2); }")
    done = subprocess.run(
        [build.compiler(), *build.FLAGS, "-Werror", "-fsyntax-only", str(source)], capture_output=True, check=False
    )
    assert b"unused" in done.stderr


BUILD = "import sys; from pathlib import Path; from haarkv.tq_ops.cpu.build import build; build(Path(sys.argv[1]))"
# Says that it runs, waits until it may go on, and writes the file after `-o`; what is only asked for flags answers at once.
COMPILER = """#!/bin/sh
case "$*" in *-fsyntax-only*) exit 0;; esac
touch {folder}/begun
while [ ! -e {folder}/go ]; do sleep 0.02; done
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


def wait_until(condition):
    for _ in range(15_000):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen in 300 s")


@pytest.fixture
def begin(tmp_path):
    """Starts a build of made/_kernels.so with a compiler that waits for the file `go`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "made").mkdir()
    compiler = tmp_path / "bin" / "c++"
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    processes = []

    def start():
        (tmp_path / "begun").unlink(missing_ok=True)
        with_compiler = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        processes.append(subprocess.Popen([sys.executable, "-c", BUILD, tmp_path / "made" / "_kernels.so"], env=with_compiler))
        return processes[-1]

    yield start
    (tmp_path / "go").touch()  # compilers of a killed build end as well
    for process in processes:
        process.wait()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_build_leaves_is_removed_by_the_next(begin, tmp_path):
    build = begin()
    wait_until((tmp_path / "begun").exists)
    build.kill()
    build.wait()
    (left,) = names_in(tmp_path / "made")
    assert left.startswith(".build-")  # the name that .gitignore and pyproject.toml leave out
    (tmp_path / "go").touch()
    assert begin().wait() == 0
    assert names_in(tmp_path / "made") == ["_kernels.so"]


def test_a_build_does_not_disturb_another(begin, tmp_path):
    first = begin()
    wait_until((tmp_path / "begun").exists)
    (working,) = names_in(tmp_path / "made")
    second = begin()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(1)
    assert names_in(tmp_path / "made") == [working]
    (tmp_path / "go").touch()
    assert (first.wait(), second.wait()) == (0, 0)
    assert names_in(tmp_path / "made") == ["_kernels.so"]
