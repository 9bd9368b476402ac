"""torch's threads sleep while they wait, are as many as before, and give the same bits."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from small_models import small_model

from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.layers.runner import validate

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs GCC's OpenMP and two processors"
)

# With an active policy GCC's threads spin for minutes after a loop, unless there are more of them than processors: then they
# sleep at once. So a look at their states tells the two apart, however fast or busy the machine is.
CODE = """
import os, time, torch
from contextlib import nullcontext
from pathlib import Path
from haarkv.tq_ops.threads import sleeping_threads

torch.set_num_threads(2)
x = torch.randn(2**20, generator=torch.Generator().manual_seed(0))

def state(task):
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended meanwhile
        return ""

def spinning():
    return any(state(task) == "R" for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid())

def total(way, spins):
    with way:
        assert torch.get_num_threads() == 2
        found = float(x.sum())
        until = time.monotonic() + 60  # on a busy machine one look may come too early
        while spinning() != spins:
            assert time.monotonic() < until
            time.sleep(0.01)
        return found

sums = {total(nullcontext(), True), total(sleeping_threads(), False), total(nullcontext(), True)}
assert torch.get_num_threads() == 2
torch.set_num_threads(1)
assert len(sums) == 1
assert float(x.sum()) not in sums  # the order of a sum follows the number of threads
"""


def test_threads_sleep_while_it_is_open_and_only_then():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    clean["OMP_WAIT_POLICY"] = "active"
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, env=clean)
    assert done.returncode == 0, done.stderr


def test_the_validator_lets_them_sleep():
    model, thread_names = small_model(), set()
    plan = KVSpec("tq4").plan(model.config.num_layers)
    try:
        torch.set_num_threads(2)
        reference = ReferenceExecutor(model)
        validate(
            reference, ReferenceExecutor(model), model, [[1, 2, 3]], 1, plan,
            lambda _: thread_names.update(thread.name for thread in threading.enumerate()),
        )  # fmt: skip
    finally:
        torch.set_num_threads(1)
    assert "haarkv-sleeping-threads" in thread_names
    assert "haarkv-sleeping-threads" not in {thread.name for thread in threading.enumerate()}
