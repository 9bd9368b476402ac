"""A benchmark of a small checkpoint, on a machine that is measured by a glance."""

import pytest
from checkpoints import write_checkpoint

from haarkv.benchmarks import cases, timing


@pytest.fixture
def glance(monkeypatch):
    for module, name, value in (
        (timing, "_COPY_BYTES", 2**16), (timing, "_MATRIX", 16), (timing, "_REST_S", 0.0),
        (cases, "_COLD_BYTES", 2**16),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def bench_fixture(main):
    """Of a function that runs a benchmark by `main`: exit code, stdout, stderr.

    Unless told otherwise the reference does, once, at 40 tokens.
    """

    @pytest.fixture
    def run(capsys, tmp_path, glance):
        checkpoint = write_checkpoint(tmp_path / "checkpoint")

        def run(name, *args):
            quick = ["--repeats", "1", "--contexts", "40", *["--executor", "reference"] * ("--executor" not in args)]
            return main([name, "--model", str(checkpoint), *quick, *args]), *capsys.readouterr()

        return run

    return run
