"""The process in which PyPTO interprets and compiles programs without an NPU, started by `tq_ops.npu.sim.simulator`.

PyPTO keeps global state, writes into its working directory and prints, and a bad kernel can take the process down.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from csv import DictReader
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pypto
import torch
from pypto import pypto_impl
from pypto._utils import BuildOnlineManager
from pypto.frontend.parser import entry

from haarkv.tq_ops.npu.folders import cache_folder
from haarkv.tq_ops.npu.program import Kernel, Program
from haarkv.tq_ops.npu.sim.simulator import Mode, Request, StoredTensor

_DTYPES = {
    "DT_FP32": torch.float32, "DT_FP16": torch.float16, "DT_BF16": torch.bfloat16, "DT_INT8": torch.int8,
    "DT_INT16": torch.int16, "DT_INT32": torch.int32, "DT_INT64": torch.int64, "DT_UINT8": torch.uint8,
}  # fmt: skip
_SIM = {"run_mode": 1}
# Of the interpreter's own comparison. It is not the verdict: the caller compares the data.
_LOOSE = [2e-2, 2e-2]


def built_calculator() -> Path:
    """PyPTO's torch calculator, built once into the user's cache folder; PyPTO itself builds it in every process (23 s)."""
    source = Path(pypto.__file__).parent / "lib/calculator"
    text = (source / "src/calc_torch.cpp").read_bytes()
    key = hashlib.sha256(f"{torch.__version__} {sys.version}".encode() + text).hexdigest()[:16]
    folder = cache_folder("pypto_calculator") / key
    library = folder / "libtile_fwk_calculator.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        torch_context, cmake = BuildOnlineManager._TorchContext(), BuildOnlineManager._CMakeContext()
        with TemporaryDirectory(prefix="haarkv-calculator-") as work:
            context = BuildOnlineManager._CMakeContext.CompileContext(src_dir=source, tmp_dir=Path(work))
            context.cfg_cmd_ext = (
                f"-DPY3_MOD_TORCH_VERSION={torch_context.torch_version} "
                f"-DPY3_MOD_TORCH_ROOT_PATH={torch_context.torch_root_dir} "
                f"-DPY3_MOD_TORCH_C_GLIBCXX_USE_CXX11_ABI={torch_context.torch_c_use_cxx11_abi}"
            )
            library_file = cmake.compile(ctx=context) / "lib" / library.name
            half = library.with_suffix(f".{os.getpid()}")
            shutil.copyfile(library_file, half)
            half.replace(library)
    return library


def _load_calculator(self: Any) -> None:
    if not self.calculator_loaded:
        ctypes.CDLL(str(built_calculator()), mode=ctypes.RTLD_GLOBAL)
        self.calculator_loaded = True


def _setup_verify_data(tensors: list[Any]) -> None:
    """Replaces PyPTO's own, which copies inputs through a stub that copies nothing, and so runs on zeros."""
    if pypto.get_verify_options().get("enable_pass_verify"):
        BuildOnlineManager().build_and_load_calculator()
        goldens = entry._pto_verify_datas.get_data()
        pypto_impl.SetVerifyData(entry._pto_to_tensor_data(tensors), [], goldens)


def _patch() -> None:
    BuildOnlineManager.build_and_load_calculator = _load_calculator
    entry.JitCallableWrapper._setup_verify_data = staticmethod(_setup_verify_data)


def _options(mode: Mode) -> dict[str, dict[str, Any]]:
    stage = pypto.CompStage
    if mode is Mode.COMPILE:
        return {"runtime_options": _SIM, "host_options": {"compile_stage": stage.CODEGEN_INSTRUCTION}}
    # Tensors with a golden are dumped anyway. All would be 5,700 files, 140 MB, in a prefill of SmolLM2's layer.
    verify = {
        "enable_pass_verify": True, "pass_verify_save_tensor": False, "pass_verify_error_tol": _LOOSE,
        "pass_verify_pass_filter": [],
    }  # fmt: skip
    return {"runtime_options": _SIM, "verify_options": verify, "host_options": {"compile_stage": stage.TENSOR_GRAPH}}


@cache
def _kernel(program: Program, mode: Mode) -> Kernel:
    return program.build(**_options(mode))


@cache
def _constant(tensor_file: StoredTensor) -> torch.Tensor:
    return tensor_file.map()


def _run(request: Request) -> dict[str, Any]:
    program, mode = request.program, request.mode
    tensors = [_constant(a) if a.constant else a.map() for a in request.arguments]
    if mode is Mode.NUMBERS:
        # A tensor is dumped only if there is something to compare it with; that verdict is ignored.
        goldens = [t if a.output else None for t, a in zip(tensors, program.arguments, strict=True)]
        pypto.set_verify_golden_data(goldens=goldens)
    began = time.perf_counter()
    with _fake_toolchain() if mode is Mode.COMPILE else nullcontext():
        _kernel(program, mode)(*tensors)
    seconds = time.perf_counter() - began
    # The verifier's files are C streams, which are otherwise flushed at exit only.
    ctypes.CDLL(None).fflush(None)
    folders = sorted(Path("output").glob("output_*"), key=lambda p: p.stat().st_mtime_ns)
    result = {"seconds": seconds, "filled": [], "report": "", "sources": {}}
    for folder in folders[-1:]:
        _collect(folder, request, tensors, result)
    shutil.rmtree("output", ignore_errors=True)
    return result


@contextmanager
def _fake_toolchain() -> Iterator[None]:
    """Code generation needs a toolkit's folder; given one with an include path, it writes the C++ and stops."""
    root = Path("toolkit").absolute()
    (root / "include/pto").mkdir(parents=True, exist_ok=True)
    os.environ["ASCEND_HOME_PATH"] = str(root)
    try:
        yield
    finally:
        del os.environ["ASCEND_HOME_PATH"]


def _collect(folder: Path, request: Request, tensors: list[torch.Tensor], result: dict[str, Any]) -> None:
    for brief in folder.glob("verify_*/verify_result_brief.csv"):
        with brief.open(encoding="utf-8") as file:
            for row in DictReader(file):
                index = int(row["ioflag"].removeprefix("output"))
                dump = brief.parent / "tensor_graph" / row["outputTensor"]
                if row["passName"] == "tensor_graph" and request.mode is Mode.NUMBERS and dump.is_file():
                    count = tensors[index].numel()
                    values = torch.from_file(str(dump), size=count, dtype=_DTYPES[row["outputDtype"]])
                    tensors[index].copy_(values.view(tensors[index].shape))
                    result["filled"].append(index)
        exceptions = brief.parent / "verify_exception.log"
        if exceptions.exists():
            result["report"] = exceptions.read_text(encoding="utf-8", errors="replace")
    # The kernel functions include a header of the control flow: all sources, each in its place.
    sources = folder.glob("kernel_*/*") if request.mode is Mode.COMPILE else ()
    for source in sorted(p for p in sources if p.suffix in (".cpp", ".h")):
        result["sources"][source.relative_to(folder).as_posix()] = source.read_text(encoding="utf-8")


def serve(connection: Connection) -> None:
    """Answer requests until the other side hangs up."""
    torch.set_num_threads(1)
    _patch()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer: dict[str, Any] = _run(request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            shutil.rmtree("output", ignore_errors=True)
        connection.send(answer)
