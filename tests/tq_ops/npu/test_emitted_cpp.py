"""The C++ of a decode program: barriers stand in it, what it includes is there, and what lies beside it in a folder."""

import re
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest
from npu_programs import needs_pypto

from haarkv.models.catalog import read_config
from haarkv.models.qwen3_14b.npu.compile import compile_programs

pytestmark = needs_pypto


@pytest.fixture(scope="module")
def cpp_sources():
    """Path -> text."""
    (program,) = compile_programs(read_config("tiny"), ("decode",), lambda _: None)
    return program.sources


def test_every_included_file_is_there(cpp_sources):
    """Quoted includes: beside the file, as its path says, or among PyPTO's headers."""
    root = Path(find_spec("pypto").origin).parent / "lib/include"
    header_folders = [root, root / "tilefwk", root / "tileop", root / "tileop/arch32"]
    assert "kernel_aicpu/expression_0.h" in cpp_sources
    for path, text in cpp_sources.items():
        for name in re.findall(r'^\s*#\s*include "(.*?)"', text, re.MULTILINE):
            neighbour = "/".join(_flat(PurePosixPath(path).parent / name))
            assert neighbour in cpp_sources or any((folder / name).is_file() for folder in header_folders), f"{path}: {name}"


def _flat(path):
    parts = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return parts


def scopes(sources):
    """Loops whose tasks a program's control flow launches, in the text's order, and `|` where all before must have ended."""
    (control,) = (text for path, text in sources.items() if path.startswith("kernel_aicpu/controlFlow"))
    matches = re.findall(r"#name: TENSOR_(\w+?)_Unroll\w*_root\b|(RUNTIME_FUNCKEY_LOOP_BARRIER)", control)
    return ["|" if barrier else scope for scope, barrier in matches]


def waits(sources):
    """Whether attention begins when all has ended that stores what it reads."""
    launch_scopes = scopes(sources)
    last_store = max(at for at, scope in enumerate(launch_scopes) if scope in ("APPEND", "KEEP", "ROTATE"))
    return "|" in launch_scopes[last_store : launch_scopes.index("KEYS")]


def test_attention_waits_for_the_rows_that_its_tokens_store(cpp_sources):
    """Without the barrier PyPTO's tables remember one writer of many; what a device then reads is chance."""
    assert scopes(cpp_sources)[:4] == ["QKV", "QUANTIZE", "APPEND", "ROTATE"]
    assert waits(cpp_sources)
    without = {path: re.sub(r".*LOOP_BARRIER.*\n", "", text) for path, text in cpp_sources.items()}
    assert not waits(without)
