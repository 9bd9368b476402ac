"""Compiles the CPU kernels as the package is built or installed; without a compiler it is installed without them."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    """Called by hatchling for wheels, editable ones among them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        builder = runpy.run_path(str(Path(self.root, "haarkv", "tq_ops", "cpu", "build.py")))
        try:
            library = builder["LIBRARY"] if builder["is_fresh"]() else builder["build"]()
        except builder["BuildError"] as error:
            self.app.display_warning(f"installed without the CPU kernels: {error}; later: python -m haarkv.tq_ops.cpu.build")
            return
        build_data["artifacts"].append(library.relative_to(self.root).as_posix())
        # Plain C inside: for this platform, but for any Python.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
