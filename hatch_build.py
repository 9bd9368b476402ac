"""Compiles the CPU kernels as the package is built or installed; without a compiler it is installed without them.

    python hatch_build.py OUT

writes what is published: the sdist, a wheel for any machine, which has no kernels, and one for each platform that a compiler
was found for. It needs the package hatchling. The package's description is README.md with links that work anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent
COMPILERS = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}
"""By machine, Debian's names."""
_BUILD, _LIBRARY = "haarkv/tq_ops/cpu/build.py", "haarkv/tq_ops/cpu/_kernels.so"


class CustomBuildHook(BuildHookInterface):
    """Called by hatchling for wheels, editable ones among them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        builder = runpy.run_path(str(Path(self.root, _BUILD)))
        try:
            library = builder["LIBRARY"] if builder["is_fresh"]() else builder["build"]()
        except builder["BuildError"] as error:
            self.app.display_warning(f"installed without the CPU kernels: {error}; later: python -m haarkv.tq_ops.cpu.build")
            return
        build_data["artifacts"].append(library.relative_to(self.root).as_posix())
        # Plain C inside: for this platform, but for any Python.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


class CustomMetadataHook(MetadataHookInterface):
    """Called by hatchling for what the metadata of a package leaves to it: the description."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text, source)}


def description(readme: str, source: str | None) -> str:
    """A page whose links and pictures lead somewhere wherever it is shown.

    Args:
        readme: Markdown that links to files beside it.
        source: where the repository is browsed, as https://github.com/OWNER/NAME. Without one, links to files become their
            words, and pictures are left out.
    """

    def elsewhere(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if source is None:
            return "" if picture else words
        return f"{picture}[{words}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", elsewhere, readme)


def build_distributions(out: Path) -> list[Path]:
    """Write the sdist and all wheels into a folder. Returns them."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        build_folder = Path(folder)
        # Hatch has no other way to say that no hook is to run.
        plain = {**os.environ, "HATCH_BUILD_NO_HOOKS": "true"}
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(build_folder)]
        subprocess.run(command, cwd=ROOT, env=plain, check=True, stdout=sys.stderr)
        (wheel,) = build_folder.glob("*.whl")
        artifacts = [*build_folder.glob("*.tar.gz"), wheel]
        for machine, compiler in COMPILERS.items():
            if shutil.which(compiler) is None:
                print(f"no wheel for {machine}: there is no compiler {compiler}", file=sys.stderr)
                continue
            library = build_folder / f"{machine}.so"
            runpy.run_path(str(ROOT / _BUILD))["build"](library, by=compiler, alone=True)
            artifacts.append(_with_library(wheel, library, f"manylinux_2_{_glibc(library)}_{machine}"))
        return [Path(shutil.move(path, out / path.name)) for path in artifacts]


def _glibc(library: Path) -> int:
    """The minor version of the glibc that a library needs."""
    return max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes()))


def _with_library(wheel: Path, library: Path, platform: str) -> Path:
    """The same wheel with a library in it, for a platform."""
    platform_wheel = wheel.with_name(wheel.name.replace("-any.whl", f"-{platform}.whl"))
    with zipfile.ZipFile(wheel) as plain, zipfile.ZipFile(platform_wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        record = next(name for name in plain.namelist() if name.endswith(".dist-info/RECORD"))
        lines = [line for line in plain.read(record).decode().splitlines() if "/WHEEL," not in line and "/RECORD," not in line]

        def write(name: str, content: bytes) -> None:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}")
            archive.writestr(zipfile.ZipInfo(name, (2020, 2, 2, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)

        for entry in plain.infolist():
            if entry.filename.endswith(".dist-info/WHEEL"):
                text = plain.read(entry).decode().replace("Purelib: true", "Purelib: false").replace("-any", f"-{platform}")
                write(entry.filename, text.encode())
            elif entry.filename != record:
                archive.writestr(entry, plain.read(entry))
        write(_LIBRARY, library.read_bytes())
        archive.writestr(record, "\n".join([*lines, f"{record},,", ""]))
    return platform_wheel


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name the folder for the sdist and the wheels: python hatch_build.py OUT")
    print(*build_distributions(Path(sys.argv[1])), sep="\n")
