"""A machine that is measured by a glance."""

import pytest

from haarkv.benchmarks import attention, timing, whole


@pytest.fixture
def glance(monkeypatch):
    for module, name, value in (
        (timing, "_COPY_BYTES", 2**16), (timing, "_FLUSH_BYTES", 2**16), (timing, "_MATRIX", 16), (timing, "_REST_S", 0.0),
        (attention, "_COLD_BYTES", 2**16), (whole, "_REST_S", 0.0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
