"""Fixtures that read golden files."""

import numpy as np
import pytest
import torch
from places import ROOT

GOLDEN = ROOT / "tests/golden"


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
