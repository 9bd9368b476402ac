"""A machine that is measured by a glance."""

import pytest

from haarkv.benchmarks import cases, timing


@pytest.fixture
def glance(monkeypatch):
    for module, name, value in (
        (timing, "_COPY_BYTES", 2**16), (timing, "_MATRIX", 16), (timing, "_REST_S", 0.0),
        (cases, "_COLD_BYTES", 2**16),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
