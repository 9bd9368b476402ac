"""The lowest rung: are the installed versions known to work together? Reads metadata and files, without torch."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement

from haarkv.tq_ops.errors import InputError
from haarkv.validation.bringup.ladder import RungFinding

SIMULATOR = "sim"
"""The device that needs no card."""


def require_executor(name: str) -> None:
    """Refuse an unknown executor without importing one."""
    if not name.isidentifier() or not all(find_spec(f"haarkv.{room}.{name}") for room in ("executors", "tq_ops")):
        raise InputError(f"unknown executor {name!r}; name npu, cuda, cpu or onnx")


def versions(executor: str) -> dict[str, str]:
    """Installed versions by name; every verdict depends on them."""
    packages = {"haarkv": _installed_version("haarkv") or "a checkout", "python": platform.python_version()}
    if module := _version_table(executor):
        device_versions = {
            name: value for name, value in asdict(module.find_installation()).items() if not name.endswith("folder")
        }
        packages |= {
            name.replace("_", "-"): str(value) for name, value in device_versions.items() if value not in (None, False)
        }
    for requirement in _requirements(executor):
        packages.setdefault(requirement.name, _installed_version(requirement.name) or "none")
    return packages


def environment(executor: str, device: str | None, load: Callable[[], object], any_versions: bool = False) -> RungFinding:
    """Compare what is installed with what is published to work, then load torch; unpublished versions may be allowed."""
    package_versions = versions(executor)
    reported_versions = {name: value for name, value in package_versions.items() if name in _REPORTED_PACKAGES}
    summary = ", ".join(f"{name} {value}" for name, value in reported_versions.items())
    problem, allowance = _missing(executor), ""
    if problem is None and (unpublished_reason := _unpublished_reason(executor, device)):
        problem, allowance = (None, unpublished_reason) if any_versions and device != SIMULATOR else (unpublished_reason, "")
    if problem is None:
        try:
            load()
        except (ImportError, OSError, RuntimeError) as error:
            problem = f"torch cannot be imported: {' '.join(str(error).split())[:300]}"
    summary += f"; allowed by --any-versions: {allowance}" * bool(allowance)
    return RungFinding(
        problem is None, problem or summary, len(package_versions), "versions", facts=package_versions, allowed=allowance
    )


_REPORTED_PACKAGES = ("python", "torch", "torch-npu", "pypto", "cann", "driver")


def _version_table(executor: str) -> ModuleType | None:
    """The executor's module of published combinations, if it has one."""
    name = f"haarkv.tq_ops.{executor}.versions"
    try:
        module_spec = find_spec(name)
    except ModuleNotFoundError:  # its ops are a module, no room
        return None
    return import_module(name) if module_spec else None


def _unpublished_reason(executor: str, device: str | None) -> str | None:
    if (module := _version_table(executor)) is None:
        return None
    table: Any = module
    is_simulator = device == SIMULATOR
    reason: str | None = (table.unsimulated_reason if is_simulator else table.unpublished_reason)(table.find_installation())
    return reason if reason is None or is_simulator else f"{reason} (--device {SIMULATOR} rehearses without a card)"


def _missing(executor: str) -> str | None:
    """Which package that haarkv requires is absent, too old or too new."""
    for requirement in _requirements(executor):
        package_version = _installed_version(requirement.name)
        if package_version is None:
            return f"{requirement.name} is not installed; haarkv needs {requirement}"
        if not requirement.specifier.contains(package_version, prereleases=True):
            return f"{requirement.name} {package_version} is installed, and haarkv needs {requirement}"
    return None


def _requirements(executor: str) -> Iterator[Requirement]:
    """What haarkv requires, with the executor's extra unless a table of its own judges those packages."""
    extra = "" if _version_table(executor) else executor
    try:
        lines = requires("haarkv") or ()
    except PackageNotFoundError:  # run from a checkout
        return
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
