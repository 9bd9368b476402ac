"""A package `torch_npu` on disk that behaves as the real one does when torch is imported, and a machine that has it."""

import os
import subprocess
import sys

import torch
from places import ROOT

UNSOURCED = """
def load():
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
load()
"""
PRESENT = """
from types import SimpleNamespace
import torch
torch.utils.rename_privateuse1_backend("npu")
npu = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, set_device=lambda index: None)
"""
_AUTOLOAD_SOURCE = "\ndef _autoload():\n    print('torch-npu was loaded by torch')\n"


def install(folder, source):
    """Write the package with its entry point, for the torch that runs the tests."""
    release = torch.__version__.split("+")[0]
    metadata = folder / f"torch_npu-{release}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {release}\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n", encoding="utf-8")
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(source + _AUTOLOAD_SOURCE, encoding="utf-8")


def run(folder, home, *arguments, cwd=None, **variables):
    """Run Python where that package is installed, in a home folder of its own; the finished process."""
    parent_env = {k: v for k, v in os.environ.items() if not k.startswith(("ASCEND", "TORCH_DEVICE", "TILE_FWK"))}
    environment = {**parent_env, "PYTHONPATH": str(folder), "HOME": str(home), **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd or ROOT, env=environment, capture_output=True, text=True, check=False
    )
