"""A device keeps the seconds that each of its programs took to compile."""

import ast

import fake_npu

COMPILES = """
import time
from haarkv.tq_ops.npu import device
device.find_spec = lambda name: object()  # torch-npu and PyPTO
runner = device.open_runner("npu:0")

class Program:
    name = "decode_layer"
    def build(self, **options):
        calls = []
        def kernel(*tensors):
            time.sleep(0 if calls else 0.3)
            calls.append(tensors)
        return kernel

program = Program()
for _ in range(3): runner.call(program, [])
print(runner.compiled)
"""


def test_a_device_keeps_what_each_program_took_to_compile(tmp_path):
    """The first call compiles; the others add nothing."""
    fake_npu.install(tmp_path / "site", fake_npu.PRESENT)
    done = fake_npu.run(tmp_path / "site", tmp_path, "-c", COMPILES)
    assert done.returncode == 0, done.stderr
    ((name, seconds),) = ast.literal_eval(done.stdout).items()
    assert name == "decode_layer"
    assert 0.3 <= seconds < 30
