"""The C++ sources compile without a warning, and a machine gets the sets that it runs."""

import subprocess

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
    assert ("bf16" in native) == bool(library.load().haarkv_isas() & library.BF16_PRODUCTS)
    assert native.items() - every.items() == {("isa", native["isa"])}
