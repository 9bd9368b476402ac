"""What is installed for an Ascend NPU, and which combinations its makers publish.

Reads package metadata and CANN's own files. Imports neither torch nor PyPTO, so it can speak where `import torch` fails.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Combination:
    """Versions that are published to work together.

    Attributes:
        cann: the release; `9.1` stands for every 9.1.x.
        torch_npu: torch's version -> the versions of torch-npu for it and this CANN.
        driver: the oldest one.
        python: of PyPTO, torch-npu and haarkv.
    """

    pypto: str
    cann: str
    torch_npu: Mapping[str, tuple[str, ...]]
    driver: str
    python: tuple[str, ...]


PUBLISHED_COMBINATIONS = (
    Combination(
        "0.2.0", "9.0.0",
        {"2.7.1": ("2.7.1.post4",), "2.8.0": ("2.8.0.post4",), "2.9.0": ("2.9.0.post2",), "2.10.0": ("2.10.0",)},
        driver="25.5.0", python=("3.11", "3.12"),
    ),
    Combination(
        "0.2.1", "9.1",
        {
            "2.7.1": ("2.7.1.post8", "2.7.1.post10"), "2.9.0": ("2.9.0.post6", "2.9.0.post8"),
            "2.10.0": ("2.10.0.post4", "2.10.0.post6"), "2.11.0": ("2.11.0", "2.11.0.post2"),
            "2.12.0": ("2.12.0", "2.12.0.post2"),
        },
        driver="25.5.0", python=("3.11", "3.12"),
    ),
)  # fmt: skip
"""What PyPTO's releases r0.2.0 and v9.1.0 and torch-npu's version tables say (gitcode.com/Ascend/pytorch, read 2026-11).

PyPTO of CANN 9.1.0, which brings it, calls itself 0.2.1. Python is what haarkv and every one of them support.
"""

SIM_PYPTO = "0.2.0"
"""The simulator replaces parts of this PyPTO, which later releases have renamed."""

_DEFAULT_FOLDER = Path("/usr/local/Ascend")


@dataclass(frozen=True)
class Installation:
    """Versions on this machine; None where nothing is installed. `sourced`: CANN's set_env.sh was run in this shell."""

    python: str
    torch: str | None
    torch_npu: str | None
    pypto: str | None
    cann: str | None
    cann_folder: Path | None
    sourced: bool
    driver: str | None


def find_installation(ascend: Path = _DEFAULT_FOLDER) -> Installation:
    """What this machine has; nothing is imported and no device is touched.

    Args:
        ascend: folder of the driver, and of CANN unless it was sourced from elsewhere.
    """
    home = sourced_from()
    folder, cann = _toolkit([Path(home)] if home else _folders(ascend))
    return Installation(
        python=platform.python_version(),
        torch=_package("torch"),
        torch_npu=_package("torch_npu"),
        pypto=_package("pypto"),
        cann=cann,
        cann_folder=folder,
        sourced=bool(home),
        driver=_field(ascend / "driver" / "version.info"),
    )


def sourced_from() -> str | None:
    """The toolkit whose set_env.sh was run in this shell, or None."""
    return os.environ.get("ASCEND_HOME_PATH") or None


def unpublished_reason(stack: Installation) -> str | None:
    """None if the combination is published, or one sentence: what is not, and what to do."""
    if stack.pypto is None:
        return "pypto is not installed; run pip install 'haarkv[npu]', or source the set_env.sh of a CANN 9.1, which brings it"
    row = _combination(stack)
    if row is None:
        combinations = " or ".join(f"{row.pypto} with CANN {row.cann}" for row in PUBLISHED_COMBINATIONS)
        return f"pypto {stack.pypto} is in no combination that is published; install {combinations}"
    return _unpublished(row, stack)


def unsimulated_reason(stack: Installation) -> str | None:
    """None if PyPTO's interpreter can run here, or in one sentence why not."""
    if stack.pypto is None:
        return "pypto is not installed; run pip install 'haarkv[npu]'"
    if stack.pypto != SIM_PYPTO:
        return (
            f"the simulator knows pypto {SIM_PYPTO} only, and {stack.pypto} is installed; use --device npu:0, or install "
            f"pypto=={SIM_PYPTO} in an environment of its own, without CANN's set_env.sh"
        )
    return None


