"""The C++ of the NPU programs, compiled once for a whole run of the tests, however many processes share it."""

import fcntl
import pickle

from npu_programs import StoreProgram, store_case

from haarkv.models.catalog import read_config
from haarkv.models.qwen3_14b.npu.compile import PROGRAMS, compile_programs
from haarkv.tq_ops.npu.program import order_arguments
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator


def shared(tmp_path_factory, worker_id, name, make):
    """What `make` returns, made by the first process that asks; `worker_id` is `master` where there is only one."""
    base = tmp_path_factory.getbasetemp()
    folder = base if worker_id == "master" else base.parent
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pickle_file = folder / f"{name}.pickle"
        if not pickle_file.exists():
            pickle_file.write_bytes(pickle.dumps(make()))
        return pickle.loads(pickle_file.read_bytes())


def compile_store(program):
    """The sources of a store program; in a process of its own, so that a fault planted in one is not met in another."""
    tensors = store_case(program.rows, program.num_kv_heads).tensors
    with Simulator() as simulator:
        return simulator.run(program, order_arguments(program, tensors), Mode.COMPILE).sources


def compile_all(model):
    """Program -> path -> text, for a model's programs and for the store program with its KV heads."""
    config = read_config(model)
    programs = {c.name: c.sources for c in compile_programs(config, tuple(PROGRAMS), lambda _: None)}
    return programs | {"store": compile_store(StoreProgram(config.heads.num_kv_heads))}
