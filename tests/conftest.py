"""Options of the test run, and fixtures that all tests share."""

import pytest
from goldens import golden, published_rotation
from last_bit_noise import become
from process_setup import set_up

__all__ = ["golden", "published_rotation"]
set_up()


def pytest_addoption(parser):
    group = parser.getgroup("haarkv")
    group.addoption("--real", metavar="FOLDER", help="with -m real: pretrained checkpoints, as GGUF files")
    group.addoption("--triton", metavar="FOLDER", help="with -m cuda_compile: compile with the Triton unpacked there")
    group.addoption("--shaken", type=int, metavar="SEED", help="torch's sums as another machine may compute them")


def pytest_configure(config):
    if (seed := config.getoption("--shaken")) is not None:
        become(seed)


@pytest.fixture(autouse=True)
def default_cache(request, monkeypatch, tmp_path_factory):
    """Without a name tests run in `tq4`, as if it had been chosen before; those marked `chooses` choose anew."""
    folder = tmp_path_factory.getbasetemp() / "kv-auto"
    monkeypatch.setattr("haarkv.validation.planning.choice_cache.home", lambda: folder)
    if request.node.get_closest_marker("chooses") is None:
        from haarkv.tq_ops.kv.plan import KVSpec

        # First the one that imports from the other: else it would keep what stands here.
        for name in ("tq.loading", "haarkv.validation.planning.choice_cache"):
            monkeypatch.setattr(f"{name}.saved_choice", lambda *_, **__: KVSpec())
