"""Whether the kernels, Triton's and those in CUDA C++, can be compiled and run here, on how many processors; launching them.

CUDA C++ is compiled where it runs, by NVIDIA's own bindings of NVRTC and of the driver. PyTorch brings NVRTC with its CUDA
builds, so no CUDA toolkit is needed. What is compiled is kept for the process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OLDEST_TRITON = (3, 6)
_INTERPRETED_PROCESSORS, _INTERPRETED_CAPABILITY = 4, 90
_compiles: ContextVar[bool] = ContextVar("compiles", default=False)


def triton_missing() -> str | None:
    """None, or in one sentence why the kernels cannot be compiled: an older torch brings a Triton that lacks what they use."""
    if find_spec("triton") is None:
        return "Triton is not installed; pip install 'haarkv[cuda]'"
    try:
        triton_version = version("triton")
    except PackageNotFoundError:  # A nightly build, by another name.
        return None
    if tuple(int(part) for part in triton_version.split(".")[:2]) >= OLDEST_TRITON:
        return None
    oldest = ".".join(map(str, OLDEST_TRITON))
    return f"Triton is {triton_version} and the kernels need {oldest}, which torch 2.11 brings; install a newer torch"


def unavailable() -> str | None:
    """None, or in one sentence why not."""
    if reason := triton_missing():
        return reason
    import triton

    if torch.cuda.is_available() or triton.knobs.runtime.interpret:
        return None
    return "there is no NVIDIA GPU; with TRITON_INTERPRET=1 the kernels run in Triton's interpreter"


@cache
def processors(device: torch.device) -> int:
    """Processors of a GPU."""
    # The interpreter runs programs one after the other; a few are enough to test that splits are merged.
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def capability(device: torch.device) -> int:
    """Compute capability of a GPU, 90 for 9.0; in the interpreter that of an H100."""
    if device.type != "cuda":
        return _INTERPRETED_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """`kernel[grid]`; within `compiled_ahead` a call that has the kernel compiled for its arguments and launches nothing."""
    return partial(kernel.warmup, grid=grid) if only_compiles() else kernel[grid]


def only_compiles() -> bool:
    """Whether nothing is to be launched now."""
    return _compiles.get()


@contextmanager
def compiled_ahead(on_kernels: Callable[[int], object]) -> Iterator[None]:
    """Launches within compile their kernels, all at once, and compute nothing; it is over when all are compiled.

    What does not compile is left to the launch that needs it, whose error it is.

    Args:
        on_kernels: called with how many there are before they are waited for.
    """
    import triton

    # Most of a compilation runs without Python's lock: two threads take 0.6 of the time of one.
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True) as mode:
        token = _compiles.set(True)
        try:
            yield
        finally:
            _compiles.reset(token)
        if mode.future_kernels:
            on_kernels(len(mode.future_kernels))


# -- CUDA C++ ----------------------------------------------------------------------------------------------------------------


class CompileError(RuntimeError):
    """NVRTC refused a source; the text is its log."""


@cache
def nvrtc_missing() -> str | None:
    """None, or in one sentence why no CUDA C++ can be compiled."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed; pip install 'haarkv[cuda]'"
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        major = (torch.version.cuda or "13").split(".")[0]
        message = " ".join(str(error).split())
        return f"NVRTC cannot be loaded; pip install 'cuda-bindings=={major}.*' beside a PyTorch for CUDA {major} ({message})"
    return None


def compiled_cpp(folder: Path, name: str, target: str, defines: Mapping[str, int | str]) -> bytes:
    """What NVRTC makes of a source file.

    Args:
        folder: of the source and of the headers that it includes, `*.cuh`.
        name: of the source.
        target: `sm_90` for machine code, `compute_90` for PTX.
        defines: macros.
    Raises:
        CompileError: with the log.
    """
    from cuda.bindings import nvrtc

    headers = sorted(folder.glob("*.cuh"))
    texts, names = [header.read_bytes() for header in headers], [header.name.encode() for header in headers]
    source = (folder / name).read_bytes()
    program = _require_success(nvrtc.nvrtcCreateProgram(source, name.encode(), len(headers), texts, names))
    try:
        options = [f"--gpu-architecture={target}", "--std=c++17", *(f"-D{key}={value}" for key, value in defines.items())]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(result):
            log = bytes(_require_success(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(log.decode(errors="replace").strip("\0 \n"))
        binary = target.startswith("sm_")
        size, get = (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if binary else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        out = bytes(_require_success(size(program)))
        _require_success(get(program, out))
        return out
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Kernel:
    """A kernel on one GPU.

    Args:
        binary: machine code, from `compiled_cpp`.
        name: of the kernel.
        shared_bytes: dynamic shared memory of a thread block.
        device: whose context is current while it is loaded and launched.
    """

    def __init__(self, binary: bytes, name: str, shared_bytes: int, device: torch.device) -> None:
        from cuda.bindings import driver

        self._device, self._shared_bytes = device, shared_bytes
        with torch.cuda.device(device):
            self._module = _require_success(driver.cuModuleLoadData(binary))
            self._function = _require_success(driver.cuModuleGetFunction(self._module, name.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _require_success(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))

    def launch(self, grid: tuple[int, int], threads: int, arguments: ctypes.Structure) -> None:
        """Queue one launch on PyTorch's current stream; its one parameter is a structure passed by value."""
        from cuda.bindings import driver

        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream().cuda_stream
            _require_success(
                driver.cuLaunchKernel(
                    self._function, *grid, 1, threads, 1, 1, self._shared_bytes, stream, ctypes.addressof(parameters), 0
                )
            )


def address(tensor: Tensor) -> int:
    """Where a kernel finds a tensor."""
    return tensor.data_ptr()


@cache
def most_shared_bytes(device: torch.device) -> int:
    """Dynamic shared memory that a thread block may ask for; what an H100 has where there is no GPU."""
    return _attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") if device.type == "cuda" else 227 * 1024


@cache
def processor_shared_bytes(device: torch.device) -> int:
    """Shared memory of a processor, for all its thread blocks; what an H100 has where there is no GPU."""
    return _attribute(device, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") if device.type == "cuda" else 228 * 1024


def _attribute(device: torch.device, name: str) -> int:
    from cuda.bindings import driver

    torch.cuda.init()
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    number = torch.cuda.current_device() if device.index is None else device.index
    return int(_require_success(driver.cuDeviceGetAttribute(attribute, _require_success(driver.cuDeviceGet(number)))))


def _require_success(response: tuple[Any, ...]) -> Any:
    """What a call of the bindings returns beside its result, which must be success."""
    result, *rest = response
    if int(result):
        raise RuntimeError(f"{type(result).__name__}: {result.name}")
    return rest[0] if len(rest) == 1 else tuple(rest)
