"""A warning names the caller's line outside the package."""

import pytest

from haarkv.tq_ops.errors import warn

INNER = """
def through(message, deep):
    through(message, deep - 1) if deep else warn(message)
"""


@pytest.mark.parametrize(
    ("package", "deep", "file"),
    [("haarkv", 0, __file__), ("haarkv", 5, __file__), ("tq", 2, __file__), ("transformers", 3, __file__),
     ("user", 3, "user.py")],
)  # fmt: skip
def test_the_first_line_outside_of_the_package_is_named_however_deep(package, deep, file):
    names = {"__name__": f"{package}.made.up", "warn": warn}
    exec(compile(INNER, f"{package}.py", "exec"), names)
    with pytest.warns(UserWarning, match="^careful$") as records:
        names["through"]("careful", deep)
    assert [one.filename for one in records] == [file]
