"""A warning names the caller's line outside the package."""

import inspect
import warnings

from haarkv.tq_ops.errors import warn

INNER = """
def through(message, deep):
    through(message, deep - 1) if deep else warn(message)
"""


def make_function(package):
    """`through` of a module of this package."""
    names = {"__name__": f"{package}.made.up", "warn": warn}
    exec(compile(INNER, f"{package}.py", "exec"), names)
    return names["through"]


def test_the_first_line_outside_of_the_package_is_named_however_deep():
    for package, deep in (("haarkv", 0), ("haarkv", 5), ("tq", 2), ("transformers", 3)):
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            line = inspect.currentframe().f_lineno + 1
            make_function(package)("careful", deep)
        assert [(str(one.message), one.filename, one.lineno) for one in records] == [("careful", __file__, line)], package


def test_another_package_is_named_itself():
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        make_function("user")("careful", 3)
    assert [one.filename for one in records] == ["user.py"]