def _unpublished(row: Combination, stack: Installation) -> str | None:
    if ".".join(stack.python.split(".")[:2]) not in row.python:
        pythons = " and ".join(row.python)
        return f"pypto {row.pypto} is published for Python {pythons}, and this is {stack.python}; use one of those"
    if stack.cann is None:
        return f"no CANN toolkit was found; install CANN {row.cann} and source its set_env.sh"
    if not (stack.cann == row.cann or stack.cann.startswith((f"{row.cann}.", f"{row.cann}-"))):
        return f"pypto {row.pypto} goes with CANN {row.cann}, and {stack.cann} is in {stack.cann_folder}; install {row.cann}"
    if not stack.sourced:
        return f"CANN {stack.cann} in {stack.cann_folder} is not sourced; source its set_env.sh"
    if stack.driver is None:
        return f"no NPU driver was found; install {row.driver} or later"
    if _numbers(stack.driver) < _numbers(row.driver):
        return f"the NPU driver is {stack.driver}, and PyPTO needs {row.driver} or later; update it"
    pairs = " or ".join(f"torch=={torch} torch-npu=={versions[-1]}" for torch, versions in row.torch_npu.items())
    if stack.torch is None or stack.torch_npu is None:
        missing = "torch" if stack.torch is None else "torch-npu"
        return f"{missing} is not installed; for CANN {row.cann} install {pairs}"
    ours, theirs = stack.torch.split("+")[0], stack.torch_npu.split("+")[0]
    if theirs in row.torch_npu.get(ours, ()) or _is_newer(row, ours, theirs):
        return None
    if ours not in row.torch_npu:
        return f"no torch-npu for torch {ours} is published with CANN {row.cann}; install {pairs}"
    pins = " or ".join(row.torch_npu[ours])
    return f"torch {ours} with CANN {row.cann} goes with torch-npu {pins} or later, and {theirs} is installed; install that"


def newer_note(stack: Installation) -> str | None:
    """One clause if torch-npu is newer than all that is published for its torch and CANN, or None."""
    row = _combination(stack)
    if row is None or stack.torch is None or stack.torch_npu is None:
        return None
    ours, theirs = stack.torch.split("+")[0], stack.torch_npu.split("+")[0]
    return f"torch-npu {theirs} is newer than any published with CANN {row.cann}" if _is_newer(row, ours, theirs) else None


def _combination(stack: Installation) -> Combination | None:
    """The published combination with this PyPTO."""
    return next((row for row in PUBLISHED_COMBINATIONS if row.pypto == stack.pypto), None)


def _is_newer(row: Combination, torch: str, torch_npu: str) -> bool:
    """Whether a torch-npu of this torch came after every published one of it, or the torch after every published torch."""
    if _numbers(torch_npu) != _numbers(torch):
        return False
    if torch in row.torch_npu:
        return _post(torch_npu) > max(map(_post, row.torch_npu[torch]))
    return _numbers(torch) > max(map(_numbers, row.torch_npu))


# -- Loading nothing --------------------------------------------------------------------------------------------------------


def leave_npu_alone() -> None:
    """Before `import torch`: let it load no device extension, in this process and its children. For the command alone.

    `import torch` loads torch-npu, and where CANN is not sourced every command would end in its traceback. The executor `npu`
    loads torch-npu itself.
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def leave_unsourced_npu_alone() -> None:
    """The same only where loading must fail: torch-npu without a sourced CANN. For `import haarkv` in another program."""
    if "torch" not in sys.modules and sourced_from() is None and find_spec("torch_npu") is not None:
        leave_npu_alone()


# -- Where versions stand ----------------------------------------------------------------------------------------------------


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _folders(ascend: Path) -> list[Path]:
    """CANN's default folders: since 8.5 `cann`, before `ascend-toolkit/latest`; for root, or for one user."""
    return [root / name for root in (ascend, Path.home() / "Ascend") for name in ("cann", "ascend-toolkit/latest")]


def _toolkit(folders: list[Path]) -> tuple[Path | None, str | None]:
    """The first toolkit in these folders, and its version."""
    for folder in folders:
        for file in (
            folder / f"{platform.machine()}-linux" / "ascend_toolkit_install.info",
            folder / "ascend_toolkit_install.info",
            folder / "compiler" / "version.info",
        ):
            if toolkit_version := _field(file):
                return folder, toolkit_version
    return None, None


def _field(file: Path) -> str | None:
    """The line `version=…` or `Version=…` of one of CANN's files, without quotes."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^\s*version\s*=\s*[\"']?([^\s\"']+)", text, re.IGNORECASE | re.MULTILINE)
    return match[1] if match else None


def _post(text: str) -> int:
    """`2.8.0.post4` as 4, and 0 without a `post`."""
    match = re.search(r"\.post(\d+)", text)
    return int(match[1]) if match else 0


def _numbers(text: str) -> tuple[int, ...]:
    """`25.5.0.b050` as (25, 5, 0): the leading numbers, which order releases."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
