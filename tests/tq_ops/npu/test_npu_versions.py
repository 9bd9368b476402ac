"""What is installed, found without importing torch, and held against what is published."""

import platform
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT

from haarkv.tq_ops.npu.versions import (
    PUBLISHED_COMBINATIONS,
    SIM_PYPTO,
    Installation,
    find_installation,
    newer_note,
    unpublished_reason,
    unsimulated_reason,
)

GOOD = Installation(
    python="3.11.9", torch="2.8.0+cpu", torch_npu="2.8.0.post4", pypto="0.2.0", cann="9.0.0",
    cann_folder=Path("/usr/local/Ascend/cann"), sourced=True, driver="25.5.0",
)  # fmt: skip
SECOND_ROW = replace(GOOD, pypto="0.2.1", cann="9.1.0", torch="2.12.0", torch_npu="2.12.0.post2", driver="25.5.1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        (vars(SECOND_ROW), None),
        (vars(SECOND_ROW) | {"cann": "9.1.1", "driver": "26.0.0.b010"}, None),  # builds and patches
        ({"pypto": None}, "pypto is not installed"),
        ({"pypto": "0.3.0"}, "pypto 0.3.0 is in no combination"),
        ({"python": "3.13.1"}, "this is 3.13.1"),
        ({"cann": None, "cann_folder": None, "sourced": False}, "no CANN toolkit"),
        ({"cann": "9.1.0"}, "goes with CANN 9.0.0, and 9.1.0"),
        ({"cann": "9.0.0.1"}, None),
        ({"cann": "9.0.01"}, "goes with CANN 9.0.0"),
        ({"sourced": False}, "is not sourced; source its set_env.sh"),
        ({"driver": None}, "no NPU driver"),
        ({"driver": "25.3.rc1"}, "the NPU driver is 25.3.rc1"),
        ({"driver": "25.10.0"}, None),
        ({"torch": None}, "torch is not installed; for CANN 9.0.0 install torch==2.7.1 torch-npu==2.7.1.post4"),
        ({"torch_npu": None}, "torch-npu is not installed"),
        ({"torch": "2.13.0+cpu"}, "no torch-npu for torch 2.13.0"),
        ({"torch_npu": "2.8.0.post2"}, "goes with torch-npu 2.8.0.post4 or later"),
        ({"torch_npu": "2.9.0.post4"}, "goes with torch-npu 2.8.0.post4 or later"),  # of another torch
        ({"torch": "2.6.0", "torch_npu": "2.6.0.post9"}, "no torch-npu for torch 2.6.0"),
    ],
)
def test_the_first_thing_that_is_not_published_is_named(changes, message):
    reason = unpublished_reason(replace(GOOD, **changes))
    if message is None:
        assert reason is None
    else:
        assert message in reason
        assert "\n" not in reason


@pytest.mark.parametrize(
    ("torch", "torch_npu"),
    [
        ("2.12.0", "2.12.0.post3"),
        ("2.10.0", "2.10.0.post7"),
        ("2.7.1", "2.7.1.post11"),
        ("2.13.0", "2.13.0"),
        ("2.14.0", "2.14.0"),
    ],
)
def test_what_is_newer_than_anything_published_is_taken_and_named(torch, torch_npu):
    stack = replace(SECOND_ROW, torch=torch, torch_npu=torch_npu)
    assert unpublished_reason(stack) is None
    assert newer_note(stack) == f"torch-npu {torch_npu} is newer than any published with CANN 9.1"
    assert newer_note(SECOND_ROW) is None


def test_the_simulator_takes_the_one_pypto_that_it_knows():
    without_cann = replace(GOOD, cann=None, cann_folder=None, sourced=False, driver=None, torch="2.13.0", torch_npu=None)
    assert unsimulated_reason(without_cann) is None
    assert "knows pypto 0.2.0 only, and 0.2.1 is installed" in unsimulated_reason(SECOND_ROW)
    assert "not installed" in unsimulated_reason(replace(GOOD, pypto=None))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with CANN 9.0.0, a driver and packages, as files."""
    arch = tmp_path / "cann" / f"{platform.machine()}-linux"
    arch.mkdir(parents=True)
    (arch / "ascend_toolkit_install.info").write_text(
        "package_name=Ascend-cann-toolkit\nversion=9.0.0\ninnerversion=V100R001C25\ncompatible_version=[V100R001C15]\n"
        f"arch={platform.machine()}\nos=linux\npath=/usr/local/Ascend/cann\n",
        encoding="utf-8",
    )
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "version.info").write_text("Version=25.5.1\nascendhal_version=7.35\naicpu_version=1.0\n", "utf-8")
    for name, release in (("torch", "2.9.0+cpu"), ("torch_npu", "2.9.0.post2"), ("pypto", "0.2.0")):
        folder = tmp_path / "site" / f"{name}-{release}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    return tmp_path


def test_versions_are_read_from_files(machine, monkeypatch):
    stack = find_installation(machine)
    assert stack == Installation(
        platform.python_version(), "2.9.0+cpu", "2.9.0.post2", "0.2.0", "9.0.0", machine / "cann", False, "25.5.1"
    )
    assert "not sourced" in unpublished_reason(stack)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(machine / "cann"))
    assert unpublished_reason(find_installation(machine)) is None


def test_the_sourced_toolkit_counts_and_no_other(machine, monkeypatch):
    other = machine / "elsewhere" / "compiler"
    other.mkdir(parents=True)
    (other / "version.info").write_text('Version="8.5.0"\n', encoding="utf-8")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(other.parent))
    assert find_installation(machine).cann == "8.5.0"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(machine / "gone"))
    assert find_installation(machine).cann is None


def test_a_machine_without_anything_is_described(tmp_path, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    stack = find_installation(tmp_path)
    assert (stack.cann, stack.cann_folder, stack.sourced, stack.driver) == (None, None, False, None)


def test_torch_is_not_imported():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['pypto'] = None\n"
        "from haarkv.tq_ops.npu import versions\nversions.unpublished_reason(versions.find_installation())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_extra_installs_what_the_simulator_knows():
    assert PROJECT["optional-dependencies"]["npu"] == [f"pypto=={SIM_PYPTO}"]


@pytest.mark.parametrize(
    ("extra", "row"), [("cann90", PUBLISHED_COMBINATIONS[0]), ("cann91", PUBLISHED_COMBINATIONS[1])], ids=["9.0", "9.1"]
)
def test_the_extras_of_an_npu_are_published_combinations(extra, row):
    pins = dict(pin.split("==") for pin in PROJECT["optional-dependencies"][extra] if "==" in pin)
    assert extra == "cann" + "".join(row.cann.split(".")[:2])
    assert pins["torch-npu"] in row.torch_npu[pins["torch"]]
    assert ("haarkv[npu]" in PROJECT["optional-dependencies"][extra]) == (row.pypto == SIM_PYPTO)


def test_the_floor_of_torch_is_the_oldest_that_an_npu_needs():
    oldest = min(
        (torch for row in PUBLISHED_COMBINATIONS for torch in row.torch_npu), key=lambda v: [int(n) for n in v.split(".")]
    )
    assert f"torch>={oldest}" in PROJECT["dependencies"]
