"""One thread a test process, as in the product's tests; goldens come from there, too."""

from goldens import golden, published_rotation
from process_setup import set_up

__all__ = ["golden", "published_rotation"]
set_up()


def pytest_addoption(parser):
    parser.addoption("--real", metavar="FOLDER", help="pretrained checkpoints, as GGUF files")
