"""What is installed: two names, every file once, and no quarrel with the folders of the project that uses it."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from places import ROOT

pytest.importorskip("hatchling", reason="needs the dev extra")
pytestmark = pytest.mark.slow

ROOMS = sorted(path.name for path in (ROOT / "haarkv").iterdir() if path.is_symlink())
# Names that many projects have at their top, the rooms' own first.
FOREIGN = [*ROOMS, "tests"]
GENERATE = ["generate", "--model", "tiny", "--kv", "tq4", "--prompt", "def main(", "--max-new-tokens", "3"]
SCRIPT = """
import models, tests, validation, executors
import tq

assert all(m.OURS for m in (models, tests, validation, executors))
print(len(tq.load("tiny", kv="tq4").generate(["def main("], max_new_tokens=3).texts))
"""


def run(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(target, source, folder):
    """A wheel or an sdist of the sources in a folder."""
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=source)
    (artifact,) = folder.iterdir()
    return artifact


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def names(wheel):
    """Files of a wheel but for the description that the build writes."""
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.namelist()
    assert len(entries) == len(set(entries)), "a file twice"
    return {name for name in entries if ".dist-info/" not in name}


def test_the_wheel_has_two_names_and_every_file(wheel):
    files = names(wheel)
    assert {name.split("/")[0] for name in files} == {"haarkv", "tq"}
    source_files = {
        path.relative_to(ROOT).as_posix()
        for folder in (ROOT / "tq", *(ROOT / "haarkv" / room for room in ROOMS))
        for path in folder.rglob("*")
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".build-") for part in path.parts)
    }
    assert files == source_files | {"haarkv/__init__.py", "haarkv/py.typed"}
    # What a search for *.py would not notice.
    assert files >= {
        "haarkv/tq_ops/cpu/_kernels.so",
        "haarkv/tq_ops/cpu/csrc/driver.cpp",
        "haarkv/codebooks/data/lloyd_max.json",
        "haarkv/models/tiny_qwen3/model.safetensors",
        "tq/py.typed",
    }


def test_every_room_is_linked():
    rooms = {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()} - {"haarkv", "lab", "tq", "tests"}
    assert rooms == set(ROOMS)


@pytest.mark.long
def test_an_sdist_builds_the_same_wheel(wheel, tmp_path):
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        assert not [m.name for m in archive if not (m.isfile() or m.isdir())], "links do not survive everywhere"
        archive.extractall(tmp_path / "sources", filter="data")
    (sources,) = (tmp_path / "sources").iterdir()
    # Compiling takes a minute. The hook takes a library that is newer than its sources, as the archive's files are old.
    library = "tq_ops/cpu/_kernels.so"
    (sources / "haarkv" / library).write_bytes((ROOT / library).read_bytes())
    # What a build leaves that is killed, and nothing that says so but pyproject.toml.
    (sources / ".gitignore").unlink()
    (sources / "haarkv" / "tq_ops" / "cpu" / ".build-killed").mkdir()
    for name in ("driver.o", "_kernels.so"):
        (sources / "haarkv" / "tq_ops" / "cpu" / ".build-killed" / name).write_text("half")
    with tarfile.open(build("sdist", sources, tmp_path / "sdist-again")) as archive:
        assert not [m.name for m in archive if ".build-" in m.name]
    assert names(build("wheel", sources, tmp_path / "again")) == names(wheel)


@pytest.fixture(scope="module", params=["editable", "wheel"])
def installed(request, tmp_path_factory):
    """The folder of executables of a new environment; libraries are those that the tests run with."""
    folder = tmp_path_factory.mktemp(request.param)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')", cwd=folder)
    # Only a folder's modules: `.pth` files in it, as an editable install's, are not read.
    Path(purelib, "libraries.pth").write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    what = ["-e", ROOT] if request.param == "editable" else [request.getfixturevalue("wheel")]
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", *what, cwd=folder)
    return python.parent


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Another project, with packages that are called as our rooms are."""
    folder = tmp_path_factory.mktemp("project")
    for name in FOREIGN:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("OURS = True\n", encoding="utf-8")
    body = "".join(f"    {line}\n" if line else "\n" for line in SCRIPT.splitlines())
    (folder / "tests" / "test_theirs.py").write_text(f"def test_theirs():\n{body}", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("installed", "command"),
    [
        ("wheel", ["python", "-m", "pytest", "-q"]),
        *(  # The rest runs with `make test-long`.
            pytest.param(*given, marks=pytest.mark.long)
            for given in (("wheel", ["tq", *GENERATE]), ("editable", ["python", "-m", "tq", *GENERATE]))
        ),
    ],
    indirect=["installed"],
    ids=["wheel-pytest", "wheel-tq", "editable-python -m tq"],
)
def test_it_works_beside_folders_of_the_same_names(installed, project, command):
    run(installed / command[0], *command[1:], cwd=project)


def test_each_environment_runs_its_own_copy(installed, project):
    where = Path(run(installed / "python", "-c", "import haarkv; print(haarkv.__file__, end='')", cwd=project))
    assert where.is_relative_to(ROOT if "editable" in str(installed) else installed.parent)


@pytest.mark.parametrize("installed", ["wheel", pytest.param("editable", marks=pytest.mark.long)], indirect=True)
def test_what_vllm_loads_is_there(installed, project):
    code = (
        "from importlib.metadata import distribution\n"
        "from importlib.util import find_spec\n"
        "import haarkv, tq, sys\n"
        "groups = {e.group: e for e in distribution('haarkv').entry_points}\n"
        "assert len([g for g in groups if g.startswith('vllm.')]) == 2, groups\n"
        "for entry in groups.values(): assert find_spec(entry.module), entry\n"
        "print(groups['vllm.general_plugins'].load().__name__)\n"
    )
    assert run(installed / "python", "-c", code, cwd=project) == "register\n"
