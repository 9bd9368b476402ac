"""One thread a test process: results do not depend on the machine's cores, and parallel workers do not fight."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"
torch.set_num_threads(1)
# Read as Triton is imported: without a GPU its kernels run in its interpreter, in worker processes and children too.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    group = parser.getgroup("haarkv")
    group.addoption(
        "--pto-isa", metavar="FOLDER", help="a checkout of pto-isa: execute the C++ of NPU programs with its CPU backend"
    )
    group.addoption("--real", metavar="FOLDER", help="with -m real: pretrained checkpoints, as GGUF files")
    group.addoption("--triton", metavar="FOLDER", help="with -m cuda_compile: compile with the Triton unpacked there")
    group.addoption("--clang", metavar="COMMAND", help="with --pto-isa: the compiler, a clang 19 or newer with libc++")


@pytest.fixture(scope="session")
def published_rotation(golden):
    """The rotation of the published kernels, for formats whose goldens were made with it: layers 0, 1 and 39 of 128."""
    bits = golden("turboquant_qwen3_14b/rotations")

    def rotation(layer, head_dim):
        assert head_dim == 128
        return torch.from_numpy(bits[f"layer{layer}_Pi_bf16_bits"].view(np.int16)).view(torch.bfloat16)

    return rotation


@pytest.fixture(scope="session")
def golden():
    """Loads a golden file: golden("turboquant_qwen3_14b/rotations")["layer0_Pi_bf16_bits"] is a numpy array."""

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
            return {key: file[key] for key in file.files}

    return load
