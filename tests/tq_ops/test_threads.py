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

# Loops with pauses: what they take of the processors, beyond the loops themselves, goes to threads that wait.
CODE = """
import time, torch
from contextlib import nullcontext
from haarkv.tq_ops.threads import sleeping_threads

torch.set_num_threads(2)
x = torch.randn(2**20, generator=torch.Generator().manual_seed(0))

def loops(way):
    with way:
        assert torch.get_num_threads() == 2
        sums, began = set(), time.process_time()
        for _ in range(100):
            sums.add(float(x.sum()))
            time.sleep(0.01)
        return time.process_time() - began, sums

ways = [loops(way) for way in (nullcontext(), sleeping_threads(), nullcontext())]
assert torch.get_num_threads() == 2
torch.set_num_threads(1)
assert {float(x.sum())} != ways[0][1] == ways[1][1] == ways[2][1]  # the order of a sum follows the number of threads
print(*(seconds for seconds, _ in ways))
"""


def test_threads_sleep_while_it_is_open_and_only_then():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, env=clean)
    assert done.returncode == 0, done.stderr
    before, inside, after = map(float, done.stdout.split())
    assert 3 * inside < min(before, after)


def test_the_validator_lets_them_sleep():
    model, seen = small_model(), set()
    plan = KVSpec("tq4").plan(model.config.num_layers)
    try:
        torch.set_num_threads(2)
        reference = ReferenceExecutor(model)
        validate(
            reference, ReferenceExecutor(model), model, [[1, 2, 3]], 1, plan,
            lambda _: seen.update(thread.name for thread in threading.enumerate()),
        )  # fmt: skip
    finally:
        torch.set_num_threads(1)
    assert "haarkv-sleeping-threads" in seen
    assert "haarkv-sleeping-threads" not in {thread.name for thread in threading.enumerate()}
