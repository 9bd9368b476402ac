"""Tests of the plug-in run where vLLM is installed; elsewhere nothing here is collected.

The folder is not named `vllm`: with `tests` on the path every look for vLLM would then find a folder of tests.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    config.addinivalue_line("markers", "vllm: needs the vllm extra")
    config.addinivalue_line("markers", "vllm_server: starts vLLM's own server; minutes")
    config.addinivalue_line("markers", "vllm_short: the shortest of the vllm tests that still starts a server")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def judge():
    """The reference with a `tq4` cache; what it has scored it remembers for all tests."""
    from vllm_judge import Judge

    return Judge()


@pytest.fixture(scope="session")
def roomy(tmp_path_factory):
    """A server with room for all requests at once, as `tq serve` starts it."""
    from vllm_server import serving

    with serving(tmp_path_factory.mktemp("roomy") / "log") as server:
        yield server
