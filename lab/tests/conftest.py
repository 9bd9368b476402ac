"""Options of the laboratory's tests; one thread a process and goldens, as in the product's tests."""

from goldens import golden, published_rotation
from process_setup import set_up

__all__ = ["golden", "published_rotation"]
set_up()


def pytest_addoption(parser):
    group = parser.getgroup("lab")
    group.addoption("--real", metavar="FOLDER", help="pretrained checkpoints, as GGUF files")
    group.addoption("--pto-isa", metavar="FOLDER", help="a checkout of pto-isa: execute the C++ of NPU programs")
    group.addoption("--clang", metavar="COMMAND", help="with --pto-isa: the compiler, a clang 19 or newer with libc++")
